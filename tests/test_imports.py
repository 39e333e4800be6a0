"""The package's imports: arrows between packages point down, no circle, optional packages stay optional, `import chatgpt` light."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# What each package may import, as docs/design.md draws it. `chatgpt` itself (its version) and `names` may be imported by all.
MATHS = {'types', 'functional'}
MODELS = MATHS | {'batching', 'sweep', 'nn'}
ALLOWED: dict[str, set[str]] = {
    'types': set(),
    'names': set(),
    'functional': set(),
    'registry': set(),
    'batching': MATHS,
    'sweep': MATHS | {'batching'},
    'cluster': set(),
    'nn': MATHS | {'batching'},
    'rollout': MODELS | {'cluster'},
    'dataset': {'types'},
    'experience': MODELS | {'rollout', 'rewards', 'dataset'},
    'checkpoint': set(),
    'trainer.strategies': MODELS | {'checkpoint', 'registry'},
    'trainer.callbacks': MATHS | {'checkpoint', 'plan', 'trainer.strategies'},
    'trainer': MODELS | {'registry', 'rollout', 'experience', 'dataset', 'checkpoint', 'trainer.strategies', 'trainer.callbacks'},
    'launch': MODELS
    | {'cluster', 'plan', 'rollout', 'rewards', 'experience', 'dataset', 'checkpoint'}
    | {'trainer', 'trainer.strategies', 'trainer.callbacks'},
    'plan': MODELS | {'trainer.strategies'},  # a strategy says what it keeps in memory, and finds a model's blocks
    'rewards': set(),
    'quickstart': MODELS
    | {'rollout', 'rewards', 'experience', 'dataset', 'checkpoint', 'trainer', 'trainer.strategies', 'trainer.callbacks', 'launch'},
    'testing': MODELS | {'rollout', 'experience', 'dataset', 'checkpoint', 'trainer', 'trainer.strategies', 'trainer.callbacks'},
    'chatgpt': {'quickstart'},
}

# Optional packages: imported inside a function, in files whose path begins so. `None`: inside a function anywhere.
OPTIONAL: dict[str, str | None] = {
    'colossalai': 'trainer/strategies/colossalai/',
    'vllm': 'rollout/vllm',
    'ray': 'cluster.py',
    'wandb': 'trainer/callbacks/wandb',
    'tensorboard': 'trainer/callbacks/tensorboard',
    'torch.utils.tensorboard': 'trainer/callbacks/tensorboard',
    'datasets': 'dataset/',
    'matplotlib': None,
    'vaderSentiment': 'rewards/sentiment',
    'peft': None,
    'pandas': None,
    'pyarrow': None,
}
PROCESS_GROUPS = ('trainer/strategies/', 'launch/', 'testing/')
@pytest.mark.parametrize('source', UPWARD.values(), ids=UPWARD.keys())
def test_an_arrow_that_points_up_is_caught(tmp_path, source):
    _, imports = write_package(tmp_path, {'__init__.py': '', 'trainer/ppo.py': '', 'nn/actor.py': source})
    assert [w.split(': ')[1] for w in wrong_arrows(imports)] == ['nn imports trainer']


def test_a_strategy_must_not_know_its_trainer_nor_an_unknown_package_slip_in(tmp_path):
    files = {
        'trainer/strategies/ddp.py': 'from chatgpt.trainer.base import Trainer\n',
        'trainer/base.py': '',
        'attic/x.py': 'import chatgpt.nn\n',
    }
    _, imports = write_package(tmp_path, files)
    wrong = wrong_arrows(imports)
    assert len(wrong) == 2 and "package 'attic' is unknown" in wrong[0] and 'trainer.strategies imports trainer' in wrong[1]


@pytest.mark.parametrize(
    'closing',
    [
        'from chatgpt.nn.a import x\n',
        'def f():\n    from chatgpt.nn.a import x\n',
        'from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import chatgpt.nn.a\n',
    ],
    ids=['at the top', 'in a function', 'for types'],
)
def test_a_circle_is_caught_at_whatever_time_it_closes(tmp_path, closing):
    files = {
        'nn/a.py': 'from chatgpt.nn import b\n',
        'nn/b.py': 'import chatgpt.nn.c\n',
        'nn/c.py': closing,
        'nn/d.py': 'import chatgpt.nn.a\n',
        'nn/__init__.py': '',
    }
    assert circles(*write_package(tmp_path, files)) == [['chatgpt.nn.a', 'chatgpt.nn.b', 'chatgpt.nn.c']]
    files['nn/c.py'] = 'import torch\n'
    assert circles(*write_package(tmp_path, files)) == []


@pytest.mark.parametrize(
    ('name', 'source', 'complaint'),
    [
        ('trainer/strategies/colossalai/strategy.py', 'import colossalai\n', 'inside the function'),
        ('nn/actor.py', 'def f():\n    import colossalai.zero\n', 'outside trainer/strategies/colossalai/'),
        ('trainer/callbacks/tensorboard.py', 'from torch.utils.tensorboard import SummaryWriter\n', 'inside the function'),
        ('nn/actor.py', 'import torch.distributed as dist\n', 'belongs to the strategies'),
        ('nn/actor.py', 'from torch import distributed\n', 'belongs to the strategies'),
        ('experience/maker.py', 'def f():\n    from torch.distributed import all_reduce\n', 'belongs to the strategies'),
    ],
)
def test_a_misplaced_import_is_caught(tmp_path, name, source, complaint):
    wrong = eager_or_misplaced(write_package(tmp_path, {name: source})[1])
    assert len(wrong) == 1 and complaint in wrong[0]


def loaded_after(statement: str) -> set[str]:
    code = f'import sys\n{statement}\nprint(*sorted({{m.split(".")[0] for m in sys.modules}}))'
    done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_importing_the_package_is_light():
    loaded = loaded_after('import chatgpt')
    assert 'chatgpt' in loaded
    assert not loaded & {'torch', 'transformers', 'datasets', 'colossalai', 'matplotlib', 'pandas'}


def test_importing_strategies_and_callbacks_loads_nothing_optional():
    loaded = loaded_after('from chatgpt.trainer.strategies import NaiveStrategy; import chatgpt.trainer.callbacks')
    assert 'torch' in loaded
    assert not loaded & {*OPTIONAL, 'transformers'}
