"""docs/doctor.md has a section for every finding, and the thresholds that the code has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from chatgpt.monitor.doctor import CHECKS, LIMITS, recommended_lr
from chatgpt.monitor.doctor.diagnosis import explanations

PAGE = (Path(__file__).resolve().parents[2] / 'docs' / 'doctor.md').read_text()


def test_a_section_for_every_finding_and_no_other():
    assert sorted(explanations()) == sorted(CHECKS)


@pytest.mark.parametrize('key', CHECKS)
def test_a_section_says_what_why_what_to_change_and_where_from(key):
    for word in ('Seen', 'Why', 'Change', 'Source'):
        (found,) = re.findall(rf'^{word}: (.{{20}})', explanations()[key], re.MULTILINE)


def test_the_thresholds_are_those_of_the_code():
    rows = re.findall(r'^\| `(\w+)` \| (\S+) \| (.*) \|$', PAGE, re.MULTILINE)
    assert [(name, float(value)) for name, value, _ in rows] == list(LIMITS.items())
    assert all(len(why) > 10 for _, _, why in rows)


def test_the_table_of_learning_rates_follows_the_rule():
    rows = re.findall(r'^\| ([\d]+) (thousand|million|billion) \| (\S+) \| (\S+) \| (\S+) \|$', PAGE, re.MULTILINE)
    assert len(rows) == 4
    for number, unit, *rates in rows:
        parameters = int(number) * {'thousand': 10**3, 'million': 10**6, 'billion': 10**9}[unit]
        for rate, learning in zip(rates, ('rm', 'ppo', 'dpo'), strict=True):
            assert recommended_lr(parameters, learning) == float(rate)


def test_the_rule_goes_through_the_published_points():
    """Ouyang et al. 2022: 9e-6 for 6 billion; arXiv 2403.17031: 3e-6 for PPO with 1 billion; Rafailov et al. 2023: 1e-6
    for DPO with 2.8 billion."""
    assert recommended_lr(6 * 10**9, 'rm') == 9e-6
    assert 3e-6 / 2 < recommended_lr(10**9, 'ppo') < 3e-6 * 2
    assert 1e-6 / 2 < recommended_lr(28 * 10**8, 'dpo') < 1e-6 * 2
    assert recommended_lr(6 * 10**9, 'rm', trained=10**7) == pytest.approx(9e-5)
    assert recommended_lr(4 * 6 * 10**9, 'sft') == pytest.approx(4.5e-6, abs=0.6e-6)
