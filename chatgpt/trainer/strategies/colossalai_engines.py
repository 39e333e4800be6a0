"""One trained model under ColossalAI's LowLevelZero (ZeRO stage 1, 2) or Gemini (stage 3), behind one small interface.

An engine owns a boosted (model, optimizer) pair: backward with accumulation, the exact gradient norm, the step, and where this
rank's part of every parameter and optimizer state lives. Upstream rounds fp32 weights to the compute dtype before it makes its
fp32 masters; an engine puts the exact values back, so a run starts and resumes on the same bits as any other strategy.

Left out: options and their checks, files and names of checkpoints (`colossalai`), running without CUDA (`colossalai_cpu`).
colossalai is never imported here: the boosted objects are handed in.
"""

from __future__ import annotations

import contextlib
import io
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass
class Shard:
    """This rank's elements [start, stop) of one parameter.

    Example: rank 1 of 2 holds the second half of a (3, 4) weight: Shard('w', (3, 4), 6, 12, data, state, 6, 12).
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    data: Tensor
    """(stop - start,), shares memory with the fp32 master (or, for an untrained parameter, is the exact value)"""
    state_key: Any
    """key into the optimizer's state; None for a parameter that is not trained"""
    write_start: int
    write_stop: int
    """the part that this rank writes: all of it, or its share of a replicated one"""


def rank_range(numel: int, rank: int, world_size: int) -> tuple[int, int]:
    """An even cut of `numel` elements, as ZeRO makes it: equal shares, the last ones shorter or empty."""
    share = -(-numel // world_size)
    return min(rank * share, numel), min((rank + 1) * share, numel)


class Engine(ABC):
    """A boosted model with its optimizer."""

    def __init__(self, model: nn.Module, optimizer: Any, names: Mapping[int, str], originals: Mapping[str, Tensor]) -> None:
        """`model` and `optimizer` as boosted; `names` by parameter id; `originals` the weights before boosting, by name."""
        self.model, self.optimizer, self.names = model, optimizer, names
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.module: nn.Module = model.module  # type: ignore[assignment]
        self.device = next((p.device for p in self.module.parameters()), torch.device('cpu'))
        self._untrained = self._keep_untrained(originals)
        with torch.no_grad():
            for shard in self.trained_shards():
                shard.data.copy_(originals[shard.name].reshape(-1)[shard.start : shard.stop])

    def _keep_untrained(self, originals: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's exact share of every parameter that boosting rounded and that has no master: {name: (n,) on CPU}."""
        kept = {}
        for parameter in self.untrained():
            original = originals[self.names[id(parameter)]]
            if original.dtype != parameter.dtype:
                start, stop = rank_range(original.numel(), self.rank, self.world_size)
                kept[self.names[id(parameter)]] = original.reshape(-1)[start:stop].to('cpu', copy=True)
        return kept

    @property
    def inner(self) -> Any:
        """The optimizer that the user built."""
        return self.optimizer.optim

    @abstractmethod
    def trained(self) -> list[nn.Parameter]:
        """The parameters that have a master, in the model's order."""

    @abstractmethod
    def trained_shards(self) -> Iterator[Shard]:
        """This rank's part of every trained parameter; empty parts are left out."""

    @abstractmethod
    def refresh(self) -> None:
        """Make the weights that the forward uses from the masters."""

    @abstractmethod
    def gather(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Every trained parameter whole, in `dtype`, on the device, one bounded buffer at a time. A collective.

        A tensor is valid until the next one is asked for.
        """

    @abstractmethod
    def backward(self, loss: Tensor, sync: bool = True) -> None:
        """Add the gradient of the mean over ranks of `loss`."""

    @abstractmethod
    def norm(self) -> float:
        """Exact L2 norm, over all ranks, of the gradients without the loss scale. Finishes outstanding reductions."""

    @abstractmethod
    def step(self, norm: float, max_norm: float | None) -> None:
        """Step with the gradients clipped to `max_norm`, and clear them. `norm` is what `norm()` returned, and finite."""

    @abstractmethod
    def discard(self) -> None:
        """Forget all gradients; the weights are as before."""

    @property
    def scaler(self) -> Any:
        """Upstream's DynamicGradScaler under fp16, else None."""
        return getattr(self._mixin, 'grad_scaler', None)

    @property
    @abstractmethod
    def _mixin(self) -> Any: ...

    @property
    def loss_scale(self) -> float:
        return float(self.scaler.scale.item()) if self.scaler is not None else 1.0

    def overflow(self) -> None:
        """Forget the gradients and, under fp16, lower the loss scale as upstream does."""
        self.discard()
        if self.scaler is not None:
            self.scaler.update(True)

    def untrained(self) -> list[nn.Parameter]:
        trained = {id(p) for p in self.trained()}
        return [p for p in self.module.parameters() if id(p) not in trained]

    def untrained_shards(self) -> Iterator[Shard]:
        """This rank's part of every parameter without a master."""
        for parameter in self.untrained():
            name = self.names[id(parameter)]
            start, stop = rank_range(parameter.numel(), self.rank, self.world_size)
            if stop > start:
                data = self._untrained.get(name)
                data = parameter.detach().reshape(-1)[start:stop] if data is None else data
                yield Shard(name, tuple(parameter.shape), start, stop, data, None, start, stop)

    def shards(self) -> Iterator[Shard]:
        yield from self.trained_shards()
        yield from self.untrained_shards()

    def set_untrained(self, name: str, parameter: nn.Parameter, values: Tensor) -> None:
        """Set a whole parameter that has no master; `values` is exact and flat."""
        with torch.no_grad():
            parameter.copy_(values.view(parameter.shape))
            if name in self._untrained:
                start, stop = rank_range(values.numel(), self.rank, self.world_size)
                self._untrained[name].copy_(values[start:stop])

    def gather_untrained(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Every parameter without a master whole, in `dtype`, from its exact values. A collective."""
        for parameter in self.untrained():
            name = self.names[id(parameter)]
            kept = self._untrained.get(name)
            if kept is None or dtype == parameter.dtype:
                yield name, parameter.detach().to(dtype)
            else:
                yield name, self._gather_flat(kept.to(self.device, dtype), parameter.numel()).view(parameter.shape)

    def _gather_flat(self, part: Tensor, numel: int) -> Tensor:
        """(numel,) from every rank's `rank_range`."""
        share = -(-numel // self.world_size)
        padded = part.new_zeros(share)
        padded[: part.numel()] = part
        out = part.new_empty(share * self.world_size)
        dist.all_gather_into_tensor(out, padded)
        return out[:numel]

    def _reduced_sqrt(self, square: Tensor) -> float:
        dist.all_reduce(square)
        return math.sqrt(square.item()) / self.loss_scale


class ZeroEngine(Engine):
    """LowLevelZeroOptimizer: full weights in the compute dtype on every rank, masters and optimizer state cut over ranks."""

    def trained(self) -> list[nn.Parameter]:
        return [p for p in self.module.parameters() if id(p) in self.optimizer.working_to_master_param]

    @property
    def _mixin(self) -> Any:
        return self.optimizer.mixed_precision_mixin

    def trained_shards(self) -> Iterator[Shard]:
        for parameter in self.trained():
            master = self.optimizer.working_to_master_param[id(parameter)]
            start, stop = rank_range(parameter.numel(), self.rank, self.world_size)
            if stop > start:
                name = self.names[id(parameter)]
                yield Shard(name, tuple(parameter.shape), start, stop, master.detach()[: stop - start], master, start, stop)

    def refresh(self) -> None:
        with torch.no_grad():
            for parameter in self.trained():
                master = self.optimizer.working_to_master_param[id(parameter)]
                padded = self.optimizer._working_param_to_padded_working_param[parameter]
                dist.all_gather_into_tensor(padded, master.to(parameter.device, parameter.dtype))
                parameter.copy_(padded[: parameter.numel()].view(parameter.shape))

    def gather(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        for parameter in self.trained():
            name = self.names[id(parameter)]
            if dtype == parameter.dtype:
                yield name, parameter.detach()
                continue
            master = self.optimizer.working_to_master_param[id(parameter)].to(parameter.device, dtype)
            whole = master.new_empty(master.numel() * self.world_size)
            dist.all_gather_into_tensor(whole, master)
            yield name, whole[: parameter.numel()].view(parameter.shape)

    def backward(self, loss: Tensor, sync: bool = True) -> None:
        # Stage 2 keeps only its share of a gradient, so it must reduce after every micro-batch.
        if sync or self.optimizer._partition_grads:
            self.optimizer.backward(loss)
        else:
            with self.optimizer.no_sync():
                self.optimizer.backward(loss)

    def norm(self) -> float:
        if not self.optimizer._partition_grads and any(p.grad is not None for p in self.trained()):
            self.optimizer._sync_grad()  # what earlier micro-batches left under no_sync and the last one did not touch
            if self.device.type == 'cuda':
                torch.cuda.synchronize()  # as upstream's backward does after a reduction on its own stream
        square = torch.zeros((), dtype=torch.float64, device=self.device)
        for group in range(self.optimizer.num_param_groups):
            for gradient in self.optimizer.get_working_grads_by_group_id(group):
                square += torch.linalg.vector_norm(gradient, dtype=torch.float64) ** 2
        return self._reduced_sqrt(square)

    def step(self, norm: float, max_norm: float | None) -> None:
        self.optimizer._clip_grad_norm = max_norm or 0.0  # upstream clips the fp32 gradients as it unscales them
        self.optimizer.step()
        self.discard()

    def discard(self) -> None:
        self.optimizer.zero_grad()
        self.module.zero_grad(set_to_none=True)


class GeminiEngine(Engine):
    """GeminiDDP: weights, masters and optimizer state cut over ranks in chunks.

    After a backward a chunk's memory holds its reduced gradient instead of its weights. Before anything else needs the
    weights, that gradient is added to an fp32 sum and the weights are made again from the masters; the step adds the sum.
    So micro-batches accumulate exactly, which upstream's own accumulation does not do for replicated chunks on two ranks.
    """

    def __init__(self, model: nn.Module, optimizer: Any, names: Mapping[int, str], originals: Mapping[str, Tensor]) -> None:
        super().__init__(model, optimizer, names, originals)
        self.chunks = list(model.chunk_manager.get_chunks(model.fp16_params))  # type: ignore[operator, union-attr]
        self.sums: list[Tensor] | None = None
        self.pending = False
        """the chunks hold a gradient that belongs to no sum yet"""

    def trained(self) -> list[nn.Parameter]:
        return list(self.model.fp16_params)  # type: ignore[arg-type]

    @property
    def _mixin(self) -> Any:
        return self.optimizer.mix_precision_mixin

    @property
    def _manager(self) -> Any:
        return self.model.chunk_manager

    def trained_shards(self) -> Iterator[Shard]:
        fakes = {id(p): self.optimizer.id_to_fake_params.get(i) for i, p in self.optimizer.id_to_real_params.items()}
        for parameter, master in zip(self.model.fp16_params, self.model.fp32_params, strict=True):  # type: ignore[arg-type]
            chunk = self._manager.get_chunk(master)
            info, numel = chunk.tensors_info[master], parameter.numel()
            base = 0 if chunk.keep_gathered else chunk.shard_begin
            length = chunk.chunk_size if chunk.keep_gathered else chunk.shard_size
            begin, end = max(0, info.offset - base), min(length, info.end - base)
            if begin >= end:
                continue
            start = begin + base - info.offset
            stop = start + end - begin
            written = rank_range(numel, self.rank, self.world_size) if chunk.keep_gathered else (start, stop)
            data = chunk.payload[begin:end]
            yield Shard(self.names[id(parameter)], tuple(parameter.shape), start, stop, data, fakes.get(id(parameter)), *written)

    def refresh(self) -> None:
        for chunk in self.chunks:
            chunk.payload.copy_(chunk.paired_chunk.payload)
            chunk.cpu_vis_flag = chunk.device_type == 'cpu'  # a pinned host copy of a chunk on the device is now out of date

    def gather(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        masters = {id(m): self.names[id(p)] for p, m in zip(self.trained(), self.model.fp32_params, strict=True)}  # type: ignore[arg-type]
        for chunk in self.chunks:
            partner = chunk.paired_chunk
            if partner.is_gathered:
                whole = partner.payload.to(dtype)
            else:
                part = partner.payload.to(self.device, dtype)
                whole = part.new_empty(partner.chunk_size)
                dist.all_gather_into_tensor(whole, part)
            for master, info in partner.tensors_info.items():
                yield masters[id(master)], whole[info.offset : info.end].view(master.shape)

    def before_forward(self) -> None:
        """The weights are about to be used."""
        if self.pending:
            self._set_aside()

    def backward(self, loss: Tensor, sync: bool = True) -> None:
        self.before_forward()
        # In its first iteration placement 'auto' prints a line of statistics.
        with contextlib.redirect_stdout(io.StringIO()) if self.model.gemini_manager.is_warmup() else contextlib.nullcontext():  # type: ignore[operator, union-attr]
            self.optimizer.backward(loss)
        self.pending = True

    def _set_aside(self) -> None:
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

    def _gradients(self) -> Iterator[tuple[Any, Tensor]]:
        for chunk in self.chunks:
            yield chunk, chunk.payload[: chunk.get_valid_length()]

    def _release(self) -> None:
        """Give back what a forward without a backward left gathered."""
        if not self.pending and self._manager.accessed_chunks:
            self.model._post_forward()  # type: ignore[operator]
            self.model.gemini_manager.reset_attributes()  # type: ignore[operator, union-attr]

    def norm(self) -> float:
        self._release()
        if self.sums is not None:
            for total, chunk in zip(self.sums, self.chunks, strict=True):
                chunk.payload.copy_(total.add_(chunk.payload) if self.pending else total)
            self.sums, self.pending = None, True
        square = torch.zeros((), dtype=torch.float64, device=self.device)
        if self.pending:
            for chunk, gradient in self._gradients():
                if not chunk.keep_gathered or self.rank == 0:  # a replicated gradient is the same on every rank
                    square += torch.linalg.vector_norm(gradient, dtype=torch.float64).to(self.device) ** 2
        return self._reduced_sqrt(square)

    def step(self, norm: float, max_norm: float | None) -> None:
        if not self.pending:
            return
        coefficient = max_norm / (norm + 1e-6) if max_norm else 1.0
        if coefficient < 1:
            # Upstream clips through the optimizer's div_scale, which its CPU path ignores for bf16 gradients.
            for _, gradient in self._gradients():
                gradient.mul_(coefficient)
        self.optimizer.step()
        self.pending = False

    def discard(self) -> None:
        self._release()
        if self.pending:
            self._restore_weights()
        self.sums = None
        self._manager.overflow_counter.zero_()
        self.module.zero_grad(set_to_none=True)
