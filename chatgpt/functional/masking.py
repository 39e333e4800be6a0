"""Sums, means, variances and whitening over the tokens that count, and sums per sequence.

Sums are accumulated in float64, so that the order and the micro-batches of a batch do not change a float32 result.
Values where the mask is False are never read: they may be NaN or infinite.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Returns the sum of x where mask is True; 0 if nothing counts.

    Args:
        x: any shape, floating point.
        mask: same shape, bool, True = counts.

    Returns:
        scalar of x's dtype. Differentiable.

    Raises:
        ValueError: the mask is not bool, or has another shape than x.
    """
    _check(x, mask)
    return _kept(x, mask).sum().to(x.dtype)


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Returns the mean of x where mask is True, scalar of x's dtype; 0 if nothing counts. Arguments as in
    `masked_sum`."""
    _check(x, mask)
    return _moments(x, mask)[1].to(x.dtype)


def masked_var(x: Tensor, mask: Tensor, *, unbiased: bool = True) -> Tensor:
    """Returns the variance of x where mask is True, scalar of x's dtype, in two passes: Σ (x − mean)² / (n − 1), or / n
    if not `unbiased`; 0 if at most one token counts. Arguments as in `masked_sum`."""
    _check(x, mask)
    count, mean = _moments(x, mask)
    return _variance(x, mask, count, mean, unbiased).to(x.dtype)


def moments(x: Tensor, mask: Tensor) -> Tensor:
    """Returns the number of tokens that count, their sum, and the sum of squares of their deviations from the mean,
    (3,) fp64. Arguments as in `masked_sum`."""
    _check(x, mask)
    count, mean = _moments(x, mask)
    return torch.stack([count, _kept(x, mask).sum(), _squares(x, mask, mean)])


def joined_moments(parts: Tensor) -> Tensor:
    """Returns the moments of the tokens of several sequences together, (3,) fp64, from those of each, (M, 3).

        S = Σ_i S_i + n_i (m_i − m)²      squares of deviations from the mean m of all, with the mean m_i of each

    Every sum is rounded once, so it does not depend on the order. Source: Chan, Golub & LeVeque 1979.
    """
    counts, sums, squares = parts.double().cpu().T.tolist()
    count, total = math.fsum(counts), _rounded_once(sums)
    mean = total / max(count, 1.0)
    apart = [n * (x / max(n, 1.0) - mean) ** 2 for n, x in zip(counts, sums, strict=True)]
    return torch.tensor([count, total, _rounded_once([*squares, *apart])], dtype=torch.float64)


def whiten(
    x: Tensor,
    mask: Tensor,
    *,
    shift_mean: bool = True,
    unbiased: bool = True,
    eps: float = 1e-8,
    over: Tensor | None = None,
) -> Tensor:
    """(x − mean) / sqrt(var + eps) over the tokens that count; with `shift_mean=False` x / sqrt(var + eps).

    Advantages are shifted and scaled, rewards only scaled: shifted rewards would reward or punish every further token
    ("The N implementation details of RLHF with PPO", reward and advantage whitening; its code adds the mean back after
    scaling instead of scaling it too).

    Args:
        x: any shape, floating point.
        mask: same shape, bool, True = counts.
        shift_mean: True subtracts the mean. False keeps the sign of every value.
        over: (3,) `moments` that give mean and variance, of more tokens than these; None: those of x.

    Returns:
        x's shape and dtype, 0 where the mask is False. A constant, a single token included, is not divided: it becomes
        0 with `shift_mean` and stays the same without.
    """
    _check(x, mask)
    mean, scale = whitening(moments(x, mask) if over is None else over.to(x.device, _wide(x)), unbiased, eps)
    centred = _kept(x, mask) - mean if shift_mean else _kept(x, mask)
    return torch.where(mask, centred * scale, torch.zeros_like(scale)).to(x.dtype)


def whitening(over: Tensor, unbiased: bool = True, eps: float = 1e-8) -> tuple[Tensor, Tensor]:
    """Returns the mean and the factor of `whiten` from (3,) `moments`."""
    count, total, squares = over
    mean, var = total / count.clamp_min(1), squares / (count - 1 if unbiased else count).clamp_min(1)
    # Equal values have rounding errors of relative size 1e-7 in fp32; dividing by their std would amplify that noise.
    constant = var <= 1e-12 * mean.square()
    return mean, torch.where(constant, torch.ones_like(var), (var + eps).rsqrt())


def segment_sum(x: Tensor, rows: Tensor, num_segments: int, *, mask: Tensor | None = None) -> Tensor:
    """Returns the sum of x per sequence.

    Args:
        x: (N,) per token.
        rows: (N,) int64, the sequence of each token, in any order.
        num_segments: B, the number of sequences.
        mask: (N,) bool, True = counts; None counts all.

    Returns:
        (B,) of x's dtype, 0 for a sequence without tokens that count. Differentiable. Deterministic, on CUDA too.
    """
    if x.dim() != 1 or x.shape != rows.shape:
        raise ValueError(f'x and rows must be 1-D and of one length; got {tuple(x.shape)} and {tuple(rows.shape)}')
    if mask is not None:
        _check(x, mask)
    values = x.to(_wide(x)) if mask is None else _kept(x, mask)
    zeros = values.new_zeros(num_segments)
    if values.is_cuda:
        # index_add adds atomically on CUDA, in an order that changes from run to run; index_put sorts first.
        total = zeros.index_put((rows,), values, accumulate=True)
    else:
        total = zeros.index_add(0, rows, values)
    return total.to(x.dtype)


def segment_count(rows: Tensor, num_segments: int, *, mask: Tensor | None = None) -> Tensor:
    """Returns the number of tokens that count per sequence, (B,) int64. Arguments as in `segment_sum`."""
    # `bincount` and `rows[mask]` would make the host wait for the sizes of their results.
    counted = torch.ones_like(rows) if mask is None else mask.to(rows.dtype)
    return rows.new_zeros(num_segments).index_add(0, rows, counted)


def segment_mean(x: Tensor, rows: Tensor, num_segments: int, *, mask: Tensor | None = None) -> Tensor:
    """Returns the mean of x per sequence, (B,); 0 for one without tokens that count. Arguments as in `segment_sum`."""
    total = segment_sum(x, rows, num_segments, mask=mask)
    return total / segment_count(rows, num_segments, mask=mask).clamp_min(1).to(x.dtype)


def _check(x: Tensor, mask: Tensor) -> None:
    if mask.dtype != torch.bool:
        raise ValueError(f'mask must be bool, True = counts; got {mask.dtype}')
    if mask.shape != x.shape:
        raise ValueError(f'mask must have the shape of x, {tuple(x.shape)}; got {tuple(mask.shape)}')


def _wide(x: Tensor) -> torch.dtype:
    """Returns the dtype of accumulation: float64 if the device has it."""
    return torch.float32 if x.device.type == 'mps' else torch.float64


def _kept(x: Tensor, mask: Tensor) -> Tensor:
    wide = x.to(_wide(x))
    return torch.where(mask, wide, torch.zeros_like(wide))


def _moments(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Returns count and mean, as scalars of the dtype of accumulation."""
    total = _kept(x, mask).sum()
    count = mask.sum().to(total.dtype)
    return count, total / count.clamp_min(1)


def _variance(x: Tensor, mask: Tensor, count: Tensor, mean: Tensor, unbiased: bool) -> Tensor:
    return _squares(x, mask, mean) / (count - 1 if unbiased else count).clamp_min(1)


def _squares(x: Tensor, mask: Tensor, mean: Tensor) -> Tensor:
    return (torch.where(mask, x.to(mean.dtype), mean) - mean).square().sum()


def _rounded_once(numbers: list[float]) -> float:
    """Returns the sum, rounded once; the plain sum if a number is not finite."""
    return math.fsum(numbers) if all(map(math.isfinite, numbers)) else sum(numbers)
