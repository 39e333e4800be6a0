"""The page for those who come from TRL names every argument and logged number of the second era."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chatgpt.compat.trl import INSTEAD, SERVED, dpo, later, ppo_train, reward, sft
from chatgpt.compat.trl.config import FIELDS

ROOT = Path(__file__).parents[2]
PAGE = '\n'.join(p.read_text() for p in (ROOT / 'docs' / 'coming_from').glob('trl*.md'))


@pytest.mark.parametrize(
    'table',
    [FIELDS, later.ARGUMENTS, dpo.FIELDS, sft.FIELDS, reward.FIELDS, ppo_train.KEYS],
    ids=lambda t: next(iter(t)),
)
def test_every_name_of_a_table_is_on_the_page(table):
    assert not [name for name in table if f'`{name}`' not in PAGE]


@pytest.mark.parametrize(
    'entries', [later.ARGUMENTS, dpo.FIELDS, sft.FIELDS, reward.FIELDS], ids=['all', 'dpo', 'sft', 'reward']
)
def test_the_page_says_of_an_argument_what_the_table_says(entries):
    for name, entry in entries.items():
        rows = [line for line in PAGE.splitlines() if line.startswith('|') and f'`{name}`' in line.split('|')[1]]
        assert any(entry.note in row for row in rows), f'{name}: {entry.note}'


def test_the_programs_are_those_that_the_page_names():
    folder = Path(__file__).parent / 'trl_recent'
    assert 'tests/compat/trl_recent/' in PAGE and len(list(folder.glob('*.py'))) >= 8


def test_served_names_and_those_that_are_not_are_apart():
    assert not set(SERVED) & set(INSTEAD)


def test_the_numbers_of_the_page_are_those_measured():
    found = json.loads((ROOT / 'benchmarks' / 'results' / 'compat_trl_recent.json').read_text())
    for name, row in found['speed'].items():
        if name != 'machine':
            seconds = f'{row["ours"]["cpu_s"]:.2f} | {row["theirs"]["cpu_s"]:.2f} | {row["ratio"]["median"]:.2f}'
            assert f'| {name.removeprefix("trl_ppo ppo, ")} | {seconds} |' in PAGE
    for name, row in found['numbers'].items():
        assert f'| {name} | {row["scores"]:.0e} |' in PAGE if 'scores' in row else f'| {name} | ' in PAGE
        assert max(row.values()) < 1e-5
