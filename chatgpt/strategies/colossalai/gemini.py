"""Engines for ColossalAI's Gemini (ZeRO stage 3): weights, masters, gradients and states are sharded in chunks."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from chatgpt.strategies.colossalai.engines import Engine, Shard, TrainedEngine, rank_range


class GeminiFrozen(Engine):
    """A GeminiDDP without an optimizer: 16-bit weights sharded in chunks, gathered one chunk at a time in a forward."""

    def _keep(self, name: str, parameter: nn.Parameter, values: Tensor) -> None:
        start, stop = rank_range(values.numel(), self.rank, self.world_size)
        self._kept[name] = values[start:stop].to('cpu', copy=True)

    def _write(self, parameter: nn.Parameter, values: Tensor) -> None:
        chunk = self.model.chunk_manager.get_chunk(parameter)  # type: ignore[operator, union-attr]
        for begin, end, start in _overlap(chunk, parameter):
            chunk.payload[begin:end].copy_(values[start : start + end - begin])
            _invalidate_host_copy(chunk)

    def before_forward(self) -> None:
        clear_eviction_cache(self.model.gemini_manager)

    def after_forward(self) -> None:
        if torch.is_grad_enabled() and self.model.chunk_manager.accessed_chunks:  # type: ignore[union-attr]
            self.model._post_forward()  # type: ignore[operator]

    def release(self) -> None:
        if self.model.chunk_manager.accessed_chunks:  # type: ignore[union-attr]
            self.model._post_forward()  # type: ignore[operator]
            self.model.gemini_manager.reset_attributes()  # type: ignore[operator, union-attr]


class GeminiEngine(TrainedEngine):
    """A trained GeminiDDP: weights, masters and optimizer state sharded over ranks in chunks.

    After a backward a chunk's memory holds its reduced gradient instead of its weights. Before the weights are needed
    again, the gradient is added to an fp32 sum and the weights are restored from the masters; the step adds the sum. So
    micro-batches accumulate exactly, unlike in upstream's accumulation with replicated chunks on two ranks.
    """

    def __init__(self, model: nn.Module, optimizer: Any, device: torch.device) -> None:
        super().__init__(model, optimizer, device)
        self.chunks = list(model.chunk_manager.get_chunks(model.fp16_params))  # type: ignore[operator, union-attr]
        self.sums: list[Tensor] | None = None
        self.pending = False
        """True if the chunks hold a gradient that is not in `sums`"""
        self._recorded: int | None = None
        # After every backward upstream's logger walks the stack for a debug message that it then drops.
        model._logger = logging.getLogger('colossalai')  # type: ignore[assignment]

    @property
    def _manager(self) -> Any:
        return self.model.chunk_manager

    @property
    def _gemini(self) -> Any:
        return self.model.gemini_manager

    @property
    def _mixin(self) -> Any:
        return self.optimizer.mix_precision_mixin

    def trained(self) -> list[nn.Parameter]:
        return list(self.model.fp16_params)  # type: ignore[arg-type]

    def _with_masters(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        return zip(self.trained(), self.model.fp32_params, strict=True)  # type: ignore[arg-type]

    def trained_shards(self) -> Iterator[Shard]:
        fakes = {id(p): self.optimizer.id_to_fake_params.get(i) for i, p in self.optimizer.id_to_real_params.items()}
        for parameter, master in self._with_masters():
            chunk = self._manager.get_chunk(master)
            for begin, end, start in _overlap(chunk, master):
                stop = start + end - begin
                written = start, stop
                if chunk.keep_gathered:
                    written = rank_range(parameter.numel(), self.rank, self.world_size)
                name, key = self.names[id(parameter)], fakes.get(id(parameter))
                yield Shard(name, tuple(parameter.shape), start, stop, chunk.payload[begin:end], key, *written)

    def refresh(self) -> None:
        for chunk in self.chunks:
            chunk.payload.copy_(chunk.paired_chunk.payload)
            _invalidate_host_copy(chunk)

    def _gather_trained(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        masters = {id(master): self.names[id(parameter)] for parameter, master in self._with_masters()}
        for chunk in self.chunks:
            partner = chunk.paired_chunk
            whole = partner.payload.to(self.device, dtype)
            if not partner.is_gathered:
                part, whole = whole, whole.new_empty(partner.chunk_size)
                dist.all_gather_into_tensor(whole, part)
            for master, info in partner.tensors_info.items():
                yield masters[id(master)], whole[info.offset : info.end].view(master.shape)

    def before_forward(self) -> None:
        self._accumulate()
        clear_eviction_cache(self._gemini)
        if not torch.is_grad_enabled() and self._gemini.need_warmup and self._gemini.is_warmup():
            # Placement 'auto' records the order of the first training iteration and refuses inference before it. RLHF
            # scores first, so the forward is allowed, and its records are removed afterwards.
            self._recorded, self._gemini.policy_name = len(self._gemini.compute_list), 'static'

    def after_forward(self) -> None:
        if self._recorded is not None:
            del self._gemini.compute_list[self._recorded :]
            self._recorded, self._gemini.policy_name = None, 'auto'

    def backward(self, loss: Tensor) -> None:
        self._accumulate()
        clear_eviction_cache(self._gemini)
        # In the first iteration placement 'auto' prints statistics.
        with contextlib.redirect_stdout(io.StringIO()) if self._gemini.is_warmup() else contextlib.nullcontext():
            self.optimizer.backward(loss)
        self.pending = True

    def _accumulate(self) -> None:
        if not self.pending:
            return
        if self.sums is None:
            self.sums = [chunk.payload.float() for chunk in self.chunks]
        else:
            for total, chunk in zip(self.sums, self.chunks, strict=True):
                total.add_(chunk.payload)
        self._restore_weights()

    def _restore_weights(self) -> None:
        for chunk in self.chunks:
            chunk.optim_update()
        self.pending = False

    def release(self) -> None:
        if not self.pending and self._manager.accessed_chunks:
            self.model._post_forward()  # type: ignore[operator]
            self._gemini.reset_attributes()

    def norm(self) -> float:
        self.release()
        if self.sums is not None:
            for total, chunk in zip(self.sums, self.chunks, strict=True):
                chunk.payload.copy_(total.add_(chunk.payload) if self.pending else total)
            self.sums, self.pending = None, True
        square = torch.zeros((), dtype=torch.float64, device=self.device)
        if self.pending:
            for chunk in self.chunks:
                if not chunk.keep_gathered or self.rank == 0:  # count a replicated gradient once
                    square += torch.linalg.vector_norm(_gradient(chunk), dtype=torch.float64).to(self.device) ** 2
        return self._reduced_sqrt(square)

    def step(self, norm: float, max_norm: float | None) -> None:
        if not self.pending:
            return
        coefficient = max_norm / (norm + 1e-6) if max_norm else 1.0
        if coefficient < 1:
            # Upstream clips by the optimizer's div_scale, which its CPU code ignores for bf16 gradients.
            for chunk in self.chunks:
                _gradient(chunk).mul_(coefficient)
        self.optimizer.step()
        self.pending = False

    def discard(self) -> None:
        self.release()
        if self.pending:
            self._restore_weights()
        self.sums = None
        self._manager.overflow_counter.zero_()
        self.module.zero_grad(set_to_none=True)


def clear_eviction_cache(manager: Any) -> None:
    """Clears upstream's cache of the chunks that can be evicted at the n-th operation of an iteration.

    Upstream assumes the same operations in every iteration. Log-probs in chunks of rows run more operations on the rank
    with more rows: with the cache, ranks would evict and gather different chunks, and deadlock.
    """
    type(manager)._get_layout_info.cache_clear()


def _overlap(chunk: Any, tensor: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yields the range of this rank's part of a chunk that holds `tensor`, if any: begin and end in the payload, and
    the index of the first element."""
    info = chunk.tensors_info[tensor]
    base, length = (0, chunk.chunk_size) if chunk.is_gathered else (chunk.shard_begin, chunk.shard_size)
    base, length = int(base), int(length)  # upstream's search for a chunk size returns numpy integers
    begin, end = max(0, info.offset - base), min(length, info.end - base)
    if begin < end:
        yield begin, end, begin + base - info.offset


def _invalidate_host_copy(chunk: Any) -> None:
    """Invalidates the pinned host copy of a chunk on the device, after its weights have been written."""
    chunk.cpu_vis_flag = chunk.device_type == 'cpu'


def _gradient(chunk: Any) -> Tensor:
    """Returns the reduced gradient in a chunk, without the padding at its end."""
    return chunk.payload[: chunk.get_valid_length()]
