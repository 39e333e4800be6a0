"""Generation in this process: the local engine, its slot cache, steps of fixed shape, and packed weights on a CPU."""

from typing import TYPE_CHECKING

from chatgpt import on_demand

if TYPE_CHECKING:
    from chatgpt.rollout.local.engine import LocalEngine as LocalEngine
    from chatgpt.rollout.local.engine import check_local as check_local

__getattr__, __dir__ = on_demand(__name__)
