"""Randomness of sampling: one uniform number per token, from a hash of (seed, sample index, position).

There is no generator and no state, so batch order, batch size, refill and world size cannot change a draw, and a
checkpoint has nothing to save. The hash is built from the SplitMix64 finaliser (Steele, Lea, Flood 2014, "Fast
splittable pseudorandom number generators", with Stafford's mix 13 constants) in wrapping int64 arithmetic, which
gives the same bits on CPU and CUDA.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _signed(value: int) -> int:
    """An unsigned 64-bit constant as the int64 with the same bits."""
    return value - (1 << 64) if value >= 1 << 63 else value


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = _signed(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = _signed(0x94D049BB133111EB)

# 52 bits, not 53: then u * total < total in float64 for every total, so a draw never falls off the end of a cumulative
# sum
UNIFORM_BITS = 52


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical right shift: torch's `>>` on int64 copies the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser, a bijection of 64-bit words. x: any shape, int64."""
    x = (x ^ _shift_right(x, 30)) * _MULTIPLIER_1
    x = (x ^ _shift_right(x, 27)) * _MULTIPLIER_2
    return x ^ _shift_right(x, 31)


def sample_keys(seed: int, indices: Tensor) -> Tensor:
    """One 64-bit key per sample. indices: (n,) int64, run-wide sample numbers. Returns (n,) int64."""
    start = torch.full_like(indices, _signed(seed % (1 << 64)))
    return _mix((_mix(start + _GAMMA) ^ indices) + _GAMMA)


def stream_keys(seed: int, indices: Tensor, offsets: Tensor) -> Tensor:
    """One 64-bit key per generation, for engines with generators of their own: later turns of a sample draw other
    numbers.

    indices, offsets: (n,) int64. Returns (n,) int64; those of `sample_keys` where the offset is 0.
    """
    keys = sample_keys(seed, indices)
    return torch.where(offsets > 0, _mix((keys ^ offsets) + _GAMMA), keys)


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """Uniform numbers in [0, 1), float64. keys and positions: int64, broadcast against each other.

    `position` counts from 0 after the prompt: response tokens, and what is appended between the turns of an episode.
    """
    bits = _shift_right(_mix((keys ^ positions) + _GAMMA), 64 - UNIFORM_BITS)
    return bits.double() * 2.0**-UNIFORM_BITS


def inverse_cdf(probs: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """The token whose cumulative interval holds the uniform number, and how far the uniform is below the interval's
    end.

    probs: (n, V) fp32, rows sum to 1 up to rounding, zeros allowed. uniform: (n, 1) float64 in [0, 1). Returns token
    (n, 1) int64 and room (n, 1) float64, the interval's upper edge minus the uniform. The lower edge is
    `room - probs[token]` above it. A token of probability 0 is never drawn.
    """
    cdf = probs.cumsum(dim=-1, dtype=torch.float64)
    target = uniform * cdf[:, -1:]
    # right=True: first entry strictly above the target, so flat stretches (probability 0) are skipped. The clamp
    # only matters for non-finite rows, which the caller reports
    token = torch.searchsorted(cdf, target, right=True).clamp_(max=probs.shape[-1] - 1)
    return token, cdf.gather(1, token) - target


def edge_distances(room: Tensor, token_probs: Tensor) -> Tensor:
    """Distance of each uniform to the nearer edge of its token's interval. Same shapes in and out; fp32.

    room: from `inverse_cdf`; token_probs: the drawn tokens' probabilities, i.e. the widths of their intervals.
    """
    return torch.minimum(room, token_probs.double() - room).clamp_(min=0.0).float()
