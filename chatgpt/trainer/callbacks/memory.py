"""`MemoryAdvice`: an out-of-memory error ends with what the run needs and the cheapest change that makes it fit.

Left out: the plan itself (`chatgpt.plan`), and errors while models are loaded, before there is a trainer
(`chatgpt.launch.planning`).
"""

from __future__ import annotations

from chatgpt.plan.of_run import common_fields, note_on_memory
from chatgpt.plan.setup import Setup
from chatgpt.trainer.callbacks.base import Callback, TrainerView


class MemoryAdvice(Callback):
    """Every trainer has one."""

    def on_exception(self, trainer: TrainerView, error: BaseException) -> None:
        note_on_memory(error, lambda: setup_of(trainer))


def setup_of(trainer: TrainerView) -> Setup | None:
    """This run as `chatgpt.plan` sees it; None where it is not planned."""
    sizes = trainer.planned_sizes()
    if sizes is None:
        return None
    model, optimizer = next(iter(trainer.models().values())), next(iter(trainer.optimizers().values()))
    strategy = trainer.strategy
    return Setup(**common_fields(strategy, trainer.config, strategy.unwrap(model), optimizer), **sizes)
