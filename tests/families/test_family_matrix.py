"""Every model type of transformers works or is refused by name (docs/models.md); a few of them in each run of the
tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from family_checks import CHECKS, Family, Wrong, check, check_apart, forward
from family_configs import model_types
from family_page import page

QUICK = ('gpt2', 'llama', 'mixtral', 'gemma2', 'falcon', 'deepseek_v2', 'gpt_neox', 'bert-generation')
MODELS_PAGE = Path(__file__).parents[2] / 'docs/models.md'


@pytest.mark.parametrize('model_type', QUICK)
def test_a_family_works_or_is_refused(model_type):
    found = check(model_type)
    assert set(found) == set(CHECKS)
    wrong = {name: text for name, text in found.items() if text.startswith(('WRONG', 'CRASH'))}
    assert not wrong
    if model_type in ('gpt2', 'llama', 'gpt_neox'):
        assert all(text.startswith('ok') for text in found.values())
    if model_type == 'bert-generation':
        assert found['forward'].startswith('no: ')


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize('model_type', model_types())
def test_every_family_works_or_is_refused(model_type):
    found = check_apart(model_type)
    if 'config' in found:
        pytest.skip(found['config'])
    assert not {name: text for name, text in found.items() if text.startswith('WRONG')}


def test_another_model_in_the_folder_is_found_wrong(tmp_path):
    """Negative control: what is compared is what was saved."""
    family = Family('llama', tmp_path)
    assert forward(family) == 'packed'
    family.actor.model.lm_head.weight.data.mul_(1.5)
    with pytest.raises(Wrong, match='off by'):
        forward(family)


def test_the_page():
    found = {
        'aa': dict.fromkeys(CHECKS, 'ok') | {'forward': 'ok: packed', 'hydra': 'no: not | this one'},
        'bb': dict.fromkeys(CHECKS, 'no: looks ahead'),
        'cc': {'config': 'none: too big'},
        'dd': dict.fromkeys(CHECKS, 'ok') | {'meta': 'WRONG: off by 1'},
    }
    text = page(found)
    assert re.search(r'^\| aa \| packed \| yes \|.* ✗ \|', text, re.MULTILINE)
    assert '- aa, hydra: not / this one' in text and '- bb: looks ahead' in text and '- cc: too big' in text
    assert '- dd, meta: off by 1' in text and '| bb |' not in text


def test_the_page_in_the_docs_has_nothing_wrong():
    text = MODELS_PAGE.read_text()
    assert re.search(r'## Wrong\n\n.*\n\nNothing\.\n', text), 'made by a run that found something wrong'
    assert {'| llama | packed |', '| gpt2 | packed |'} <= set(re.findall(r'\| \w+ \| packed \|', text))
