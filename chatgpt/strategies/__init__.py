"""Strategies: one device, many (DDP), sharded (FSDP2, ColossalAI). Each is imported at its first use.

>>> from chatgpt.strategies import NaiveStrategy
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from chatgpt import on_demand

if TYPE_CHECKING:
    from chatgpt.strategies.base import Strategy as Strategy
    from chatgpt.strategies.colossalai import ColossalAIStrategy as ColossalAIStrategy
    from chatgpt.strategies.ddp import DDPStrategy as DDPStrategy
    from chatgpt.strategies.fsdp import FSDPStrategy as FSDPStrategy
    from chatgpt.strategies.naive import NaiveStrategy as NaiveStrategy
    from chatgpt.strategies.registry import strategy_by_name as strategy_by_name

__getattr__, __dir__ = on_demand(__name__)
