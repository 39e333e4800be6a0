"""Which part of one model a process of ColossalAI's ZeRO holds under tensor parallelism, and among whom the rest of it
is sharded. What HybridParallelPlugin is for, without it: the model is cut by `tensor_parallel`, as under FSDP, and ZeRO
shards masters and states of the parts over the ranks. Left out: how parts compute (`tensor_parallel`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from chatgpt.checkpoint.layout import Piece
from chatgpt.trainer.strategies.cuts import Cut
from chatgpt.trainer.strategies.streaming import on_meta
from chatgpt.trainer.strategies.tensor_group import TensorGroup
from chatgpt.trainer.strategies.tensor_parallel import parallelize
from chatgpt.trainer.strategies.tensor_ranks import TensorRanks


@dataclass(frozen=True)
class Parts:
    """Of one model. As it is by default: all of it, sharded over all processes."""

    data: Any = None
    """the process group of ZeRO: those who hold the same part; None: all"""
    group: TensorGroup | None = None
    """the processes that compute together"""
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    """by name of a parameter that is held in parts, tied names included"""
    partial: Set[str] = frozenset()
    """names of whole parameters whose gradients are sums over the group"""
    skeleton: nn.Module | None = None
    """the module that the user built, with meta parameters"""

    @property
    def leads(self) -> bool:
        """Whether this process speaks for what all of its group hold."""
        return self.group is None or self.group.index == 0

    def counts(self, name: str) -> bool:
        """Whether this process adds a parameter to sums: a part always, what all hold whole on the first process
        only."""
        return self.leads or name in self.cuts

    def taken(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """This process's parts of whole tensors."""
        return ((name, self.cuts[name].take(tensor) if name in self.cuts else tensor) for name, tensor in tensors)

    def joined(self, name: str, part: Tensor) -> Tensor:
        """The whole tensor. A collective of the group where it is cut."""
        if self.group is None or name not in self.cuts:
            return part
        return self.cuts[name].join(part, self.group)

    def pieces(self, parameter: str, piece: Piece, device: torch.device) -> Iterator[Piece]:
        """What this process writes of a piece of what it holds of a parameter, or of a state of its size. A collective
        of the group, on `device`."""
        if self.group is not None and parameter in self.cuts:
            data = piece.data.to(device)
            yield from self.cuts[parameter].pieces(piece.name, piece.start, piece.stop, data, self.group)
        elif self.counts(parameter):
            yield piece


WHOLE = Parts()


def cut_model(
    model: nn.Module, optimizer: Optimizer | None, names: list[list[str]], plan: dict[str, str], ranks: TensorRanks
) -> Parts:
    """Leave this process's part of `model`, and point the optimizer at it; `names` are its parameters', by group."""
    skeleton, tensor = on_meta(model), ranks.mesh['tensor']
    cuts, partial = parallelize(model, tensor, plan)
    parameters: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    for name, cut in cuts.items():
        parameters[name].whole_shape = cut.shape
    for settings, own in zip(optimizer.param_groups if optimizer is not None else (), names, strict=True):
        settings['params'] = [parameters[name] for name in own]
    group = TensorGroup(tensor.get_group(), ranks.index, ranks.tensor_parallel)
    return Parts(ranks.mesh.get_group('data'), group, cuts, partial, skeleton)
