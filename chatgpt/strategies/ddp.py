"""`DDPStrategy`: a whole copy of every model on each process; gradients are summed.

Gradients are summed once per optimizer step, in buckets whose layout depends on the parameters alone. torch's own
`DistributedDataParallel` lays its buckets out anew after the first step, in the order in which gradients arrived; a
resumed run would then add in another order than the run it continues. It also leaves gradients unsummed for a parameter
that only an earlier micro-batch used. Modules are not wrapped, so any method of theirs can be called. The sum does not
overlap with the backward pass.
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
    """Data parallelism. Launch with torchrun.

    `bucket_bytes` bounds the extra memory of a reduction. Every rank starts from rank 0's weights.
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
        self.take_weights_of_rank_0(model, self.bucket_bytes)
        return model

    def _reduce_gradients(self, pair: Trained) -> None:
        """A parameter without a gradient here counts as zero; one without a gradient anywhere keeps none."""
        parameters = self.fill_gradients([p for p in pair.parameters() if p.requires_grad])
        gradients = [p.grad for p in parameters if p.grad is not None]
        for bucket in buckets(gradients, self.bucket_bytes):
            flat = torch.cat([g.reshape(-1) for g in bucket])
            with self.ranks.whereabouts.waiting():
                flat = self.sums.all_reduced(flat)
            for gradient, values in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                gradient.copy_(values.view(gradient.shape))
