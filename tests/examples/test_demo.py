"""The demo, on a budget of seconds: it leaves what it promises."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def test_demo_leaves_models_a_table_and_a_plot(monkeypatch, tmp_path, capsys):
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    from chatgpt.dataset import embedded
    from chatgpt.trainer import PPOTrainer

    spec = importlib.util.spec_from_file_location('demo', ROOT / 'examples' / 'demo.py')
    assert spec is not None and spec.loader is not None
    demo: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    corpus, pairs, prompts, fit = embedded.demo_corpus, embedded.demo_preferences, embedded.demo_prompts, PPOTrainer.fit
    monkeypatch.setattr(embedded, 'demo_corpus', lambda num, seed: corpus(min(num, 264), seed))
    monkeypatch.setattr(embedded, 'demo_preferences', lambda num, seed: pairs(min(num, 128), seed))
    monkeypatch.setattr(embedded, 'demo_prompts', lambda num, seed: prompts(min(num, 8), seed))
    monkeypatch.setattr(PPOTrainer, 'fit', lambda self, p, **kw: fit(self, p, **kw | {'max_timesteps': 2}))
    monkeypatch.setattr(sys, 'argv', ['demo.py', '--out', str(tmp_path)])
    demo.main()
    shown = capsys.readouterr().out
    table = (tmp_path / 'before_after.txt').read_text()
    assert 'win rate of PPO over SFT by the truth: ' in table
    assert 'of eval pairs in the right order' in table
    assert table.count('SFT') >= 6 and table.count('PPO') >= 6
    assert table.strip() in shown
    assert (tmp_path / 'curves.png').read_bytes().startswith(b'\x89PNG')
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / 'reward_model').config.num_labels == 1
    for name in ('sft', 'ppo'):
        assert AutoModelForCausalLM.from_pretrained(tmp_path / name).config.vocab_size == len(embedded.demo_tokenizer())
