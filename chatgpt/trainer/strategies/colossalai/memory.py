"""What `ColossalAIStrategy` keeps in memory, from the layouts of ColossalAI 0.5.0: 16-bit working weights, fp32
masters, Adam's two moments (Rajbhandari et al. 2020, section 3, without the residual states), and the exact values that
the strategy keeps of what has no master. Left out: Gemini's rounding up to chunks.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from chatgpt.trainer.strategies.memory import Layout, Memory, MemoryModel, ModelSize, gathered_copy


def _share(size: ModelSize, run: Layout, *, trained_only: bool = False) -> int:
    """Elements of one rank's equal part of every parameter."""
    return sum(math.ceil(p.numel / run.num_processes) for p in size.parameters if p.trained or not trained_only)


class _Masters(MemoryModel, ABC):
    """Weights in the compute dtype, with masters and states of what is trained split over ranks."""

    whole: ClassVar[bool] = False

    @abstractmethod
    def weights(self, size: ModelSize, run: Layout) -> int:
        """Bytes of the working weights."""

    @abstractmethod
    def gradients(self, size: ModelSize, run: Layout) -> int:
        """Bytes of the gradients, in the compute dtype."""

    @property
    def weights_on_host(self) -> bool:
        return False

    def trained(self, name: str, size: ModelSize, run: Layout) -> Memory:
        memory, share = Memory(), _share(size, run, trained_only=True)
        if run.precision != 'fp32':  # what is not trained has no master: its exact values wait on the host
            memory.add(f'{name} exact values', 4 * (_share(size, run) - share), host=True)
        memory.add(f'{name} weights', self.weights(size, run), host=self.weights_on_host)
        memory.add(f'{name} masters', 4 * share, host=self.offloads)
        memory.add(f'{name} gradients', self.gradients(size, run))
        memory.add(f'{name} optimizer', 4 * run.slots * share, host=self.offloads)
        return memory

    def frozen(self, name: str, size: ModelSize, run: Layout) -> Memory:
        memory = Memory()
        memory.add(f'{name} weights', self.weights(size, run), host=self.weights_on_host)
        if run.precision != 'fp32':
            memory.add(f'{name} exact values', 4 * _share(size, run), host=True)
        return memory


@dataclass(frozen=True)
class ZeroMemory(_Masters):
    """Stages 1 and 2: working weights whole on each rank."""

    stage: int = 1

    def weights(self, size: ModelSize, run: Layout) -> int:
        return self._itemsize(run) * size.total

    def gradients(self, size: ModelSize, run: Layout) -> int:
        sums = 1
        if self.atoms:
            sums += max(self.atoms // run.num_processes, 1).bit_length() - 1  # those that wait for each other
        held = size.trained if self.stage == 1 else _share(size, run, trained_only=True)
        return self._itemsize(run) * held * sums

    def _itemsize(self, run: Layout) -> int:
        return 4 if self.atoms else run.itemsize

    def step(self, size: ModelSize, run: Layout) -> int:
        return 0 if self.offloads else 2 * run.itemsize * min(size.trained, 12 * 2**20)

    def full_copy(self, size: ModelSize, run: Layout) -> Memory:
        memory = Memory()
        if size.adapted:  # otherwise the module itself is lent
            memory.add('full copy', 4 * size.total)
        return memory


class GeminiMemory(_Masters):
    """Stage 3: all split over ranks in chunks; gradients take the place of weights, chunk by chunk."""

    streams: ClassVar[bool] = True

    @property
    def places_frozen(self) -> bool:
        return True

    @property
    def weights_on_host(self) -> bool:
        return self.offloads

    def weights(self, size: ModelSize, run: Layout) -> int:
        return run.itemsize * math.ceil(size.total / run.num_processes)

    def gradients(self, size: ModelSize, run: Layout) -> int:
        return 0

    def gathered(self, size: ModelSize, run: Layout, *, backward: bool) -> int:
        return run.itemsize * size.two_blocks

    def step(self, size: ModelSize, run: Layout) -> int:
        return 0

    def full_copy(self, size: ModelSize, run: Layout) -> Memory:
        itemsize = 4 if size.adapted else run.itemsize  # adapters are folded in fp32, then the copy is rounded
        return gathered_copy(size, run, itemsize)
