"""Every model type of transformers works or is refused by name (docs/results/model_types.md); an ordinary run tries a
few."""

from __future__ import annotations

import re
from pathlib import Path

import family_checks
import pytest
import transformers
from family_checks import CHECKS, Family, Wrong, cells, check, check_apart, forward, outcome, peft, read_page
from family_configs import model_types

from chatgpt.nn.lora import lora_layers
from chatgpt.nn.peft_format import export_peft

QUICK = ('gpt2', 'llama', 'gemma2', 'mixtral', 'zamba2', 'cpmant')
"""ordinary types, a separate head, experts, a recurrent state, and a refused type"""
THIS_VERSION = f'of transformers {transformers.__version__} '
"""in a page for the installed version"""
MODELS_PAGE = Path(__file__).parents[2] / 'docs/results/model_types.md'


@pytest.mark.parametrize('model_type', QUICK)
def test_a_family_works_or_is_refused(model_type):
    found = check(model_type)
    assert set(found) == set(CHECKS)
    as_the_page_says(model_type, found)
    if model_type in ('gpt2', 'llama'):
        assert all(text.startswith('ok') for text in found.values())
    if model_type == 'cpmant':
        assert found['forward'].startswith('no: CpmAntModel gives a token other numbers')


def as_the_page_says(model_type: str, found: dict[str, str]) -> None:
    """Fails if the outcome of a family differs from the page's, or if it crashes or is wrong."""
    wrong = {name: text for name, text in found.items() if text.startswith(('WRONG', 'CRASH'))}
    assert not wrong
    text = MODELS_PAGE.read_text()
    if THIS_VERSION not in text:
        return
    whole_no = found['forward'].startswith('no:')
    here, there = [] if whole_no else cells(found), read_page(text)[model_type]
    if there:  # a dash: cannot be tried here, such as peft
        here = [there[i] if cell == '–' else cell for i, cell in enumerate(here)]
    assert here == there, f'{found}; if it is meant, make the page again'


@pytest.mark.slow
@pytest.mark.parametrize('model_type', model_types())
def test_every_family_works_or_is_refused(model_type):
    found = check_apart(model_type)
    if 'config' in found:
        text = MODELS_PAGE.read_text()
        assert THIS_VERSION not in text or read_page(text)[model_type] == []
        pytest.skip(found['config'])
    as_the_page_says(model_type, found)


def test_another_model_in_the_folder_is_found_wrong(tmp_path):
    """Negative control: the check compares the saved model."""
    family = Family('llama', tmp_path)
    assert forward(family) == 'packed'
    family.actor.model.lm_head.weight.data.mul_(1.5)
    with pytest.raises(Wrong, match='off by'):
        forward(family)


def test_an_adapter_that_peft_reads_otherwise_is_found_wrong(monkeypatch, tmp_path):
    """Negative control: the check compares the written adapter."""
    pytest.importorskip('peft', exc_type=Exception)
    family = Family('llama', tmp_path)
    assert peft(family) == ''

    def halved(actor, folder):
        for layer in lora_layers(actor.model).values():
            layer.lora_B.mul_(0.5)
        export_peft(actor, folder)

    monkeypatch.setattr(family_checks, 'export_peft', halved)
    with pytest.raises(Wrong, match='off by'):
        peft(family)
    monkeypatch.setattr(family_checks, '_draw_adapters', lambda actor: None)
    with pytest.raises(Wrong, match='the adapters change nothing'):
        peft(family)


@pytest.mark.skipif('inkling2_text' not in model_types(), reason='this transformers has no inkling2_text')
def test_an_adapter_that_peft_would_look_for_elsewhere_is_refused_by_the_models_name(tmp_path):
    pytest.importorskip('peft', exc_type=Exception)
    found = outcome(peft, Family('inkling2_text', tmp_path))
    assert re.match(r'no: export_peft: peft would look for \S+ of Inkling2ForCausalLM under another name; leave', found)
