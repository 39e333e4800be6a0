"""Memory models of `ColossalAIStrategy`, from the sources of ColossalAI 0.5.0: 16-bit working weights, fp32 masters,
Adam's two moments (Rajbhandari et al. 2020, section 3), buckets and chunks, and the strategy's exact values of
parameters without a master. On a CPU they include gloo's copies.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import torch

from chatgpt.strategies.memory import Layout, Memory, MemoryModel, ModelSize, gathered_copy


@dataclass(frozen=True)
class _Masters(MemoryModel, ABC):
    """Memory of weights in the compute dtype, with masters and states of trained parameters sharded over ranks."""

    whole: ClassVar[bool] = False

    def _share(self, size: ModelSize, run: Layout, *, trained_only: bool = False) -> int:
        """Returns the elements of one rank's equal part of every parameter."""
        return sum(math.ceil(p.numel / run.num_processes) for p in size.parameters if p.trained or not trained_only)

    @abstractmethod
    def weights(self, size: ModelSize, run: Layout) -> Memory:
        """Returns 'weights', the working weights, on the device or the host."""

    def exact_values(self, size: ModelSize, run: Layout, *, frozen: bool) -> int:
        """Returns the bytes on the host of exact values of parameters without a master; 0 if the weights are fp32."""
        if self.full_itemsize(run) == 4:
            return 0
        return 4 * (self._share(size, run) - (0 if frozen else self._share(size, run, trained_only=True)))

    def _named(self, name: str, parts: Memory) -> Memory:
        return Memory(
            {f'{name} {part}': size for part, size in parts.device.items()},
            {f'{name} {part}': size for part, size in parts.host.items()},
        )

    def frozen(self, name: str, size: ModelSize, run: Layout) -> Memory:
        memory = self._named(name, self.weights(as_trained(size), run))
        memory.add(f'{name} exact values', self.exact_values(size, run, frozen=True), host=True)
        return memory


def as_trained(size: ModelSize) -> ModelSize:
    """Returns the size with every parameter trained, since Gemini shards frozen models as trained ones."""
    return replace(size, parameters=tuple(replace(p, trained=True) for p in size.parameters))


@dataclass(frozen=True)
class ZeroMemory(_Masters):
    """Memory of stages 1 and 2: working weights are whole on each rank; gradients are reduced in buckets during a
    backward, the last one at its end."""

    stage: int = 1
    bucket: int = 12 * 2**20
    """elements of a reduction, and of a rank's part of an all-gather"""

    def weights(self, size: ModelSize, run: Layout) -> Memory:
        return Memory().add('weights', self.full_itemsize(run) * size.total)

    def trained(self, name: str, size: ModelSize, run: Layout) -> Memory:
        share, memory = self._share(size, run, trained_only=True), self._named(name, self.weights(size, run))
        memory.add(f'{name} exact values', self.exact_values(size, run, frozen=False), host=True)
        memory.add(f'{name} masters', 4 * share, host=self.offloads)
        memory.add(f'{name} gradients', self.gradients(size, run))
        memory.add(f'{name} optimizer', 4 * run.slots * share, host=self.offloads)
        return memory

    def gradients(self, size: ModelSize, run: Layout) -> int:
        """Returns the bytes of the gradients, in the compute dtype."""
        held = size.trained if self.stage == 1 else self._share(size, run, trained_only=True)
        held *= 1 + self.waiting(run)
        if self.autocasts and self.stage == 2:  # an exact run keeps whole gradients of a round
            held += size.trained
        return self.full_itemsize(run) * held

    def growing(self, size: ModelSize, run: Layout, *, again: bool) -> float:
        if self.stage == 1 and again:  # autograd adds them in place, and they are reduced once
            return 0.0
        in_bucket = min(1.0, self.bucket / max(size.trained, 1))
        reduced = 0.0 if again or in_bucket == 1 else 1.0 if self.stage == 1 else 1 / run.num_processes
        return self.full_itemsize(run) * (in_bucket + reduced)

    def reduction(self, size: ModelSize, run: Layout, *, again: bool) -> int:
        bucket = self.full_itemsize(run) * min(size.trained, self.bucket)
        if self.stage == 1:  # gradients of autograd, beside the flat bucket that becomes the gradients
            return bucket
        received = bucket // run.num_processes if again else 0  # added to the sum, else it becomes the gradient
        gloo = 0 if run.on_cuda else bucket  # gloo copies its input
        return 2 * bucket + received + gloo

    def step(self, size: ModelSize, run: Layout) -> int:
        if self.offloads:
            return 0
        itemsize, share = self.full_itemsize(run), self._share(size, run, trained_only=True)
        norm = 8 * math.ceil(size.largest_trained / run.num_processes)  # a gradient in fp64
        in_fp32 = 4 * share if itemsize < 4 else 0
        foreach = 4 * share if run.on_cuda else 0  # torch's Adam has a temporary as large as the masters
        # Masters are copied to the working weights in buckets: rounded (on a CPU always copied), flattened, gathered.
        bucket = itemsize * min(share, self.bucket)
        rounded = bucket if itemsize < 4 or not run.on_cuda else 0
        gloo = 0 if run.on_cuda else bucket * run.num_processes  # gloo receives into a copy
        return max(norm, in_fp32 + foreach, rounded + bucket + bucket * run.num_processes + gloo)

    def full_copy(self, size: ModelSize, run: Layout) -> Memory:
        memory = Memory()
        if size.adapted:  # otherwise it is the module itself; adapters are folded in fp32 and then rounded
            memory.add('full copy', 4 * size.total)
        return memory


@dataclass(frozen=True)
class Chunks:
    """Sizes of a rank's part of Gemini's chunks of a model, in elements."""

    elements: int
    """in all chunks, with their padding"""
    largest: int
    """in the largest chunk"""
    filled: int
    """in all chunks, without their padding"""
    gathered: int
    """in a whole chunk, which is gathered when it is used; 0: the only chunk is whole on every rank"""


@dataclass(frozen=True)
class GeminiMemory(_Masters):
    """Memory of stage 3: trained parameters are sharded over ranks in chunks of 16-bit weights, which gradients
    overwrite, and of masters. A model below the smallest chunk size is one chunk, whole on every rank and never
    offloaded. Frozen parameters of a trained model are whole on every rank.
    """

    search_range: float = 32
    interval: int = 1024
    min_chunk: float = 32
    """settings of the search for a chunk size, in 2^20 elements, elements and 2^20 elements"""

    streams: ClassVar[bool] = True

    @property
    def places_frozen(self) -> bool:
        return True

    def chunks(self, size: ModelSize, run: Layout) -> Chunks:
        sizes = tuple(p.numel for p in size.parameters)
        trained = tuple(p.numel for p in size.parameters if p.trained)
        if sum(sizes) < round(self.min_chunk * 2**20):
            return Chunks(sum(sizes), sum(sizes), sum(trained), 0)
        whole = chunk_size(
            sizes, round(self.min_chunk * 2**20), round(self.search_range * 2**20), self.interval, run.num_processes
        )
        made: list[list[int]] = []  # [size, elements of parameters] of each chunk
        for numel in trained:
            if not made or made[-1][1] + numel > made[-1][0]:
                made.append([max(whole, numel + -numel % run.num_processes), 0])
            made[-1][1] += numel
        parts = [length // run.num_processes for length, _ in made]
        filled = sum(min(filled, part) for (_, filled), part in zip(made, parts, strict=True))
        return Chunks(sum(parts), max(parts), filled, max(length for length, _ in made))

    def _on_host(self, chunks: Chunks) -> bool:
        return self.offloads and chunks.gathered > 0

    def weights(self, size: ModelSize, run: Layout) -> Memory:
        memory, chunks = Memory(), self.chunks(size, run)
        memory.add('weights', run.itemsize * (size.total - size.trained))
        memory.add('weights', run.itemsize * chunks.elements, host=self._on_host(chunks))
        return memory

    def trained(self, name: str, size: ModelSize, run: Layout) -> Memory:
        chunks, memory = self.chunks(size, run), self._named(name, self.weights(size, run))
        memory.add(f'{name} exact values', self.exact_values(size, run, frozen=False), host=True)
        memory.add(f'{name} masters', 4 * chunks.elements, host=self._on_host(chunks))
        memory.add(f'{name} optimizer', 4 * run.slots * chunks.filled, host=self._on_host(chunks))
        return memory

    def growing(self, size: ModelSize, run: Layout, *, again: bool) -> float:
        return 0.0

    def gathered(self, size: ModelSize, run: Layout, *, backward: bool) -> int:
        # the chunk of an operation, and the one before it, which still waits for gradients
        chunks = self.chunks(size if size.trained else as_trained(size), run)
        return 2 * run.itemsize * (chunks.gathered - chunks.gathered // run.num_processes)

    def sums(self, name: str, size: ModelSize, run: Layout) -> Memory:
        chunks, memory = self.chunks(size, run), Memory()
        memory.add(f'{name} sums of gradients', 4 * chunks.elements, host=self._on_host(chunks))
        return memory

    def reduction(self, size: ModelSize, run: Layout, *, again: bool) -> int:
        chunks = self.chunks(size, run)
        finite = (run.itemsize + 1) * min(chunks.largest, chunks.filled)  # upstream computes |x| == inf of a chunk
        # A CPU converts 16-bit gradients to fp32 before it adds them to the fp32 sum.
        return max(finite, 4 * chunks.largest if again and not run.on_cuda else 0)

    def step(self, size: ModelSize, run: Layout) -> int:
        chunks = self.chunks(size, run)
        norm = 8 * min(chunks.largest, chunks.filled)  # a chunk in fp64
        adam = 0 if run.on_cuda else 12 * size.largest_trained  # Adam on a CPU: gradient, root and quotient in fp32
        return max(norm, adam)

    def gathering(self, size: ModelSize, run: Layout) -> int:
        itemsize = 4 if size.adapted else run.itemsize
        chunks = self.chunks(size, run)
        return itemsize * max(chunks.gathered, chunks.largest)

    def full_copy(self, size: ModelSize, run: Layout) -> Memory:
        itemsize = 4 if size.adapted else run.itemsize  # adapters are folded in fp32, and then the copy is rounded
        return gathered_copy(size, run, itemsize)


@lru_cache(maxsize=64)
def chunk_size(sizes: tuple[int, ...], least: int, search_range: int, interval: int, ranks: int) -> int:
    """Returns upstream's chunk size in elements: of the multiples of `interval` in the range, the first with the least
    padding. Parameters more than three standard deviations above the mean size have chunks of their own."""
    numbers = torch.tensor(sizes, dtype=torch.float64)
    limit = float(numbers.mean() + 3 * numbers.std(correction=0))
    usual = [numel for numel in sizes if numel <= limit]
    start = -(-max(least, *usual) // interval) * interval
    candidates = torch.arange(start, start + search_range + 1, interval)
    empty, left = torch.zeros_like(candidates), torch.zeros_like(candidates)
    for numel in usual:
        full = left < numel
        empty += torch.where(full, left, 0)
        left = torch.where(full, candidates, left) - numel
    best = int(candidates[int((empty + left).argmin())])
    return best + -best % ranks
