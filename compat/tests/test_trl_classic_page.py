"""The pages of docs/coming_from about TRL list every argument and have the measured numbers."""

from __future__ import annotations

import json
import re

import pytest
from trl_page import PAGE, ROOT, rows, section

from chatgpt_compat.trl import SERVED, pairs, sft
from chatgpt_compat.trl.config import UNSUPPORTED, PPOConfig

CONFIGS = [PPOConfig, pairs.DPOConfig, sft.SFTConfig, pairs.RewardConfig]
REASONS = [
    *UNSUPPORTED.values(),
    pairs.DPOTrainer.UNSUPPORTED,
    sft.SFTTrainer.UNSUPPORTED,
    pairs.RewardTrainer.UNSUPPORTED,
]


@pytest.mark.parametrize('config', CONFIGS)
def test_every_argument_is_on_the_page(config) -> None:
    assert not [name for name in config.__dataclass_fields__ if f'`{name}`' not in PAGE]


@pytest.mark.parametrize('reasons', REASONS, ids=['classic', 'second', 'dpo', 'sft', 'reward'])
def test_unsupported_names_are_arguments(reasons) -> None:
    known = {name for config in CONFIGS for name in config.__dataclass_fields__}
    assert reasons.keys() <= known


def test_numbers() -> None:
    recorded = json.loads((ROOT / 'compat' / 'benchmarks' / 'results' / 'compat_trl.json').read_text())
    told = {name: numbers for name, *numbers in rows('The same numbers') if name in recorded['numbers']}
    assert told == {name: [f'{x:.0e}' for x in row.values()] for name, row in recorded['numbers'].items()}
    assert max(x for row in recorded['numbers'].values() for x in row.values()) < 1e-5
    for case, here, there, _, median, _ in rows('Speed'):
        found = recorded['speed'][f'trl_classic ppo, {case}']
        assert (here, there) == (f'{found["ours"]["cpu_s"]:.2f}', f'{found["theirs"]["cpu_s"]:.2f}')
        assert median == f'**{found["ratio"]["median"]:.2f}**'


def test_names_of_the_table_are_served() -> None:
    table = section('Name by name')
    assert {'PPOTrainer', 'PPOConfig', 'create_reference_model'} <= set(re.findall(r'`(\w+)`', table))
    for name in re.findall(r'`(core\.\w+)`', table):
        assert name in SERVED


def test_the_numbers_of_the_second_era_are_those_measured() -> None:
    found = json.loads((ROOT / 'compat' / 'benchmarks' / 'results' / 'compat_trl_recent.json').read_text())
    for name, row in found['speed'].items():
        if name != 'machine':
            seconds = f'{row["ours"]["cpu_s"]:.2f} | {row["theirs"]["cpu_s"]:.2f} | {row["ratio"]["median"]:.2f}'
            assert f'| {name.removeprefix("trl_ppo ppo, ")} | {seconds} |' in PAGE
    for name, row in found['numbers'].items():
        assert f'| {name} | {row["scores"]:.0e} |' in PAGE if 'scores' in row else f'| {name} | ' in PAGE
        assert max(row.values()) < 1e-5
