"""Random numbers for sampling: one uniform number per token, from a hash of (seed, sample index, position).

There is no generator state, so draws do not depend on batch order, batch size, refilling or world size, and checkpoints
have nothing to save. The hash uses the SplitMix64 finaliser (Steele, Lea, Flood 2014, "Fast splittable pseudorandom
number generators", with Stafford's mix 13 constants) in wrapping int64 arithmetic, with the same bits on CPU and CUDA.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _signed(value: int) -> int:
    """Returns an unsigned 64-bit constant as the int64 with the same bits."""
    return value - (1 << 64) if value >= 1 << 63 else value


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = _signed(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = _signed(0x94D049BB133111EB)

# 52 bits, not 53: then u * total < total in float64 for every total, so a draw never exceeds the cumulative sum
UNIFORM_BITS = 52
COLUMNS = 512
"""columns of a block of `in_two_levels`: near the root of a vocabulary of 152 000"""


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shifts right logically; torch's `>>` on int64 copies the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """Applies SplitMix64's finaliser, a bijection of 64-bit words. x: any shape, int64."""
    x = (x ^ _shift_right(x, 30)) * _MULTIPLIER_1
    x = (x ^ _shift_right(x, 27)) * _MULTIPLIER_2
    return x ^ _shift_right(x, 31)


def sample_keys(seed: int, indices: Tensor) -> Tensor:
    """Returns one 64-bit key per sample, (n,) int64. indices: (n,) int64, run-wide sample indices."""
    start = torch.full_like(indices, _signed(seed % (1 << 64)))
    return _mix((_mix(start + _GAMMA) ^ indices) + _GAMMA)


def stream_keys(seed: int, indices: Tensor, offsets: Tensor) -> Tensor:
    """Returns one 64-bit seed per turn of a sample, (n,) int64, for engines with generators of their own.

    indices, offsets: (n,) int64. Equal to `sample_keys` where the offset is 0.
    """
    keys = sample_keys(seed, indices)
    return torch.where(offsets > 0, _mix((keys ^ offsets) + _GAMMA), keys)


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """Returns uniform numbers in [0, 1), float64. keys and positions: int64, broadcast against each other.

    Positions count from 0 after the prompt, over response tokens and observations of an episode.
    """
    bits = _shift_right(_mix((keys ^ positions) + _GAMMA), 64 - UNIFORM_BITS)
    return bits.double() * 2.0**-UNIFORM_BITS


def inverse_cdf(probs: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Samples by inverting the cumulative distribution. A token of probability 0 is never drawn.

    On an accelerator by `in_two_levels`, whose sums have another order: the token differs only if the uniform number
    is within rounding of fp64 of an edge.

    Args:
        probs: (n, V) fp32; rows sum to 1 up to rounding, zeros are allowed.
        uniform: (n, 1) float64 in [0, 1).

    Returns:
        The token, (n, 1) int64, with the interval that contains the uniform number, and the interval's upper edge minus
        the uniform number, (n, 1) float64.
    """
    if probs.device.type != 'cpu' and probs.shape[-1] > COLUMNS:
        return in_two_levels(probs, uniform)
    cdf = probs.cumsum(dim=-1, dtype=torch.float64)
    target = uniform * cdf[:, -1:]
    # right=True finds the first entry strictly above the target, so tokens of probability 0 are skipped. The clamp only
    # matters for non-finite rows, which the caller reports.
    token = torch.searchsorted(cdf, target, right=True).clamp_(max=probs.shape[-1] - 1)
    return token, cdf.gather(1, token) - target


def in_two_levels(probs: Tensor, uniform: Tensor, columns: int = COLUMNS) -> tuple[Tensor, Tensor]:
    """As `inverse_cdf`, by a scan over sums of blocks of columns, then a scan within the block that contains the
    uniform number: a scan over a whole row of 152 000 columns leaves most of a GPU idle and writes fp64 for each."""
    n, size = probs.shape
    whole = size - size % columns
    sums = probs[:, :whole].view(n, -1, columns).sum(-1, dtype=torch.float64)
    if whole < size:
        sums = torch.cat([sums, probs[:, whole:].sum(-1, keepdim=True, dtype=torch.float64)], dim=1)
    cdf = sums.cumsum(-1)
    target = uniform * cdf[:, -1:]
    block = torch.searchsorted(cdf, target, right=True).clamp_(max=sums.shape[1] - 1)
    before = torch.where(block > 0, cdf.gather(1, (block - 1).clamp_(min=0)), 0.0)
    index = block * columns + torch.arange(columns, device=probs.device)
    inside = torch.where(index < size, probs.gather(1, index.clamp(max=size - 1)), 0.0).cumsum(-1, dtype=torch.float64)
    rest = target - before
    # the sum of a block and the scan within it round differently, so `rest` may reach the end of the scan: then the
    # token is the last one of the block with a probability above 0, where the scan first has its last value; a row of
    # NaN has no such place
    last = torch.searchsorted(inside, inside[:, -1:].contiguous())
    place = torch.minimum(torch.searchsorted(inside, rest, right=True), last).clamp_(max=columns - 1)
    return (block * columns + place).clamp_(max=size - 1), inside.gather(1, place) - rest


def edge_distances(room: Tensor, token_probs: Tensor) -> Tensor:
    """Returns the distance of each uniform number to the nearer edge of its token's interval, fp32.

    room: distance to the upper edge, from `inverse_cdf`. token_probs: the token's probability, of the same shape.
    """
    return torch.minimum(room, token_probs.double() - room).clamp_(min=0.0).float()
