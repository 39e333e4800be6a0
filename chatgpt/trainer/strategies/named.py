"""Strategies by the names of `registry`, for those who need no more than a name."""

from __future__ import annotations

import atexit
import inspect
import os
from typing import Any

import torch
from torch import nn

from chatgpt.trainer.strategies.base import Strategy
from chatgpt.trainer.strategies.exact import Reproducible
from chatgpt.trainer.strategies.items import is_pair
from chatgpt.trainer.strategies.precision import resolve_precision
from chatgpt.trainer.strategies.registry import STRATEGIES


def strategy_by_name(
    name: str,
    *,
    seed: int = 42,
    precision: Any = 'auto',
    meta_init: bool = True,
    timeout_s: float = 1800.0,
    deterministic: bool = False,
    reproducible: Reproducible = None,
    atoms: int = 8,
    tensor_parallel: int = 1,
) -> Strategy:
    """A new strategy of a registered name, or of `module:Class`.

    Args:
        meta_init: where the strategy can, models are built on the meta device, so no rank holds a whole model.
        timeout_s: a rank that keeps the others waiting longer ends the run, by name.
        deterministic: repeat a run on a GPU more exactly, at a price (docs/strategies.md).
        reproducible, atoms: 'exact' gives the same bits in every layout that divides `atoms` (docs/strategies.md).
        tensor_parallel: processes that hold each layer together and are one rank (docs/strategies.md).

    Raises:
        ValueError: a name that is not known, or one that does not fit the processes that were started.
    """
    entry = STRATEGIES.find(name)
    if entry.one_process and int(os.environ.get('WORLD_SIZE', '1')) > 1:
        others = [other for other, e in STRATEGIES.items() if not e.one_process]
        raise ValueError(f'strategy {name} is one process; under torchrun use one of {", ".join(others)}')
    if entry.only_16_bits:  # on any device
        precision = resolve_precision(precision, torch.device('cpu'), only_16_bits=True)
    cls = entry.load()
    taken = inspect.signature(cls).parameters
    if not {'seed', 'precision'} <= set(taken):
        raise ValueError(f'{cls.__name__} cannot be made by name: its constructor must take seed and precision')
    if deterministic and 'deterministic' not in taken:
        raise ValueError(f'deterministic: {cls.__name__} takes no such option; leave it out')
    if reproducible is not None and 'reproducible' not in taken:
        raise ValueError(f'reproducible: {cls.__name__} takes no such option; leave it out')
    if tensor_parallel != 1 and 'tensor_parallel' not in taken:
        raise ValueError(f'tensor_parallel: {cls.__name__} takes no such option; use strategy fsdp, or leave it out')
    further = {
        'meta_init': meta_init,
        'timeout_s': timeout_s,
        'deterministic': deterministic,
        'reproducible': reproducible,
        'atoms': atoms,
        'tensor_parallel': tensor_parallel,
    }
    return cls(seed=seed, precision=precision, **{k: v for k, v in further.items() if k in taken} | dict(entry.options))


def as_strategy(strategy: Any) -> Any:
    """The strategy itself, or a new one of that name, which is closed when the process ends."""
    if not isinstance(strategy, str):
        return strategy
    found = strategy_by_name(strategy)
    atexit.register(found.close)
    return found


def prepared_by(strategy: Any, *items: Any) -> tuple[Any, ...]:
    """Strategy and items as they are; for a name a new strategy, and models and (model, optimizer) pairs as it prepares
    them."""
    if not isinstance(strategy, str):
        return strategy, *items
    strategy = as_strategy(strategy)
    return strategy, *(
        strategy.prepare(item) if isinstance(item, (nn.Module, list)) or is_pair(item) else item for item in items
    )
