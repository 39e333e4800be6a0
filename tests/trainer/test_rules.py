"""Rules of settings: each is broken by settings that a user can give, with a message that names them; valid settings
break none."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import chatgpt.trainer  # noqa: F401
from chatgpt.launch.runs import DataRun, PPORun, Run
from chatgpt.rollout import SamplingParams
from chatgpt.rules import Rule, check, is_changed
from chatgpt.trainer.algorithms import ESTIMATORS, POLICY_LOSSES, PolicyLoss
from chatgpt.trainer.config import PPOConfig
from chatgpt.trainer.objectives.config import SFTConfig
from chatgpt.trainer.objectives.ilql import ILQLConfig
from chatgpt.trainer.objectives.kto import KTOConfig
from chatgpt.trainer.objectives.pairs import DPOConfig, ORPOConfig, SimPOConfig
from chatgpt.trainer.objectives.reward_model import RewardModelConfig
from chatgpt.trainer.rft import RFTConfig
from chatgpt.trainer.rules import DECODE_RULES, LEARNING_RULES, PPO_RULES
from chatgpt.trainer.settings import RANGES, Settings, numeric_fields, range_of

GROUP = {'advantage_estimator': 'grpo', 'num_samples_per_prompt': 4}
A2C = {'advantage_estimator': 'a2c'}
APART = {'advantage_estimator': 'gdpo', 'num_samples_per_prompt': 4, 'kl_coef': 0.0}
BROKEN: list[dict[str, Any]] = [
    *({name: value} for name, value in {'lr_decay_steps': 7, 'lr_end_factor': 0.1}.items()),
    {'max_staleness': 1, 'tis_cap': 0.0},
    {'off_policy': 'sequence_mask'},
    {'tis_floor': 0.5},
    {'tis_cap': 2.0, 'tis_floor': 2.0},
    *({'policy_loss': loss, 'dual_clip': 3.0} for loss in ('reinforce', 'cispo')),
    {'policy_loss': 'gspo', 'loss_aggregation': 'token'},
    {'kl_in': 'loss', 'kl_kind': 'full'},
    {'policy_loss': 'reinforce', 'eps_clip': 0.1},
    {'lr_schedule': 'linear', 'warmup_steps': 6, 'lr_decay_steps': 6},
    {'kl_horizon': 100.0},
    {'kl_target': 6.0, 'kl_coef': 0.0},
    *(APART | {name: value} for name, value in {'kl_coef': 0.1, 'score_scaling': 'norm', 'score_clip': 3.0}.items()),
    *(APART | {name: value} for name, value in {'missing_eos_score': -1.0, 'overlong_buffer': 4}.items()),
    *(APART | {name: value} for name, value in {'token_penalty': 0.1, 'whiten_rewards': True}.items()),
    APART | {'environment_failures': 'penalise'},
    *(GROUP | {name: value} for name, value in {'value_clip': None, 'value_coef': 0.3}.items()),
    *(GROUP | {name: 2} for name in ('critic_warmup_phases', 'critic_epochs', 'critic_train_batch_size')),
    GROUP | {'critic_loss': 'huber'},
    GROUP | {'critic_loss': 'huber', 'critic_loss_settings': {'delta': 2.0}},
    {'critic_loss': 'categorical', 'value_clip': 0.2},
    GROUP | {'num_samples_per_prompt': 1},
    *(A2C | {name: value} for name, value in {'gae_over': 'turn', 'value_lam': 1.0, 'lam_length': 0.05}.items()),
    {'lam_length': 0.05, 'lam': 0.9},
    {'kl_importance': True},
    {'dynamic_sampling_rounds': 2},
    {'nlpo_top_p': 0.9, 'recompute_logprobs': True},
    {'nlpo_update_interval': 2},
    *(given | {'lam': 0.9} for given in (GROUP, A2C)),
    GROUP | {'gamma': 0.9},
    {'nlpo_top_p': 0.9, 'tis_cap': 2.0},
    {'tis_cap': 2.0, 'recompute_logprobs': False},
    {'failure_reward': -2.0},
    {'overlong_filter': True, 'missing_eos_score': -1.0},
]
EXACT: list[dict[str, Any]] = [{'nlpo_top_p': 0.9}, {'tis_cap': 2.0}, {'recompute_logprobs': False}]


def test_settings_that_exclude_each_other_are_refused_by_name():
    for settings in BROKEN:
        with pytest.raises(ValueError) as error:
            PPOConfig(**settings).validate()
        assert any(name in str(error.value) for name in settings) and '{' not in str(error.value), settings
    rows = [*LEARNING_RULES, *PPO_RULES]
    of_runs = [row for row in rows if not any(row.broken_by(PPOConfig(**given)) for given in BROKEN)]
    assert len(of_runs) == 3  # critic, critic_lr and critic_from, which only a run of the command has
    assert all(any(row.broken_by(PPOConfig(**given)) for given in EXACT) for row in DECODE_RULES)


def test_defaults_break_none():
    for name in ESTIMATORS:
        config = PPOConfig(advantage_estimator=name, num_samples_per_prompt=2, kl_coef=0.0)
        check(config, [*LEARNING_RULES, *PPO_RULES, *DECODE_RULES])


def test_a_sentence_names_the_values():
    rule = Rule(lambda s: s.kl_coef > 1, 'kl_coef={s.kl_coef} is large')
    assert rule.broken_by(PPOConfig(kl_coef=2.0)) == 'kl_coef=2.0 is large'
    assert rule.broken_by(PPOConfig()) is None
    with pytest.raises(ValueError, match='kl_coef=3.0 is large'):
        check(PPOConfig(kl_coef=3.0), [rule])
    assert is_changed(PPOConfig(lam=0.5), 'lam') and not is_changed(PPOConfig(), 'lam')
    assert not is_changed(PPOConfig(), 'critic_lr')


@dataclass(frozen=True)
class Softness:
    tau: float
    power: float = 2.0

    def __post_init__(self) -> None:
        if self.tau <= 0:
            raise ValueError(f'tau={self.tau} must be positive')


def test_a_policy_loss_has_settings_of_its_own(monkeypatch):
    def fn(x: Any, settings: Any) -> Any:
        return x.logprobs * settings.of_loss.tau**settings.of_loss.power

    monkeypatch.setitem(POLICY_LOSSES.data, 'soft', PolicyLoss(fn=fn, settings=Softness))
    config = PPOConfig(policy_loss='soft', loss_settings={'tau': 3.0})
    config.validate()
    inputs = type('Inputs', (), {'logprobs': torch.tensor([2.0])})
    assert POLICY_LOSSES.find('soft').fn(inputs, config).tolist() == [18.0]
    assert PPOConfig(**config.to_dict()) == config
    for given, sentence in (
        ({'loss_settings': {'tua': 1.0}}, "this policy_loss has no setting 'tua'.*tau"),
        ({}, 'loss_settings: .*tau'),
        ({'loss_settings': {'tau': 0.0}}, 'tau=0.0 must be positive'),
        ({'policy_loss': 'ppo', 'loss_settings': {'tau': 1.0}}, "this policy_loss has no setting 'tau'"),
    ):
        with pytest.raises(ValueError, match=sentence):
            PPOConfig(**({'policy_loss': 'soft'} | given)).validate()


def classes(base: type = Settings) -> list[type[Any]]:
    found = [c for c in base.__subclasses__() if c.__module__.startswith('chatgpt.trainer.')]
    return [*found, *(inner for c in found for inner in classes(c))]


CLASSES = sorted(set(classes()), key=lambda c: c.__name__)


def values(cls: type, name: str) -> tuple[list[Any], list[Any]]:
    """Returns values inside and outside of the range, read from its text."""
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


def test_every_numeric_setting_has_a_range_and_no_range_is_left_over():
    known = {PPOConfig, SFTConfig, RewardModelConfig, DPOConfig, KTOConfig, ORPOConfig, SimPOConfig}
    assert known | {ILQLConfig, RFTConfig} <= set(CLASSES)
    assert [(cls, name) for cls in CLASSES for name in numeric_fields(cls) if range_of(cls, name) is None] == []
    names = {base.__name__: cls for cls in [*CLASSES, Run, DataRun, PPORun] for base in cls.__mro__[::-1]}
    every = [(owner, name) for owner, ranges in RANGES.items() for name in ranges]
    assert [(o, n) for o, n in every if o not in names or n not in numeric_fields(names[o])] == []


@pytest.mark.parametrize('cls', CLASSES, ids=lambda cls: cls.__name__)
def test_a_value_outside_is_refused_in_one_line_and_one_inside_is_not(cls):
    for name in numeric_fields(cls):
        inside, outside = values(cls, name)
        for value in inside:
            assert getattr(cls(**{name: value}), name) == value
        for value in outside:
            with pytest.raises(ValueError) as refused:
                cls(**{name: value})
            assert str(refused.value).startswith(f'{name}={value!r} must ')
            assert '\n' not in str(refused.value)


def test_messages():
    for cls, settings, message in (
        (PPOConfig, {'eps_clip': 1.5}, 'eps_clip=1.5 must lie in (0, 1)'),
        (PPOConfig, {'whiten_rewards': 'no'}, "whiten_rewards='no' is not known; choose one of [True, False]"),
        (PPORun, {'num_layers_unfrozen': -5}, 'num_layers_unfrozen=-5 must be at least -1'),
        (PPOConfig, {'kl_coef': math.nan}, 'kl_coef=nan must be a finite number'),
        (PPOConfig, {'train_batch_size': 8.5}, 'train_batch_size=8.5 must be a whole number'),
        (PPOConfig, {'warmup_steps': -1}, 'warmup_steps=-1 must not be negative'),
    ):
        with pytest.raises(ValueError) as refused:
            cls(**settings)
        assert str(refused.value) == message
    with pytest.raises(
        ValueError, match='train_batch_size=1 must be at least 2: KTO compares each answer with another'
    ):
        KTOConfig(train_batch_size=1)
    SimPOConfig(gamma=1.6)
    config = PPOConfig()
    config.eps_clip = 1.5  # later changes are checked too
    with pytest.raises(ValueError, match='eps_clip=1.5'):
        config.validate()


def test_sampling_refuses_values_outside_too():
    for name in numeric_fields(SamplingParams):
        for value in (-1, math.nan, math.inf, -math.inf, '3', True):
            with pytest.raises(ValueError, match=f'^sampling: {name}='):
                SamplingParams(**{'max_new_tokens': 4, name: value})
