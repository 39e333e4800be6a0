"""Heads that turn a hidden state into one number, always computed in fp32.

Left out: the language-model head, which belongs to the Hugging Face model.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def critic_head(width: int) -> nn.Linear:
    """Linear(width, 1) that starts near zero, so that a new critic predicts about 0 everywhere."""
    head = nn.Linear(width, 1)
    nn.init.normal_(head.weight, std=1e-3 / math.sqrt(width))
    nn.init.zeros_(head.bias)
    return head


def reward_head(width: int) -> nn.Linear:
    """Linear(width, 1), weights N(0, 1 / (width + 1)), bias 0.

    Source: standard deviation 1/sqrt(d + 1), Stiennon et al. 2020; "The N implementation details of RLHF with PPO"; arXiv 2403.17031.
    """
    head = nn.Linear(width, 1)
    nn.init.normal_(head.weight, std=1.0 / math.sqrt(width + 1))
    nn.init.zeros_(head.bias)
    return head


def mlp_head(width: int) -> nn.Sequential:
    """width → 2 width → ReLU → 1, the value head of trlX; its last layer starts near zero."""
    return nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), critic_head(2 * width))


def in_fp32(head: nn.Module, hidden: Tensor) -> Tensor:
    """`head(hidden)` in fp32 whatever autocast says, without its last dimension of size 1: (..., D) → (...).

    A bf16 value has 8 bits of mantissa, too few for a difference of values.
    """
    with torch.autocast(device_type=hidden.device.type, enabled=False):
        weight = next(head.parameters(), None)
        dtype = torch.float32 if weight is None else weight.dtype
        if dtype == torch.float32:
            return head(hidden.float()).squeeze(-1)
        # A model cast for the collect phase: its head is 16 bits, the product is not.
        out = hidden.float()
        for layer in head if isinstance(head, nn.Sequential) else [head]:
            is_linear = isinstance(layer, nn.Linear)
            out = nn.functional.linear(out, layer.weight.float(), _float(layer.bias)) if is_linear else layer(out)
        return out.squeeze(-1)


def _float(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.float()
