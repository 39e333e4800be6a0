"""The hash behind every draw, against plain Python integers; inverse cumulative distribution, against a loop in
float64."""

from __future__ import annotations

import math

import pytest
import torch

from chatgpt.rollout import compare_samples
from chatgpt.rollout.randomness import _GAMMA, _mix, edge_distances, inverse_cdf, sample_keys, uniforms
from chatgpt.types import Sample

MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15


def mix(x: int) -> int:
    """SplitMix64's finaliser on unsigned Python integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def uniform(seed: int, index: int, position: int) -> float:
    start = mix(((seed & MASK) + GAMMA) & MASK)
    key = mix(((start ^ index) + GAMMA) & MASK)
    return (mix(((key ^ position) + GAMMA) & MASK) >> 12) / 2**52


def test_finaliser_is_splitmix64s():
    # the first two outputs of SplitMix64 with seed 0, as published with the algorithm's reference implementation
    state = torch.tensor([0, _GAMMA]) + _GAMMA
    assert [int(x) & MASK for x in _mix(state)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


@pytest.mark.parametrize('seed', [0, 1, 42, -3, 2**63, 2**64 - 1])
def test_uniforms_equal_the_integer_reference(seed):
    indices = torch.tensor([0, 1, 2, 999, 2**40])
    positions = torch.tensor([0, 1, 2, 77, 100_000])
    got = uniforms(sample_keys(seed, indices)[:, None], positions)
    assert got.dtype == torch.float64
    want = [[uniform(seed, i, t) for t in positions.tolist()] for i in indices.tolist()]
    assert got.tolist() == want


def test_a_shifted_position_or_index_is_another_number():
    keys = sample_keys(7, torch.arange(50))
    u = uniforms(keys[:, None], torch.arange(50))
    assert not (u[:, 1:] == uniforms(keys[:, None], torch.arange(49))).any()
    assert not (u[1:] == u[:-1]).any()
    assert u.flatten().unique().numel() == 2500


def test_uniforms_are_uniform_and_uncorrelated():
    u = uniforms(sample_keys(3, torch.arange(400))[:, None], torch.arange(250))
    counts = torch.histc(u.flatten(), bins=100, min=0, max=1)
    chi_square = float(((counts - 1000) ** 2 / 1000).sum())
    assert 56 < chi_square < 160  # 99 degrees of freedom: 0.02 % on either side
    for a, b in ((u[:, 1:], u[:, :-1]), (u[1:], u[:-1])):
        correlation = float(((a - 0.5) * (b - 0.5)).mean() * 12)
        assert abs(correlation) < 4.5 / math.sqrt(a.numel())
    assert float(u.min()) >= 0 and float(u.max()) < 1


def test_inverse_cdf_equals_a_slow_loop():
    generator = torch.Generator().manual_seed(0)
    probs = torch.softmax(torch.randn(40, 9, generator=generator) * 2, dim=-1)
    probs[:, 4] = 0
    probs = probs / probs.sum(-1, keepdim=True)
    u = torch.rand(40, 1, generator=generator, dtype=torch.float64)
    token, room = inverse_cdf(probs, u)
    edges = edge_distances(room, probs.gather(1, token))
    for row in range(40):
        total = math.fsum(probs[row].tolist())
        low = 0.0
        expected = 0
        while float(u[row]) * total >= low + float(probs[row, expected]):
            low += float(probs[row, expected])
            expected += 1
        assert int(token[row]) == expected
        p = float(probs[row, expected])
        want = min(float(u[row]) * total - low, low + p - float(u[row]) * total)
        assert float(edges[row]) == pytest.approx(want, abs=1e-6)
        assert abs(float(edges[row]) - (float(u[row]) * total - low + 0.01)) > 1e-3  # a shifted edge is another number


@pytest.mark.parametrize('scale', [1.0, 0.99999, 1.00001])
def test_a_token_of_probability_zero_is_never_drawn(scale):
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.25, 0.5, 0.0, 0.0]]) * scale
    uniform = torch.tensor([[0.0], [2.0**-52], [0.5], [1 - 2.0**-52]], dtype=torch.float64)
    assert inverse_cdf(probs.expand(4, -1), uniform)[0].flatten().tolist() == [1, 1, 4, 4]


@pytest.mark.gpu
def test_cuda_gives_the_same_bits():
    if not torch.cuda.is_available():
        pytest.skip('needs a CUDA device')
    indices, positions = torch.arange(1000), torch.arange(200)
    cpu = uniforms(sample_keys(42, indices)[:, None], positions)
    cuda = uniforms(sample_keys(42, indices.cuda())[:, None], positions.cuda())
    assert torch.equal(cpu, cuda.cpu())


# ---------------------------------------------------------------------- comparison of samples


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


def test_samples_are_compared_up_to_a_difference_that_an_edge_explains():
    a = [sample(0, [5, 6]), sample(1, [7])]
    report = compare_samples(a, reversed(a))
    assert report.equal and report.explained and (report.num_samples, report.num_tokens) == (2, 3)
    report = compare_samples([sample(0, [5, 6, 7, 8], [0.1, 2e-6, 0.1, 0.1])], [sample(0, [5, 9, 1, 1])])
    assert not report.equal and report.explained and report.num_tokens == 1
    (difference,) = report.differences
    assert (difference.index, difference.position, difference.tokens) == (0, 1, (6, 9))
    assert difference.edge_distance == pytest.approx(2e-6)
    assert not compare_samples([sample(0, [5, 6], [0.1, 2e-6])], [sample(0, [5, 9])], tolerance=1e-6).explained


def test_a_difference_away_from_an_edge_or_of_length_is_not_explained():
    report = compare_samples([sample(3, [5, 6])], [sample(3, [5, 7])])
    assert not report.explained and 'sample 3, position 1: 6 or 7, not explained' in str(report)
    report = compare_samples([sample(0, [5, 6], [0.0, 0.0])], [sample(0, [5], [0.0])])
    assert report.differences[0].tokens == (6, None) and not report.explained


def test_other_samples_are_refused():
    with pytest.raises(ValueError, match=r'indices \[1\] are on one side only'):
        compare_samples([sample(0, [5])], [sample(0, [5]), sample(1, [5])])
    with pytest.raises(ValueError, match='sample 0 has two different prompts'):
        compare_samples([sample(0, [5])], [sample(0, [5], prompt=(2,))])
