"""Experience from samples: rewards by hand, references, masks, and independence of the micro-batches."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from experience_samples import sample as any_sample

from chatgpt.nn import GPTActor, GPTCritic
from chatgpt.strategies import NaiveStrategy
from chatgpt.testing.fakes import tiny_config
from chatgpt.trainer.algorithms import estimate_advantages
from chatgpt.trainer.config import PPOConfig
from chatgpt.trainer.experience import ExperienceMaker, ExperienceSettings, FunctionScorer, ScoreShaper
from chatgpt.trainer.experience.reference import Reference
from chatgpt.trainer.experience.scorers import RewardValueError
from chatgpt.trainer.selection import ReplayBuffer
from chatgpt.types import Experience, Sample


def sample(index: int, response: list[int], mask: list[bool] | None = None) -> Sample:
    return any_sample(index, response, prompt=[3, 4 + index], mask=mask, response_text='x' * len(response))


def estimated(experiences: list[Experience], config: PPOConfig) -> None:
    estimate_advantages(experiences, config.estimator, config)


def make(scores: list[Any], *, reference: bool = True, clip: float | None = None, **settings: Any) -> ExperienceMaker:
    strategy = NaiveStrategy(seed=0)
    actor = GPTActor(config=tiny_config('gpt2'))
    torch.manual_seed(7)
    other = GPTActor(config=tiny_config('gpt2'))
    actor, critic, other = strategy.prepare(actor, GPTCritic(config=tiny_config('gpt2')), other)
    return ExperienceMaker(
        strategy,
        actor,
        critic,
        Reference(strategy, actor, actor, other if reference else None),
        FunctionScorer(lambda p, r: scores),
        ScoreShaper(clip=clip),
        ExperienceSettings(**settings),
        estimate=lambda experiences: estimated(experiences, PPOConfig(gamma=0.9, lam=0.8)),
    )


SAMPLES = [sample(0, [5, 6, 2]), sample(1, [7, 2])]


def test_reward_is_minus_beta_kl_with_the_score_once_at_the_end():
    made = make([2.0, -1.0]).make(SAMPLES, kl_coef=0.5)
    for e, score in zip(made, [2.0, -1.0], strict=True):
        kl = e.old_logprobs - e.ref_logprobs  # k1
        expected = (-0.5 * kl).tolist()
        expected[-1] += score
        assert e.rewards.tolist() == pytest.approx(expected, abs=1e-6)
        assert e.old_logprobs.tolist() == [-1.0] * e.num_actions  # from decoding, not recomputed
        # Negative control: a score on every token gives other rewards.
        assert e.rewards.tolist() != pytest.approx([-0.5 * k + score for k in kl.tolist()])
    for e in make([1.0, 1.0], reference=False).make(SAMPLES, kl_coef=0.5):  # no penalty
        assert e.rewards.tolist() == [0.0] * (e.num_actions - 1) + [1.0]


def test_a_policy_has_kl_zero_to_itself_and_recomputing_gives_its_own_log_probs():
    maker = make([0.0, 0.0], recompute_logprobs=True)
    maker.reference = Reference(maker.strategy, maker.actor, None, deepcopy(maker.actor))
    for e in maker.make(SAMPLES, kl_coef=1.0):
        assert e.kl.abs().max() == 0.0
        assert (e.old_logprobs != -1.0).all()


def test_full_kl_is_the_sum_over_the_vocabulary():
    maker = make([0.0, 0.0], kl_kind='full')
    e = maker.make(SAMPLES, kl_coef=1.0)[0]
    ids = torch.cat([SAMPLES[0].prompt_ids, SAMPLES[0].response_ids])[None]
    p, q = (m.model(ids).logits[0, 1:4].double().log_softmax(-1) for m in (maker.actor, maker.reference.initial_model))
    assert e.kl.tolist() == pytest.approx((p.exp() * (p - q)).sum(-1).tolist(), rel=1e-4)
    assert (e.kl >= 0).all()


def test_masked_tokens_get_no_reward_and_dense_scores_are_given_per_token_and_not_twice():
    masked = sample(0, [5, 6, 7, 2], [True, True, False, False])
    e = make([3.0]).make([masked], kl_coef=0.0)[0]
    assert e.rewards.tolist() == [0.0, 3.0, 0.0, 0.0]  # the score goes to the last token that counts
    assert e.advantages[2:].tolist() == [0.0, 0.0]
    e = make([[0.5, 0.25, 1.0]]).make([sample(0, [5, 6, 2])], kl_coef=0.0)[0]
    assert e.rewards.tolist() == [0.5, 0.25, 1.0] and e.score == 1.75


def test_settings_of_the_score_reach_scores_per_token():
    maker = make([[0.5, 0.25, 1.0], [0.5, 0.5]], reference=False)
    maker.shaper = ScoreShaper(missing_eos_score=-1.0, token_penalty=0.125)
    cut = sample(1, [7, 5])
    cut.finish_reason = 'length'
    ended, unended = maker.make([sample(0, [5, 6, 2]), cut], kl_coef=0.0)
    assert ended.rewards.tolist() == [0.5, 0.25, 1.0 - 3 * 0.125]
    assert unended.rewards.tolist() == [0.0, -1.0 - 2 * 0.125]
    assert [ended.shaped_score, unended.shaped_score] == [1.75 - 0.375, -1.25]


@pytest.mark.parametrize('whiten', [False, True])
@pytest.mark.parametrize('dense', [False, True])
def test_a_response_without_a_token_that_counts_is_in_its_groups_baseline_with_its_score(whiten, dense):
    scores: list[Any] = [[1.0, 2.0], 9.0] if dense else [3.0, 9.0]
    maker = make(scores, reference=False, whiten_rewards=whiten)
    config = PPOConfig(advantage_estimator='dr_grpo', num_samples_per_prompt=2)
    maker.estimate = lambda experiences: estimated(experiences, config)
    counted, masked = maker.make([sample(0, [5, 2]), sample(1, [6, 2], [False, False])], kl_coef=0.0)
    # By hand: 3 against a mean of (3 + 9) / 2. A score that counted as 0 would leave 3 - 1.5.
    factor = float(counted.rewards.sum()) / 3.0
    assert counted.advantages.tolist() == pytest.approx([factor * -3.0] * 2)
    assert factor == pytest.approx(1.0) or whiten
    assert masked.rewards.tolist() == masked.advantages.tolist() == [0.0, 0.0]


def test_micro_batches_and_order_change_nothing_but_rounding():
    samples = [sample(i, [5 + i % 3] * (1 + i % 4) + [2]) for i in range(6)]
    whole = make([float(i) for i in range(6)]).make(samples, kl_coef=0.3)
    cut = make([float(i) for i in range(6)], max_tokens_per_batch=8).make(samples[::-1], kl_coef=0.3)
    assert [e.index for e in cut] == list(range(6))
    for a, b in zip(whole, cut, strict=True):
        assert torch.allclose(a.advantages, b.advantages, atol=1e-5)


def test_whitened_rewards_keep_their_sign():
    made = make([1.0, 2.0], reference=False, whiten_rewards=True).make(SAMPLES, kl_coef=0.0)
    flat = torch.cat([e.rewards for e in made])
    std = torch.tensor([0.0, 0.0, 1.0, 0.0, 2.0]).std()
    assert flat.tolist() == pytest.approx([0.0, 0.0, float(1 / std), 0.0, float(2 / std)], rel=1e-5)


def test_replay_buffer_keeps_the_newest():
    made = make([0.0] * 5, reference=False).make([sample(i, [5, 2]) for i in range(5)], kl_coef=0.0)
    buffer = ReplayBuffer(limit=3)
    buffer.append(made[:2])
    buffer.append(made[2:])
    assert [e.index for e in buffer] == [2, 3, 4]
    buffer.clear()
    assert len(buffer) == 0


@pytest.mark.parametrize('score', [1e30, [1e30, -1e30]])
def test_a_score_whose_square_overflows_is_refused_with_its_sample_unless_it_is_clipped(score):
    samples = [sample(0, [5, 6]), sample(1, [5, 6])]
    with pytest.raises(RewardValueError, match=r'the score .* of sample 1 .*score_clip'):
        make([1.0, score]).make(samples, kl_coef=0.1)
    if isinstance(score, float):
        clipped = make([1.0, score], clip=5.0).make(samples, kl_coef=0.1)
        assert clipped[1].shaped_score == 5.0
