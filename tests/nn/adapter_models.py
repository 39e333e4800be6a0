"""What the tests of LoRA and of PEFT's format do to a model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

IDS = torch.tensor([[5, 9, 3, 17, 40], [8, 8, 21, 2, 33]])


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def disturb(model: nn.Module, scale: float = 0.3) -> None:
    """Give everything that is trainable other values, as training would."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * scale)
