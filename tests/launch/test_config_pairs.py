"""llm-on-ray's two keys for one model: trained weights where there are any, else the name; decided by value, never by
presence."""

from __future__ import annotations

import json

import pytest

from chatgpt.launch.config_file import parse_run
from chatgpt.launch.runs import PPORun

PAIRS = [('model_name', 'model_pretrain', 'pretrain'), ('rm_name', 'rm_pretrain', 'reward_model')]


def run(tmp_path, general: dict[str, str | None], *words: str) -> PPORun:
    path = tmp_path / 'ppo.json'
    path.write_text(json.dumps({'General': general}))
    return parse_run(PPORun, description='', positional='prompt_path', argv=['--config_file', str(path), *words])


@pytest.mark.parametrize('turned', [False, True], ids=['name_first', 'weights_first'])
@pytest.mark.parametrize(
    ('name', 'weights', 'expected'),
    [
        (None, None, None),
        ('x', None, 'x'),
        (None, 'folder', 'folder'),
        ('x', 'folder', 'folder'),
    ],
)
@pytest.mark.parametrize(('name_key', 'weights_key', 'field'), PAIRS)
def test_weights_win_and_null_means_the_name(tmp_path, name_key, weights_key, field, name, weights, expected, turned):
    items = [(name_key, name), (weights_key, weights)]
    assert getattr(run(tmp_path, dict(reversed(items) if turned else items)), field) == expected


@pytest.mark.parametrize(('name_key', 'weights_key', 'field'), PAIRS)
def test_one_key_alone_and_our_own(tmp_path, name_key, weights_key, field):
    assert getattr(run(tmp_path, {name_key: 'x'}), field) == 'x'
    assert getattr(run(tmp_path, {weights_key: 'folder'}), field) == 'folder'
    assert getattr(run(tmp_path, {field: 'own', weights_key: None}), field) == 'own'
    with pytest.raises(ValueError, match=f'both set {field}; give one'):
        run(tmp_path, {field: 'own', name_key: 'x'})


@pytest.mark.parametrize(('name_key', 'weights_key', 'field'), PAIRS)
def test_words_win_over_the_file(tmp_path, name_key, weights_key, field):
    both: dict[str, str | None] = {name_key: 'x', weights_key: 'folder'}
    assert getattr(run(tmp_path, both, f'General.{weights_key}=other'), field) == 'other'
    assert getattr(run(tmp_path, both, f'General.{name_key}=y'), field) == 'y'
    assert getattr(run(tmp_path, both, f'General.{weights_key}=null'), field) == 'x'
    assert getattr(run(tmp_path, {weights_key: 'folder'}, f'{weights_key}=null'), field) is None
