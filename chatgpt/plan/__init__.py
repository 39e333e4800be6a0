"""Does it fit? Memory per rank and phase of a run, from a config.json alone, before any weight is loaded.

    python -m chatgpt.plan config.json --strategy fsdp --num_processes 8 --memory 24GiB

`make_plan(Setup(...))` is the same from Python. Weights, gradients and optimizer states are counted from the very
modules, built without memory; activations from a forward and backward of theirs on tensors without memory. Left out:
memory of the CUDA context and of fragmentation (a margin stands for both), models that are not causal language models.
"""

from typing import TYPE_CHECKING

from chatgpt import on_demand

if TYPE_CHECKING:
    from chatgpt.plan.advice import cheapest_change, explain_out_of_memory
    from chatgpt.plan.phases import Plan, make_plan
    from chatgpt.plan.setup import Setup, parse_bytes, show_bytes
    from chatgpt.strategies.registry import STRATEGIES

__getattr__, __dir__ = on_demand(__name__)

__all__ = [
    'STRATEGIES',
    'Plan',
    'Setup',
    'cheapest_change',
    'explain_out_of_memory',
    'make_plan',
    'parse_bytes',
    'show_bytes',
]
