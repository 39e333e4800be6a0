"""How much a strategy keeps in memory: the words (`ModelSize`, `Memory`), the run it is asked about (`Layout`), and
`MemoryModel`, which a strategy gives of itself (`Strategy.memory_model`) so that `chatgpt.plan` can plan any.

Numbers are bytes of the rank that holds most.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal


@dataclass(frozen=True)
class ParameterSize:
    name: str
    shape: tuple[int, ...]
    trained: bool
    block: int | None
    """which transformer block it belongs to; None: none"""
    narrow: bool = False
    """nothing trains it, and a run in 16 bits keeps it in them"""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class ModelSize:
    """Parameters of one module, tied ones once."""

    parameters: tuple[ParameterSize, ...]
    adapted: int = 0
    """elements of weights that carry a LoRA adapter"""
    packable: int = 0
    """elements of the weights of linear layers, heads among them, that the local engine would pack on a CPU"""

    @property
    def total(self) -> int:
        return sum(p.numel for p in self.parameters)

    @property
    def trained(self) -> int:
        return sum(p.numel for p in self.parameters if p.trained)

    @property
    def narrow(self) -> int:
        """Elements that a run in 16 bits keeps in them."""
        return sum(p.numel for p in self.parameters if p.narrow)

    @property
    def largest_trained(self) -> int:
        """Elements of the largest parameter that is trained."""
        return max((p.numel for p in self.parameters if p.trained), default=0)

    @property
    def num_trained(self) -> int:
        return sum(p.trained for p in self.parameters)

    def blocks(self) -> list[int]:
        """Elements of each block."""
        sizes: dict[int, int] = {}
        for p in self.parameters:
            if p.block is not None:
                sizes[p.block] = sizes.get(p.block, 0) + p.numel
        return [sizes[i] for i in sorted(sizes)]

    @property
    def outside(self) -> int:
        """Elements that lie in no block."""
        return sum(p.numel for p in self.parameters if p.block is None)

    @property
    def two_blocks(self) -> int:
        """Elements on the device while blocks are gathered one at a time: everything outside the blocks, and the two
        largest blocks."""
        return self.outside + sum(sorted(self.blocks(), reverse=True)[:2])


@dataclass
class Memory:
    """Bytes by what they are for, on the device and on the host."""

    device: dict[str, int] = field(default_factory=dict)
    host: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, size: float, *, host: bool = False) -> None:
        place = self.host if host else self.device
        if size:
            place[name] = place.get(name, 0) + math.ceil(size)

    def __add__(self, other: Memory) -> Memory:
        total = Memory(dict(self.device), dict(self.host))
        for name, size in other.device.items():
            total.add(name, size)
        for name, size in other.host.items():
            total.add(name, size, host=True)
        return total


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a run lies on processes and devices, and what it computes in. `chatgpt.plan.Setup` is one."""

    num_processes: int = 1
    processes_per_machine: int | None = None
    """share the host's memory; None: all of them"""
    precision: Literal['auto', 'fp32', 'bf16', 'fp16'] = 'fp32'
    on_cuda: bool = True
    optimizer: Literal['adamw', 'adamw8bit', 'paged_adamw8bit', 'sgd'] = 'adamw'
    fused: bool = True
    """on a GPU AdamW is torch's fused one, as `Strategy.make_optimizer` makes it"""
    stream_blocks: bool = False

    @property
    def itemsize(self) -> int:
        """Bytes of a number in the compute dtype."""
        return 4 if self.precision == 'fp32' else 2

    @property
    def slots(self) -> float:
        """Optimizer states per trained number, in numbers of fp32; those of 8 bits have a scale for 256 of them."""
        return {'adamw': 2.0, 'sgd': 0.0}.get(self.optimizer, 2 * (1 / 4 + 1 / 256))

    @property
    def on_machine(self) -> int:
        """Processes that share a host."""
        return self.processes_per_machine or self.num_processes


@dataclass(frozen=True)
class MemoryModel:
    """Of whole fp32 weights, gradients and optimizer states on each rank, computed with under autocast. A strategy that
    shards or offloads gives a subclass with the methods that differ.
    """

    offloads: bool = False
    """what can wait in host memory does"""
    bucket_bytes: int = 0
    """of a sum of gradients"""
    atoms: int = 0
    """of an exact run, whose sums of gradients wait for each other; 0: it is an ordinary one"""

    whole: ClassVar[bool] = True
    """False: weights are held or gathered in the compute dtype, and no rank keeps whole gradients in fp32"""
    streams: ClassVar[bool] = False
    """whether `stream_blocks` generates without a full copy on the device"""

    @property
    def autocasts(self) -> bool:
        """Computes from weights in fp32, under autocast."""
        return self.whole or self.atoms > 0

    @property
    def keeps_narrow(self) -> bool:
        """A run in 16 bits keeps in them what nothing trains."""
        return not self.atoms

    @property
    def can_be_cut(self) -> bool:
        """Goes with tensor parallelism."""
        return not self.offloads and not self.atoms

    def shares(self, ranks: int) -> int:
        """Into how many equal parts a batch is cut before `max_tokens_per_batch`."""
        return self.atoms or ranks

    def full_itemsize(self, run: Layout) -> int:
        """Bytes of a number while generating: an exact run does so in fp32."""
        return 4 if self.atoms else run.itemsize

    @property
    def places_frozen(self) -> bool:
        """Frozen models stay where this strategy puts them, so that `offload='idle'` is refused."""
        return self.offloads

    def trained(self, name: str, size: ModelSize, run: Layout) -> Memory:
        """Of a model that learns, while its gradients are there: '<name> weights', '<name> gradients', '<name>
        optimizer', ..."""
        return self._trained(name, run, size.total - self.saved(size, run), size.trained, size.num_trained)

    def waiting(self, run: Layout) -> int:
        """Sums of gradients of an exact run that wait for each other."""
        return max(self.atoms // run.num_processes, 1).bit_length() - 1

    def saved(self, size: ModelSize, run: Layout) -> float:
        """Numbers of fp32 that a run in 16 bits does not keep of what nothing trains."""
        return size.narrow * (1 - run.itemsize / 4) if self.keeps_narrow else 0.0

    def _trained(self, name: str, run: Layout, weights: float, trained: int, num_trained: int) -> Memory:
        """The same from this rank's numbers of elements, all in fp32."""
        memory = Memory()
        memory.add(f'{name} weights', 4 * weights, host=self.offloads)
        memory.add(f'{name} gradients', 4 * trained, host=self.offloads)
        memory.add(f'{name} waiting gradients', 4 * trained * self.waiting(run), host=self.offloads)
        memory.add(f'{name} optimizer', 4 * run.slots * trained, host=self.offloads)
        if run.optimizer != 'sgd':
            memory.add(f'{name} optimizer', 4 * num_trained, host=True)  # a step count for each parameter
        return memory

    def frozen(self, name: str, size: ModelSize, run: Layout) -> Memory:
        """Of a model that only scores: '<name> weights'."""
        memory = Memory()
        memory.add(f'{name} weights', 4 * (size.total - self.saved(size, run)))
        return memory

    def gathered(self, size: ModelSize, run: Layout, *, backward: bool) -> int:
        """Bytes of whole weights that come and go while a sharded model computes."""
        return 0

    def kept_gathered(self, size: ModelSize, run: Layout) -> int:
        """Bytes of whole weights of a model that only scores, which stay after its first forward."""
        return 0

    def growing(self, size: ModelSize, run: Layout, *, again: bool) -> float:
        """Bytes per trained number by which gradients on the device grow while one backward goes on. again: in a
        micro-batch after the first, whose gradients are added to those that are there."""
        return 0.0 if again or self.offloads else 4.0

    def sums(self, name: str, size: ModelSize, run: Layout) -> Memory:
        """'<name> sums of gradients' beside '<name> gradients', where there are several micro-batches."""
        return Memory()

    def reduction(self, size: ModelSize, run: Layout, *, again: bool) -> int:
        """Bytes that reducing gradients takes at the end of a backward, when activations are gone, beside '<name>
        gradients' and `sums`."""
        return 0

    def step(self, size: ModelSize, run: Layout) -> int:
        """What an optimizer step needs beside its states: one temporary as large as the weights (torch's foreach Adam,
        not the fused one), on a CPU two as large as the largest weight (its Adam for one tensor at a time: the root of
        the second moment, and that corrected), or a bucket."""
        one_by_one = 0 if run.on_cuda or run.optimizer == 'sgd' else 2 * 4 * size.largest_trained
        return (4 * size.trained if self.has_temporary(run) else one_by_one) + self.bucket_bytes

    def has_temporary(self, run: Layout) -> bool:
        """Whether an optimizer step makes one as large as the weights."""
        fused = run.fused and run.optimizer == 'adamw' and not self.atoms
        return run.on_cuda and not fused

    def gathering(self, size: ModelSize, run: Layout) -> int:
        """Bytes that come and go while the full copy is made."""
        return 0

    def full_copy(self, size: ModelSize, run: Layout) -> Memory:
        """Of the whole weights that generation needs, beside what is there already; adapters are folded in."""
        memory = Memory()
        itemsize = self.full_itemsize(run)
        if itemsize < 4:
            memory.add('full copy', itemsize * size.total)
        else:
            memory.add('weights before merging', itemsize * size.adapted)
        return memory


def of_numerics(options: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a `MemoryModel` out of a strategy's options."""
    return {'atoms': int(options.get('atoms', 8)) if options.get('reproducible') else 0}


def gathered_copy(size: ModelSize, run: Layout, itemsize: int) -> Memory:
    """A full copy under a strategy that shards weights: on the device, or streamed there from a file that a machine's
    ranks share."""
    memory = Memory()
    if run.stream_blocks:
        memory.add('full copy', run.itemsize * size.two_blocks)
        memory.add('full copy', run.itemsize * size.total / run.on_machine, host=True)
    else:
        memory.add('full copy', itemsize * size.total)
    return memory
