"""Frozen models that wait in host memory and are on the device only while they are used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from chatgpt.trainer.strategies.base import Strategy


class IdleWeights:
    """Moves a frozen module's weights and buffers, keeping its parameters the same objects.

    The host copy stays for good, page-locked where the device is a CUDA one: frozen weights never change, so leaving the device copies
    nothing.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.device = device
        self.tensors = [*module.parameters(), *(b for b in module.buffers() if b is not None)]
        self.host = [t.detach().to('cpu', copy=device.type == 'cuda') for t in self.tensors]
        if device.type == 'cuda':
            self.host = [t.pin_memory() for t in self.host]
        self.leave()

    def on_device(self, copy: Tensor) -> Tensor:
        return copy.to(self.device, non_blocking=True)

    def come(self) -> None:
        for tensor, copy in zip(self.tensors, self.host, strict=True):
            tensor.data = self.on_device(copy)

    def leave(self) -> None:
        for tensor, copy in zip(self.tensors, self.host, strict=True):
            tensor.data = copy


class IdleShards(IdleWeights):
    """The same for a module under FSDP2, which has to know where its shards are."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.module, self.device = module, device
        self.leave()

    def come(self) -> None:
        self.module.to(self.device)

    def leave(self) -> None:
        self.module.to('cpu')


class KeepsIdle:
    """The part of a strategy that lets frozen models wait in host memory."""

    _idle: dict[int, IdleWeights]
    """id of the user's module -> its waiting weights"""

    def keep_idle(self: Any, model: nn.Module) -> None:
        """From now on a frozen model's weights wait in host memory; they are on the device inside `at_hand`. On a CPU nothing moves.

        Raises:
            ValueError: this strategy places frozen weights itself.
        """
        strategy: Strategy = self
        module = strategy.unwrap(model)
        waiting = vars(strategy).setdefault('_idle', {})
        kind = strategy.idle_kind()
        if id(module) not in waiting and strategy.device.type != 'cpu':
            waiting[id(module)] = kind(module, strategy.device)

    def idle_kind(self) -> type[IdleWeights]:
        """How this strategy's frozen models are moved; ValueError where they cannot be."""
        return IdleWeights

    @contextmanager
    def at_hand(self: Any, model: nn.Module) -> Iterator[None]:
        """Inside, a model given to `keep_idle` is on the device; nothing for any other."""
        idle = vars(self).get('_idle', {}).get(id(self.unwrap(model)))
        if idle is None:
            yield
            return
        idle.come()
        try:
            yield
        finally:
            idle.leave()
