"""Strategies by the names of the command line, for those who need no more than a name."""

from __future__ import annotations

import atexit
import os
from typing import Any

from torch import nn

from chatgpt.names import STRATEGIES, hint
from chatgpt.trainer import strategies as s
from chatgpt.trainer.strategies.base import Strategy


def strategy_by_name(
    name: str, *, seed: int = 42, precision: Any = 'fp32', meta_init: bool = True, timeout_s: float = 1800.0
) -> Strategy:
    """A new strategy. `timeout_s`: a rank that keeps the others waiting longer ends the run, by name.

    Args:
        meta_init: FSDP builds on the meta device, so no rank holds a whole model.

    Raises:
        ValueError: a name that is not known, or one that does not fit the processes that were started.
    """
    if name not in STRATEGIES:
        raise ValueError(f'strategy={name!r} is not known; choose one of {", ".join(STRATEGIES)}{hint(name, STRATEGIES)}')
    if int(os.environ.get('WORLD_SIZE', '1')) > 1 and name == 'naive':
        raise ValueError('--strategy naive is one process; under torchrun use ddp, fsdp or one of the colossalai strategies')
    if name == 'naive':
        return s.NaiveStrategy(seed=seed, precision=precision)
    if name == 'ddp':
        return s.DDPStrategy(seed=seed, precision=precision, timeout_s=timeout_s)
    if name.startswith('fsdp'):
        return s.FSDPStrategy(
            seed=seed, precision=precision, cpu_offload=name.endswith('_cpu'), meta_init=meta_init, timeout_s=timeout_s
        )
    stage = {'gemini': 3, 'zero1': 1, 'zero2': 2}[name.split('_')[1]]
    policy: Any = 'cpu' if name.endswith('_cpu') else ('auto' if stage == 3 else 'cuda')
    return s.ColossalAIStrategy(stage=stage, precision=precision, seed=seed, placement_policy=policy, timeout_s=timeout_s)


def as_strategy(strategy: Any) -> Any:
    """The strategy itself, or a new one of that name, which is closed when the process ends."""
    if not isinstance(strategy, str):
        return strategy
    found = strategy_by_name(strategy)
    atexit.register(found.close)
    return found


def prepared_by(strategy: Any, *items: Any) -> tuple[Any, ...]:
    """Strategy and items as they are; for a name a new strategy, and models and (model, optimizer) pairs as it prepares them."""
    if not isinstance(strategy, str):
        return strategy, *items
    strategy = as_strategy(strategy)
    return strategy, *(
        strategy.prepare(item) if isinstance(item[0] if isinstance(item, tuple) else item, nn.Module) else item for item in items
    )
