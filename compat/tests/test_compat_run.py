"""Tests of `python -m chatgpt_compat run` with scripts of an invented system."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from chatgpt.launch import demo_world
from chatgpt.nn import GPTActor
from chatgpt.testing.processes import free_port
from chatgpt_compat import tables
from chatgpt_compat.runner import run
from chatgpt_compat.tables import System

ROOT = Path(__file__).resolve().parents[2]

TABLES = """
SERVED = {
    'Trainer': 'our_things:Trainer',
    'core.LengthSampler': 'our_things:LengthSampler',
    'data.configs.Config': 'our_things:Config',
}
INSTEAD = {'OtherTrainer': 'chatgpt.trainer.PPOTrainer (docs/train.md)', 'extras': 'nothing: it is not needed'}
"""
OURS = """
class Trainer: who = 'ours'
class LengthSampler: who = 'ours'
class Config: who = 'ours'
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for scripts, with a system `madeup` of which three names are served."""
    tmp_path.joinpath('lib').mkdir()
    tmp_path.joinpath('scripts').mkdir()
    tmp_path.joinpath('lib', 'madeup_tables.py').write_text(TABLES)
    tmp_path.joinpath('lib', 'our_things.py').write_text(OURS)
    monkeypatch.syspath_prepend(tmp_path / 'lib')
    monkeypatch.setitem(tables.SYSTEMS, 'madeup', System('madeup', 'madeup_tables'))
    yield tmp_path / 'scripts'
    for name in [m for m in sys.modules if m.split('.')[0] in ('madeup', 'madeup_tables', 'our_things', 'beside')]:
        del sys.modules[name]


def install(folder: Path, files: dict[str, str]) -> None:
    """Installs a package `madeup`."""
    for name, text in files.items():
        path = folder.parent / 'lib' / 'madeup' / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def script(folder: Path, text: str, *arguments: str) -> int:
    path = folder / 'script.py'
    path.write_text(text)
    return run(str(path), arguments)


def test_names_modules_and_aliases_are_ours(folder, capsys):
    text = """
import madeup
import madeup.data.configs as configs
from madeup import Trainer
from madeup.core import LengthSampler
from madeup.data.configs import Config
assert madeup.Trainer is Trainer and configs.Config is Config and madeup.core.LengthSampler is LengthSampler
print(Trainer.who, LengthSampler.who, Config.who, hasattr(madeup, 'OtherTrainer'), sorted(madeup.__all__))
"""
    assert script(folder, text) == 0
    out, err = capsys.readouterr()
    assert out == "ours ours ours False ['Trainer']\n"
    lines = [line.split() for line in err.splitlines()]
    assert lines[0] == ['chatgpt_compat:', str(folder / 'script.py'), 'uses']
    assert ['madeup.Trainer', 'served', 'by', 'our_things:Trainer'] in lines
    assert ['madeup.core.LengthSampler', 'served', 'by', 'our_things:LengthSampler'] in lines


def test_the_script_is_main_with_its_folder_and_arguments(folder, capsys):
    folder.joinpath('beside.py').write_text('from madeup import Trainer\nVALUE = Trainer.who + " beside"\n')
    text = """
import sys, pickle
from beside import VALUE
class Thing: pass
assert pickle.loads(pickle.dumps(Thing())).__class__ is Thing
if __name__ == '__main__':
    print(VALUE, sys.argv[1:], __file__ == sys.argv[0], sys.path[0])
"""
    argv, path, main = sys.argv, list(sys.path), sys.modules['__main__']
    assert script(folder, text, '--lr', '3', 'run') == 0
    assert capsys.readouterr().out == f"ours beside ['--lr', '3', 'run'] True {folder.resolve()}\n"
    assert (sys.argv, sys.path, sys.modules['__main__']) == (argv, path, main)
    assert 'madeup' not in sys.modules


def test_an_unknown_name_is_an_error_of_one_line(folder, capsys):
    for line, sentence in (
        ('from madeup import OtherTrainer', 'instead: chatgpt.trainer.PPOTrainer (docs/train.md)'),
        ('from madeup.core import OtherTrainer', 'instead: chatgpt.trainer.PPOTrainer (docs/train.md)'),
        ('from madeup.extras import anything', 'instead: nothing: it is not needed'),
        ('import madeup.extras.more', 'instead: nothing: it is not needed'),
        ('from madeup import Trainr', 'served are madeup.Trainer'),
        ('from madeup import LengthSampler', 'served are madeup.core.LengthSampler'),
    ):
        assert script(folder, f'\n{line}\n') == 1
        err = capsys.readouterr().err
        (said,) = [text for text in err.splitlines() if text.startswith('ImportError: ')]
        assert ' is not served, and no madeup is installed; ' + sentence in said, said
        assert said.endswith(f'({folder / "script.py"}, line 2)')
        assert 'Traceback' not in err
    folder.joinpath('beside.py').write_text('\n\nimport madeup.extras\n')
    assert script(folder, 'import beside\n') == 1
    assert capsys.readouterr().err.splitlines()[-1].endswith(f'({folder / "beside.py"}, line 3)')


def test_a_script_may_look_for_a_name_itself(folder, capsys):
    text = """
import madeup
try:
    from madeup import OtherTrainer
except ImportError as error:
    print('not there:', error)
try:
    madeup.OtherTrainer
except AttributeError:
    print('no attribute')
"""
    assert script(folder, text) == 0
    assert capsys.readouterr().out.startswith('not there: madeup.OtherTrainer is not served')


def test_an_error_is_the_scripts_own(folder, capsys):
    assert script(folder, 'def f():\n    raise KeyError("mine")\nf()\n') == 1
    err = capsys.readouterr().err
    frames = [line.strip() for line in err.splitlines() if line.strip().startswith('File ')]
    path = folder / 'script.py'
    assert frames == [f'File "{path}", line 3, in <module>', f'File "{path}", line 2, in f']
    assert err.endswith("KeyError: 'mine'\n")


@pytest.mark.parametrize(('said', 'code'), [('3', 3), ('', None), ('"sorry"', 'sorry')])
def test_exit_codes_pass_through(folder, said, code):
    with pytest.raises(SystemExit) as stop:
        script(folder, f'import sys\nsys.exit({said})\n')
    assert stop.value.code == code


@pytest.mark.parametrize(
    ('text', 'sentence'), [('x = (\n', 'line 1: this is no Python'), ('a\0b', 'this is no Python'), (None, 'No such')]
)
def test_a_file_that_is_no_script(folder, text, sentence):
    path = folder / 'notes.py'
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=sentence):
        run(str(path), ())


INSTALLED = {
    '__init__.py': """
from .core import Sampler, LengthSampler
from .trainer import Trainer
__version__ = '0.4'
def __getattr__(name):
    if name == 'Late':
        return 'late'
    raise AttributeError(name)
""",
    'core.py': """
from . import helpers
class LengthSampler: who = 'theirs'
class Sampler: who = 'theirs'
def later():
    from .helpers import VALUE
    return VALUE
""",
    'trainer.py': 'class Trainer: who = "theirs"\n',
    'helpers.py': 'from madeup.core import LengthSampler\nVALUE = LengthSampler.who\n',
}


def test_other_names_come_from_the_installed_package(folder, capsys):
    install(folder, INSTALLED)
    text = """
import madeup
from madeup import Trainer, Sampler
from madeup.core import LengthSampler, Sampler as same, later
import madeup.trainer
from madeup.data.configs import Config
import madeup.helpers
print(Trainer.who, Sampler.who, LengthSampler.who, Config.who, later(), madeup.trainer.Trainer.who)
print(madeup.__version__, madeup.Late, same is Sampler, madeup.Trainer is Trainer)
from madeup import Nobodys
"""
    assert script(folder, text) == 1
    out, err = capsys.readouterr()
    assert out == 'ours theirs ours ours ours theirs\n0.4 late True True\n'
    assert 'ImportError: madeup.Nobodys is not served, and the installed madeup has no such name' in err


def test_an_installed_package_that_cannot_be_imported_does_no_harm(folder, capsys):
    install(folder, {'__init__.py': 'import a_package_of_2019\n'})
    assert script(folder, 'from madeup import Trainer\nprint(Trainer.who)\n') == 0
    assert capsys.readouterr().out == 'ours\n'
    assert script(folder, 'from madeup import Sampler\n') == 1
    (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith('ImportError: ')]
    assert "importing the installed madeup raised ModuleNotFoundError: No module named 'a_package_of_2019'" in said


# ---------------------------------------------------------------------- no GPU

CUDA = """
import torch
from torch import nn
model = nn.Linear(2, 1).cuda()
assert model is model.to(torch.cuda.current_device()) and model.weight is model.cuda().weight
made = [
    torch.ones(2).cuda(), torch.ones(2).to('cuda'), torch.ones(2).to(0), torch.zeros(2, device='cuda:0'),
    torch.randint(5, (2,), device=torch.cuda.current_device()), torch.ones(2).to(torch.device('cuda'), torch.float64),
    torch.ones(2).to(device='cuda'), torch.ones(2).pin_memory(), model.to(device='cuda', dtype=torch.float64).weight,
]
assert all(t.device.type == 'cpu' for t in made), made
assert made[5].dtype == made[8].dtype == torch.float64
torch.cuda.set_device(0); torch.cuda.synchronize(); torch.cuda.empty_cache()
print('rank_%d.pt' % torch.cuda.current_device(), torch.cuda.is_available(), torch.cuda.max_memory_allocated())
model.double()(torch.ones(1, 2, device='cuda', dtype=torch.float64)).sum().backward()
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason='about machines without a GPU')
def test_cuda_calls_run_on_the_cpu(folder, capsys):
    assert script(folder, CUDA) == 0, capsys.readouterr().err
    assert capsys.readouterr().out == 'rank_0.pt False 0\n'
    for wrong in (
        lambda: torch.ones(1).cuda(),
        lambda: torch.ones(1).to('cuda'),
        lambda: torch.nn.Linear(1, 1).cuda(),
        lambda: torch.zeros(1, device='cuda'),
    ):
        with pytest.raises((AssertionError, RuntimeError)):
            wrong()


LOADED = """
import sys
import torch
from transformers import AutoModelForCausalLM, pipeline
folder = sys.argv[1]
with torch.cuda.device(0):
    made = [torch.ones(1, device='cuda')]
for place in ('cuda', 0, torch.device('cuda', 0), {'cuda:0': 'cuda:1'}, None, 'cpu'):
    made.append(torch.load(f'{folder}/tensors.pt', map_location=place)['a'])
made.append(torch.load(f'{folder}/tensors.pt', 'cuda:0')['a'])
for place in (0, 'cuda', 'auto', {'': 0}, {'': 'cuda:0'}, {'': torch.device('cuda')}, None):
    made.append(AutoModelForCausalLM.from_pretrained(folder, device_map=place).lm_head.weight)
say = pipeline('text-generation', model=folder, device='cuda:0')
assert isinstance(say('a small fox', max_new_tokens=2)[0]['generated_text'], str)
assert all(t.device.type == 'cpu' for t in [*made, say]), made
torch.cuda.reset_max_memory_allocated(); torch.cuda.ipc_collect()
print(torch.cuda.max_memory_cached())
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason='about machines without a GPU')
def test_loads_onto_a_gpu_go_to_the_cpu(folder, tmp_path, capsys):
    from transformers import AutoModelForCausalLM

    GPTActor(config=demo_world.demo_config()).save_pretrained(tmp_path, tokenizer=demo_world.demo_tokenizer())
    torch.save({'a': torch.ones(2)}, tmp_path / 'tensors.pt')
    assert script(folder, LOADED, str(tmp_path)) == 0, capsys.readouterr().err
    assert capsys.readouterr().out == '0\n'
    with pytest.raises(RuntimeError):
        torch.load(tmp_path / 'tensors.pt', map_location='cuda')
    with pytest.raises((AssertionError, RuntimeError)):
        AutoModelForCausalLM.from_pretrained(tmp_path, device_map='cuda')


def command(*words: str) -> subprocess.Popen[str]:
    program = [sys.executable, '-m', *words]
    return subprocess.Popen(program, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.system
@pytest.mark.parametrize('program', ['chatgpt_compat', 'chatgpt compat'])
def test_mistakes_and_interrupts_give_one_line(tmp_path, program):
    waiting = tmp_path / 'waiting.py'
    waiting.write_text('import time, warnings\nwarnings.warn("slowly")\nprint("here", flush=True)\ntime.sleep(3600)\n')
    process = command(*program.split(), 'run', str(waiting))
    assert process.stdout.readline() == 'here\n'
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130
    assert err.splitlines()[1:] == [f'{waiting}:2: UserWarning: slowly', 'interrupted']
    process = command(*program.split(), 'run')
    _, err = process.communicate()
    assert process.returncode == 2
    assert re.fullmatch(r'error: the following arguments are required: script \(.*\)\n', err)


@pytest.mark.system
def test_a_script_without_a_trainer_does_not_import_that_of_transformers(tmp_path):
    script = tmp_path / 'light.py'
    script.write_text('import sys\nprint("transformers.trainer" in sys.modules, "peft" in sys.modules)\n')
    out, _ = command('chatgpt_compat', 'run', str(script)).communicate()
    assert out == 'False False\n'


# ---------------------------------------------------------------------- the real tables of TRL and trlX

REAL = """
import trl, trlx
import trlx.data.configs
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, create_reference_model
from trl.core import LengthSampler, respond_to_batch
from trlx.data.default_configs import TRLConfig, default_ppo_config

draws = {LengthSampler(2, 5)() for _ in range(200)}
config = TRLConfig.update(default_ppo_config(), {'train.batch_size': 3, 'method.gamma': 0.5})
found = sorted(draws), config.train.batch_size, config.method.gamma, PPOConfig(ppo_epochs=7).ppo_epochs
print(' '.join(map(str, found)) + '\\n', end='')  # in one write: torchrun's processes have no buffer
for thing in (trl.PPOTrainer, PPOTrainer, trlx.train, trlx.data.configs.TRLConfig, create_reference_model):
    assert thing.__module__.startswith('chatgpt_compat.'), thing.__module__
"""


def test_names_of_trl_and_trlx_are_ours(folder, capsys):
    assert script(folder, REAL) == 0, capsys.readouterr().err
    out, err = capsys.readouterr()
    assert out == '[2, 3, 4] 3 0.5 7\n'  # the upper end of a length is excluded, as in TRL
    assert 'trl.core.LengthSampler' in err and 'trlx.train' in err
    for line, sentence in (
        ('from trl import GRPOTrainer', "instead: chatgpt.trainer.PPOTrainer with advantage_estimator='grpo'"),
        ('from trl import GRPOConfig', 'off_policy= for vllm_importance_sampling_mode'),
        ('from trlx import no_such_verb', 'trlx.no_such_verb is not served'),
    ):
        assert script(folder, f'{line}\n') == 1
        assert sentence in capsys.readouterr().err


# torchrun stops the other process once one has failed.
BOTH_PRINTED = """
import os, sys, time
from pathlib import Path

sys.stdout.flush()
folder = Path(__file__).parent
(folder / f'printed-{os.environ["RANK"]}').touch()
while len(list(folder.glob('printed-*'))) < 2:
    time.sleep(0.05)
"""


@pytest.mark.system
def test_the_real_tables_under_torchrun(tmp_path):
    path = tmp_path / 'script.py'
    path.write_text(REAL + BOTH_PRINTED + 'sys.exit(len(sys.argv))\n')
    env = os.environ | {'OMP_NUM_THREADS': '1'}
    command = [sys.executable, '-m', 'torch.distributed.run', '--nproc-per-node=2', f'--master-port={free_port()}']
    done = subprocess.run(
        [*command, '-m', 'chatgpt_compat', 'run', str(path), '--lr', '3'], env=env, capture_output=True, text=True
    )
    assert done.stdout.count('[2, 3, 4] 3 0.5 7') == 2, done.stderr
    assert done.stderr.count('chatgpt_compat: ') == 1
    assert 'exitcode  : 3' in done.stderr  # the script's, which has three entries in sys.argv


def test_modules_of_a_system_are_importable_below_ours():
    """They are importable without the runner, after a change of the import line."""
    from chatgpt_compat.coati.trainer.strategies import GeminiStrategy
    from chatgpt_compat.trl.trainer.ppo_trainer import PolicyAndValueWrapper
    from chatgpt_compat.trlx.data.configs import TRLConfig
    from chatgpt_compat.trlx.data.default_configs import default_ppo_config
    from chatgpt_compat.trlx.pipeline.offline_pipeline import PromptPipeline

    for thing in (GeminiStrategy, PolicyAndValueWrapper, TRLConfig, default_ppo_config, PromptPipeline):
        assert thing.__module__.startswith('chatgpt_compat.'), thing
    with pytest.raises(ImportError, match='chatgpt.types.Experience'):
        from chatgpt_compat.trlx.data.ppo_types import PPORLElement  # noqa: F401
