"""Settings of PPOTrainer in whole runs: every method learns, long responses, `step`, refusals."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_runs import close, fit, ppo, vowels, weights

from chatgpt.rollout import LocalEngine
from chatgpt.strategies import DDPStrategy, NaiveStrategy
from chatgpt.strategies.base import Abilities
from chatgpt.testing.processes import run_distributed

GROUPS: dict[str, Any] = {'advantage_estimator': 'grpo', 'num_samples_per_prompt': 4}
METHODS: dict[str, dict[str, Any]] = {
    'grpo': GROUPS | {'kl_in': 'loss', 'kl_coef': 0.04},
    'dapo': GROUPS
    | {'eps_clip_high': 0.28, 'loss_aggregation': 'token', 'kl_coef': 0.0}
    | {'dynamic_sampling_rounds': 2, 'overlong_buffer': 3},
    'gspo': GROUPS | {'policy_loss': 'gspo', 'eps_clip': 3e-4, 'eps_clip_high': 4e-4, 'kl_coef': 0.0},
    'cispo': GROUPS | {'policy_loss': 'cispo', 'eps_clip_high': 4.0, 'kl_coef': 0.0},
    'dr_grpo': GROUPS | {'advantage_estimator': 'dr_grpo', 'kl_coef': 0.0},
    'rloo': GROUPS | {'advantage_estimator': 'rloo'},
    'reinforce++': {'advantage_estimator': 'reinforce++'},
    'reinforce++_baseline': GROUPS
    | {'advantage_estimator': 'reinforce++_baseline', 'kl_in': 'loss', 'kl_loss_kind': 'k2'},
    'a2c': {'advantage_estimator': 'a2c', 'policy_loss': 'reinforce'},
}
QUERIES = [torch.tensor([3, 4])] * 2 + [torch.tensor([5])] * 2
RESPONSES = [torch.tensor([5, 6, 7])] * 4


def make(strategy: Any = None, **settings: Any) -> Any:
    return ppo(strategy, **{'train_batch_size': 8, 'max_new_tokens': 8} | settings)


@pytest.mark.parametrize('name', METHODS)
def test_every_method_learns(name):
    trainer = fit(make(lr=1e-2, **{'max_epochs': 2} | METHODS[name]), 12)
    scores = [p['rollout/score_mean'] for p in trainer.log.phases]
    assert sum(scores[-3:]) / 3 > scores[0] + 0.5, scores
    assert (trainer.critic is None) == (name != 'a2c')


def short(prompts: list[str], responses: list[str]) -> list[float]:
    return [-0.1 * len(r) for r in responses]


ON_RANKS: list[dict[str, Any]] = [
    METHODS['dapo'] | {'kl_in': 'loss', 'kl_coef': 0.05, 'max_tokens_per_batch': 64},
    GROUPS | {'advantage_estimator': 'gdpo', 'kl_coef': 0.0, 'reward': [(1.0, vowels), (0.5, short)]},
    {'advantage_estimator': 'reinforce++', 'nlpo_top_p': 0.6, 'head_scale': 12.0},
]


def under(kind: Any) -> list[list[dict[str, float]]]:
    found = []
    for settings in ON_RANKS:
        with kind(seed=3, device='cpu') as strategy:
            found.append(fit(make(strategy, **settings), 2).log.phases)
    return found


def test_ranks_have_no_effect():
    alone = under(NaiveStrategy)
    for found in run_distributed(under, 2, DDPStrategy, init_group=True):
        for phases, want in zip(found, alone, strict=True):
            close(phases, want, rel=2e-3, abs=2e-5)


def test_long_responses_cost_and_may_be_left_out():
    for e in fit(make(overlong_buffer=4, kl_coef=0.0), 1).log.experiences[0]:
        want = e.score - min(max((e.num_actions - 4) / 4, 0.0), 1.0)
        assert float(e.rewards.sum()) == pytest.approx(want, abs=1e-6)
    log = fit(make(overlong_filter=True), 1).log
    cut = [not e.ended for e in log.experiences[0]]
    assert 0 < sum(cut) and [not bool(e.response_mask.any()) for e in log.experiences[0]] == cut
    assert log.phases[0]['rollout/filtered_share'] == sum(cut) / len(cut)


def test_when_every_response_was_too_long_nothing_is_learned():
    trainer = make(overlong_filter=True, max_new_tokens=1, eos_token_id=[])
    before = weights(trainer)
    (phase,) = fit(trainer, 1).log.phases
    assert phase['rollout/filtered_share'] == phase['ppo/skipped_batches'] == 1.0
    assert all(math.isfinite(v) for v in phase.values()), phase
    assert torch.equal(before, weights(trainer))  # no weight decay either


def test_step_compares_consecutive_responses():
    trainer = make(advantage_estimator='dr_grpo', num_samples_per_prompt=2, kl_coef=0.0)
    trainer.step(QUERIES, RESPONSES, [0.0, 1.0, 5.0, 9.0])
    assert [e.advantages[0].item() for e in trainer.last_experiences] == [-0.5, 0.5, -2.0, 2.0]
    assert len({e.index for e in trainer.last_experiences}) == 4
    with pytest.raises(ValueError, match='queries 0 to 1 are one group of dr_grpo and must be equal; query 1 is not'):
        trainer.step(QUERIES[::2] * 2, RESPONSES, [0.0] * 4)
    with pytest.raises(ValueError, match='3 responses do not divide'):
        trainer.step(QUERIES[:3], RESPONSES[:3], [0.0] * 3)


@pytest.mark.parametrize(
    ('settings', 'sentence'),
    [
        ({'tis_cap': 2.0}, 'which step is not given'),
        (GROUPS | {'dynamic_sampling_rounds': 1}, 'draws further prompts'),
        ({'advantage_estimator': 'reinforce++', 'nlpo_top_p': 0.6}, 'generate and step do not know: use fit'),
    ],
)
def test_step_refuses_what_only_fit_can_do(settings, sentence):
    trainer = make(**settings)
    with pytest.raises(ValueError, match=sentence):
        trainer.step(QUERIES, RESPONSES, [0.0] * 4)
    assert trainer.phase == 0


class Off(LocalEngine):
    """An engine with other log-probs than the trainer's."""

    def generate(self, *args: Any, **kw: Any) -> Any:
        samples = super().generate(*args, **kw)
        for s in samples:
            s.logprobs = s.logprobs - 0.5
        return samples


class Own(Off):
    abilities = replace(LocalEngine.abilities, exact_logprobs=False)


def test_truncated_importance_sampling_weighs_another_engine():
    for engine, cap, weight in (
        (Off(), 1.3, 1.3),  # exp(0.5) is capped
        (None, 1.3, 1.0),
        (Own(), None, math.exp(0.5)),  # the default of 2 is above
        (Own(), 0.0, None),
        (None, None, None),
    ):
        (phase,) = fit(make(engine=engine, tis_cap=cap), 1).log.phases
        assert phase.get('ppo/tis_weight') == (None if weight is None else pytest.approx(weight, abs=1e-4)), cap
        far = 0.5 if engine else 0.0
        found = [phase.get(f'rollout/{n}') for n in ('logprob_mismatch', 'logprob_mismatch_max', 'engine_kl')]
        if engine or cap:  # in fp32 the log-probs of the local engine are not recomputed
            assert found == pytest.approx([far, far, math.exp(far) - 1 - far], abs=1e-4)
        else:
            assert found == [None] * 3


def test_step_does_not_weigh_tokens_that_come_from_anywhere():
    trainer = make(engine=Own())
    assert trainer.step(QUERIES, RESPONSES, [0.0] * 4)['ppo/tis_weight'] == 1.0


def test_a_kl_in_the_loss_is_not_in_the_reward():
    near, far = (fit(make(lr=1e-2, **given), 8) for given in ({'kl_in': 'loss', 'kl_coef': 5.0}, {'kl_coef': 0.0}))
    for experiences in near.log.experiences:
        assert all(float(e.rewards.sum()) == pytest.approx(e.score, abs=1e-5) for e in experiences)
    assert near.log.phases[-1]['ppo/kl_loss'] > 0
    assert near.log.phases[-1]['rollout/non_score_reward_mean'] == 0.0
    assert near.log.phases[-1]['rollout/kl_mean'] < 0.7 * far.log.phases[-1]['rollout/kl_mean']


def test_a_value_head_that_the_method_does_not_need_is_left_alone():
    plain = make(**METHODS['grpo'])
    with pytest.warns(UserWarning, match='value head is not trained: advantage_estimator=') as seen:
        headed = make(value_head=True, **METHODS['grpo'])
        head = [p.detach().clone() for p in headed.actor.value_head.parameters()]
        fit(headed, 2)
    assert len([w for w in seen if 'value head' in str(w.message)]) == 1
    fit(plain, 2)
    assert all(map(torch.equal, head, headed.actor.value_head.parameters()))  # no weight decay either
    assert plain.log.phases == headed.log.phases, 'the policy learns something else'
    assert all(map(torch.equal, plain.actor.model.parameters(), headed.actor.model.parameters()))


def test_a_strategy_that_cannot_leave_a_head_alone_refuses_it():
    class NeedsEveryGradient(NaiveStrategy):
        abilities = Abilities(unused=False)

    text = "'grpo' takes no values, and NeedsEveryGradient cannot leave the actor's value head untrained"
    with pytest.raises(ValueError, match=text):
        make(NeedsEveryGradient(seed=3, device='cpu'), value_head=True, **METHODS['grpo'])


def test_a_value_head_that_the_method_needs_is_trained():
    trainer = make(value_head=True)
    head = [p.detach().clone() for p in trainer.actor.value_head.parameters()]
    assert 'ppo/value_loss' in fit(trainer, 1).log.phases[0]
    assert not all(map(torch.equal, head, trainer.actor.value_head.parameters()))
