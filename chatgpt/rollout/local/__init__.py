"""Generating in this process with a slot cache of our own: the engine, the cache, steps of fixed shape, packed weights
on CPU."""

from typing import TYPE_CHECKING

from chatgpt import on_demand

if TYPE_CHECKING:
    from chatgpt.rollout.local.engine import LocalEngine, check_local

__getattr__, __dir__ = on_demand(__name__)

__all__ = ['LocalEngine', 'check_local']
