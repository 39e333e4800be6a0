"""Strategies: one device, many (DDP), sharded (FSDP2, ColossalAI). Each is imported when it is first asked for.

>>> from chatgpt.trainer.strategies import NaiveStrategy
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chatgpt.trainer.strategies.base import Strategy
    from chatgpt.trainer.strategies.colossalai import ColossalAIStrategy
    from chatgpt.trainer.strategies.ddp import DDPStrategy
    from chatgpt.trainer.strategies.fsdp import FSDPStrategy
    from chatgpt.trainer.strategies.naive import NaiveStrategy

__all__ = ['ColossalAIStrategy', 'DDPStrategy', 'FSDPStrategy', 'NaiveStrategy', 'Strategy']

_HOME = {
    'ColossalAIStrategy': 'colossalai',
    'DDPStrategy': 'ddp',
    'FSDPStrategy': 'fsdp',
    'NaiveStrategy': 'naive',
    'Strategy': 'base',
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    return getattr(importlib.import_module(f'{__name__}.{_HOME[name]}'), name)
