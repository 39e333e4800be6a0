"""The demo: a short run writes its files; the whole run (slow) wins and does not repeat itself. The loop with people,
with simulated judges."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
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


@pytest.mark.slow
def test_the_whole_demo_wins_and_does_not_repeat_itself(demo, tmp_path):
    """Margins are three standard errors of a difference: with 600 stories each has 0.004 within and 0.005 across."""
    demo.train(tmp_path, seed=0)
    numbers, _ = demo.compare(tmp_path, num_prompts=600)
    assert numbers['win_rate'] > 0.9
    assert numbers['PPO within'] < numbers['SFT within'] + 0.017


ROOT = Path(__file__).resolve().parents[2]


def loop(*words: str) -> subprocess.CompletedProcess[str]:
    script = str(ROOT / 'examples' / 'human_loop.py')
    return subprocess.run([sys.executable, script, *words], capture_output=True, text=True, cwd=ROOT)


@pytest.mark.system
def test_the_new_policy_wins_and_a_second_start_resumes(tmp_path):
    done = loop('--simulated', '--out', str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = re.findall(r'(\S+) wins against (\S+) in ([\d.]+)% \(95 % interval ([\d.]+)%', done.stdout)
    assert found[-1][:2] == (f'{tmp_path}/round-1/ppo/actor', f'{tmp_path}/sft/actor') and float(found[-1][3]) > 55
    assert done.stdout.count('600 of 600 judgements, of 300 pairs by Ada (300), Bo (300)') == 2
    rows = [json.loads(line) for line in (tmp_path / 'round-1' / 'preferences.jsonl').read_text().splitlines()]
    assert len(rows) > 150 and all(row['votes_chosen'] > row['votes_rejected'] for row in rows)
    again = loop('--simulated', '--out', str(tmp_path))
    assert again.returncode == 0, again.stderr
    assert 'answers 300 prompts' not in again.stdout and 'phase' not in again.stdout
    assert again.stdout.splitlines()[-1] == f'the policy of the last round: {tmp_path}/round-1/ppo/actor'
