"""compare_samples: equality, the first difference, and whether an edge explains it."""

from __future__ import annotations

import pytest
import torch

from chatgpt.rollout import compare_samples
from chatgpt.types import Sample


def sample(index: int, ids: list[int], edges: list[float] | None = None, prompt: tuple[int, ...] = (1,)) -> Sample:
    n = len(ids)
    return Sample(
        index=index,
        group=index,
        prompt_ids=torch.tensor(prompt),
        response_ids=torch.tensor(ids),
        response_mask=torch.ones(n, dtype=torch.bool),
        logprobs=torch.zeros(n),
        filtered_logprobs=torch.zeros(n),
        edge_distances=torch.tensor(edges if edges is not None else [0.1] * n),
        finish_reason='length',
    )


def test_equal_in_any_order():
    a = [sample(0, [5, 6]), sample(1, [7])]
    report = compare_samples(a, reversed(a))
    assert report.equal and report.explained and (report.num_samples, report.num_tokens) == (2, 3)


def test_a_difference_at_an_edge_is_explained_and_ends_the_sample():
    report = compare_samples([sample(0, [5, 6, 7, 8], [0.1, 2e-6, 0.1, 0.1])], [sample(0, [5, 9, 1, 1])])
    assert not report.equal and report.explained and report.num_tokens == 1
    (difference,) = report.differences
    assert (difference.index, difference.position, difference.tokens) == (0, 1, (6, 9))
    assert difference.edge_distance == pytest.approx(2e-6)
    assert not compare_samples([sample(0, [5, 6], [0.1, 2e-6])], [sample(0, [5, 9])], tolerance=1e-6).explained


def test_a_difference_away_from_an_edge_is_not_explained():
    report = compare_samples([sample(3, [5, 6])], [sample(3, [5, 7])])
    assert not report.explained and 'sample 3, position 1: 6 or 7, not explained' in str(report)


def test_a_difference_of_length_is_never_explained():
    report = compare_samples([sample(0, [5, 6], [0.0, 0.0])], [sample(0, [5], [0.0])])
    assert report.differences[0].tokens == (6, None) and not report.explained


def test_other_samples_are_refused():
    with pytest.raises(ValueError, match=r'indices \[1\] are on one side only'):
        compare_samples([sample(0, [5])], [sample(0, [5]), sample(1, [5])])
    with pytest.raises(ValueError, match='sample 0 has two different prompts'):
        compare_samples([sample(0, [5])], [sample(0, [5], prompt=(2,))])
