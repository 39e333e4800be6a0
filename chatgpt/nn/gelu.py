"""GPT-2's GELU as torch's one kernel instead of transformers' eight.

`NewGELUActivation` is the tanh approximation (Hendrycks & Gimpel 2016), 0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³))),
written as eight passes over a tensor, and its backward as ten more: a tenth of an update. `gelu(approximate='tanh')` is
the same function; results differ by rounding (in 16 bits it rounds once instead of eight times).

Left out: every other activation.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import NewGELUActivation


class FusedNewGELU(NewGELUActivation):
    """Drop-in for the plain module."""

    def forward(self, input: Tensor) -> Tensor:
        return F.gelu(input, approximate='tanh')


def use_fused_gelu(model: nn.Module) -> None:
    """Put `FusedNewGELU` in place of every plain `NewGELUActivation` of the model."""
    for module in model.modules():
        for name, child in module.named_children():
            if type(child) is NewGELUActivation:
                setattr(module, name, FusedNewGELU())
