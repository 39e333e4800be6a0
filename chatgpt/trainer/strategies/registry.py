"""Strategies by name: `STRATEGIES['mine'] = StrategyEntry('my_package.my_file:MyStrategy', {'option': 1})` adds one,
which command lines, config files, `chatgpt.train`, every trainer and the planner then know. `my_file.py:MyStrategy`
needs no line at all.

Classes are imported when they are asked for. Left out: making one (`named`).
"""

from __future__ import annotations

import inspect
from argparse import ArgumentTypeError
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, TypeGuard

from chatgpt.registry import Registry, load_object

if TYPE_CHECKING:  # a mistake in a flag must not wait for torch
    from chatgpt.trainer.strategies.base import Strategy
    from chatgpt.trainer.strategies.memory import MemoryModel


@dataclass(frozen=True)
class StrategyEntry:
    """A class and how to build it, and what has to be known of it before."""

    target: str | type[Strategy]
    """the class, or module:Class, or path/to/file.py:Class. It is built with `seed`, `precision`, and `timeout_s` and
    `meta_init` where it takes them"""
    options: Mapping[str, Any] = field(default_factory=dict)
    """further arguments of its constructor"""
    one_process: bool = False
    only_16_bits: bool = False
    """precision='fp32' is refused"""
    whole_layers: bool = False
    """`tensor_parallel` is refused, though the class takes it with other options"""
    offloaded: str | None = None
    """the entry that is the same with more in host memory, for advice on memory; None: `FRUGAL`"""

    def load(self) -> type[Strategy]:
        """The class.

        Raises:
            ValueError: there is none, or it is no strategy.
        """
        found = _loaded(self.target) if isinstance(self.target, str) else self.target
        if not _is_strategy(found):
            raise ValueError(f'{self.target!r} is no subclass of chatgpt.trainer.strategies.Strategy')
        return found

    @property
    def takes_tensor_parallel(self) -> bool:
        return not self.whole_layers and 'tensor_parallel' in inspect.signature(self.load()).parameters

    def memory_model(self, **options: Any) -> MemoryModel:
        """What such a strategy keeps in memory; `options` stand above the entry's own."""
        return self.load().memory_model(**{**self.options, **options})


_loaded = cache(load_object)  # a file that is executed twice makes two classes


def _is_strategy(found: Any) -> TypeGuard[type[Strategy]]:
    from chatgpt.trainer.strategies.base import Strategy

    return isinstance(found, type) and issubclass(found, Strategy)


class StrategyRegistry(Registry[StrategyEntry]):
    """Where a class that is named `module:Class` is an entry without options."""

    def admit(self, name: str, found: Any) -> StrategyEntry:
        if _is_strategy(found):
            return StrategyEntry(found)
        return super().admit(name, found)


_HERE = 'chatgpt.trainer.strategies'


def _colossalai(stage: int, placement: str, offloaded: str | None = None) -> StrategyEntry:
    options = {'stage': stage, 'placement_policy': placement}
    return StrategyEntry(
        f'{_HERE}.colossalai:ColossalAIStrategy',
        options,
        only_16_bits=stage == 3,
        offloaded=offloaded,
        whole_layers=stage == 3 or placement != 'cuda',
    )


STRATEGIES = StrategyRegistry(
    'strategy',
    StrategyEntry,
    {
        'naive': StrategyEntry(f'{_HERE}.naive:NaiveStrategy', one_process=True),
        'ddp': StrategyEntry(f'{_HERE}.ddp:DDPStrategy'),
        'fsdp': StrategyEntry(f'{_HERE}.fsdp:FSDPStrategy', {'cpu_offload': False}),
        'fsdp_cpu': StrategyEntry(f'{_HERE}.fsdp:FSDPStrategy', {'cpu_offload': True}, whole_layers=True),
        'colossalai_gemini': _colossalai(3, 'auto', 'colossalai_gemini_cpu'),
        'colossalai_gemini_cpu': _colossalai(3, 'cpu'),
        'colossalai_zero1': _colossalai(1, 'cuda', 'colossalai_zero1_cpu'),
        'colossalai_zero1_cpu': _colossalai(1, 'cpu'),
        'colossalai_zero2': _colossalai(2, 'cuda', 'colossalai_zero2_cpu'),
        'colossalai_zero2_cpu': _colossalai(2, 'cpu'),
    },
)
SHARDED, FRUGAL = 'fsdp', 'fsdp_cpu'
"""What memory advice suggests: SHARDED in place of whole copies, FRUGAL where device memory must be least."""


def that_cut_layers() -> str:
    """The names of those that take `tensor_parallel`, for a message."""
    *names, last = (name for name, entry in STRATEGIES.items() if entry.takes_tensor_parallel)
    return f'{", ".join(names)} or {last}'


def strategy_flag(text: str) -> str:
    """The value of a flag `--strategy`, for argparse."""
    try:
        STRATEGIES.find(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None
    return text


def _is_of(entry: StrategyEntry, cls: type[Strategy]) -> bool:
    try:
        return entry.load() is cls
    except ValueError:  # another's, which cannot be imported here
        return False


def name_of(strategy: Strategy) -> str:
    """The registered name of a strategy object: the entry with the same memory model, else any entry of its class, else
    module:Class, which is then registered."""
    cls = type(strategy)
    own = {name: entry for name, entry in STRATEGIES.items() if _is_of(entry, cls)}
    model = cls.memory_model(**strategy.options)
    same = [name for name, e in own.items() if cls.memory_model(**{**strategy.options, **e.options}) == model]
    if not own:
        STRATEGIES[f'{cls.__module__}:{cls.__qualname__}'] = StrategyEntry(cls)
    return next(iter([*same, *own]), f'{cls.__module__}:{cls.__qualname__}')
