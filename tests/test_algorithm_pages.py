"""Every page under docs/algorithms has the same five parts, none of them empty, and names metrics that docs/metrics.md
knows."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from chatgpt.launch.runs import PPORun
from chatgpt.rollout.sampling import generation_fields
from chatgpt.trainer import RFTConfig
from chatgpt.trainer.algorithms import ESTIMATORS, POLICY_LOSSES
from chatgpt.trainer.config import PPOConfig, SFTConfig
from chatgpt.trainer.objectives.ilql import ILQLConfig
from chatgpt.trainer.objectives.kto import KTOConfig
from chatgpt.trainer.objectives.pairs import DPOConfig, ORPOConfig, SimPOConfig
from chatgpt.trainer.objectives.reward_model import RewardModelConfig

DOCS = Path(__file__).resolve().parents[1] / 'docs'
PAGES = sorted((DOCS / 'algorithms').glob('*.md'))
CONFIGS = (
    PPOConfig,
    SFTConfig,
    RFTConfig,
    ILQLConfig,
    KTOConfig,
    DPOConfig,
    ORPOConfig,
    SimPOConfig,
    RewardModelConfig,
    PPORun,
)
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
    names = set(
        re.findall(
            r'`((?:rollout|environment|ppo|sft|rm|dpo|orpo|simpo|kto|ilql|rft|perf)/[a-z_0-9.]+)`', parts['Metrics']
        )
    )
    known = (DOCS / 'metrics.md').read_text()
    assert all(f'`{name.removesuffix("...")}' in known for name in names)
    for name in PARTS:  # negative control: a page without one of them is found out
        assert missing(text.replace(f'## {name}\n', '')) == [name]


def test_there_is_a_page_for_every_estimator_and_trainer():
    assert {p.stem for p in PAGES} >= {
        'a2c',
        'cispo',
        'dapo',
        'dpo',
        'gdpo',
        'grpo',
        'gspo',
        'ilql',
        'kto',
        'nlpo',
        'off_policy',
        'orpo',
        'ppo',
        'reinforce++',
        'reward_model',
        'rft',
        'rloo',
        'sft',
        'simpo',
    }


@pytest.mark.parametrize('page', PAGES, ids=lambda p: p.stem)
def test_the_settings_that_a_page_lists_are_there(page):
    known = {f.name for config in CONFIGS for f in fields(config)} | set(generation_fields())
    listed = re.findall(r'^\| `(\w+)`', parts_of(page.read_text())['Defaults'], re.MULTILINE)
    assert listed and set(listed) <= known


def test_every_name_of_the_tables_is_on_a_page():
    text = ''.join(p.read_text() for p in PAGES)
    names = [name for name in (*ESTIMATORS, *POLICY_LOSSES) if ':' not in name]  # module:name stays where it was found
    assert [name for name in names if not re.search(rf"['`]{re.escape(name)}['`]", text)] == []


def files_that_are_missing(page: Path, text: str) -> list[str]:
    """Python files that a page names by path and that stand neither there nor in a folder that pages leave out."""
    bases = (DOCS.parent, DOCS.parent / 'chatgpt', DOCS.parent / 'chatgpt' / 'trainer', page.parent)
    return [
        name
        for name in re.findall(r'`([\w+.-]+(?:/[\w+.-]+)+\.py)`', text)
        if not any((base / name).is_file() for base in bases)
    ]


def test_the_files_that_pages_name_are_there():
    pages = [DOCS.parent / 'README.md', DOCS.parent / 'CONTRIBUTING.md', *DOCS.rglob('*.md')]
    pages = [p for p in pages if p.parent.name != 'coming_from']  # whose paths are those of other systems
    assert {str(p): missing for p in pages if (missing := files_that_are_missing(p, p.read_text()))} == {}
    assert files_that_are_missing(DOCS, '`trainer/losses.py` and `trainer/ppo_loss.py`') == [
        'trainer/ppo_loss.py'
    ]  # negative control
