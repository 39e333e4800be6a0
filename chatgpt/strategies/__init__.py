"""Strategies: one device, many (DDP), sharded (FSDP2, ColossalAI). Each is imported at its first use.

>>> from chatgpt.strategies import NaiveStrategy
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from chatgpt import on_demand

if TYPE_CHECKING:
    from chatgpt.strategies.base import Strategy
    from chatgpt.strategies.colossalai import ColossalAIStrategy
    from chatgpt.strategies.ddp import DDPStrategy
    from chatgpt.strategies.fsdp import FSDPStrategy
    from chatgpt.strategies.naive import NaiveStrategy
    from chatgpt.strategies.registry import strategy_by_name

__getattr__, __dir__ = on_demand(__name__)

__all__ = ['ColossalAIStrategy', 'DDPStrategy', 'FSDPStrategy', 'NaiveStrategy', 'Strategy', 'strategy_by_name']
