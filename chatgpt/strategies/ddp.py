"""`DDPStrategy`: a whole copy of every model on each process; gradients are summed.

Gradients are summed once per optimizer step, in buckets that depend on the parameters alone. torch's
`DistributedDataParallel` rebuilds its buckets after the first step, in the order in which gradients arrived, so a
resumed run would sum in a different order. It also does not sum the gradient of a parameter that only an earlier
micro-batch used. Modules are not wrapped, so all of their methods can be called. The sum follows the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from chatgpt.strategies.memory import MemoryModel, of_numerics
from chatgpt.strategies.pairs import Trained
from chatgpt.strategies.precision import Precision
from chatgpt.strategies.processes import ProcessGroupStrategy, buckets

BUCKET_BYTES = 32 << 20


class DDPStrategy(ProcessGroupStrategy):
    """Data parallelism. Launch with torchrun. Every rank starts with rank 0's weights.

    Args:
        bucket_bytes: bytes of a bucket of gradients, and so the extra memory of a reduction.
    """

    def __init__(
        self,
        seed: int = 42,
        precision: Precision = 'auto',
        *,
        device: str | torch.device | None = None,
        timeout_s: float = 1800.0,
        bucket_bytes: int = BUCKET_BYTES,
        **numerics: Any,
    ) -> None:
        if bucket_bytes < 1:
            raise ValueError(f'bucket_bytes={bucket_bytes} must be positive')
        super().__init__(seed, precision, device=device, timeout_s=timeout_s, **numerics)
        self.bucket_bytes = bucket_bytes

    @classmethod
    def memory_model(cls, bucket_bytes: int = BUCKET_BYTES, **options: Any) -> MemoryModel:
        return MemoryModel(bucket_bytes=bucket_bytes, **of_numerics(options))

    def _setup_model(self, model: nn.Module, trained: bool) -> nn.Module:
        model = super()._setup_model(model, trained)
        self.broadcast_weights(model, self.bucket_bytes)
        return model

    def _reduce_gradients(self, pair: Trained) -> None:
        """Sums gradients over ranks. One that is None on some ranks counts as zero; one that is None on all stays
        so."""
        parameters = self.fill_gradients([p for p in pair.parameters() if p.requires_grad])
        gradients = [p.grad for p in parameters if p.grad is not None]
        for bucket in buckets(gradients, self.bucket_bytes):
            flat = torch.cat([g.reshape(-1) for g in bucket])
            with self.ranks.status.waiting():
                flat = self.sums.all_reduced(flat)
            for gradient, values in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                gradient.copy_(values.view(gradient.shape))
