"""docs/coming_from/trl.md says what the tables of the code say."""

from __future__ import annotations

import json
import re
from pathlib import Path

from chatgpt.compat.trl import SERVED
from chatgpt.compat.trl.config import FIELDS
from chatgpt.compat.trl.statistics import KEYS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / 'docs' / 'coming_from' / 'trl.md').read_text()
WORDS = {
    'ours': 'ours',
    'converted': 'converted',
    'label': 'kept',
    'warned': 'warning',
    'absent': 'warning',
    'refused': 'error',
}


def rows(section: str) -> list[list[str]]:
    text = PAGE.split(f'\n## {section}\n')[1].split('\n## ')[0]
    cells = [
        [cell.strip() for cell in line.strip('|').split('|')] for line in text.splitlines() if line.startswith('| ')
    ]
    return cells[1:]


def test_arguments() -> None:
    told = {name.strip('`'): (kind, note.strip('`')) for name, kind, note in rows('Arguments')}
    assert told == {name: (WORDS[entry.kind], entry.note) for name, (entry, _) in FIELDS.items()}


def test_statistics() -> None:
    assert {name.strip('`'): note for name, note in rows('Statistics')} == KEYS


def test_numbers() -> None:
    recorded = json.loads((ROOT / 'benchmarks' / 'results' / 'compat_trl.json').read_text())
    told = {name: numbers for name, *numbers in rows('The same numbers') if name in recorded['numbers']}
    assert told == {name: [f'{x:.0e}' for x in row.values()] for name, row in recorded['numbers'].items()}
    assert max(x for row in recorded['numbers'].values() for x in row.values()) < 1e-5
    for case, here, there, _, median, _ in rows('Speed'):
        found = recorded['speed'][f'trl_classic ppo, {case}']
        assert (here, there) == (f'{found["ours"]["cpu_s"]:.2f}', f'{found["theirs"]["cpu_s"]:.2f}')
        assert median == f'**{found["ratio"]["median"]:.2f}**'


def test_names_of_the_table_are_served() -> None:
    table = PAGE.split('## Name by name')[1].split('\n## ')[0]
    assert {'PPOTrainer', 'PPOConfig', 'create_reference_model'} <= set(re.findall(r'`(\w+)`', table))
    for name in re.findall(r'`(core\.\w+)`', table):
        assert name in SERVED
