"""The commands of docs/one_card.md in order; each uses the output of the one before."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from chatgpt.batching import collate
from chatgpt.nn import Actor
from chatgpt.testing.tiny import tiny_sequences

ROOT = Path(__file__).resolve().parents[2]
DATA = {
    'stories.jsonl': [{'prompt': 'one day', 'completion': ' a fox'}, {'prompt': 'the', 'completion': ' kind cat'}],
    'preferences.jsonl': [{'prompt': 'one day', 'chosen': ' a fox', 'rejected': ' a dog'}],
    'prompts.jsonl': [{'prompt': t} for t in ('one day', 'the', 'a cat', 'tom')],
}
SMALL = {
    'sft': ['--max_epochs=1', '--train_batch_size=2'],
    'reward-model': ['--max_epochs=1', '--train_batch_size=2'],
    'ppo': [
        *('--experience_batch_size=4', '--train_batch_size=4', '--max_new_tokens=5', '--num_episodes=1'),
        *('--max_timesteps=2', '--update_timesteps=1', '--save_path=outputs/ppo'),
    ],
}


def commands() -> list[list[str]]:
    """Returns the arguments of the page's first commands, which form the chain."""
    text = (ROOT / 'docs' / 'one_card.md').read_text().replace('\\\n', ' ')
    lines = [line.strip() for line in text.splitlines() if line.startswith('    python -m chatgpt ')]
    return [shlex.split(line)[3:] for line in lines[:3]]


@pytest.mark.system
def test_the_commands_of_the_page_run_in_order(tmp_path, model_folder):
    for name, rows in DATA.items():
        (tmp_path / name).write_text(''.join(json.dumps(row) + '\n' for row in rows))
    environment = os.environ | {'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1', 'HF_HUB_OFFLINE': '1'}
    assert [words[0] for words in commands()] == list(SMALL)
    for words in commands():
        words = [str(model_folder) if word == 'Qwen/Qwen2.5-7B' else word for word in words]
        argv = [sys.executable, '-m', 'chatgpt', *words, *SMALL[words[0]]]
        done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    out = tmp_path / 'outputs'
    actor = Actor.from_pretrained(out / 'ppo' / 'actor')
    batch = collate(tiny_sequences(3))
    assert torch.isfinite(actor(batch).logprobs).all()
    assert not torch.equal(actor(batch).logprobs, Actor.from_pretrained(out / 'sft' / 'actor')(batch).logprobs)
    rows = [json.loads(line) for line in (out / 'ppo' / 'metrics.jsonl').read_text().splitlines()]
    assert len(rows) == 2 and any('critic' in name for name in rows[0])
