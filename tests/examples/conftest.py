"""Inputs of the examples."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from chatgpt.launch import demo_world
from chatgpt.nn import GPTRM, GPTActor

pytest.register_assert_rewrite('example_script')


@pytest.fixture(scope='session')
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with files of every shape, a model and a reward model."""
    from example_script import write_rows

    folder = tmp_path_factory.mktemp('data')
    stories, pairs = demo_world.demo_corpus(24), demo_world.demo_preferences(24)
    labels = [{'text': r['prompt'] + r['response'], 'label': ('neg', 'pos')[i % 2]} for i, r in enumerate(stories)]
    ranked = [
        {'prompt': r['prompt'], 'responses': [r['chosen'], r['rejected'], f'{r["rejected"]} {r["rejected"]}']}
        for r in pairs[:6]
    ]
    rows = {
        'sft': [{'instruction': r['prompt'], 'output': r['response']} for r in stories],
        'pairs': pairs,
        'ranked': ranked,
        'labels': labels,
        'rewards': [{'prompt': r['prompt'], 'response': r['response'], 'reward': 0.73} for r in stories[:4]],
        'stories': stories[:4],
        'prompts': demo_world.demo_prompts(8),
    }
    for name, of in rows.items():
        write_rows(folder / f'{name}.jsonl', of)
    tokenizer = demo_world.demo_tokenizer()
    torch.manual_seed(0)
    GPTActor(config=demo_world.demo_config()).save_pretrained(folder / 'base', tokenizer=tokenizer)
    GPTRM(config=demo_world.demo_config()).save_pretrained(folder / 'rm', tokenizer=tokenizer)
    return folder


@pytest.fixture(scope='session')
def prompt_file(data: Path) -> Path:
    return data / 'prompts.jsonl'
