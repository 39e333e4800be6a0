"""Estimates the memory of a run per rank and phase, from a config.json alone, before any weight is loaded.

    python -m chatgpt.plan config.json --strategy fsdp --num_processes 8 --memory 24GiB

`make_plan(Setup(...))` is the same from Python. Weights, gradients and optimizer states are counted on the run's
modules on the meta device, and activations by a forward and backward on fake tensors. A margin covers the CUDA context
and fragmentation. Only causal language models are supported.
"""

from typing import TYPE_CHECKING

from chatgpt import on_demand

if TYPE_CHECKING:
    from chatgpt.plan.advice import cheapest_change as cheapest_change
    from chatgpt.plan.advice import explain_out_of_memory as explain_out_of_memory
    from chatgpt.plan.phases import Plan as Plan
    from chatgpt.plan.phases import make_plan as make_plan
    from chatgpt.plan.setup import Setup as Setup
    from chatgpt.plan.setup import parse_bytes as parse_bytes
    from chatgpt.plan.setup import show_bytes as show_bytes
    from chatgpt.strategies.registry import STRATEGIES as STRATEGIES

__getattr__, __dir__ = on_demand(__name__)
