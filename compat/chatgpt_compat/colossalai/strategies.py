"""Its strategies, where a script asks them for more than ours do.

A file of an actor's weights holds the bare model's tensors, as `actor.model.load_state_dict(torch.load(path))` expects
them, and `load_model` reads it; `map_location` is taken and not needed.
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
    """Weights in one file of whole fp32 tensors, whatever `only_rank0` says: each of its ranks wrote the same."""

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
    """`chatgpt.strategies.NaiveStrategy` with its files, and fp32 as there."""

    def __init__(self, seed: int = 42, precision: Any = 'fp32', **options: Any) -> None:
        super().__init__(seed, precision, **options)


class DDPStrategy(_Files, ours.DDPStrategy):
    """`chatgpt.strategies.DDPStrategy` with its files, and fp32 as there."""

    def __init__(self, seed: int = 42, precision: Any = 'fp32', **options: Any) -> None:
        super().__init__(seed, precision, **options)


class ColossalAIStrategy(_Files, ours.ColossalAIStrategy):
    """`chatgpt.strategies.ColossalAIStrategy` with its files, and fp16 as there."""

    def __init__(self, stage: int = 3, precision: Any = 'fp16', *args: Any, **options: Any) -> None:
        super().__init__(stage, precision, *args, **options)

    @property
    def shard_init(self) -> bool:
        return self.settings.shard_init
