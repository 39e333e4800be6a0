"""Memory of a strategy: sizes of a model (`ModelSize`), bytes (`Memory`), the run (`Layout`), and `MemoryModel`, which
`Strategy.memory_model` returns for `chatgpt.plan`.

All bytes are of the rank that holds the most.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self


@dataclass(frozen=True)
class ParameterSize:
    name: str
    shape: tuple[int, ...]
    trained: bool
    block: int | None
    """index of its transformer block, or None outside of blocks"""
    narrow: bool = False
    """stored in 16 bits by a run in 16 bits; if it is trained, with an fp32 master"""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class ModelSize:
    """Parameters of one module, tied ones once."""

    parameters: tuple[ParameterSize, ...]
    adapted: int = 0
    """elements of weights that have a LoRA adapter"""
    packable: int = 0
    """elements of weights of linear layers, including heads, that the local engine packs on a CPU"""

    @property
    def total(self) -> int:
        return sum(p.numel for p in self.parameters)

    @property
    def trained(self) -> int:
        return sum(p.numel for p in self.parameters if p.trained)

    @property
    def narrow(self) -> int:
        """Elements of frozen weights that a run in 16 bits stores in 16 bits."""
        return sum(p.numel for p in self.parameters if p.narrow and not p.trained)

    @property
    def mastered(self) -> int:
        """Elements of trained weights that a run in 16 bits stores in 16 bits, with fp32 masters."""
        return sum(p.numel for p in self.parameters if p.narrow and p.trained)

    @property
    def largest_trained(self) -> int:
        """Elements of the largest trained parameter."""
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
        """Elements outside of blocks."""
        return sum(p.numel for p in self.parameters if p.block is None)

    @property
    def two_blocks(self) -> int:
        """Elements on the device while blocks are gathered one at a time: those outside of blocks, and two blocks."""
        return self.outside + sum(sorted(self.blocks(), reverse=True)[:2])


@dataclass
class Memory:
    """Bytes by purpose, on the device and on the host."""

    device: dict[str, int] = field(default_factory=dict)
    host: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, size: float, *, host: bool = False) -> Self:
        place = self.host if host else self.device
        if size:
            place[name] = place.get(name, 0) + math.ceil(size)
        return self

    def __add__(self, other: Memory) -> Memory:
        total = Memory(dict(self.device), dict(self.host))
        for name, size in other.device.items():
            total.add(name, size)
        for name, size in other.host.items():
            total.add(name, size, host=True)
        return total


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Processes, devices, precision and optimizer of a run. `chatgpt.plan.Setup` is a subclass."""

    num_processes: int = 1
    """number of processes, one per device"""
    processes_per_machine: int | None = None
    """processes that share the memory of a host; none: all of them"""
    precision: Literal['auto', 'fp32', 'bf16', 'fp16'] = 'fp32'
    on_cuda: bool = True
    optimizer: Literal['adamw', 'adamw8bit', 'paged_adamw8bit', 'sgd'] = 'adamw'
    """adamw8bit stores its states in 8 bits, paged_adamw8bit also moves them to host memory; sgd has none"""
    fused: bool = True
    """on a GPU AdamW is torch's fused one, as from `Strategy.make_optimizer`"""
    stream_blocks: bool = False
    """generate with blocks that are copied to the device one at a time from host memory, with strategy fsdp"""

    @property
    def itemsize(self) -> int:
        """Bytes of a number in the compute dtype."""
        return 4 if self.precision == 'fp32' else 2

    @property
    def slots(self) -> float:
        """Optimizer states per trained element, in fp32 elements; 8-bit states have one scale per 256 of them."""
        return {'adamw': 2.0, 'sgd': 0.0}.get(self.optimizer, 2 * (1 / 4 + 1 / 256))

    @property
    def on_machine(self) -> int:
        """Number of processes that share a host."""
        return self.processes_per_machine or self.num_processes


@dataclass(frozen=True)
class MemoryModel:
    """The memory of whole weights, gradients and optimizer states on each rank: fp32, with 16 bits beside them in a run
    in 16 bits. A strategy that shards or offloads has a subclass that overrides the methods that differ.
    """

    offloads: bool = False
    """True: weights, gradients and optimizer states are in host memory"""
    bucket_bytes: int = 0
    """bytes of a bucket of gradients"""
    atoms: int = 0
    """atoms of an exact run; 0: the run is not exact"""

    shards_trunk: bool = False
    """True: each process holds a part of the 4-bit weights of a shared base"""

    whole: ClassVar[bool] = True
    """False: weights are stored or gathered in the compute dtype, and no rank has whole gradients in fp32"""
    streams: ClassVar[bool] = False
    """True: `stream_blocks` generates without a full copy on the device"""

    @property
    def autocasts(self) -> bool:
        """True if forwards use fp32 weights under autocast."""
        return self.whole or self.atoms > 0

    @property
    def keeps_narrow(self) -> bool:
        """True if a run in 16 bits stores weights in 16 bits."""
        return not self.atoms

    @property
    def can_be_cut(self) -> bool:
        """True if tensor parallelism is supported."""
        return not self.offloads and not self.atoms

    def shares(self, ranks: int) -> int:
        """Returns the number of equal parts that a batch is split into before `max_tokens_per_batch`."""
        return self.atoms or ranks

    def full_itemsize(self, run: Layout) -> int:
        """Returns the bytes of a weight while generating; an exact run generates in fp32."""
        return 4 if self.atoms else run.itemsize

    @property
    def places_frozen(self) -> bool:
        """True if the strategy places frozen models itself, so that `offload='idle'` is refused."""
        return self.offloads

    def trained(self, name: str, size: ModelSize, run: Layout) -> Memory:
        """Returns the memory of a trained model with its gradients: '<name> weights', '<name> gradients', '<name>
        optimizer', ..."""
        return self._trained(name, run, size.total - self.saved(size, run), size.trained, size.num_trained)

    def waiting(self, run: Layout) -> int:
        """Returns the number of partial sums of gradients that an exact run keeps."""
        return max(self.atoms // run.num_processes, 1).bit_length() - 1

    def saved(self, size: ModelSize, run: Layout) -> float:
        """Returns the fp32 elements that a run in 16 bits saves by storing frozen weights in 16 bits, less those of
        trained weights in 16 bits, which come beside their masters."""
        if not self.keeps_narrow or run.itemsize == 4:
            return 0.0
        return size.narrow * (1 - run.itemsize / 4) - size.mastered * run.itemsize / 4

    def _trained(self, name: str, run: Layout, weights: float, trained: int, num_trained: int) -> Memory:
        """Returns the memory of a trained model from this rank's numbers of fp32 elements."""
        memory = Memory()
        memory.add(f'{name} weights', 4 * weights, host=self.offloads)
        memory.add(f'{name} gradients', 4 * trained, host=self.offloads)
        memory.add(f'{name} waiting gradients', 4 * trained * self.waiting(run), host=self.offloads)
        memory.add(f'{name} optimizer', 4 * run.slots * trained, host=self.offloads)
        if run.optimizer != 'sgd':
            memory.add(f'{name} optimizer', 4 * num_trained, host=True)  # a step count for each parameter
        return memory

    def frozen(self, name: str, size: ModelSize, run: Layout) -> Memory:
        """Returns the memory of a frozen model: '<name> weights'."""
        return Memory().add(f'{name} weights', 4 * (size.total - self.saved(size, run)))

    def gathered(self, size: ModelSize, run: Layout, *, backward: bool) -> int:
        """Returns the bytes of weights that are gathered temporarily while a sharded model computes."""
        return 0

    def kept_gathered(self, size: ModelSize, run: Layout) -> int:
        """Returns the bytes of gathered weights of a frozen model that stay after its first forward."""
        return 0

    def growing(self, size: ModelSize, run: Layout, *, again: bool) -> float:
        """Returns the bytes per trained element by which gradients on the device grow during a backward.

        Args:
            again: the micro-batch is not the first, so its gradients are added to existing ones.
        """
        return 0.0 if again or self.offloads else 4.0

    def sums(self, name: str, size: ModelSize, run: Layout) -> Memory:
        """Returns '<name> sums of gradients', beside '<name> gradients', with several micro-batches."""
        return Memory()

    def reduction(self, size: ModelSize, run: Layout, *, again: bool) -> int:
        """Returns the bytes of reducing gradients at the end of a backward, beside '<name> gradients' and `sums`."""
        return 0

    def step(self, size: ModelSize, run: Layout) -> int:
        """Returns the bytes of an optimizer step beside its states: a temporary as large as the weights (foreach Adam),
        on a CPU two as large as the largest weight (Adam for one tensor at a time: the root of the second moment before
        and after bias correction), and a bucket."""
        one_by_one = 0 if run.on_cuda or run.optimizer == 'sgd' else 2 * 4 * size.largest_trained
        return (4 * size.trained if self.has_temporary(run) else one_by_one) + self.bucket_bytes

    def has_temporary(self, run: Layout) -> bool:
        """Returns True if an optimizer step has a temporary as large as the weights."""
        fused = run.fused and run.optimizer == 'adamw' and not self.atoms
        return run.on_cuda and not fused

    def gathering(self, size: ModelSize, run: Layout) -> int:
        """Returns the temporary bytes of making the full copy."""
        return 0

    def full_copy(self, size: ModelSize, run: Layout) -> Memory:
        """Returns the additional memory of the full weights for generation, with adapters folded in."""
        memory = Memory()
        itemsize = self.full_itemsize(run)
        if itemsize < 4:
            memory.add('full copy', itemsize * size.total)
        else:
            memory.add('weights before merging', itemsize * size.adapted)
        return memory


def of_numerics(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a `MemoryModel` that follow from a strategy's options."""
    return {'atoms': int(options.get('atoms', 8)) if options.get('reproducible') else 0}


def gathered_copy(size: ModelSize, run: Layout, itemsize: int) -> Memory:
    """Returns the memory of a full copy of a sharded model: on the device, or streamed from a file of the machine."""
    memory = Memory()
    if run.stream_blocks:
        memory.add('full copy', run.itemsize * size.two_blocks)
        memory.add('full copy', run.itemsize * size.total / run.on_machine, host=True)
    else:
        memory.add('full copy', itemsize * size.total)
    return memory
