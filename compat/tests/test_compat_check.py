"""Tests of `python -m chatgpt_compat check`, which lists the names of other systems in a script without running it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from chatgpt_compat import tables
from chatgpt_compat.check import check, findings, read_script, uses
from chatgpt_compat.tables import SYSTEMS, System

ROOT = Path(__file__).resolve().parents[2]
TABLES = """
SERVED = {'Trainer': 'our_checked_things:Trainer', 'core.Sampler': 'our_checked_things:Sampler'}
INSTEAD = {'Other': 'chatgpt.trainer.PPOTrainer'}
"""
OURS = """
from dataclasses import dataclass
class Trainer:
    def __init__(self, model, *, batch_size=1): ...
@dataclass
class Sampler:
    low: int = 0
    def go(self): ...
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Returns a function that writes a script; a system `invented` has two served names."""
    tmp_path.joinpath('invented_tables.py').write_text(TABLES)
    tmp_path.joinpath('our_checked_things.py').write_text(OURS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(tables.SYSTEMS, 'invented', System('invented', 'invented_tables'))

    def write(text: str) -> str:
        path = tmp_path / 'script.py'
        path.write_text(text)
        return str(path)

    yield write
    for name in ('invented_tables', 'our_checked_things'):
        sys.modules.pop(name, None)


def found(path: str) -> list[tuple[int, str, bool]]:
    return [(f.line, f.name, f.served) for f in findings(uses(read_script(path)))]


def test_imports_aliases_attributes_and_keywords(script):
    path = script(
        """import invented as inv, os
from invented import Trainer as T, Other
import invented.core
def late():
    from invented.core import Sampler
    return Sampler(low=2).go()
inv.Trainer
inv.core.Sampler.go
invented.core.Missing
T(1, batch_size=2,
  batch_sise=3)
inv.Trainer(model=1, lr=2, **os.environ)
x = T
unrelated.Trainer(lr=3)
"""
    )
    assert found(path) == [
        (1, 'invented', True),
        (2, 'invented.Other', False),
        (2, 'invented.Trainer', True),
        (3, 'invented.core', True),
        (5, 'invented.core.Sampler', True),
        (7, 'invented.Trainer', True),
        (8, 'invented.core.Sampler', True),
        (9, 'invented.core.Missing', False),
        (11, 'invented.Trainer(batch_sise=)', False),
        (12, 'invented.Trainer(lr=)', False),
    ]


def test_both_ppo_trainers_are_checked(script, capsys):
    path = script(
        """from trl import PPOTrainer, SFTTrainer
old = PPOTrainer(c, m, None, t, dataset=d, data_colator=f)
old.step(q, r, s, scores=2, masks=3)
old.accelerator.wait_for_everyone()
old.dataloader, old.save_state
new = PPOTrainer(args=c, reward_model=m, reward_modell=m)
new.train(resume=True)
new.save_state()
sft = SFTTrainer(m, max_seq_length=3, formatting_func=f, peft_confg=None, dataset_text_field='a')
sft.evaluate(metric_key_prefix='x')
"""
    )
    assert check([path]) == 1
    lines = [line.removeprefix(f'{path}:') for line in capsys.readouterr().out.splitlines()[:-1]]
    assert [
        line.partition(': ')[0] + line.partition(':')[2].partition(': not')[0] for line in lines if ': not' in line
    ] == [
        '2 trl.PPOTrainer(data_colator=)',
        '3 trl.PPOTrainer().step(masks=)',
        '5 trl.PPOTrainer().save_state',
        '6 trl.PPOTrainer(reward_modell=)',
        '7 trl.PPOTrainer().train(resume=)',
        '9 trl.SFTTrainer(peft_confg=)',
    ]


def test_scripts_are_not_run_and_replacements_are_named(script, tmp_path, capsys):
    path = script(f'import pathlib\npathlib.Path({str(tmp_path)!r}, "ran").touch()\nfrom invented import Other\n')
    assert check([path]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out == [f'{path}:3: invented.Other: not served; instead: chatgpt.trainer.PPOTrainer', '1 uses, 1 not served']
    assert not (tmp_path / 'ran').exists()


def test_a_fully_served_script(script, capsys):
    path = script('from invented import Trainer\nTrainer(1)\n')
    assert check([path]) == 0
    assert capsys.readouterr().out == (
        f'{path}:1: invented.Trainer: served by our_checked_things:Trainer\n1 uses, all served\n'
    )


def test_star_imports(script):
    path = script('from invented import *\nTrainer(1, rate=2)\n')
    assert found(path) == [(1, 'invented', True), (2, 'invented.Trainer(rate=)', False)]


def test_the_librarys_own_names_are_served_unchanged(script):
    path = script(
        'from chatgpt.nn import GPTActor\nfrom chatgpt.trainer.strategies import NaiveStrategy\n'
        'import chatgpt.trainer\nchatgpt.trainer.PPOTrainer\nfrom chatgpt.trainer import NoSuchTrainer\n'
    )
    assert found(path) == [
        (1, 'chatgpt.nn.GPTActor', True),
        (2, 'chatgpt.trainer.strategies.NaiveStrategy', True),
        (3, 'chatgpt.trainer', True),
        (4, 'chatgpt.trainer.PPOTrainer', True),
        (5, 'chatgpt.trainer.NoSuchTrainer', False),
    ]


def test_a_name_that_the_library_lacks_is_not_served(script):
    path = script('from chatgpt.nn import Foo\nfrom chatgpt.trainer.callbacks import SaveCheckpointt\n')
    for finding in findings(uses(read_script(path))):
        assert not finding.served and finding.what.startswith('not served; '), finding


@pytest.mark.parametrize(
    'line, said',
    [
        ('from trl.trainer.utils import disable_dropout_in_model', 'resid_pdrop'),
        ('from trl.extras.dataset_formatting import get_formatting_func_from_dataset', 'trl.extras'),
        ('from trl import OnlineDPOConfig', 'chatgpt.trainer.PPOConfig'),
        ('from trl import KTOTrainer', 'python -m chatgpt kto'),
        ('from chatgpt.experience_maker import NaiveExperienceMaker', 'chatgpt.trainer.experience.ExperienceMaker'),
        ('from coati.ray.utils import is_rank_0', 'Ray'),
    ],
)
def test_common_names_have_a_replacement(script, line, said):
    (finding,) = findings(uses(read_script(script(f'{line}\n'))))
    assert not finding.served and 'instead: ' in finding.what and said in finding.what


def test_the_command(tmp_path):
    good, bad, words = tmp_path / 'good.py', tmp_path / 'bad.py', tmp_path / 'words.txt'
    good.write_text('from chatgpt.trainer import PPOTrainer\n')
    bad.write_text('from chatgpt.trainer import NoSuchTrainer\n')
    words.write_text('a poem about rewards\n')

    def command(*arguments: str) -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, '-m', 'chatgpt_compat', *arguments], cwd=ROOT, capture_output=True, text=True
        )
        return done.returncode, done.stdout, done.stderr

    code, out, _ = command('check', str(good), str(bad))
    assert code == 1 and f'{good}:1: chatgpt.trainer.PPOTrainer: served' in out
    assert f'{bad}:1: chatgpt.trainer.NoSuchTrainer: not served' in out
    code, out, err = command('check', str(good), str(words))
    assert (code, out) == (2, '') and err == f'error: {words}, line 1: this is no Python: invalid syntax\n'


def test_targets_of_every_table_exist():
    """Every target in the tables of all systems exists."""
    for system in SYSTEMS.values():
        try:
            served, instead = system.served, system.module.INSTEAD
        except ModuleNotFoundError:
            continue
        assert served.keys().isdisjoint(instead), f'{system.package}: both served and not'
        for name, target in served.items():
            assert tables.load(target) is not None, f'{system.package}.{name}: {target}'
        assert all(sentence.strip() for sentence in instead.values())


# ---------------------------------------------------------------------- what a green check promises


def checked(capsys: pytest.CaptureFixture[str], *paths: str) -> tuple[int, str]:
    code = check(paths)
    return code, capsys.readouterr().out


@pytest.mark.parametrize(
    'text, said',
    [
        ('import never_installed_here\n', 'never_installed_here is not installed'),
        ('from never_installed_here.part import thing\n', 'never_installed_here is not installed'),
        ('try:\n    import never_installed_here\nexcept ImportError:\n    raise\n', 'is not installed'),
        ('def main():\n    import never_installed_here\n', 'never_installed_here is not installed'),
        ('from transformers import NeverTokenizerFast\n', 'not in the installed transformers'),
        ('from transformers.never_there import thing\n', 'cannot be imported'),
        ('import transformers\ntransformers.NeverThere\n', 'not in the installed transformers'),
        ('from json import loads, NeverThere\n', 'not in the installed json'),
        ('from transformers import TrainingArguments\nTrainingArguments("out", never=1)\n', 'not a parameter here'),
        ('from invented import Trainer\nt = Trainer(1)\nt.never()\n', 'has no such attribute'),
        ('from invented.core import Sampler\ns = Sampler(low=1)\ns.go(twice=True)\n', 'not a parameter here'),
        ('import helper_beside\n', 'never_installed_here is not installed'),
        ('from helper_beside import name\n', 'never_installed_here is not installed'),
        ('import colossalai.never_there\n', 'colossalai.never_there: not served'),
    ],
)
def test_a_failing_program_is_not_green(script, tmp_path, monkeypatch, capsys, text, said):
    """Programs with an error that a checker of names alone does not find."""
    (tmp_path / 'helper_beside.py').write_text('import never_installed_here\nname = 1\n')
    code, out = checked(capsys, script(text))
    assert code == 1 and said in out, out


@pytest.mark.parametrize(
    'text',
    [
        'try:\n    import never_installed_here\nexcept ImportError:\n    pass\n',
        'from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import never_installed_here\n',
        'import sys\nif "--rare" in sys.argv:\n    import never_installed_here\n',
        'from transformers import BloomTokenizerFast\nimport peft.utils.config\n',
        'from transformers import TrainingArguments\nTrainingArguments("out", evaluation_strategy="steps")\n',
        'from invented import Trainer\nt = Trainer(1)\nt.own = 2\nt.own\n',
        'from invented import Trainer\nt = Trainer(1)\nt = other()\nt.anything\n',
        'from helper_beside import name\nimport helper_package.part\n',
        'import os.path\nos.path.join("a")\n',
    ],
)
def test_a_running_program_is_green(script, tmp_path, capsys, text):
    (tmp_path / 'helper_beside.py').write_text('name = 1\n')
    (tmp_path / 'helper_package').mkdir()
    (tmp_path / 'helper_package' / '__init__.py').write_text('')
    (tmp_path / 'helper_package' / 'part.py').write_text('import json\n')
    code, out = checked(capsys, script(text))
    assert code == 0, out


def test_a_dropped_name_is_listed_with_its_replacement(script, capsys):
    path = script(
        'from transformers import BloomTokenizerFast, Trainer\n'
        'BloomTokenizerFast\nTrainer(model=1, tokenizer=2)\nfrom transformers import AutoModel\n'
        'AutoModel.from_pretrained("gpt2", use_auth_token=True)\n'
    )
    code, out = checked(capsys, path)
    assert code == 0
    assert f'{path}:1: transformers.BloomTokenizerFast: dropped by transformers 5; replaced by ' in out
    assert 'transformers.Trainer(tokenizer=): dropped by transformers 5; given as processing_class=' in out
    assert 'AutoModel.from_pretrained(use_auth_token=): dropped by transformers 5; given as token=' in out
