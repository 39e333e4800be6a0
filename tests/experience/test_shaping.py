"""Scores between the scorer and the reward: running moments, scaling, clipping, penalties."""

import math

import pytest
import torch

from chatgpt.experience import RunningMoments, ScoreShaper
from chatgpt.types import Sample


def sample(ended: bool = True, tokens: int = 2) -> Sample:
    zeros = torch.zeros(tokens)
    return Sample(
        index=0,
        group=0,
        prompt_ids=torch.tensor([1]),
        response_ids=torch.ones(tokens, dtype=torch.int64),
        response_mask=torch.ones(tokens, dtype=torch.bool),
        logprobs=zeros,
        filtered_logprobs=zeros,
        edge_distances=zeros,
        finish_reason='eos' if ended else 'length',
    )


def test_running_moments_equal_those_of_everything_seen():
    moments = RunningMoments()
    moments.update([1.0, 2.0, 6.0])
    moments.update([3.0])
    moments.update([])
    # By hand: mean of 1, 2, 6, 3 is 3; squared deviations 4 + 1 + 9 + 0 = 14; 14 / 3.
    assert moments.mean == pytest.approx(3.0)
    assert moments.std == pytest.approx(math.sqrt(14 / 3))


def test_running_moments_twin_forgetting_the_shift_between_batches_is_wrong():
    squares = sum((v - 3.0) ** 2 for v in [1.0, 2.0, 6.0])  # deviations within the first batch only (its mean is 3)
    moments = RunningMoments()
    moments.update([1.0, 2.0, 6.0])
    moments.update([7.0])
    assert moments.sum_squares != pytest.approx(squares)
    assert moments.sum_squares == pytest.approx(sum((v - 4.0) ** 2 for v in [1.0, 2.0, 6.0, 7.0]))


def test_running_moments_resume_to_the_bit():
    a, b = RunningMoments(), RunningMoments()
    a.update([0.1, 0.7, 0.3])
    b.load_state_dict(a.state_dict())
    a.update([0.9])
    b.update([0.9])
    assert a == b


@pytest.mark.parametrize(
    ('scaling', 'expected'),
    [('none', [1.0, 3.0]), ('running', [1 / math.sqrt(2), 3 / math.sqrt(2)]), ('norm', [-1 / math.sqrt(2), 1 / math.sqrt(2)])],
)
def test_scaling(scaling, expected):
    shaper = ScoreShaper(scaling=scaling)
    assert shaper([1.0, 3.0], [sample(), sample()]) == pytest.approx(expected)


def test_ref_scaling_keeps_the_first_batch():
    shaper = ScoreShaper(scaling='ref')
    shaper([1.0, 3.0], [sample(), sample()])
    assert shaper([100.0, -100.0], [sample(), sample()]) == pytest.approx([100 / math.sqrt(2), -100 / math.sqrt(2)])


def test_clip_then_missing_end_then_length():
    shaper = ScoreShaper(clip=2.0, missing_eos_score=-1.0, token_penalty=0.1)
    assert shaper([5.0, 5.0], [sample(tokens=3), sample(ended=False, tokens=4)]) == pytest.approx([2.0 - 0.3, -1.0 - 0.4])
