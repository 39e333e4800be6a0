"""`DDPStrategy`: a whole copy of every model on each process; gradients are summed.

Gradients are summed once per optimizer step, in buckets that depend on the parameters alone, each as soon as the last
backward has computed it. torch's `DistributedDataParallel` rebuilds its buckets after the first step, in the order in
which gradients arrived, so a resumed run would sum in a different order. It also does not sum the gradient of a
parameter that only an earlier micro-batch used. Modules are not wrapped, so all of their methods can be called.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from chatgpt.strategies.memory import MemoryModel, of_numerics
from chatgpt.strategies.pairs import Trained
from chatgpt.strategies.precision import Precision
from chatgpt.strategies.processes import ProcessGroupStrategy, ReduceDtype, check_reduce_dtype
from chatgpt.strategies.reducer import Reducer

BUCKET_BYTES = 32 << 20


class DDPStrategy(ProcessGroupStrategy):
    """Data parallelism. Launch with torchrun. Every rank starts with rank 0's weights.

    Args:
        bucket_bytes: bytes of a bucket of gradients, and so the extra memory of a reduction.
        reduce_dtype: dtype in which gradients are summed over ranks; sums over micro-batches stay fp32.
    """

    def __init__(
        self,
        seed: int = 42,
        precision: Precision = 'auto',
        *,
        device: str | torch.device | None = None,
        timeout_s: float = 1800.0,
        bucket_bytes: int = BUCKET_BYTES,
        reduce_dtype: ReduceDtype = 'fp32',
        **numerics: Any,
    ) -> None:
        check_reduce_dtype(reduce_dtype, numerics)
        if bucket_bytes < 1:
            raise ValueError(f'bucket_bytes={bucket_bytes} must be positive')
        super().__init__(seed, precision, device=device, timeout_s=timeout_s, **numerics)
        self.bucket_bytes, self.reduce_dtype = bucket_bytes, reduce_dtype
        self._reducers: dict[int, Reducer] = {}
        """by id of a pair"""
        self._is_last = False
        """inside the context of a step's last micro-batch"""

    @classmethod
    def memory_model(cls, bucket_bytes: int = BUCKET_BYTES, **options: Any) -> MemoryModel:
        return MemoryModel(bucket_bytes=bucket_bytes, **of_numerics(options))

    def _setup_model(self, model: nn.Module, trained: bool) -> nn.Module:
        model = super()._setup_model(model, trained)
        self.broadcast_weights(model, self.bucket_bytes)
        return model

    @contextmanager
    def accumulate(self, model: nn.Module, last: bool) -> Iterator[None]:
        self._is_last = last and not self.sums.exact
        try:
            with super().accumulate(model, last):
                yield
            for reducer in self._reducers.values():
                reducer.flush()
        finally:
            self._is_last = False

    def backward(self, loss: Tensor, model: nn.Module, optimizer: Optimizer) -> None:
        if self._is_last:
            self._reducer(self._pair(optimizer)).start()
        super().backward(loss, model, optimizer)

    def _reduce_gradients(self, pair: Trained) -> None:
        """Sums gradients over ranks. One that is None on some ranks counts as zero; one that is None on all stays
        so."""
        self._reducer(pair).finish()

    def discard_gradients(self, optimizer: Optimizer) -> None:
        if (reducer := self._reducers.get(id(self._pair(optimizer)))) is not None:
            reducer.clear()
        super().discard_gradients(optimizer)

    def _reducer(self, pair: Trained) -> Reducer:
        parameters = [p for p in pair.parameters() if p.requires_grad]
        found = self._reducers.get(id(pair))
        if found is None or list(map(id, found.parameters)) != list(map(id, parameters)):
            if found is not None:
                found.close()
            dtype = torch.bfloat16 if self.reduce_dtype == 'bf16' else None
            found = Reducer(parameters, self.bucket_bytes, dtype, self.sums, self.ranks)
            self._reducers[id(pair)] = found
        return found

    def close(self) -> None:
        for reducer in self._reducers.values():
            reducer.close()
        self._reducers.clear()
        super().close()
