"""Every numeric setting of every trainer has a range, which an object is checked against when it is made."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest

import chatgpt.trainer  # noqa: F401
from chatgpt.launch.runs import DataRun, PPORun, Run
from chatgpt.rollout import SamplingParams
from chatgpt.trainer.config import PPOConfig
from chatgpt.trainer.objectives.config import SFTConfig, SupervisedConfig
from chatgpt.trainer.objectives.ilql import ILQLConfig
from chatgpt.trainer.objectives.kto import KTOConfig
from chatgpt.trainer.objectives.pairs import DPOConfig, ORPOConfig, SimPOConfig
from chatgpt.trainer.objectives.reward_model import RewardModelConfig
from chatgpt.trainer.rft import RFTConfig
from chatgpt.trainer.settings import RANGES, Settings, numeric_fields, range_of


def classes(base: type = Settings) -> list[type[Any]]:
    """Every settings class of the trainers."""
    found = [c for c in base.__subclasses__() if c.__module__.startswith('chatgpt.trainer.')]
    return [*found, *(inner for c in found for inner in classes(c))]


CLASSES = sorted(set(classes()), key=lambda c: c.__name__)
EVERY = [(cls, name) for cls in CLASSES for name in numeric_fields(cls)]


def values(cls: type, name: str) -> tuple[list[Any], list[Any]]:
    """Inside and outside of the range, read from its text by hand."""
    interval = (range_of(cls, name) or '').split(':')[0]
    whole, optional = numeric_fields(cls)[name]
    low, high = (float(end) for end in interval[1:-1].split(', '))
    step = 1 if whole else 1e-6
    inside: list[Any] = [None] if optional else []
    outside: list[Any] = [math.nan, '3', True, [1]] if optional else [math.nan, '3', True, [1], None]
    for end, closed, inwards in ((low, interval[0] == '[', step), (high, interval[-1] == ']', -step)):
        (inside if closed else outside).append(int(end) if whole and math.isfinite(end) else end)
        if math.isfinite(end):
            inside.append(int(end + inwards) if whole else end + inwards)
            outside.append(int(end - inwards) if whole else end - inwards)
    if whole:
        outside.append(max(low, 1) + 0.5)
    if math.isinf(high) and math.isinf(low):
        inside += [-1.0, 0.0, 1.0]
    return inside, outside


def test_the_classes_are_found_and_every_numeric_setting_has_a_range():
    known = {PPOConfig, SupervisedConfig, SFTConfig, RewardModelConfig, DPOConfig, KTOConfig}
    known |= {ORPOConfig, SimPOConfig, ILQLConfig, RFTConfig}
    assert known <= set(CLASSES)
    assert [f'{cls.__name__}.{name}' for cls, name in EVERY if range_of(cls, name) is None] == []
    # The hints that `numeric_fields` reads, beside the source's own words.
    for cls in CLASSES:
        words = {f.name for f in fields(cls) if {'int', 'float'} & set(str(f.type).replace('|', ' ').split())}
        assert words == set(numeric_fields(cls))


def test_no_range_is_left_over():
    names = {base.__name__: cls for cls in [*CLASSES, Run, DataRun, PPORun] for base in cls.__mro__[::-1]}
    assert [
        f'{c}.{n}'
        for c, ranges in RANGES.items()
        for n in ranges
        if c not in names or n not in numeric_fields(names[c])
    ] == []


@pytest.mark.parametrize(('cls', 'name'), EVERY, ids=lambda value: value if isinstance(value, str) else value.__name__)
def test_a_value_outside_is_refused_in_one_line_and_one_inside_is_not(cls, name):
    inside, outside = values(cls, name)
    for value in inside:
        made = cls(**{name: value})
        assert getattr(made, name) == value
    for value in outside:
        with pytest.raises(ValueError) as refused:
            cls(**{name: value})
        assert str(refused.value).startswith(f'{name}={value!r} must ')
        assert '\n' not in str(refused.value)


@pytest.mark.parametrize(
    ('cls', 'settings', 'message'),
    [
        (PPOConfig, {'eps_clip': 1.5}, 'eps_clip=1.5 must lie in (0, 1)'),
        (PPOConfig, {'whiten_rewards': 'no'}, "whiten_rewards='no' is not known; choose one of [True, False]"),
        (PPORun, {'lora_dropout': 2.0}, 'lora_dropout=2.0 must lie in [0, 1)'),
        (PPORun, {'ema_decay': 2.0}, 'ema_decay=2.0 must lie in (0, 1)'),
        (PPORun, {'num_layers_unfrozen': -5}, 'num_layers_unfrozen=-5 must be at least -1'),
        (PPORun, {'rollout_chunk_size': 0}, 'rollout_chunk_size=0 must be positive'),
        (PPOConfig, {'kl_coef': math.nan}, 'kl_coef=nan must be a finite number'),
        (PPOConfig, {'train_batch_size': 0}, 'train_batch_size=0 must be positive'),
        (PPOConfig, {'train_batch_size': 8.5}, 'train_batch_size=8.5 must be a whole number'),
        (PPOConfig, {'warmup_steps': -1}, 'warmup_steps=-1 must not be negative'),
        (PPOConfig, {'dual_clip': 1.0}, 'dual_clip=1.0 must be above 1'),
        (
            KTOConfig,
            {'train_batch_size': 1},
            'train_batch_size=1 must be at least 2: KTO compares each answer with another '
            'prompt of its batch; use 2 or more',
        ),
        (SimPOConfig, {'gamma': 1.6}, None),
        (ILQLConfig, {'gamma': 1.6}, 'gamma=1.6 must lie in [0, 1]'),
    ],
)
def test_what_is_said(cls, settings, message):
    if message is None:
        cls(**settings)
        return
    with pytest.raises(ValueError) as refused:
        cls(**settings)
    assert str(refused.value) == message


def test_a_setting_that_was_changed_later_is_checked_by_validate():
    config = PPOConfig()
    config.eps_clip = 1.5
    with pytest.raises(ValueError, match='eps_clip=1.5'):
        config.validate()


@pytest.mark.parametrize('value', [-1, math.nan, math.inf, -math.inf, '3', True])
@pytest.mark.parametrize('name', sorted(numeric_fields(SamplingParams)))
def test_sampling_refuses_them_too(name, value):
    with pytest.raises(ValueError, match=f'^sampling: {name}='):
        SamplingParams(**{'max_new_tokens': 4, name: value})
