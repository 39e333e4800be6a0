"""`evaluate` with reward functions as people write them: columns that they require, and TRL's convention."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from command_line import call

from chatgpt.nn import GPTActor
from chatgpt.testing.fakes import byte_tokenizer, tiny_config

REWARDS = """
def right(prompts, responses, answer, **k):
    return [float(a) for a in answer]

def theirs(completions, answer, **kwargs):
    return [float(a) + (p.startswith('p') and not c.startswith('p')) for c, a, p in
            zip(completions, answer, kwargs['prompts'])]

def misspelt(prompts, responses, anser):
    return [0.0] * len(prompts)

def broken(prompts, responses, answer):
    return [float('nan') if a == 3 else 0.0 for a in answer]
"""


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp('models')
    torch.manual_seed(0)
    config = tiny_config('gpt2', vocab_size=259, positions=64)
    GPTActor(config=config).save_pretrained(folder / 'actor', tokenizer=byte_tokenizer())
    (folder / 'r.py').write_text(REWARDS)
    rows = [{'prompt': f'p{i} ', 'answer': i} for i in range(4)]
    (folder / 'prompts.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return folder


@pytest.mark.parametrize(('name', 'mean'), [('right', 1.5), ('theirs', 2.5)])
def test_columns_and_texts_go_by_name(monkeypatch, capsys, folder, name, mean):
    words = [f'{folder}/actor', f'{folder}/prompts.jsonl', '--max_new_tokens=2', f'--reward_fn={folder}/r.py:{name}']
    assert call(monkeypatch, 'evaluate', *words) == 0
    assert f'"score_mean": {mean}' in capsys.readouterr().out


@pytest.mark.parametrize(
    ('name', 'message', 'code'),
    [
        ('misspelt', "needs a column 'anser' beside the prompts; there are answer; did you mean answer?", 2),
        ('broken', "returned nan for eval prompt 3, counted from 0 ('p3 ')", 1),
    ],
)
def test_what_is_wrong_is_named_in_a_users_words(monkeypatch, capsys, folder, name, message, code):
    words = [f'{folder}/actor', f'{folder}/prompts.jsonl', '--max_new_tokens=2', f'--reward_fn={folder}/r.py:{name}']
    assert call(monkeypatch, 'evaluate', *words) == code
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert message in line
