"""--skip_bad_records through examples/train_prompts.py: every source it reads counts, skips and says so."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from chatgpt.launch import demo_world
from chatgpt.launch.arguments import run_main
from chatgpt.nn import GPTActor

ROOT = Path(__file__).resolve().parents[2]


def test_bad_records_of_every_source_are_counted_and_named(monkeypatch, capsys, tmp_path):
    GPTActor(config=demo_world.demo_config()).save_pretrained(tmp_path / 'model', tokenizer=demo_world.demo_tokenizer())
    good = '{"prompt": "one day a small fox"}\n'
    (tmp_path / 'prompts.jsonl').write_text(good * 4 + '{"prompt": ""}\nnonsense\n')
    (tmp_path / 'validation.jsonl').write_text('nonsense\n' + good)
    (tmp_path / 'ptx.jsonl').write_text('{"text": "a fox ."}\n{"text": 3}\n')
    sources = {n: str(tmp_path / f'{n}.jsonl') for n in ('prompts', 'validation', 'ptx')}
    flags = [
        sources['prompts'],
        '--validation_file',
        sources['validation'],
        '--ptx_data',
        sources['ptx'],
        '--ptx_coef=0.5',
        '--pretrain',
        str(tmp_path / 'model'),
        '--reward_fn',
        f'{ROOT / "examples" / "rewards.py"}:joy',
        '--num_episodes=1',
        '--max_timesteps=1',
        '--update_timesteps=1',
        '--experience_batch_size=2',
        '--train_batch_size=2',
        '--max_epochs=1',
        '--max_new_tokens=2',
        '--save_path',
        str(tmp_path / 'run'),
    ]
    main = runpy.run_path(str(ROOT / 'examples' / 'train_prompts.py'))['main']
    monkeypatch.setattr(sys, 'argv', ['train_prompts.py', *flags])
    with pytest.raises(SystemExit):
        run_main(main)
    assert f'{sources["prompts"]}, line 5: ' in capsys.readouterr().err  # without the flag the first one ends the run
    monkeypatch.setattr(sys, 'argv', ['train_prompts.py', *flags, '--skip_bad_records'])
    run_main(main)
    said = capsys.readouterr().out
    assert f'{sources["prompts"]}: 4 prompts, 2 bad ones left out ({sources["prompts"]}, line 5: ' in said
    assert f'{sources["validation"]}: 1 eval prompts, 1 bad ones left out ({sources["validation"]}, line 1: ' in said
    assert f'{sources["ptx"]}: 1 texts, 1 bad ones left out ({sources["ptx"]}, line 2: ' in said
