"""Settings that do not go together: every row of the tables is broken by settings that a user can give, and says what
they are; settings that fit break none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from chatgpt.rules import Rule, check, is_changed
from chatgpt.trainer.algorithms import ESTIMATORS, POLICY_LOSSES, PolicyLoss
from chatgpt.trainer.config import PPOConfig
from chatgpt.trainer.rules import DECODE_RULES, LEARNING_RULES, PPO_RULES

GROUP = {'advantage_estimator': 'grpo', 'num_samples_per_prompt': 4}
APART = {'advantage_estimator': 'gdpo', 'num_samples_per_prompt': 4, 'kl_coef': 0.0}
BROKEN: list[dict[str, Any]] = [
    {'lr_decay_steps': 7},
    {'lr_end_factor': 0.1},
    {'policy_loss': 'gspo', 'loss_aggregation': 'token'},
    {'policy_loss': 'reinforce', 'dual_clip': 3.0},
    {'policy_loss': 'cispo', 'dual_clip': 3.0},
    {'kl_in': 'loss', 'kl_kind': 'full'},
    APART | {'kl_coef': 0.1},
    APART | {'score_scaling': 'norm'},
    APART | {'score_clip': 3.0},
    APART | {'missing_eos_score': -1.0},
    APART | {'overlong_buffer': 4},
    APART | {'token_penalty': 0.1},
    APART | {'environment_failures': 'penalise'},
    APART | {'whiten_rewards': True},
    GROUP | {'value_clip': None},
    GROUP | {'value_coef': 0.3},
    {'advantage_estimator': 'a2c', 'gae_over': 'turn'},
    {'advantage_estimator': 'a2c', 'value_lam': 1.0},
    {'advantage_estimator': 'a2c', 'lam_length': 0.05},
    {'lam_length': 0.05, 'lam': 0.9},
    {'kl_importance': True},
    {'dynamic_sampling_rounds': 2},
    GROUP | {'num_samples_per_prompt': 1},
    {'nlpo_top_p': 0.9, 'recompute_logprobs': True},
    {'nlpo_top_p': 0.9, 'tis_cap': 2.0},
    {'tis_cap': 2.0, 'recompute_logprobs': False},
    {'max_staleness': 1},
    {'failure_reward': -2.0},
    {'overlong_filter': True, 'missing_eos_score': -1.0},
]
EXACT: list[dict[str, Any]] = [{'nlpo_top_p': 0.9}, {'tis_cap': 2.0}, {'recompute_logprobs': False}]


@pytest.mark.parametrize('settings', BROKEN, ids=str)
def test_settings_that_exclude_each_other_are_refused_by_name(settings):
    with pytest.raises(ValueError) as error:
        PPOConfig(**settings).validate()
    assert any(f'{name}' in str(error.value) for name in settings)
    assert '{' not in str(error.value)


def test_every_row_is_broken_by_one_of_them():
    rows = [*LEARNING_RULES, *PPO_RULES]
    of_runs = sum(1 for row in rows if not any(row.broken_by(PPOConfig(**given)) for given in BROKEN))
    assert of_runs == 3  # critic, critic_lr and critic_from, which only a run of the command has
    assert all(any(row.broken_by(PPOConfig(**given)) for given in EXACT) for row in DECODE_RULES)


@pytest.mark.parametrize('name', ESTIMATORS)
def test_defaults_break_none(name):
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
