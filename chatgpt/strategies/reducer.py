"""`Reducer`: sums of whole gradients over ranks, in buckets that are sent while a backward still computes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from chatgpt.strategies.processes import ProcessGroup, buckets
from chatgpt.strategies.sums import Sums


class Reducer:
    """Sums the gradients of an optimizer's parameters over ranks. The buckets are the same on all ranks, and sent in
    one order, the last parameters first.

    Args:
        dtype: of what is sent; None for that of the gradients.
    """

    def __init__(
        self, parameters: list[Tensor], bucket_bytes: int, dtype: torch.dtype | None, sums: Sums, ranks: ProcessGroup
    ) -> None:
        self.parameters, self.dtype, self.sums, self.ranks = parameters, dtype, sums, ranks
        self.buckets = list(buckets(reversed(parameters), bucket_bytes))
        self._missing: list[int] | None = None
        """numbers of gradients that buckets wait for, from `start` to `flush`"""
        self._sent: list[tuple[Tensor, Any]] = []
        """flat gradients of the first buckets, and the work that sums them"""
        self._used: list[bool] = []
        """for each of their parameters, whether it had a gradient on this rank"""
        # The gradient of a weight in 16 bits is added to its master by an earlier hook of the weight.
        self._hooks = [
            getattr(p, 'master_of', p).register_post_accumulate_grad_hook(partial(self._arrived, i))
            for i, bucket in enumerate(self.buckets)
            for p in bucket
        ]

    def start(self) -> None:
        """Sends buckets from now on, each once a backward has added its gradients."""
        if not self._sent:
            self._missing = [len(bucket) for bucket in self.buckets]

    def _arrived(self, bucket: int, _: Tensor) -> None:
        if self._missing is not None:
            self._missing[bucket] -= 1
            while len(self._sent) < len(self.buckets) and self._missing[len(self._sent)] <= 0:
                self._send()

    @torch.no_grad()
    def _send(self) -> None:
        bucket = self.buckets[len(self._sent)]
        self._used += [p.grad is not None for p in bucket]
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in bucket])
        for parameter in bucket:
            parameter.grad = None
        self._sent.append(self.sums.begin_all_reduce(flat if self.dtype is None else flat.to(self.dtype)))

    def flush(self) -> None:
        """Sends the other buckets if `start` was called. The reducers of two models would otherwise send in different
        orders on ranks that lack a gradient."""
        if self._missing is not None:
            self._send_rest()

    def _send_rest(self) -> None:
        self._missing = None
        while len(self._sent) < len(self.buckets):
            self._send()

    @torch.no_grad()
    def finish(self) -> None:
        """Sets all gradients to their sums over ranks. One that is None on some ranks counts as zero; one that is None
        on all stays so. A collective."""
        ordered = [p for bucket in self.buckets for p in bucket]
        total: list[Tensor | None] = [None] * len(ordered)
        again = 1
        while again:  # for gradients that another backward added after their bucket was sent
            self._send_rest()
            flags = torch.tensor([*self._used, any(p.grad is not None for p in ordered)], dtype=torch.int32)
            *used, again = self.ranks.all_reduce(flags, 'max').tolist()
            for i, (part, flag) in enumerate(zip(self._collect(), used, strict=True)):
                if flag:
                    before = total[i]
                    total[i] = part if before is None else before + part
        for parameter, gradient in zip(ordered, total, strict=True):
            parameter.grad = gradient

    def _collect(self) -> list[Tensor]:
        """Waits for what was sent and returns the sums, in the order of the buckets."""
        sent, self._sent, self._used, found = self._sent, [], [], list[Tensor]()
        for bucket, (flat, work) in zip(self.buckets, sent, strict=False):
            if work is not None:
                with self.ranks.status.waiting():
                    work.wait()
            parts = flat.to(bucket[0].dtype).split([p.numel() for p in bucket])
            found += [part.view(p.shape) for p, part in zip(bucket, parts, strict=True)]
        return found

    def clear(self) -> None:
        """Drops what was sent."""
        self._missing = None
        self._collect()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
