"""The demo: on a budget of seconds it leaves what it promises; whole (slow) it wins and does not repeat itself."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from example_script import loaded


@pytest.fixture
def demo() -> Any:
    return loaded('demo')


@pytest.mark.system
def test_demo_leaves_models_with_cards_a_table_and_reports(demo, monkeypatch, tmp_path, capsys):
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    from chatgpt.launch import demo_world

    corpus, prompts = demo_world.demo_corpus, demo_world.demo_prompts
    monkeypatch.setattr(demo_world, 'demo_corpus', lambda num, seed: corpus(min(num, 264), seed))
    monkeypatch.setattr(demo_world, 'demo_prompts', lambda num, seed: prompts(min(num, 8), seed))
    monkeypatch.setitem(demo.PREFERENCES, 'num_pairs', 128)
    monkeypatch.setitem(demo.PPO, 'num_phases', 2)
    monkeypatch.setattr(sys, 'argv', ['demo.py', '--out', str(tmp_path)])
    demo.main()
    shown = capsys.readouterr().out
    table = (tmp_path / 'before_after.txt').read_text()
    assert 'win rate of PPO over SFT by the truth: ' in table
    assert 'of eval pairs in the right order' in table
    assert 'repeated runs of 4 words within a story: SFT ' in table
    assert 'runs of 4 words that another of the 8 stories has too: SFT ' in table
    assert table.count('SFT') >= 6 and table.count('PPO') >= 6
    assert table.strip() in shown
    assert [line[0] for line in shown.splitlines() if line[:2] in ('1.', '2.', '3.', '4.')] == ['1', '2', '3', '4']
    assert '## Training' in (tmp_path / 'ppo' / 'README.md').read_text()
    assert (tmp_path / 'ppo_run' / 'report.html').exists()
    assert shown.splitlines()[-1] == f'report: {tmp_path}/ppo_run/report.html'
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / 'reward_model').config.num_labels == 1
    for name in ('sft', 'ppo'):
        assert AutoModelForCausalLM.from_pretrained(tmp_path / name).config.vocab_size == len(
            demo_world.demo_tokenizer()
        )


def test_the_comparison_counts_wins_and_repetition(demo, monkeypatch, tmp_path):
    """Two answers by hand: PPO wins one and ties one, and says a sentence twice in one of them."""
    told = {
        'sft': ['it felt calm .', 'it felt glad . it felt sad .'],
        'ppo': ['it felt glad . it felt glad .', 'it felt calm . it found a leaf .'],
    }
    monkeypatch.setattr(demo, 'answers', lambda folder, prompts, seed: told[folder.name])
    monkeypatch.setattr(demo, 'NUM_SHOWN', 2)
    numbers, rows = demo.compare(tmp_path, num_prompts=2)
    assert (numbers['count'], numbers['wins'], numbers['ties'], numbers['win_rate']) == (2, 1, 1, 0.75)
    assert numbers['SFT truth'] == 0.0 and numbers['PPO truth'] == pytest.approx(0.25 / 2)
    assert numbers['SFT within'] == 0.0
    # of the five runs of 'it felt glad . it felt glad .' the last stood before; the other story has none twice
    assert numbers['PPO within'] == pytest.approx(1 / 5 / 2)
    # 'it felt calm .' has one run, which the second of the SFT stories does not have
    assert numbers['SFT across'] == 0.0
    assert numbers['PPO words'] == 8.5
    assert [row['truth'] for row in rows if row['']] == ['', '+0.00', '+0.25', '', '+0.00', '+0.00']


@pytest.mark.slow
def test_the_whole_demo_wins_and_does_not_repeat_itself(demo, tmp_path):
    """Margins: 600 stories leave a standard error of 0.004 within and 0.005 across; three of the difference of two."""
    demo.train(tmp_path, seed=0)
    numbers, _ = demo.compare(tmp_path, num_prompts=600)
    assert numbers['win_rate'] > 0.9
    assert numbers['PPO within'] < numbers['SFT within'] + 0.017
