"""Strategies of `coati`: `prepare` of dicts, `save_pretrained`, models in 16 bits."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
from torch import nn

from chatgpt.strategies import Strategy
from chatgpt_compat.colossalai import strategies as march


def _to_fp32(item: Any) -> None:
    """Converts weights to 32 bits in place: 16 bits are too few for the small changes of an update."""
    if isinstance(item, nn.Module):
        dtypes = {p.dtype for p in item.parameters()} & {torch.float16, torch.bfloat16}
        if dtypes:
            warnings.warn(
                f'{type(item).__name__}: weights are kept in 32 bits instead of {dtypes.pop()}; precision= of the '
                'strategy says what is computed in',
                stacklevel=4,
            )
            item.float()
    elif isinstance(item, (tuple, list)):
        for part in item:
            _to_fp32(part)


class _Coati(Strategy):
    def prepare(self, *items: Any) -> Any:
        """Prepares as `Strategy.prepare`; dicts of model, optimizer and lr_scheduler are returned as dicts."""
        found = []
        for item in items:
            if isinstance(item, dict):
                _to_fp32(item.get('model'))
                pair = (item['model'], item['optimizer']) if item.get('optimizer') is not None else item['model']
                made = super().prepare(pair)
                names = ('model', 'optimizer') if isinstance(pair, tuple) else ('model',)
                values = made if isinstance(pair, tuple) else (made,)
                found.append({**item, **dict(zip(names, values, strict=True))})
            else:
                _to_fp32(item)
                found.append(super().prepare(item))
        return found[0] if len(found) == 1 else tuple(found)

    def save_model(  # type: ignore[override]
        self, model: nn.Module, path: str | os.PathLike[str], only_rank0: bool = False, tokenizer: Any = None
    ) -> None:
        """Writes a file of weights, or with a tokenizer a Hugging Face folder."""
        if tokenizer is None:
            super().save_model(model, path, only_rank0)  # type: ignore[safe-super]
        else:
            self.save_pretrained(model, path, only_rank0, tokenizer)

    def save_pretrained(
        self, model: nn.Module, path: str | os.PathLike[str], only_rank0: bool = True, tokenizer: Any = None
    ) -> None:
        """Writes a Hugging Face folder of an actor, critic or reward model, with adapters merged."""
        with self.full_model(model, whole=True, read_only=True) as full:
            self.run_on_rank0(lambda: full.save_pretrained(path, tokenizer=tokenizer))  # type: ignore[operator]


class NaiveStrategy(_Coati, march.NaiveStrategy):
    """A single process without distribution."""


class DDPStrategy(_Coati, march.DDPStrategy):
    """Data parallelism by torch's DDP."""


class ColossalAIStrategy(_Coati, march.ColossalAIStrategy):
    """ZeRO by ColossalAI; stage 3 is Gemini."""


class GeminiStrategy(ColossalAIStrategy):
    """`ColossalAIStrategy(stage=3)`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        options.setdefault('placement_policy', 'cuda')
        super().__init__(3, *args, **options)


class LowLevelZeroStrategy(ColossalAIStrategy):
    """`ColossalAIStrategy(stage=1 or 2)`."""

    def __init__(self, stage: int = 2, *args: Any, **options: Any) -> None:
        super().__init__(stage, *args, **options)
