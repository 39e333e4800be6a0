"""One model under ColossalAI's LowLevelZero (ZeRO stage 1, 2), or Gemini (`gemini`), behind one small interface.

An engine owns a boosted model, with its optimizer when it is trained: backward with accumulation, the exact gradient
norm, the step, and where this rank's part of every parameter and optimizer state lives, as pieces and back. Upstream
rounds fp32 weights to the compute dtype before it makes its fp32 masters, and keeps no exact copy of weights that are
not trained. An engine puts the exact values in and keeps them, so a run starts and resumes on the same bits as under
any other strategy.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from chatgpt.strategies import states
from chatgpt.strategies.checkpoint.layout import CheckpointMismatch, Piece, TensorReader
from chatgpt.strategies.precision import LossScaler
from chatgpt.strategies.processes import buckets
from chatgpt.strategies.sums import tree_reduce_scatter

_ADAM_SLOTS = ('exp_avg', 'exp_avg_sq', 'step')


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

    def piece(self, name: str, data: Tensor) -> Piece:
        """What this rank writes of (stop - start,) `data`."""
        part = data[self.write_start - self.start : self.write_stop - self.start].detach()
        return Piece(name, self.shape, self.write_start, self.write_stop, part)

    def read_into(self, out: Tensor, reader: TensorReader, name: str) -> None:
        """Fill `out`, (stop - start,), a bounded part at a time."""
        for at in range(0, out.numel(), states.CHUNK):
            end = min(at + states.CHUNK, out.numel())
            out[at:end].copy_(reader.read(name, self.start + at, self.start + end))


def rank_range(numel: int, rank: int, world_size: int) -> tuple[int, int]:
    """An even cut of `numel` elements, as ZeRO makes it: equal shares, the last ones shorter or empty."""
    share = -(-numel // world_size)
    return min(rank * share, numel), min((rank + 1) * share, numel)


class Engine:
    """A boosted model that is not trained, whole on every rank: the base of the other engines."""

    def __init__(self, model: nn.Module, optimizer: Any, device: torch.device) -> None:
        """`model` and `optimizer` (None: frozen) as boosted, `device` where they compute. `fill` must follow."""
        self.model, self.optimizer, self.device = model, optimizer, device
        self.module: nn.Module = model.module  # type: ignore[assignment]
        self.names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._kept: dict[str, Tensor] = {}
        """this rank's exact share, on the CPU, of each untrained parameter that was rounded"""

    # ------------------------------------------------------------------ which parameters live where

    def trained(self) -> list[nn.Parameter]:
        """The parameters that have a master, in the model's order."""
        return []

    def trained_shards(self) -> Iterator[Shard]:
        """This rank's part of every trained parameter; empty parts are left out."""
        return iter(())

    def untrained(self) -> list[nn.Parameter]:
        trained = {id(p) for p in self.trained()}
        return [p for p in self.module.parameters() if id(p) not in trained]

    def untrained_shards(self) -> Iterator[Shard]:
        """This rank's part of every parameter without a master."""
        for parameter in self.untrained():
            name = self.names[id(parameter)]
            start, stop = rank_range(parameter.numel(), self.rank, self.world_size)
            if stop > start:
                data = self._kept[name] if name in self._kept else parameter.detach().reshape(-1)[start:stop]
                yield Shard(name, tuple(parameter.shape), start, stop, data, None, start, stop)

    # ------------------------------------------------------------------ values in

    @torch.no_grad()
    def fill(self, tensors: Iterable[tuple[str, Tensor]], fresh: bool = False) -> None:
        """Take exact values of whole tensors by name. `fresh`: the model was boosted without them, so set its weights
        and buffers too."""
        shards = {shard.name: shard for shard in self.trained_shards()}
        untrained = {self.names[id(p)]: p for p in self.untrained()}
        buffers = dict(self.module.named_buffers())
        for name, tensor in tensors:
            flat = tensor.detach().reshape(-1)
            if name in shards:
                shards[name].data.copy_(flat[shards[name].start : shards[name].stop])
            elif name in untrained:
                self._keep(name, untrained[name], flat)
                if fresh:
                    self._write(untrained[name], flat)
            elif fresh and name in buffers:
                buffers[name].copy_(tensor)
        if fresh:
            self.refresh()

    @torch.no_grad()
    def load_pieces(self, reader: TensorReader, strict: bool) -> None:
        """Fill masters, untrained parameters and buffers, and make the working weights from them. A collective."""
        tensors, aliases = states.named_tensors(self.module)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        stored = states.match_names(shapes, aliases, reader, strict=strict)
        self.discard()
        for shard in self.trained_shards():
            if shard.name in stored:
                shard.read_into(shard.data, reader, stored[shard.name])
        for parameter in self.untrained():
            name = self.names[id(parameter)]
            if name in stored:
                values = reader.read(stored[name], 0, parameter.numel())
                if name in self._kept:
                    start, stop = rank_range(values.numel(), self.rank, self.world_size)
                    self._kept[name].copy_(values[start:stop])
                self._write(parameter, values)
        for name, buffer in self.buffers().items():
            if name in stored:
                states.copy_from(reader, stored[name], buffer)
        self.refresh()

    def _keep(self, name: str, parameter: nn.Parameter, values: Tensor) -> None:
        if values.dtype != parameter.dtype:
            start, stop = rank_range(values.numel(), self.rank, self.world_size)
            self._kept[name] = values[start:stop].to('cpu', copy=True)

    def _write(self, parameter: nn.Parameter, values: Tensor) -> None:
        parameter.copy_(values.view(parameter.shape))

    def refresh(self) -> None:
        """Make the weights that the forward uses from the masters. May be a collective."""

    def discard(self) -> None:
        """Forget all gradients; the weights are as before."""

    # ------------------------------------------------------------------ values out

    def buffers(self) -> dict[str, Tensor]:
        """The persistent ones."""
        return {n: t for n, t in states.named_tensors(self.module)[0].items() if not isinstance(t, nn.Parameter)}

    def pieces(self) -> Iterator[Piece]:
        """This rank's of all parameters: fp32 masters, and exact values of what is not trained. Buffers are not among
        them."""
        for shard in (*self.trained_shards(), *self.untrained_shards()):
            if shard.write_stop > shard.write_start:
                yield shard.piece(shard.name, shard.data)

    @torch.no_grad()
    def gather(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Every parameter whole, in `dtype`, on the device, one bounded buffer at a time. A collective: exhaust it on
        every rank. A tensor is valid until the next one is asked for."""
        yield from self._gather_trained(dtype)
        for parameter in self.untrained():
            name = self.names[id(parameter)]
            if name in self._kept:
                part = self._kept[name].to(self.device, dtype)
                yield name, self._gather_flat(part, parameter.numel()).view(parameter.shape)
            else:
                yield name, parameter.detach().to(dtype) if parameter.is_floating_point() else parameter.detach()

    def _gather_trained(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        return iter(())

    def _gather_flat(self, part: Tensor, numel: int) -> Tensor:
        """(numel,) from every rank's `rank_range`."""
        share = -(-numel // self.world_size)
        padded = part.new_zeros(share)
        padded[: part.numel()] = part
        out = part.new_empty(share * self.world_size)
        dist.all_gather_into_tensor(out, padded)
        return out[:numel]

    # ------------------------------------------------------------------ around a forward

    def before_forward(self) -> None:
        """The weights are about to be used."""

    def after_forward(self) -> None:
        """Also after a forward that failed."""

    def release(self) -> None:
        """Give back what a forward without a backward, or one that failed, has left gathered."""


class TrainedEngine(Engine, ABC):
    """A boosted (model, optimizer) pair."""

    sync = True
    """False: this micro-batch is not the last before the step"""

    @property
    def inner(self) -> Any:
        """The optimizer that the user built."""
        return self.optimizer.optim

    @property
    @abstractmethod
    def _mixin(self) -> Any:
        """Upstream's mixed precision helper."""

    @property
    def scaler(self) -> Any:
        """Upstream's DynamicGradScaler under fp16, else None."""
        return getattr(self._mixin, 'grad_scaler', None)

    @property
    def loss_scale(self) -> float:
        return float(self.scaler.scale.item()) if self.scaler is not None else 1.0

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Add the gradient of the mean over ranks of `loss`."""

    @abstractmethod
    def norm(self) -> float:
        """Exact L2 norm, over all ranks, of the gradients without the loss scale. Finishes outstanding reductions."""

    @abstractmethod
    def step(self, norm: float, max_norm: float | None) -> None:
        """Step with the gradients clipped to `max_norm`, and clear them. `norm` is what `norm()` returned, and
        finite."""

    def overflow(self) -> None:
        """Forget the gradients and, under fp16, lower the loss scale as upstream does."""
        self.discard()
        if self.scaler is not None:
            self.scaler.update(True)

    def _reduced_sqrt(self, square: Tensor) -> float:
        dist.all_reduce(square)
        return math.sqrt(square.item()) / self.loss_scale

    def state_pieces(self) -> Iterator[Piece]:
        """This rank's pieces '<parameter>/<slot>'. A number is written by the rank that holds the parameter's first
        element."""
        for shard in self.trained_shards():
            if shard.state_key is None or shard.write_stop == shard.write_start:
                continue
            for slot, value in self.inner.state.get(shard.state_key, {}).items():
                name = f'{shard.name}/{slot}'
                if isinstance(value, Tensor) and value.dim() > 0:
                    yield shard.piece(name, value.reshape(-1))
                elif shard.write_start == 0 and isinstance(value, (Tensor, int, float)) and not isinstance(value, bool):
                    yield Piece(name, (), 0, 1, torch.as_tensor(value, dtype=torch.float32).reshape(1))

    def load_state(self, members: set[str], reader: TensorReader) -> None:
        """Replace the optimizer's states; `members` are the names of its parameters. Checks all before it changes
        any."""
        shapes = {name: tuple(p.shape) for name, p in self.module.named_parameters() if name in members}
        slots = states.checked_slots(reader, shapes, None)
        upstream = type(self.inner).__module__.startswith('colossalai.')
        for name, slot in ((name, slot) for name, found in slots.items() for slot in found if upstream):
            if slot not in _ADAM_SLOTS:
                raise CheckpointMismatch(
                    f'{name}/{slot}: {type(self.inner).__name__} has no {slot!r}, only {", ".join(_ADAM_SLOTS)}'
                )
        on_device = any(group.get('fused') or group.get('capturable') for group in self.inner.param_groups)
        self.discard()
        self.inner.state.clear()
        for shard in (s for s in self.trained_shards() if s.state_key is not None):
            state, device = self.inner.state[shard.state_key], shard.data.device
            for slot in slots.get(shard.name, []):
                name = f'{shard.name}/{slot}'
                if reader.shape(name) == ():  # ColossalAI counts steps in an int, torch in a tensor
                    value = reader.read(name, 0, 1)
                    number = value.reshape(()).to(device if on_device else 'cpu', copy=True)
                    state[slot] = int(value) if upstream else number
                    continue
                size = max(shard.state_key.numel(), shard.data.numel())  # ZeRO pads to equal shares
                state[slot] = torch.zeros(size, dtype=torch.float32, device=device)
                shard.read_into(state[slot][: shard.data.numel()], reader, name)


class UpstreamScaler(LossScaler):
    """Upstream's dynamic loss scale under the names that other strategies save theirs by."""

    def __init__(self, upstream: Any) -> None:
        self.upstream = upstream

    def to_json(self) -> dict[str, float]:
        scaler = self.upstream
        counts = {'num_finite': scaler._growth_step, 'num_overflows': scaler._hysteresis_step}
        return {'scale': float(scaler.scale.item()), **counts}

    def from_json(self, state: dict[str, Any]) -> None:
        self.upstream._scale.fill_(float(state['scale']))
        self.upstream._growth_step = int(state['num_finite'])
        self.upstream._hysteresis_step = int(state.get('num_overflows', 0))


class ZeroEngine(TrainedEngine):
    """LowLevelZeroOptimizer: full weights in the compute dtype on every rank, masters and optimizer state sharded over
    ranks."""

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
                name, data = self.names[id(parameter)], master.detach()[: stop - start]
                yield Shard(name, tuple(parameter.shape), start, stop, data, master, start, stop)

    @torch.no_grad()
    def refresh(self) -> None:
        for parameter in self.trained():
            master = self.optimizer.working_to_master_param[id(parameter)]
            padded = self.optimizer._working_param_to_padded_working_param[parameter]
            dist.all_gather_into_tensor(padded, master.to(parameter.device, parameter.dtype))
            parameter.copy_(padded[: parameter.numel()].view(parameter.shape))

    def _gather_trained(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        for parameter in self.trained():
            name = self.names[id(parameter)]
            if dtype == parameter.dtype:
                yield name, parameter.detach()
                continue
            master = self.optimizer.working_to_master_param[id(parameter)].to(parameter.device, dtype)
            whole = master.new_empty(master.numel() * self.world_size)
            dist.all_gather_into_tensor(whole, master)
            yield name, whole[: parameter.numel()].view(parameter.shape)

    def backward(self, loss: Tensor) -> None:
        # Stage 2 keeps only its share of a gradient, so it must reduce after every micro-batch.
        if self.sync or self.optimizer._partition_grads:
            self.optimizer.backward(loss)
        else:
            with self.optimizer.no_sync():
                self.optimizer.backward(loss)

    def accumulate(self, loss: Tensor) -> None:
        """Add the gradient of `loss` to those of the working weights, and leave ranks alone."""
        with self.optimizer.no_sync():
            loss.backward()

    @torch.no_grad()
    def summed_shards(self, parameters: list[Tensor], bucket_numel: int) -> dict[int, Tensor]:
        """Takes the gradients of working weights: this rank's part of their sums over ranks, by the parameters' ids."""
        shards: dict[int, Tensor] = {}
        for bucket in buckets(parameters, 4 * bucket_numel):
            sizes = [self.optimizer.working_to_master_param[id(p)].numel() for p in bucket]
            rows = []
            for parameter, size in zip(bucket, sizes, strict=True):
                assert parameter.grad is not None
                flat, parameter.grad = parameter.grad.reshape(-1), None
                rows.append(nn.functional.pad(flat, (0, size * self.world_size - flat.numel())).view(-1, size))
            part = tree_reduce_scatter(torch.cat(rows, dim=1).view(-1))
            shards |= zip(map(id, bucket), part.split(sizes), strict=True)
        return shards

    def set_shards(self, shards: dict[int, Tensor]) -> None:
        """Makes them the gradients that the next step takes."""
        for group, parameters in self.optimizer._working_param_groups.items():
            for parameter in parameters:
                if id(parameter) in shards:
                    store = self.optimizer.pid_to_grad_store[id(parameter)]
                    for _ in range(1 if self.optimizer._partition_grads else self.world_size):  # it reads its rank's
                        store.append_gradients_by_param_id(shards[id(parameter)], group, id(parameter))

    def norm(self) -> float:
        if not self.optimizer._partition_grads and any(p.grad is not None for p in self.trained()):
            self.optimizer._sync_grad()  # what earlier micro-batches left under no_sync and the last one did not touch
            if self.device.type == 'cuda':
                torch.cuda.synchronize()  # as upstream's backward does after a reduction on its own stream
        square = torch.zeros((), dtype=torch.float64, device=self.device)
        for group in range(self.optimizer.num_param_groups):
            for store in self.optimizer.pg_to_grad_store.values():
                for gradients in store._grads_of_params.get(group, {}).values():
                    square += torch.linalg.vector_norm(gradients[store._working_index], dtype=torch.float64) ** 2
        return self._reduced_sqrt(square)

    def step(self, norm: float, max_norm: float | None) -> None:
        # In place of upstream's own, which divides by the scale that this step may just have raised.
        scale, mixin = self.loss_scale, self.optimizer.mixed_precision_mixin

        def unscale_and_clip(gradients: Iterable[Tensor], scaled_norm: float) -> None:
            if mixin is not None:
                mixin.get_grad_div_scale()  # which notes that it is done
            divisor = scale * max(1.0, (scaled_norm / scale + 1e-6) / max_norm) if max_norm else scale
            for gradient in gradients:
                gradient.data.mul_(1.0 / divisor)

        self.optimizer._unscale_and_clip_grads = unscale_and_clip
        self.optimizer.step()
        self.discard()

    def discard(self) -> None:
        self.optimizer.zero_grad()
        self.module.zero_grad(set_to_none=True)


def wire(wrapped: nn.Module, engine: Engine, force_fp32: bool) -> None:
    """Hooks around every forward of a boosted model, and a `train` that reaches the module inside.

    Gemini returns a tensor class of its own, which turns in-place operations such as `add_` into ones that change
    nothing.
    """

    def before(module: nn.Module, args: Any) -> None:
        engine.before_forward()

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        engine.after_forward()
        return tree_map(functools.partial(_plain, force_fp32=force_fp32), output)

    def train(module: Any, mode: bool = True) -> nn.Module:
        module.training = mode
        module.module.train(mode)
        return module

    wrapped.register_forward_pre_hook(before)
    wrapped.register_forward_hook(after, always_call=True)
    wrapped.train = MethodType(train, wrapped)  # type: ignore[method-assign]


def _plain(value: Any, force_fp32: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    if type(value) is not Tensor:
        with torch._C.DisableTorchFunction():
            value = value.as_subclass(Tensor)
    return value.float() if force_fp32 and value.is_floating_point() else value
