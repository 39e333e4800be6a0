"""Losses of the critic against loops over tokens and bins in float64, each with a wrong variant that must differ."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from chatgpt.functional.ppo import clipped_value_loss
from chatgpt.functional.values import expected_value, hl_gauss_loss, hl_gauss_target

RETURNS = [-3.0, -1.0, -0.4, 0.0, 0.3, 0.95, 1.0, 8.0]
LOW, HIGH, BINS = -1.0, 1.5, 5


def f64(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def slow_target(value: float, sigma: float, shift: float = 0.0) -> list[float]:
    """The mass of a normal distribution in each bin, from its cumulative distribution; `shift` in bins is a fault."""
    width = (HIGH - LOW) / BINS
    mean, deviation = min(max(value, LOW), HIGH) + shift * width, sigma * width
    below = [0.5 * (1 + math.erf((LOW + i * width - mean) / (deviation * math.sqrt(2)))) for i in range(BINS + 1)]
    return [(below[i + 1] - below[i]) / (below[-1] - below[0]) for i in range(BINS)]


def logits() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(len(RETURNS), BINS, generator=generator, dtype=torch.float64)


def slow_cross_entropy(rows: list[list[float]], targets: list[list[float]]) -> list[float]:
    found = []
    for row, target in zip(rows, targets, strict=True):
        total = sum(math.exp(x) for x in row)
        found.append(-sum(p * math.log(math.exp(x) / total) for p, x in zip(target, row, strict=True)))
    return found


@pytest.mark.parametrize('sigma', [0.3, 0.75, 3.0])
def test_hl_gauss(sigma):
    targets = [slow_target(value, sigma) for value in RETURNS]
    ours = hl_gauss_target(f64(RETURNS), BINS, LOW, HIGH, sigma)
    assert ours.tolist() == [pytest.approx(target, abs=1e-12) for target in targets]
    assert ours.sum(-1).tolist() == pytest.approx([1.0] * len(RETURNS))
    loss = hl_gauss_loss(logits(), f64(RETURNS), LOW, HIGH, sigma).tolist()
    assert loss == pytest.approx(slow_cross_entropy(logits().tolist(), targets), abs=1e-12)
    shifted = [slow_target(value, sigma, shift=0.5) for value in RETURNS]
    assert loss != pytest.approx(slow_cross_entropy(logits().tolist(), shifted), rel=1e-3)
    in_fp32 = hl_gauss_loss(logits().float(), f64(RETURNS).float(), LOW, HIGH, sigma)
    assert in_fp32.dtype == torch.float32 and in_fp32.tolist() == pytest.approx(loss, rel=1e-4)


def test_the_value_is_the_mean_of_the_centres_and_learning_brings_it_to_the_return():
    centres = [LOW + (i + 0.5) * (HIGH - LOW) / BINS for i in range(BINS)]
    edges = [LOW + i * (HIGH - LOW) / BINS for i in range(BINS)]

    def slow(at: list[float]) -> list[float]:
        rows = []
        for row in logits().tolist():
            total = sum(math.exp(x) for x in row)
            rows.append(sum(math.exp(x) / total * c for x, c in zip(row, at, strict=True)))
        return rows

    assert expected_value(logits(), LOW, HIGH).tolist() == pytest.approx(slow(centres), abs=1e-12)
    assert expected_value(logits(), LOW, HIGH).tolist() != pytest.approx(slow(edges), abs=1e-2)
    learned = logits().requires_grad_(True)
    optimizer = torch.optim.Adam([learned], lr=0.05)
    for _ in range(800):
        optimizer.zero_grad()
        hl_gauss_loss(learned, f64(RETURNS), LOW, HIGH).sum().backward()
        optimizer.step()
    found = dict(zip(RETURNS, expected_value(learned.detach(), LOW, HIGH).tolist(), strict=True))
    assert (found[0.0], found[0.3]) == pytest.approx((0.0, 0.3), abs=0.02)
    assert LOW < found[-3.0] == pytest.approx(found[-1.0], abs=0.01), (
        'the normal distribution is cut at the end of the range'
    )


def huber(error: float, delta: float) -> float:
    return 0.5 * error**2 if abs(error) <= delta else delta * (abs(error) - 0.5 * delta)


@pytest.mark.parametrize('clip', [None, 0.4])
def test_huber(clip):
    values, old, delta = [0.1, -2.0, 0.7, 3.0, 0.5], [0.0, 0.3, 0.65, 2.9, -4.0], 0.8
    returns = [1.5, 0.2, 0.7, -4.0, 0.6]

    def slow(of: Callable[[float], float]) -> list[float]:
        found = []
        for v, o, r in zip(values, old, returns, strict=True):
            near = v if clip is None else min(max(v, o - clip), o + clip)
            found.append(max(of(v - r), of(near - r)))
        return found

    ours = clipped_value_loss(f64(values), f64(old), f64(returns), clip, delta=delta)
    assert ours.tolist() == pytest.approx(slow(lambda e: huber(e, delta)), abs=1e-12)
    assert ours.tolist() != pytest.approx(slow(lambda e: 0.5 * e**2), rel=1e-3)
    assert ours.tolist() != pytest.approx(slow(lambda e: huber(e, 1.0)), rel=1e-3)
    leaf = f64(values).requires_grad_(True)
    clipped_value_loss(leaf, f64(old), f64(returns), None, delta=delta).sum().backward()
    by_hand = [min(max(v - r, -delta), delta) for v, r in zip(values, returns, strict=True)]
    assert leaf.grad is not None and leaf.grad.tolist() == pytest.approx(by_hand)
