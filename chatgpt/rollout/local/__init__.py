"""Generating in this process with a slot cache of our own: the engine, the cache, steps of fixed shape, packed weights
on CPU."""

from chatgpt.rollout.local.engine import LocalEngine, check_local

__all__ = ['LocalEngine', 'check_local']
