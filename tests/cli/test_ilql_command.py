"""ILQL as a command: rows with rewards, a model that generates, and mistakes in the data."""

from __future__ import annotations

import json

import pytest
import torch
from command_line import call

from chatgpt.launch.demo_world import rewarded_stories
from chatgpt.nn.ilql import ILQLModel


@pytest.fixture
def words(tmp_path, model_folder):
    return ['ilql', str(tmp_path / 'data.jsonl'), f'--pretrain={model_folder}', f'--save_path={tmp_path}/run']


def write(tmp_path, rows):
    (tmp_path / 'data.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))


def test_a_run_learns_from_the_rewards_of_its_rows(monkeypatch, capsys, tmp_path, words):
    rows = rewarded_stories(12)
    write(tmp_path, rows)
    assert call(monkeypatch, *words, '--max_epochs=1', '--log_interval=1', '--train_batch_size=4') == 0
    lines = [json.loads(line) for line in (tmp_path / 'run' / 'metrics.jsonl').read_text().splitlines()]
    assert len(lines) == 3 and all(line['ilql/td_loss'] > 0 for line in lines)
    assert capsys.readouterr().out.endswith(f'python -m chatgpt generate {tmp_path}/run/actor "your prompt"\n')
    first = ILQLModel.from_pretrained(tmp_path / 'run' / 'actor')
    assert call(monkeypatch, 'generate', str(tmp_path / 'run' / 'actor'), 'one day a fox', '--max_new_tokens=2') == 0
    write(tmp_path, [row | {'reward': -row['reward']} for row in rows])  # what is learned is the reward
    words[-1] = f'--save_path={tmp_path}/second'
    assert call(monkeypatch, *words, '--max_epochs=1', '--log_interval=1', '--train_batch_size=4') == 0
    second = ILQLModel.from_pretrained(tmp_path / 'second' / 'actor')
    same = [torch.equal(a, b) for a, b in zip(first.q_heads.parameters(), second.q_heads.parameters(), strict=True)]
    assert not all(same)
