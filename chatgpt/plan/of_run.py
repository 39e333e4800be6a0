"""From a run to its plan: the machine it is on, and what a trainer already knows about itself.

Left out: runs of the example scripts, which are planned before there is a trainer (`chatgpt.launch.planning`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypedDict

import torch

from chatgpt.plan.setup import Setup
from chatgpt.trainer.strategies.registry import name_of

OUT_OF_CPU_MEMORY = ("can't allocate memory", 'Cannot allocate memory')
"""what torch's CPU allocator says, in a plain RuntimeError"""


class Machine(TypedDict):
    """Memory limits, as `Setup` takes them."""

    on_cuda: bool
    memory: int | None
    host_memory: int | None


def this_machine() -> Machine:
    """The first device and the host, which a container may have been given less of."""
    on_cuda = torch.cuda.is_available()
    host = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') if hasattr(os, 'sysconf') else None
    for name in ('memory.max', 'memory/memory.limit_in_bytes'):
        limit = Path('/sys/fs/cgroup', name)
        text = limit.read_text().strip() if limit.is_file() else ''
        if text.isdigit() and host is not None:
            host = min(host, int(text))
    memory = int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory) if on_cuda else None
    return {'on_cuda': on_cuda, 'memory': memory, 'host_memory': host}


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_CPU_MEMORY)
    )


def common_fields(strategy: Any, config: Any, model: Any, optimizer: Any) -> dict[str, Any]:
    """What is the same for every trainer: `config` is its settings, `model` the unwrapped module that learns first.

    Raises:
        ValueError: an optimizer that the planner does not know.
    """
    from chatgpt.nn import lora
    from chatgpt.nn.quantized import NF4Linear

    kind = type(optimizer).__name__
    if not ('Adam' in kind or kind == 'SGD'):
        raise ValueError(f'{kind} is no optimizer that can be planned')
    layers = lora.lora_layers(model)
    on_trunk = any(lora.is_shared(p) for p in model.parameters())
    in_4_bits = any(isinstance(m, NF4Linear) for m in model.modules())
    precision = {torch.float32: 'fp32', torch.bfloat16: 'bf16', torch.float16: 'fp16'}[strategy.dtype]
    return {
        'config': model.model.config,
        'strategy': name_of(strategy),
        'strategy_options': strategy.options,
        'num_processes': strategy.processes.world_size,
        'precision': precision,
        'fused': bool(optimizer.param_groups[0].get('fused')),
        'optimizer': {'SGD': 'sgd', 'AdamW8bit': 'adamw8bit', 'PagedAdamW8bit': 'paged_adamw8bit'}.get(kind, 'adamw'),
        'lora_rank': next(iter(layers.values())).r if layers else 0,
        'shared_trunk': on_trunk,
        'quantize': 'nf4' if in_4_bits else 'none',
        'gradient_checkpointing': any(getattr(m, 'gradient_checkpointing', False) for m in model.modules()),
        'logprob_kernel': getattr(model, 'logprob_kernel', 'auto'),
        'train_batch_size': config.train_batch_size,
        'max_tokens_per_batch': config.max_tokens_per_batch,
        **this_machine(),
    }


def note_on_memory(error: BaseException, make_setup: Any) -> None:
    """Let an out-of-memory error end with what the run needs and the cheapest change that makes it fit."""
    from chatgpt.plan.advice import explain_out_of_memory

    if not is_out_of_memory(error):
        return
    try:
        setup: Setup | None = make_setup()
    except Exception:  # the advice must not hide the error it is about
        setup = None
    error.add_note(explain_out_of_memory(setup, error))
