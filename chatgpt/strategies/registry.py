"""The registry of strategies. `STRATEGIES['mine'] = StrategyEntry('my_package.my_file:MyStrategy', {'option': 1})` adds
one to command lines, config files, `chatgpt.train`, every trainer and the planner. A strategy can also be chosen as
`my_file.py:MyStrategy` without an entry.

Classes, and torch, are imported at their first use.
"""

from __future__ import annotations

import atexit
import inspect
import os
from argparse import ArgumentTypeError
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, TypeGuard

from chatgpt.registry import Registry, load_object

if TYPE_CHECKING:  # errors in flags are reported without importing torch
    from chatgpt.strategies.base import Strategy
    from chatgpt.strategies.memory import MemoryModel


@dataclass(frozen=True)
class StrategyEntry:
    """A strategy class, its options, and the properties that are needed before it is imported."""

    target: str | type[Strategy]
    """the class, module:Class, or path/to/file.py:Class. It is built with `seed`, `precision`, and `timeout_s` and
    `meta_init` if it takes them"""
    options: Mapping[str, Any] = field(default_factory=dict)
    """further arguments of its constructor"""
    one_process: bool = False
    only_16_bits: bool = False
    """True: precision='fp32' is refused, and 'auto' is bf16"""
    offloaded: str | None = None
    """name of the same strategy with more in host memory, for advice on memory; None: `FRUGAL`"""

    def load(self) -> type[Strategy]:
        """Imports and returns the class.

        Raises:
            ValueError: if it does not exist or is not a strategy.
        """
        found = _loaded(self.target) if isinstance(self.target, str) else self.target
        if not _is_strategy(found):
            raise ValueError(f'{self.target!r} is no subclass of chatgpt.strategies.Strategy')
        return found

    @property
    def takes_tensor_parallel(self) -> bool:
        return self.takes('tensor_parallel') and not self.options.get('cpu_offload')

    def takes(self, option: str) -> bool:
        return option in inspect.signature(self.load()).parameters

    def memory_model(self, **options: Any) -> MemoryModel:
        """Returns the strategy's memory model; `options` override those of the entry."""
        return self.load().memory_model(**{**self.options, **options})


_loaded = cache(load_object)  # executing a file twice would define two classes


def _is_strategy(found: Any) -> TypeGuard[type[Strategy]]:
    from chatgpt.strategies.base import Strategy

    return isinstance(found, type) and issubclass(found, Strategy)


class StrategyRegistry(Registry[StrategyEntry]):
    """A registry in which a class named `module:Class` is an entry without options."""

    def admit(self, name: str, found: Any) -> StrategyEntry:
        if _is_strategy(found):
            return StrategyEntry(found)
        return super().admit(name, found)


_HERE = 'chatgpt.strategies'


def _colossalai(stage: int, placement: str, offloaded: str | None = None) -> StrategyEntry:
    options = {'stage': stage, 'placement_policy': placement}
    target = f'{_HERE}.colossalai:ColossalAIStrategy'
    return StrategyEntry(target, options, only_16_bits=stage == 3, offloaded=offloaded)


STRATEGIES = StrategyRegistry(
    'strategy',
    StrategyEntry,
    {
        'naive': StrategyEntry(f'{_HERE}.naive:NaiveStrategy', one_process=True),
        'ddp': StrategyEntry(f'{_HERE}.ddp:DDPStrategy'),
        'fsdp': StrategyEntry(f'{_HERE}.fsdp:FSDPStrategy', {'cpu_offload': False}),
        'fsdp_cpu': StrategyEntry(f'{_HERE}.fsdp:FSDPStrategy', {'cpu_offload': True}),
        'colossalai_gemini': _colossalai(3, 'auto', 'colossalai_gemini_cpu'),
        'colossalai_gemini_cpu': _colossalai(3, 'cpu'),
        'colossalai_zero1': _colossalai(1, 'cuda', 'colossalai_zero1_cpu'),
        'colossalai_zero1_cpu': _colossalai(1, 'cpu'),
        'colossalai_zero2': _colossalai(2, 'cuda', 'colossalai_zero2_cpu'),
        'colossalai_zero2_cpu': _colossalai(2, 'cpu'),
    },
)
STRATEGY_OPTIONS = ('deterministic', 'reproducible', 'atoms', 'tensor_parallel', 'sequence_parallel')
"""Settings of a run that are passed to its strategy, beside seed, precision and timeout."""
SHARDED, FRUGAL = 'fsdp', 'fsdp_cpu'
"""Suggestions of advice on memory: SHARDED instead of whole copies, FRUGAL for the least device memory."""


def strategy_flag(text: str) -> str:
    """Checks and returns a value of the flag `--strategy`, for argparse."""
    try:
        STRATEGIES.find(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None
    return text


def strategy_by_name(
    name: str,
    *,
    seed: int = 42,
    precision: Any = 'auto',
    meta_init: bool = True,
    timeout_s: float = 1800.0,
    tensor_parallel: int = 1,
    sequence_parallel: int = 1,
    **numerics: Any,
) -> Strategy:
    """Returns a new strategy by its registered name, or by `module:Class`.

    Args:
        meta_init: build models on the meta device, so that no rank holds a whole model; ignored if not supported.
        timeout_s: a rank that keeps the others waiting for longer ends the run with an error that names it.
        tensor_parallel: number of processes that split each layer and form one rank (docs/strategies.md).
        sequence_parallel: number of processes that split each sequence and form one rank.
        numerics: the other fields of `chatgpt.strategies.precision.Numerics`.

    Raises:
        ValueError: for an unknown name, or a strategy that does not fit the started processes.
    """
    entry = STRATEGIES.find(name)
    if entry.one_process and int(os.environ.get('WORLD_SIZE', '1')) > 1:
        others = [other for other, e in STRATEGIES.items() if not e.one_process]
        raise ValueError(f'strategy {name} is one process; under torchrun use one of {", ".join(others)}')
    cls = entry.load()
    taken = inspect.signature(cls).parameters
    if not {'seed', 'precision'} <= set(taken):
        raise ValueError(f'{cls.__name__} cannot be made by name: its constructor must take seed and precision')
    together = {'tensor_parallel': tensor_parallel, 'sequence_parallel': sequence_parallel}
    for option in (option for option, parts in together.items() if parts != 1 and option not in taken):
        raise ValueError(f'{option}: {cls.__name__} takes no such option; use strategy fsdp, or leave it out')
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in taken.values()):
        for option in ('deterministic', 'reproducible'):
            if numerics.get(option) and option not in taken:
                raise ValueError(f'{option}: {cls.__name__} takes no such option; leave it out')
        numerics = {k: v for k, v in numerics.items() if k in taken}
    further = {'meta_init': meta_init, 'timeout_s': timeout_s, **together}
    given = {k: v for k, v in further.items() if k in taken}
    return cls(**{'seed': seed, 'precision': precision, **numerics, **given, **entry.options})


def as_strategy(strategy: Any) -> Any:
    """Returns a strategy as it is, and for a name a new one that is closed when the process ends."""
    if not isinstance(strategy, str):
        return strategy
    found = strategy_by_name(strategy)
    atexit.register(found.close)
    return found


def prepared_by(strategy: Any, *items: Any) -> tuple[Any, ...]:
    """Returns strategy and items as they are; for a name a new strategy, and models and pairs prepared by it."""
    if not isinstance(strategy, str):
        return strategy, *items
    from torch import nn

    from chatgpt.strategies.pairs import is_pair

    strategy = as_strategy(strategy)
    return strategy, *(
        strategy.prepare(item) if isinstance(item, (nn.Module, list)) or is_pair(item) else item for item in items
    )
