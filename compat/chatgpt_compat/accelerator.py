"""What scripts touch of `trainer.accelerator`, answered by the strategy. There is no accelerate behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from chatgpt.strategies import Strategy


class Accelerator:
    """`device`, `is_main_process`, `gather`, `unwrap_model`, `log`, ... of a strategy.

    Args:
        log: called by `log` on the main process with values by name and a step or None.
        end: called by `end_training`.
    """

    def __init__(
        self,
        strategy: Strategy,
        log: Callable[[dict[str, Any], int | None], None] | None = None,
        end: Callable[[], None] | None = None,
    ) -> None:
        self._strategy, self._log, self._end = strategy, log, end
        self.sync_gradients = True
        self.state = SimpleNamespace(deepspeed_plugin=None, num_processes=strategy.world_size)
        self.distributed_type = 'MULTI_GPU' if strategy.world_size > 1 else 'NO'

    @property
    def device(self) -> torch.device:
        return self._strategy.device

    @property
    def num_processes(self) -> int:
        return self._strategy.world_size

    @property
    def process_index(self) -> int:
        return self._strategy.rank

    @property
    def local_process_index(self) -> int:
        return self._strategy.local_rank

    @property
    def is_main_process(self) -> bool:
        return self._strategy.is_rank_0

    @property
    def is_local_main_process(self) -> bool:
        return self._strategy.local_rank == 0

    @property
    def is_last_process(self) -> bool:
        return self._strategy.rank == self._strategy.world_size - 1

    @property
    def mixed_precision(self) -> str:
        return {'fp32': 'no'}.get(precision := self._strategy.numerics.precision, precision)

    def wait_for_everyone(self) -> None:
        self._strategy.barrier()

    def unwrap_model(self, model: Any, keep_fp32_wrapper: bool = True) -> Any:
        """The model without what a strategy wrapped around it."""
        bare: Any = self._strategy.unwrap(model) if isinstance(model, nn.Module) else model
        return bare if hasattr(bare, 'v_head') else getattr(bare, 'model', bare)

    def prepare(self, *items: Any, **_: Any) -> Any:
        """Modules on the device, in place; everything else as it is."""
        for item in items:
            if isinstance(item, nn.Module):
                item.to(self.device)
        return items[0] if len(items) == 1 else items

    def gather(self, tensor: Any) -> Any:
        """A tensor, or each in a list, tuple or dict, of all processes, one after another along the first dimension."""
        if isinstance(tensor, dict):
            return {name: self.gather(value) for name, value in tensor.items()}
        if isinstance(tensor, (list, tuple)):
            return type(tensor)(self.gather(value) for value in tensor)
        if not isinstance(tensor, Tensor) or self.num_processes == 1:
            return tensor
        parts = self._strategy.all_gather_object(tensor.cpu())
        return torch.cat([part if part.dim() else part[None] for part in parts]).to(self.device)

    gather_for_metrics = gather

    def reduce(self, tensor: Tensor, reduction: str = 'sum', scale: float = 1.0) -> Tensor:
        """Sum or mean of a tensor over processes."""
        total = self._strategy.all_reduce(tensor.clone(), op='sum') * scale
        return total / self.num_processes if reduction == 'mean' else total

    def print(self, *args: Any, **kwargs: Any) -> None:
        if self.is_main_process:
            print(*args, **kwargs)

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        """To the trackers of `log_with`."""
        if self.is_main_process and self._log is not None:
            self._log(values, step)

    def end_training(self) -> None:
        """Close the trackers."""
        if self._end is not None:
            self._end()

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        if not self.is_main_process:
            self.wait_for_everyone()
        yield
        if self.is_main_process:
            self.wait_for_everyone()

    local_main_process_first = main_process_first

    def autocast(self) -> AbstractContextManager[Any]:
        return self._strategy.autocast()

    def on_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that does nothing on other processes."""
        return function if self.is_main_process else lambda *_, **__: None

    def no_sync(self, model: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def free_memory(self) -> None:
        """Does nothing: nothing is held here."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f'accelerator.{name} is not served: there is no accelerate behind this trainer; optimizer steps and '
            "backward passes are the trainer's, and other questions `accelerate.Accelerator()` answers"
        )
