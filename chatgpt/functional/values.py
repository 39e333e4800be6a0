"""Losses of a critic that learns a distribution over bins instead of a number (HL-Gauss), and its value.

Source: Farebrother et al. 2024, "Stop regressing: training value functions via classification for scalable deep RL",
arXiv 2403.03950, section 3.1. The range [low, high] is divided into K bins of width ς = (high − low) / K.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def bin_centres(bins: int, low: float, high: float, *, like: Tensor) -> Tensor:
    """Returns the centres low + (i + ½) ς of the K bins, (K,) with dtype and device of `like`."""
    half = 0.5 * (high - low) / bins
    return torch.linspace(low + half, high - half, bins, dtype=like.dtype, device=like.device)


def expected_value(logits: Tensor, low: float, high: float) -> Tensor:
    """Returns Σ_i softmax(logits)_i · centre_i: (..., K) → (...)."""
    return (logits.softmax(-1) * bin_centres(logits.shape[-1], low, high, like=logits)).sum(-1)


def hl_gauss_target(returns: Tensor, bins: int, low: float, high: float, sigma: float = 0.75) -> Tensor:
    """Returns the probability of each bin under a normal distribution around the return, cut to [low, high]: (N,) →
    (N, K).

        p_i = (Φ((edge_{i+1} − R) / s) − Φ((edge_i − R) / s)) / (Φ((high − R) / s) − Φ((low − R) / s)),  s = sigma · ς

    Source: section 3.1, with the paper's default of 0.75 for s / ς.

    Args:
        returns: those outside of the range count as its nearest end.
        sigma: s in widths of a bin.
    """
    width = (high - low) / bins
    edges = torch.linspace(low, high, bins + 1, dtype=returns.dtype, device=returns.device)
    scaled = (edges - returns.clamp(low, high).unsqueeze(-1)) / (sigma * width * math.sqrt(2.0))
    below = torch.special.erf(scaled)
    return (below[..., 1:] - below[..., :-1]) / (below[..., -1:] - below[..., :1])


def hl_gauss_loss(logits: Tensor, returns: Tensor, low: float, high: float, sigma: float = 0.75) -> Tensor:
    """−Σ_i p_i log softmax(logits)_i with p of `hl_gauss_target`: the cross-entropy of each value, (N, K), (N,) → (N,).

    Args:
        logits: with gradient.
        returns: constants.
    """
    target = hl_gauss_target(returns, logits.shape[-1], low, high, sigma)
    return -(target * logits.log_softmax(-1)).sum(-1)
