"""`--engine=hf --no_packing` in examples/train_prompts.py: a run without the fast paths."""

from __future__ import annotations

from typing import Any

import pytest
from example_script import QUICK, REWARD, metrics_of, run, write_rows

import chatgpt.nn.packing as packing_module
from chatgpt.launch import demo_world
from chatgpt.rollout import HFEngine, LocalEngine


@pytest.mark.parametrize('plain', [True, False])
def test_which_paths_run(monkeypatch, data, tmp_path, plain):
    """How often a packed forward, the local engine and transformers' generate ran."""
    cut = [' '.join(row['prompt'].split()[: 3 + i]) for i, row in enumerate(demo_world.demo_prompts(4))]
    prompts = write_rows(tmp_path / 'prompts.jsonl', [{'prompt': text} for text in cut])  # there is padding
    counts = {'packed': 0, 'local': 0, 'hf': 0}

    def count(owner: Any, name: str, kind: str) -> None:
        original = getattr(owner, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            counts[kind] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counting)

    count(packing_module, '_packed_hidden', 'packed')
    # a model's first checks are packed forwards too
    monkeypatch.setattr(packing_module, '_agrees', lambda model: True)
    for place in ('actor', 'critic', 'reward_model'):
        monkeypatch.setattr(f'chatgpt.nn.{place}.check_company', lambda model: None)
    count(LocalEngine, 'generate', 'local')
    count(HFEngine, 'generate', 'hf')
    flags = f'{prompts} --pretrain {data}/base --save_path {tmp_path}/run --max_timesteps=1'.split()
    run(monkeypatch, *QUICK, *flags, *REWARD, *(['--engine=hf', '--no_packing'] if plain else []))
    assert [counts[kind] > 0 for kind in ('packed', 'local', 'hf')] == [not plain, not plain, plain]
    assert metrics_of(tmp_path / 'run')[0]['ppo/first_ratio_error'] < 1e-4
