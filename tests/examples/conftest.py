"""Inputs of the examples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chatgpt.launch import demo_world

pytest.register_assert_rewrite('train_prompts_runs')


@pytest.fixture(scope='module')
def prompt_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp('data') / 'prompts.jsonl'
    path.write_text('\n'.join(json.dumps(row) for row in demo_world.demo_prompts(8)) + '\n')
    return path
