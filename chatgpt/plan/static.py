"""What stays in memory between phases: weights, gradients and optimizer states of one rank, by strategy.

Numbers are those of the rank that holds most. Sources: the strategies of this package; for ZeRO and Gemini the layouts of ColossalAI
0.5.0 (16-bit working weights, fp32 masters, Adam's two moments; Rajbhandari et al. 2020, section 3, without the residual states), and
the exact values that `ColossalAIStrategy` keeps of what has no master. Gemini's rounding up to chunks is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from chatgpt.plan.models import ModelSize, ParameterSize
from chatgpt.plan.setup import Setup


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


def shard(parameter: ParameterSize, world_size: int) -> int:
    """Elements of rank 0's dim-0 shard under FSDP2."""
    if not parameter.shape:
        return 1
    return math.ceil(parameter.shape[0] / world_size) * math.prod(parameter.shape[1:])


def _sum(size: ModelSize, elements: Callable[[ParameterSize], int], *, trained_only: bool = False) -> int:
    return sum(elements(p) for p in size.parameters if p.trained or not trained_only)


def slots(setup: Setup) -> int:
    """Optimizer states per trained number, each fp32."""
    return 2 if setup.optimizer == 'adamw' else 0


def trained_memory(name: str, size: ModelSize, setup: Setup) -> Memory:
    """Of a model that learns, while its gradients are there."""
    memory, w, b = Memory(), setup.num_processes, setup.itemsize
    weights, gradients, states = f'{name} weights', f'{name} gradients', f'{name} optimizer'
    steps = 4 * size.num_trained if setup.optimizer == 'adamw' else 0  # a step count for each parameter
    if setup.strategy in ('naive', 'ddp'):
        memory.add(weights, 4 * size.total)
        memory.add(gradients, 4 * size.trained)
        memory.add(states, 4 * slots(setup) * size.trained)
        memory.add(states, steps, host=True)
        return memory
    host = setup.offloads
    if setup.is_fsdp:
        memory.add(weights, 4 * _sum(size, lambda p: shard(p, w)), host=host)
        cut = _sum(size, lambda p: shard(p, w), trained_only=True)
        memory.add(gradients, 4 * cut, host=host)
        memory.add(states, 4 * slots(setup) * cut, host=host)
        memory.add(states, steps, host=True)
        return memory
    share = _sum(size, lambda p: math.ceil(p.numel / w), trained_only=True)
    if setup.precision != 'fp32':  # what is not trained has no master: its exact values wait on the host
        untrained = _sum(size, lambda p: math.ceil(p.numel / w)) - share
        memory.add(f'{name} exact values', 4 * untrained, host=True)
    if setup.is_zero:
        memory.add(weights, b * size.total)
        memory.add(f'{name} masters', 4 * share, host=host)
        memory.add(gradients, b * (size.trained if 'zero1' in setup.strategy else share))
        memory.add(states, 4 * slots(setup) * share, host=host)
        return memory
    memory.add(weights, b * math.ceil(size.total / w), host=host)  # gradients take the place of weights, chunk by chunk
    memory.add(f'{name} masters', 4 * share, host=host)
    memory.add(states, 4 * slots(setup) * share, host=host)
    return memory


def frozen_memory(name: str, size: ModelSize, setup: Setup) -> Memory:
    """Of a model that only scores."""
    memory, w, b = Memory(), setup.num_processes, setup.itemsize
    weights = f'{name} weights'
    if setup.strategy in ('naive', 'ddp'):
        memory.add(weights, 4 * size.total)
    elif setup.is_fsdp:
        memory.add(weights, 4 * _sum(size, lambda p: shard(p, w)), host=setup.offloads)
    elif setup.is_zero:
        memory.add(weights, b * size.total)
    else:
        memory.add(weights, b * math.ceil(size.total / w), host=setup.offloads)
    if (setup.is_zero or setup.is_gemini) and setup.precision != 'fp32':
        memory.add(f'{name} exact values', 4 * _sum(size, lambda p: math.ceil(p.numel / w)), host=True)
    return memory


def gathered(size: ModelSize, setup: Setup, *, backward: bool) -> int:
    """Bytes of whole weights that a sharded strategy holds while it computes: what is outside of blocks, and two blocks."""
    if not (setup.is_fsdp or setup.is_gemini):
        return 0
    blocks = sorted(size.blocks(), reverse=True)
    elements = size.outside + sum(blocks[:2])
    reduced = 4 * max(blocks, default=0) if backward and setup.is_fsdp else 0  # gradients of a block before they are cut, in fp32
    return setup.itemsize * elements + reduced


def step_bytes(size: ModelSize, setup: Setup) -> int:
    """What an optimizer step needs beside its states: one temporary as large as the weights (torch's foreach Adam), or a bucket."""
    if setup.offloads:
        return 0
    if setup.strategy in ('naive', 'ddp'):
        return (4 * size.trained if setup.on_cuda else 0) + (32 * 2**20 if setup.strategy == 'ddp' else 0)
    if setup.is_fsdp:
        return 4 * _sum(size, lambda p: shard(p, setup.num_processes), trained_only=True) if setup.on_cuda else 0
    if setup.is_zero:
        return 2 * setup.itemsize * min(size.trained, 12 * 2**20)
    return 0
