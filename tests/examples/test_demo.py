"""The demo, on a budget of seconds: it leaves what it promises."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def test_demo_leaves_models_a_table_and_a_plot(monkeypatch, tmp_path, capsys):
    from transformers import AutoModelForCausalLM

    from chatgpt.dataset import embedded
    from chatgpt.trainer import PPOTrainer

    spec = importlib.util.spec_from_file_location('demo', ROOT / 'examples' / 'demo.py')
    assert spec is not None and spec.loader is not None
    demo: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    corpus, prompts, fit = embedded.demo_corpus, embedded.demo_prompts, PPOTrainer.fit
    monkeypatch.setattr(embedded, 'demo_corpus', lambda num, seed: corpus(min(num, 264), seed))
    monkeypatch.setattr(embedded, 'demo_prompts', lambda num, seed: prompts(min(num, 8), seed))
    monkeypatch.setattr(PPOTrainer, 'fit', lambda self, p, **kw: fit(self, p, **kw | {'max_timesteps': 2}))
    monkeypatch.setattr(sys, 'argv', ['demo.py', '--out', str(tmp_path)])
    demo.main()
    shown = capsys.readouterr().out
    assert 'mean score on 8 new prompts: before PPO' in shown
    table = (tmp_path / 'before_after.txt').read_text()
    assert table.count('before') >= 8 and table.count('after') >= 8
    assert (tmp_path / 'curves.png').read_bytes().startswith(b'\x89PNG')
    for name in ('sft', 'ppo'):
        assert AutoModelForCausalLM.from_pretrained(tmp_path / name).config.vocab_size == len(embedded.demo_tokenizer())
