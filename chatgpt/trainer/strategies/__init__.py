"""Strategies: one device, many (DDP), sharded (FSDP2, ColossalAI). Each is imported when it is first asked for.

>>> from chatgpt.trainer.strategies import NaiveStrategy
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from chatgpt.trainer.strategies.base import Strategy
from chatgpt.trainer.strategies.naive import NaiveStrategy

if TYPE_CHECKING:
    from chatgpt.trainer.strategies.colossalai import ColossalAIStrategy
    from chatgpt.trainer.strategies.ddp import DDPStrategy
    from chatgpt.trainer.strategies.fsdp import FSDPStrategy

__all__ = ['ColossalAIStrategy', 'DDPStrategy', 'FSDPStrategy', 'NaiveStrategy', 'Strategy']

_LAZY = {'ColossalAIStrategy': 'colossalai', 'DDPStrategy': 'ddp', 'FSDPStrategy': 'fsdp'}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    return getattr(importlib.import_module(f'{__name__}.{_LAZY[name]}'), name)
