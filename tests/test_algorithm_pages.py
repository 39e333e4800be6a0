"""Every page under docs/algorithms has the same five parts, none of them empty, and names metrics that docs/metrics.md knows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[1] / 'docs'
PAGES = sorted((DOCS / 'algorithms').glob('*.md'))
PARTS = ('Formula', 'Source', 'Defaults', 'What we do differently', 'Metrics')


def parts_of(text: str) -> dict[str, str]:
    """What stands under each heading of second rank."""
    found = re.split(r'^## (.+)$', text, flags=re.MULTILINE)[1:]
    return {heading: body.strip() for heading, body in zip(found[::2], found[1::2], strict=True)}


def missing(text: str) -> list[str]:
    parts = parts_of(text)
    return [name for name in PARTS if not parts.get(name)]


@pytest.mark.parametrize('page', PAGES, ids=lambda p: p.stem)
def test_a_page_has_its_five_parts(page):
    text = page.read_text()
    assert not missing(text)
    parts = parts_of(text)
    assert re.search(r'^\| `\w+`.*\|$', parts['Defaults'], re.MULTILINE), 'a table of settings is missing'
    names = set(re.findall(r'`((?:rollout|ppo|sft|rm|dpo|orpo|simpo|kto|ilql|rft|perf)/[a-z_0-9.]+)`', parts['Metrics']))
    known = (DOCS / 'metrics.md').read_text()
    assert all(f'`{name.removesuffix("...")}' in known for name in names)
    for name in PARTS:  # negative control: a page without one of them is found out
        assert missing(text.replace(f'## {name}\n', '')) == [name]


def test_there_is_a_page_for_every_estimator_and_trainer():
    assert {p.stem for p in PAGES} >= {
        'a2c', 'cispo', 'dapo', 'dpo', 'gdpo', 'grpo', 'gspo', 'ilql', 'kto', 'nlpo', 'off_policy', 'orpo', 'ppo', 'reinforce++',
        'reward_model', 'rft', 'rloo', 'sft', 'simpo',
    }  # fmt: skip
