"""Strategies of ColossalAI's `chatgpt` with its file format.

A file of an actor's weights contains the tensors of `actor.model`, so that
`actor.model.load_state_dict(torch.load(path))` works; `load_model` reads it, too. `map_location` has no effect.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from chatgpt import strategies as ours
from chatgpt.nn import Actor
from chatgpt.strategies import Strategy
from chatgpt.strategies.checkpoint import save_tensors


class _Files(Strategy):
    """Saves weights as whole fp32 tensors in one file; `only_rank0` has no effect."""

    def save_model(self, model: nn.Module, path: str | os.PathLike[str], only_rank0: bool = False) -> None:
        tensors = self.full_state_dict(model, Path(path).parent)
        if isinstance(self.unwrap(model), Actor):
            tensors = {name.removeprefix('model.'): tensor for name, tensor in tensors.items()}
        self.run_on_rank0(lambda: save_tensors(tensors, path))

    def load_model(  # type: ignore[override]
        self, model: nn.Module, path: str | os.PathLike[str], map_location: Any = None, strict: bool = True
    ) -> None:
        super().load_model(model, path, strict)

    def load_optimizer(self, optimizer: Optimizer, path: str | os.PathLike[str], map_location: Any = None) -> None:
        super().load_optimizer(optimizer, path)


class NaiveStrategy(_Files, ours.NaiveStrategy):
    """`chatgpt.strategies.NaiveStrategy` with ColossalAI's files, in fp32 by default."""

    def __init__(self, seed: int = 42, precision: Any = 'fp32', **options: Any) -> None:
        super().__init__(seed, precision, **options)


class DDPStrategy(_Files, ours.DDPStrategy):
    """`chatgpt.strategies.DDPStrategy` with ColossalAI's files, in fp32 by default."""

    def __init__(self, seed: int = 42, precision: Any = 'fp32', **options: Any) -> None:
        super().__init__(seed, precision, **options)


class ColossalAIStrategy(_Files, ours.ColossalAIStrategy):
    """`chatgpt.strategies.ColossalAIStrategy` with ColossalAI's files, in fp16 by default."""

    def __init__(self, stage: int = 3, precision: Any = 'fp16', *args: Any, **options: Any) -> None:
        super().__init__(stage, precision, *args, **options)

    @property
    def shard_init(self) -> bool:
        return self.settings.shard_init
