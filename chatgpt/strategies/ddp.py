"""`DDPStrategy`: a whole copy of every model on each process; gradients are summed.

Gradients are summed once per optimizer step, in buckets that depend on the parameters alone, each as soon as the last
backward has computed it. torch's `DistributedDataParallel` rebuilds its buckets after the first step, in the order in
which gradients arrived, so a resumed run would sum in a different order. It also does not sum the gradient of a
parameter that only an earlier micro-batch used. Modules are not wrapped, so all of their methods can be called.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from chatgpt.strategies.memory import MemoryModel, of_numerics
from chatgpt.strategies.pairs import Trained
from chatgpt.strategies.precision import Precision
from chatgpt.strategies.processes import ProcessGroupStrategy, ReduceDtype, check_reduce_dtype
from chatgpt.strategies.reducer import Reducer

BUCKET_BYTES = 32 << 20


def nf4_layers(module: nn.Module) -> list[Any]:
    """Returns the layers with weights in 4 bits."""
    from chatgpt.nn.quantized import NF4Linear

    return [m for m in module.modules() if isinstance(m, NF4Linear)]


class DDPStrategy(ProcessGroupStrategy):
    """Data parallelism. Launch with torchrun. Every rank starts with rank 0's weights.

    Args:
        bucket_bytes: bytes of a bucket of gradients, and so the extra memory of a reduction.
        shard_trunk: keep a part of the 4-bit weights of a shared base (`SharedTrunk`) on each process. A forward and a
            backward gather one layer at a time; `full_model` holds all of them.
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
        shard_trunk: bool = False,
        **numerics: Any,
    ) -> None:
        check_reduce_dtype(reduce_dtype, numerics)
        if shard_trunk and numerics.get('reproducible') is not None:
            raise ValueError('shard_trunk does not go with reproducible: leave one of them out')
        if bucket_bytes < 1:
            raise ValueError(f'bucket_bytes={bucket_bytes} must be positive')
        super().__init__(seed, precision, device=device, timeout_s=timeout_s, **numerics)
        self.bucket_bytes, self.reduce_dtype = bucket_bytes, reduce_dtype
        self.shard_trunk = shard_trunk
        self._reducers: dict[int, Reducer] = {}
        """by id of a pair"""
        self._is_last = False
        """inside the context of a step's last micro-batch"""

    @classmethod
    def memory_model(cls, bucket_bytes: int = BUCKET_BYTES, shard_trunk: bool = False, **options: Any) -> MemoryModel:
        return MemoryModel(bucket_bytes=bucket_bytes, shards_trunk=shard_trunk, **of_numerics(options))

    def _setup_model(self, model: nn.Module, trained: bool) -> nn.Module:
        model = super()._setup_model(model, trained)
        layers = nf4_layers(model) if self.shard_trunk else []
        self.broadcast_weights(model, self.bucket_bytes, {id(m.packed) for m in layers if m.gather is not None})
        for layer in (layer for layer in layers if layer.gather is None):
            whole = layer.packed.reshape(-1)
            part = -(-len(whole) // self.world_size)
            own = whole.new_zeros(part)
            own[: len(whole[self.rank * part :][:part])] = whole[self.rank * part :][:part]
            layer.packed, layer.gather = own, partial(self._gathered, len(whole))
        return model

    def _gathered(self, size: int, part: Tensor) -> Tensor:
        """Returns the packed weight of a layer, shape (size, 1), from the parts of all ranks."""
        whole = part.new_empty(len(part) * self.world_size)
        with self.ranks.status.waiting():
            dist.all_gather_into_tensor(whole, part)
        return whole[:size].view(-1, 1)

    @contextmanager
    def full_model(self, model: nn.Module, *given: Any, **options: Any) -> Iterator[nn.Module]:
        parts = [(m, m.packed, m.gather) for m in nf4_layers(self.unwrap(model)) if m.gather is not None]
        for layer, part, gather in parts:
            layer.packed, layer.gather = gather(part), None
        try:
            with super().full_model(model, *given, **options) as full:
                yield full
        finally:
            for layer, part, gather in parts:
                layer.packed, layer.gather = part, gather

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
