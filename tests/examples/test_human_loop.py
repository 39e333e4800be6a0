"""The loop with people in it: whole, with judges that know the truth; and what it says where nobody judges."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.system


def loop(*words: str) -> subprocess.CompletedProcess[str]:
    script = str(ROOT / 'examples' / 'human_loop.py')
    return subprocess.run([sys.executable, script, *words], capture_output=True, text=True, cwd=ROOT)


def test_the_new_policy_wins_and_a_second_start_goes_on(tmp_path):
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
