"""`run` and `check` with the real tables of TRL and trlX: what is served is ours, what is not says what to write."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from chatgpt.testing.processes import free_port
from chatgpt_compat.check import check
from chatgpt_compat.runner import run

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import trl, trlx
import trlx.data.configs
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, create_reference_model
from trl.core import LengthSampler, respond_to_batch
from trlx.data.default_configs import TRLConfig, default_ppo_config

draws = {LengthSampler(2, 5)() for _ in range(200)}
config = TRLConfig.update(default_ppo_config(), {'train.batch_size': 3, 'method.gamma': 0.5})
print(sorted(draws), config.train.batch_size, config.method.gamma, PPOConfig(ppo_epochs=7).ppo_epochs)
for thing in (trl.PPOTrainer, PPOTrainer, trlx.train, trlx.data.configs.TRLConfig, create_reference_model):
    assert thing.__module__.startswith('chatgpt_compat.'), thing.__module__
"""


@pytest.fixture
def script(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / 'script.py'
        path.write_text(text)
        return str(path)

    return write


def test_their_names_are_ours(script, capsys):
    path = script(SCRIPT)
    assert run(path, []) == 0, capsys.readouterr().err
    out, err = capsys.readouterr()
    assert out == '[2, 3, 4] 3 0.5 7\n'  # the upper end of a length is left out, as theirs
    assert 'trl.core.LengthSampler' in err and 'trlx.train' in err
    assert check([path]) == 0


@pytest.mark.parametrize(
    ('line', 'sentence'),
    [
        ('from trl import GRPOTrainer', "instead: chatgpt.trainer.PPOTrainer with advantage_estimator='grpo'"),
        ('from trl.trainer import NoSuchTrainer', 'trl.trainer.NoSuchTrainer is not served'),
        ('from trlx import no_such_verb', 'trlx.no_such_verb is not served'),
    ],
)
def test_what_is_not_there_is_one_line(script, capsys, line, sentence):
    path = script(f'{line}\n')
    assert run(path, []) == 1
    (said,) = [text for text in capsys.readouterr().err.splitlines() if text.startswith('ImportError: ')]
    assert sentence in said and said.endswith(f'({path}, line 1)')
    assert check([path]) == 1
    assert f'{path}:1: ' in capsys.readouterr().out


@pytest.mark.system
def test_the_command_under_torchrun(script, tmp_path):
    path = script(SCRIPT + 'import os, sys\nsys.exit(int(os.environ["RANK"]) * 0 + len(sys.argv))\n')
    env = os.environ | {'OMP_NUM_THREADS': '1'}
    command = [sys.executable, '-m', 'torch.distributed.run', '--nproc-per-node=2', f'--master-port={free_port()}']
    done = subprocess.run(
        [*command, '-m', 'chatgpt_compat', 'run', path, '--lr', '3'], env=env, capture_output=True, text=True
    )
    assert done.stdout.count('[2, 3, 4] 3 0.5 7') == 2, done.stderr
    assert done.stderr.count('chatgpt_compat: ') == 1
    assert 'exitcode  : 3' in done.stderr  # that of the script, which has three words in sys.argv
