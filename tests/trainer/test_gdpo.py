"""GDPO in whole runs: the scores of a weighted list stay separate, and a slow loop recomputes the advantages."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tiny_runs import PROMPTS, fit, ppo, vowels

from chatgpt.launch.inputs import check_run
from chatgpt.launch.runs import PPORun
from chatgpt.types import Experience

GDPO = {'advantage_estimator': 'gdpo', 'num_samples_per_prompt': 4, 'kl_coef': 0.0}


def short(prompts: list[str], responses: list[str]) -> list[float]:
    return [-100.0 * len(r) for r in responses]


class LastToken:
    def score(self, samples: list[Any], strategy: Any) -> list[torch.Tensor]:
        return [torch.tensor([0.0] * (s.num_actions - 1) + [1.0 + s.index % 3]) for s in samples]


REWARDS = [(1.0, vowels), (0.5, short), (0.25, LastToken())]


def make(reward: Any = REWARDS, **settings: Any) -> Any:
    return ppo(reward=reward, **{'train_batch_size': 8, 'max_new_tokens': 8} | GDPO | settings)


def normalised(values: list[float]) -> list[float]:
    mean = sum(values) / len(values)
    std = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
    return [(v - mean) / (std + 1e-4) for v in values]


def slow(experiences: list[Experience]) -> dict[int, float]:
    """Returns the advantage by sample index, from texts and indices alone."""
    texts = [e.response_text for e in experiences]
    columns = [vowels([], texts), short([], texts), [1.0 + e.index % 3 for e in experiences]]
    totals = dict.fromkeys((e.index for e in experiences), 0.0)
    for weight, column in zip([1.0, 0.5, 0.25], columns, strict=True):
        for group in {e.group for e in experiences}:
            places = [i for i, e in enumerate(experiences) if e.group == group]
            for i, value in zip(places, normalised([column[i] for i in places]), strict=True):
                totals[experiences[i].index] += weight * value
    return dict(zip(totals, normalised(list(totals.values())), strict=True))


def test_advantages_by_a_slow_loop():
    trainer = make()
    trainer.fit(PROMPTS, 1, 2, 2)
    (experiences,) = trainer.log.experiences
    assert len(experiences) == 32  # both timesteps form one batch
    for e in experiences:
        parts = [vowels([], [e.response_text])[0], short([], [e.response_text])[0], 1.0 + e.index % 3]
        assert e.weighted_scores == tuple(zip((1.0, 0.5, 0.25), parts, strict=True))
        assert e.score == pytest.approx(sum(w * s for w, s in e.weighted_scores))
    got = trainer.config.estimator.whiten(experiences)
    assert all(len(set(e.advantages.tolist())) == 1 for e in got)
    ours = {e.index: e.advantages[0].item() for e in got}
    assert ours == pytest.approx(slow(experiences), abs=1e-5)
    summed = normalised([e.score for e in experiences])  # the negative control
    assert list(ours.values()) != pytest.approx(summed, abs=1e-3)
    phase = trainer.log.phases[0]
    assert phase['rollout/score_2_mean'] == pytest.approx(sum(e.weighted_scores[1][1] for e in experiences) / 32)
    third = torch.tensor([1.0 + e.index % 3 for e in experiences])
    assert phase['rollout/score_3_std'] == pytest.approx(third.std().item())


def test_responses_without_a_token_that_counts_have_no_effect_on_the_batch():
    trainer = fit(make(overlong_filter=True), 1)
    (experiences,) = trainer.log.experiences
    own = [e for e in experiences if bool(e.response_mask.any())]
    assert 1 < len(own) < len(experiences)
    want = normalised([e.advantages[0].item() for e in own])
    got = [e.advantages[0].item() for e in trainer.config.estimator.whiten(experiences) if bool(e.response_mask.any())]
    assert got == pytest.approx(want, abs=1e-5)


class Traded:
    """Two rewards with the same sum for every response."""

    def __init__(self, sign: float) -> None:
        self.sign = sign

    def score(self, samples: list[Any], strategy: Any) -> list[float]:
        return [self.sign * (s.index % 4) for s in samples]


def test_dynamic_sampling_looks_at_each_reward():
    (phase,) = fit(make(reward=[(1.0, Traded(1.0)), (1.0, Traded(-1.0))], dynamic_sampling_rounds=1), 1).log.phases
    assert phase['rollout/informative_share'] == 1.0 and phase['rollout/score_std'] == 0.0


def test_what_gdpo_refuses():
    for reward in (vowels, [(1.0, vowels)]):
        with pytest.raises(ValueError, match='give reward_model as a list of two'):
            make(reward=reward)
    with pytest.raises(ValueError, match='needs the scores of each reward, which step is not given'):
        make().step([torch.tensor([3, 4])] * 4, [torch.tensor([5, 6, 7])] * 4, [0.0] * 4)
    with pytest.raises(ValueError, match='takes a list of rewards, which the command line cannot give'):
        check_run(PPORun(**GDPO), 1)
