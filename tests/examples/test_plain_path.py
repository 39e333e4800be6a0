"""`--engine=hf --no_packing` in examples/train_prompts.py: a run without the fast paths."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

import chatgpt.nn.packing as packing_module
from chatgpt.launch import demo_world
from chatgpt.launch.arguments import run_main
from chatgpt.nn import GPTActor
from chatgpt.rollout import HFEngine, LocalEngine

EXAMPLES = Path(__file__).resolve().parents[2] / 'examples'
SCRIPT = EXAMPLES / 'train_prompts.py'
QUICK = [
    '--num_episodes=1',
    '--max_timesteps=1',
    '--update_timesteps=1',
    '--experience_batch_size=4',
    '--train_batch_size=4',
    '--max_epochs=1',
    '--max_new_tokens=4',
]


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, *flags: str) -> tuple[dict[str, Any], dict[str, int]]:
    """The metrics of a phase, and how often a packed forward, the local engine and transformers' generate ran."""
    GPTActor(config=demo_world.demo_config()).save_pretrained(folder / 'model', tokenizer=demo_world.demo_tokenizer())
    prompts = folder / 'prompts.jsonl'  # of different lengths, so that there is padding
    cut = [' '.join(row['prompt'].split()[: 3 + i]) for i, row in enumerate(demo_world.demo_prompts(4))]
    prompts.write_text(''.join(json.dumps({'prompt': text}) + '\n' for text in cut))
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
    spec = importlib.util.spec_from_file_location('train_prompts', SCRIPT)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    out = folder / 'run'
    given = [
        str(prompts),
        '--pretrain',
        str(folder / 'model'),
        '--reward_fn',
        f'{EXAMPLES / "rewards.py"}:joy',
        '--save_path',
        str(out),
    ]
    monkeypatch.setattr(sys, 'argv', [str(SCRIPT), *given, *QUICK, *flags])
    run_main(module.main)
    return json.loads((out / 'metrics.jsonl').read_text().splitlines()[0]), counts


def test_the_plain_path(monkeypatch, tmp_path):
    metrics, counts = run(monkeypatch, tmp_path, '--engine=hf', '--no_packing')
    assert counts['packed'] == counts['local'] == 0 and counts['hf'] > 0
    assert metrics['ppo/first_ratio_error'] < 1e-4


def test_the_default_takes_the_fast_ones(monkeypatch, tmp_path):
    metrics, counts = run(monkeypatch, tmp_path)
    assert counts['packed'] > 0 and counts['local'] > 0 and counts['hf'] == 0
    assert metrics['ppo/first_ratio_error'] < 1e-4
