"""Writing a prepared model as a Hugging Face folder, whatever strategy holds its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from chatgpt.trainer.strategies.base import Strategy


def save_pretrained(strategy: Strategy, model: nn.Module, path: str | Path, *, tokenizer: Any = None) -> None:
    """Write the full fp32 weights (adapters folded in) as a folder that `transformers` loads. Call it on every rank."""
    with strategy.full_model(model, dtype=torch.float32, on_disk=Path(path).parent) as full:
        strategy.run_on_rank0(lambda: cast(Any, full).save_pretrained(path, tokenizer=tokenizer))
