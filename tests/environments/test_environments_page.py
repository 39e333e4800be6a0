"""The example of docs/environments.md is complete and runs as it stands."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from chatgpt.launch.recipes import execute
from chatgpt.launch.runs import PPORun
from chatgpt.testing import byte_tokenizer, tiny_causal_lm

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / 'docs' / 'environments.md').read_text()


def example() -> str:
    (code,) = re.findall(r'```python\n(# guess\.py\n.*?)```', PAGE, re.DOTALL)
    return code


def lm() -> Any:
    return tiny_causal_lm('gpt2', vocab_size=259, n_positions=128, pad_token_id=256, bos_token_id=257, eos_token_id=258)


@pytest.fixture
def guess(tmp_path, monkeypatch) -> Any:
    """The class of the page, in a file outside of the package."""
    monkeypatch.chdir(tmp_path)
    Path('guess.py').write_text(example())
    spec = importlib.util.spec_from_file_location('guess_of_a_test', 'guess.py')
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, 'guess_of_a_test', module)
    spec.loader.exec_module(module)
    return module.Guess


def test_the_command_of_the_page_takes_its_file(guess, tmp_path):
    lm().save_pretrained('model')
    byte_tokenizer().save_pretrained('model')
    less = {'num_episodes': 1, 'max_timesteps': 2, 'update_timesteps': 1, 'max_epochs': 1, 'max_new_tokens': 64}
    run = PPORun(
        environment='guess.py:Guess',
        pretrain='model',
        max_turn_tokens=4,
        eval_episodes=5,
        save_path='run',
        experience_batch_size=4,
        train_batch_size=4,
        **less,
    )
    run.said = {}
    execute(run)
    row = json.loads(Path('run/metrics.jsonl').read_text().splitlines()[-1])
    before = json.loads(Path('run/eval.jsonl').read_text().splitlines()[0])
    assert row['environment/num_turns_mean'] > 0 and 'eval/success_share' in before
