"""Every model type of transformers works or is refused by name (docs/models.md); a few of them in each run of the
tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import transformers
from family_checks import CHECKS, SPEED, Family, Wrong, check, check_apart, forward, outcome
from family_configs import model_types
from family_page import cells, page, read_page

from chatgpt.nn import AutoActor
from chatgpt.nn.hydra import make_hydra

QUICK = (
    'xglm',
    'zamba2',
    'moshi',
    'deepseek_v4',
    'gpt2',
    'llama',
    'mixtral',
    'gemma2',
    'falcon',
    'deepseek_v2',
    'gpt_neox',
    'cpmant',
)
THIS_VERSION = f'of transformers {transformers.__version__} '
"""on a page whose cells hold for the one that is installed"""
MODELS_PAGE = Path(__file__).parents[2] / 'docs/models.md'


@pytest.mark.parametrize('model_type', QUICK)
def test_a_family_works_or_is_refused(model_type):
    found = check(model_type)
    assert set(found) == set(CHECKS)
    as_the_page_says(model_type, found)
    if model_type in ('gpt2', 'llama', 'gpt_neox'):
        assert all(text.startswith('ok') for text in found.values())
    if model_type == 'cpmant':
        assert found['forward'].startswith('no: CpmAntModel gives a token other numbers')


def as_the_page_says(model_type: str, found: dict[str, str]) -> None:
    """A family that worked and is refused now, or crashes, or is wrong, is another than the page's."""
    wrong = {name: text for name, text in found.items() if text.startswith(('WRONG', 'CRASH'))}
    assert not wrong
    text = MODELS_PAGE.read_text()
    if THIS_VERSION not in text:
        return
    on_page = read_page(text)
    whole_no = found.get('forward', 'no').startswith('no')
    assert on_page[model_type] == ([] if whole_no else cells(found)), f'{found}; if it is meant, make the page again'


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize('model_type', model_types())
def test_every_family_works_or_is_refused(model_type):
    found = check_apart(model_type)
    if 'config' in found:
        text = MODELS_PAGE.read_text()
        assert THIS_VERSION not in text or read_page(text)[model_type] == []
        pytest.skip(found['config'])
    as_the_page_says(model_type, found)


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
    assert read_page(text) == {'aa': cells(found['aa']), 'bb': [], 'cc': [], 'dd': cells(found['dd'])}
    assert cells(found['aa'])[:2] == ['packed', 'yes'] and '✗' in cells(found['aa'])
    with_speed = page({'ee': dict.fromkeys(CHECKS, 'ok') | {SPEED: 'ok: 1.07'}})
    assert '| yes | 1.07 |' in with_speed and '| yes | – |' in text


class _Speaks:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def __call__(self, family: Family) -> str:
        raise self.error


def test_only_the_librarys_own_words_about_this_model_are_a_refusal(tmp_path):
    family = Family('llama', tmp_path)

    def refused(_: Family) -> str:
        return str(make_hydra(family.actor.model, 7))

    assert outcome(refused, family).startswith('no: num_layers_unfrozen: 7 given, but LlamaForCausalLM has 2')
    # ValueErrors of others, and of the library about something else
    assert outcome(_Speaks(ValueError('LlamaForCausalLM')), family).startswith('CRASH: ')
    assert outcome(lambda _: str(AutoActor(tmp_path, wrong=1)), family).startswith("CRASH: unknown argument 'wrong'")
    assert outcome(_Speaks(IndexError('x')), family) == 'CRASH: IndexError: x'


def test_the_page_in_the_docs_has_nothing_wrong():
    text = MODELS_PAGE.read_text()
    for part in ('Wrong', 'Crashes'):
        assert re.search(rf'## {part}\n\n.*\n\nNothing\.\n', text), 'made by a run that found something wrong'
    if THIS_VERSION in text:
        assert set(read_page(text)) == set(model_types()), 'made by a run of some types'
    assert {'| llama | packed |', '| gpt2 | packed |'} <= set(re.findall(r'\| \w+ \| packed \|', text))
