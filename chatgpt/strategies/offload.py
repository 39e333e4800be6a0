"""Frozen models that wait in host memory and are on the device only while they are used."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn


class Offloaded(ABC):
    """A frozen module in host memory. `with` this, it is on the device."""

    @abstractmethod
    def onload(self) -> None: ...

    @abstractmethod
    def offload(self) -> None: ...

    def __enter__(self) -> None:
        self.onload()

    def __exit__(self, *_: object) -> None:
        self.offload()


class OffloadedWeights(Offloaded):
    """Moves a frozen module's weights and buffers, keeping its parameters the same objects.

    The host copy stays for good, page-locked where the device is a CUDA one: frozen weights never change, so offloading
    copies nothing.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.device = device
        self.tensors = [*module.parameters(), *(b for b in module.buffers() if b is not None)]
        self.host = [t.detach().to('cpu', copy=device.type == 'cuda') for t in self.tensors]
        if device.type == 'cuda':
            self.host = [t.pin_memory() for t in self.host]
        for tensor, copy in zip(self.tensors, self.host, strict=True):
            tensor.data = copy

    def on_device(self, copy: Tensor) -> Tensor:
        return copy.to(self.device, non_blocking=True)

    def onload(self) -> None:
        for tensor, copy in zip(self.tensors, self.host, strict=True):
            tensor.data = self.on_device(copy)

    def offload(self) -> None:
        for tensor, copy in zip(self.tensors, self.host, strict=True):
            tensor.data = copy


class OffloadedShards(Offloaded):
    """The same for a module under FSDP2, which has to know where its shards are."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.module, self.device = module.to('cpu'), device

    def onload(self) -> None:
        self.module.to(self.device)

    def offload(self) -> None:
        self.module.to('cpu')
