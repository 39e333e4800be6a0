"""Tokens of observations are no actions: values at them do not change losses or metrics.

The negative control of each test puts the same values at tokens of the policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_trainer import experience

from chatgpt.functional.ppo import token_rewards
from chatgpt.trainer import metrics
from chatgpt.trainer.algorithms import estimate_advantages
from chatgpt.trainer.callbacks.rollouts import rows_of_phase
from chatgpt.trainer.callbacks.samples import rows_of
from chatgpt.trainer.config import PPOConfig
from chatgpt.trainer.estimates import whiten_responses
from chatgpt.trainer.experience import ScoreShaper
from chatgpt.trainer.experience.scorers import sequence_score
from chatgpt.trainer.losses import COLUMNS
from chatgpt.types import Episode, Experience, Turn

VOCAB = 16
GARBAGE = [math.nan, math.inf, -math.inf, 1e30]
PER_TOKEN = (*COLUMNS, 'kl', 'rewards')


def experiences() -> list[Experience]:
    generator = torch.Generator().manual_seed(0)
    masks = ['11011', '1001', '111', '10001101']
    found = []
    for i, mask in enumerate(masks):
        own = torch.tensor([c == '1' for c in mask])
        n = len(own)
        numbers = {name: torch.randn(n, generator=generator) for name in PER_TOKEN}
        numbers |= {name: -torch.rand(n, generator=generator) * 3 for name in PER_TOKEN[:3]}
        starts = [t for t in range(n) if own[t] and (t == 0 or not own[t - 1])]
        stops = [t + 1 for t in range(n) if own[t] and (t == n - 1 or not own[t + 1])]
        turns = tuple(Turn(start=a, stop=b, rewards={'reward': 0.5 * i}) for a, b in zip(starts, stops, strict=True))
        ended = {'finish_reason': 'eos' if i % 2 else 'length', 'shaped_score': float(i), 'group': i // 2}
        ended['episode'] = Episode(turns=turns, end='terminated' if i % 2 else 'tokens')
        ids = torch.randint(3, VOCAB, (n,), generator=generator).tolist()
        found.append(experience(i, [3, 4], ids, float(i), response_mask=own, **ended, **numbers))
    return found


def with_garbage(given: list[Experience], garbage: float, *, own: bool = False) -> list[Experience]:
    """Returns experiences with garbage in every number of observation tokens; with `own`, of the policy's tokens
    instead."""
    found = []
    for e in given:
        at = e.response_mask if own else ~e.response_mask
        found.append(replace(e, **{name: torch.where(at, garbage, getattr(e, name)) for name in PER_TOKEN}))
    return found


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return a == b


def check_ignores_observations(measure: Callable[[list[Experience]], Any]) -> None:
    """Checks that the measure depends on the policy's tokens and not on observations."""
    expected = measure(experiences())
    for garbage in GARBAGE:
        assert same(measure(with_garbage(experiences(), garbage)), expected)
    assert not same(measure(with_garbage(experiences(), 0.25, own=True)), expected)


@pytest.mark.parametrize(
    'settings',
    [
        {},
        {'gae_over': 'turn', 'value_lam': 1.0},
        {'advantage_estimator': 'a2c'},
        {'advantage_estimator': 'reinforce++'},
        *(
            {'advantage_estimator': name, 'num_samples_per_prompt': 2}
            for name in ('grpo', 'dr_grpo', 'rloo', 'reinforce++_baseline')
        ),
    ],
    ids=str,
)
def test_advantages_and_their_whitening(settings):
    config = PPOConfig(gamma=0.9, **settings)

    def measure(given: list[Experience]) -> list[torch.Tensor]:
        estimate_advantages(given, config.estimator, config)
        white = config.estimator.whiten(given)
        return [x for e in given for x in (e.advantages, e.returns)] + [e.advantages for e in white]

    check_ignores_observations(measure)


def test_responses_are_whitened_by_hand():
    """A response counts once, whatever its observations, and not at all if no token counts."""
    given = experiences()
    given[1].response_mask = torch.zeros_like(given[1].response_mask)
    for e, advantage in zip(given, (1.0, 50.0, 2.0, 6.0), strict=True):
        e.advantages = torch.where(e.response_mask, advantage, math.nan)
    filtered = given[1].advantages
    std = math.sqrt((4 + 1 + 9) / 2)  # of 1, 2 and 6, with mean 3
    found = whiten_responses(given)
    assert found[1].advantages is filtered
    for i, difference in ((0, -2), (2, -1), (3, 3)):
        want = [difference / (std + 1e-4) if own else 0.0 for own in given[i].response_mask.tolist()]
        assert found[i].advantages.tolist() == pytest.approx(want)


def test_rewards_of_tokens():
    """Neither a KL of any kind nor a score at an observation is paid."""
    e = experiences()[3]
    dense = torch.arange(8.0)
    expected = token_rewards(e.kl, 0.1, 2.0, e.response_mask, token_scores=dense)
    shaped = ScoreShaper('none', 3.0).of_tokens(dense, e)[0][e.response_mask]
    for garbage in GARBAGE:
        kl, scores = (torch.where(e.response_mask, x, garbage) for x in (e.kl, dense))
        assert torch.equal(token_rewards(kl, 0.1, 2.0, e.response_mask, token_scores=scores), expected)
        got, clipped = ScoreShaper('none', 3.0).of_tokens(scores, e)
        assert clipped == 0.0 and torch.equal(got[e.response_mask], shaped)
    assert not expected[~e.response_mask].any()
    assert ScoreShaper(token_penalty=1.0)([0.0] * 4, experiences()) == [-4, -2, -3, -4]


def test_metrics_of_learning_and_of_rollouts():
    check_ignores_observations(metrics.value_metrics)
    check_ignores_observations(lambda given: metrics.rollout_metrics(given, 0.1))
    for measure in (metrics.group_metrics, metrics.environment_metrics):
        for garbage in GARBAGE:
            assert measure(with_garbage(experiences(), garbage)) == measure(experiences())


@pytest.mark.parametrize('with_turns', [True, False])
def test_observations_are_no_repetition(with_turns):
    """A repeated observation does not count, nor do 4-grams across one."""

    def measured(observation: list[int]) -> dict[str, float]:
        ids = [5, 6, 7, 8, 9, *observation, 5, 6, 7, 8, 10]
        mask = torch.tensor([True] * 5 + [False] * len(observation) + [True] * 5)
        turns = (Turn(start=0, stop=5), Turn(start=5 + len(observation), stop=len(ids)))
        changed = {'response_ids': torch.tensor(ids), 'response_mask': mask}
        changed['episode'] = Episode(turns=turns, end='terminated') if with_turns else None
        e = replace(experiences()[0], **changed, **{name: torch.zeros(len(ids)) for name in PER_TOKEN})
        found = metrics.rollout_metrics([e, replace(e, index=1)], 0.0)
        return {name: value for name, value in found.items() if 'repetition' in name}

    # 4-grams of the policy: 5678, 6789, 5678, 678(10): one of four is a repetition; those of the other response are all
    # here.
    expected = {'rollout/repetition_within': 0.25, 'rollout/repetition_across': 0.5}
    for observation in ([1], [1, 2, 3, 4] * 3, list(range(1, 15))):
        assert measured(observation) == expected


def test_repetition_of_filtered_responses_is_measured():
    """`overlong_filter` leaves no token that counts, but their repetition is still measured."""
    given = experiences()
    for e in given:
        before = metrics.sampled_mask(e)
        e.response_mask = torch.zeros_like(e.response_mask)
        assert torch.equal(metrics.sampled_mask(e), before)
        e.episode = None
        assert metrics.sampled_mask(e).all()


def test_sums_of_scores_leave_observations_out():
    """In RFT, evaluation and best of n, as in PPO."""
    e = experiences()[3]
    assert sequence_score(torch.where(e.response_mask, 2.0, 1e30), e) == 8.0
    assert sequence_score(3, e) == 3.0


def test_recorded_rows_ignore_observations():
    check_ignores_observations(lambda given: [row['kl'] for row in rows_of(given, 4)])
    check_ignores_observations(lambda given: [row['kl'] for row in rows_of_phase(given, 1, None, {})])
