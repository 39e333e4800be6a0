"""Shaping of scores: running moments, scaling, clipping, penalties."""

import math

import pytest
import torch
from experience_samples import sample as any_sample

from chatgpt.functional.ppo import token_rewards
from chatgpt.rollout import SamplingParams
from chatgpt.trainer.experience import RunningMoments, ScoreShaper
from chatgpt.types import Sample


def sample(ended: bool = True, tokens: int = 2, prompt: int = 1, mask: list[bool] | None = None) -> Sample:
    return any_sample(0, [1] * tokens, prompt=[1] * prompt, mask=mask, ended=ended)


def test_running_moments_equal_those_of_everything_seen_and_resume_to_the_bit():
    moments = RunningMoments()
    moments.update([1.0, 2.0, 6.0])
    moments.update([7.0])
    moments.update([])
    # By hand: the mean of 1, 2, 6, 7 is 4, and squared deviations are 9 + 4 + 4 + 9 = 26; 26 / 3.
    assert moments.mean == pytest.approx(4.0)
    assert moments.std == pytest.approx(math.sqrt(26 / 3))
    a, b = RunningMoments(), RunningMoments()
    a.update([0.1, 0.7, 0.3])
    b.load_state_dict(a.state_dict())
    a.update([0.9])
    b.update([0.9])
    assert a == b


def test_scaling():
    for scaling, expected in (
        ('none', [1.0, 3.0]),
        ('running', [1 / math.sqrt(2), 3 / math.sqrt(2)]),
        ('norm', [-1 / math.sqrt(2), 1 / math.sqrt(2)]),
    ):
        assert ScoreShaper(scaling=scaling)([1.0, 3.0], [sample(), sample()]) == pytest.approx(expected)


def test_clip_then_missing_end_then_length():
    shaper = ScoreShaper(clip=2.0, missing_eos_score=-1.0, token_penalty=0.1)
    shaped = shaper([5.0, -5.0, 5.0], [sample(tokens=3), sample(tokens=3), sample(ended=False, tokens=4)])
    assert shaped == pytest.approx([2.0 - 0.3, -2.0 - 0.3, -1.0 - 0.4])


@pytest.mark.parametrize('scaling', ['running', 'ref', 'norm'])
@pytest.mark.parametrize('value', [0.0, 0.1, -3.0, 1e3])
def test_equal_scores_are_not_divided(scaling, value):
    shaper = ScoreShaper(scaling=scaling)
    expected = 0.0 if scaling == 'norm' else value
    for size in (1, 3, 2):
        assert shaper([value] * size, [sample()] * size) == pytest.approx([expected] * size, abs=1e-9)
        assert shaper.is_idle
    shaper([value, value + 2.0], [sample()] * 2)
    assert not shaper.is_idle
    # By hand: seven equal scores and one 2 above them; mean +0.25, squared deviations 7 * 0.0625 + 3.0625 = 3.5
    # over 7.
    assert shaper.scale()[1] == pytest.approx(1 / math.sqrt(0.5))
    assert not ScoreShaper().is_idle


def test_ref_scaling_takes_the_first_batch_that_differs_and_stays():
    shaper = ScoreShaper(scaling='ref')
    for scores in ([0.0, 0.0], [0.0, 4.0], [100.0, -100.0]):
        shaped = shaper(scores, [sample()] * 2)
    # By hand: 0, 0, 0, 4 have mean 1, squared deviations 1 + 1 + 1 + 9 = 12 over 3.
    assert shaped == pytest.approx([100.0 / 2.0, -100.0 / 2.0])


@pytest.mark.parametrize(
    ('sampling', 'prompt', 'penalties'),
    [
        (SamplingParams(max_new_tokens=8), 5, [0.0, 0.0, 0.25, 1.0]),
        (SamplingParams(max_length=13), 5, [0.0, 0.0, 0.25, 1.0]),
        (SamplingParams(max_length=13, max_new_tokens=10), 5, [0.0, 0.0, 0.25, 1.0]),
        (SamplingParams(max_length=13, max_new_tokens=10), 3, [0.0, 0.0, 0.0, 0.5]),  # ten more tokens fit
    ],
)
def test_the_overlong_penalty_ends_at_the_limit_of_the_context(sampling, prompt, penalties):
    shaper = ScoreShaper(overlong=(sampling.room, 4))
    samples = [sample(tokens=n, prompt=prompt) for n in (2, 4, 5, 8)]
    assert shaper([1.0] * 4, samples) == pytest.approx([1.0 - p for p in penalties])


DENSE = [2.0, -1.0, 5.0, 100.0]
MASK = [True, True, True, False]


@pytest.mark.parametrize(
    ('settings', 'ended', 'expected'),
    [
        ({}, True, [2.0, -1.0, 5.0]),
        ({'token_penalty': 0.5}, True, [2.0, -1.0, 5.0 - 1.5]),
        ({'overlong': (lambda prompt: 4, 2)}, True, [2.0, -1.0, 5.0 - 1.0]),
        ({'missing_eos_score': -1.0}, True, [2.0, -1.0, 5.0]),
        ({'missing_eos_score': -1.0}, False, [0.0, 0.0, -1.0]),
        ({'missing_eos_score': -1.0, 'token_penalty': 0.5, 'clip': 0.25}, False, [0.0, 0.0, -1.0 - 1.5]),
        ({'clip': 6.0}, True, [2.0, -1.0, 5.0]),
        ({'clip': 3.0}, True, [1.0, -0.5, 2.5]),
        # The scores seen are 6 and 2: mean 4, deviation sqrt(8).
        ({'scaling': 'running'}, True, [x / math.sqrt(8) for x in (2.0, -1.0, 5.0)]),
        ({'scaling': 'norm'}, True, [x / math.sqrt(8) for x in (2.0, -1.0, 5.0 - 4.0)]),
        # 2 / sqrt(8) is clipped to 0.5
        ({'scaling': 'norm', 'clip': 0.5}, True, [x / 4 for x in (2.0, -1.0, 5.0 - 4.0)]),
    ],
)
def test_scores_per_token_by_hand_and_their_sum_is_what_one_score_becomes(settings, ended, expected):
    shaper = ScoreShaper(**settings)
    given = sample(ended, tokens=4, mask=MASK)
    single = shaper([6.0, 2.0], [given, sample()])[0]
    dense, once = shaper.of_tokens(torch.tensor(DENSE), given)
    rewards = token_rewards(torch.zeros(4), 0.0, once, given.response_mask, token_scores=dense)
    assert rewards.tolist() == pytest.approx([*expected, 0.0], abs=1e-6)
    assert float(rewards.sum()) == pytest.approx(single, abs=1e-6)
