"""Engines: a common interface to models under ColossalAI's LowLevelZero (ZeRO stage 1, 2) and Gemini (`gemini`).

An engine owns a boosted model, and its optimizer if it is trained: backward with accumulation, exact gradient norm,
step, and this rank's parts of parameters and optimizer states as pieces. Upstream rounds fp32 weights to the compute
dtype before it creates the fp32 masters, and keeps no exact copy of frozen weights. An engine sets and keeps the exact
values, so that a run starts and resumes with the same bits as under other strategies.
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

    Example: rank 1 of 2 has the second half of a (3, 4) weight: Shard('w', (3, 4), 6, 12, data, state, 6, 12).
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    data: Tensor
    """shape (stop - start,); shares memory with the fp32 master, or is the exact value of a frozen parameter"""
    state_key: Any
    """key in the optimizer's state; None for a frozen parameter"""
    write_start: int
    write_stop: int
    """the elements that this rank writes: all, or its share of a replicated parameter"""

    def piece(self, name: str, data: Tensor) -> Piece:
        """Returns the piece that this rank writes of `data`, shape (stop - start,)."""
        part = data[self.write_start - self.start : self.write_stop - self.start].detach()
        return Piece(name, self.shape, self.write_start, self.write_stop, part)

    def read_into(self, out: Tensor, reader: TensorReader, name: str) -> None:
        """Fills `out`, shape (stop - start,), in chunks of bounded size."""
        for at in range(0, out.numel(), states.CHUNK):
            end = min(at + states.CHUNK, out.numel())
            out[at:end].copy_(reader.read(name, self.start + at, self.start + end))


def rank_range(numel: int, rank: int, world_size: int) -> tuple[int, int]:
    """Returns [start, stop) of a rank's share of `numel` elements as in ZeRO: equal, the last ones shorter or empty."""
    share = -(-numel // world_size)
    return min(rank * share, numel), min((rank + 1) * share, numel)


class Engine:
    """A frozen boosted model, whole on every rank; the base class of the other engines. Call `fill` after building it.

    Args:
        model, optimizer: as boosted; optimizer None: the model is frozen.
        device: device of forwards.
    """

    def __init__(self, model: nn.Module, optimizer: Any, device: torch.device) -> None:
        self.model, self.optimizer, self.device = model, optimizer, device
        self.module: nn.Module = model.module  # type: ignore[assignment]
        self.names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._kept: dict[str, Tensor] = {}
        """this rank's exact share, on the CPU, of each frozen parameter that upstream rounded"""

    # ------------------------------------------------------------------ location of parameters

    def trained(self) -> list[nn.Parameter]:
        """Returns the parameters with a master, in the model's order."""
        return []

    def trained_shards(self) -> Iterator[Shard]:
        """Yields this rank's part of every trained parameter, except empty ones."""
        return iter(())

    def untrained(self) -> list[nn.Parameter]:
        trained = {id(p) for p in self.trained()}
        return [p for p in self.module.parameters() if id(p) not in trained]

    def untrained_shards(self) -> Iterator[Shard]:
        """Yields this rank's part of every parameter without a master."""
        for parameter in self.untrained():
            name = self.names[id(parameter)]
            start, stop = rank_range(parameter.numel(), self.rank, self.world_size)
            if stop > start:
                data = self._kept[name] if name in self._kept else parameter.detach().reshape(-1)[start:stop]
                yield Shard(name, tuple(parameter.shape), start, stop, data, None, start, stop)

    # ------------------------------------------------------------------ writing values

    @torch.no_grad()
    def fill(self, tensors: Iterable[tuple[str, Tensor]], fresh: bool = False) -> None:
        """Sets exact values from whole tensors by name.

        Args:
            fresh: the model was boosted without values, so also set its weights and buffers.
        """
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
        """Fills masters, frozen parameters and buffers, and sets the working weights from them. Collective."""
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
        """Sets the working weights, which forwards use, from the masters. May be collective."""

    def discard(self) -> None:
        """Clears all gradients; weights do not change."""

    # ------------------------------------------------------------------ reading values

    def buffers(self) -> dict[str, Tensor]:
        """Returns the persistent buffers."""
        return {n: t for n, t in states.named_tensors(self.module)[0].items() if not isinstance(t, nn.Parameter)}

    def pieces(self) -> Iterator[Piece]:
        """Yields this rank's pieces of all parameters: fp32 masters, and exact values of frozen ones; no buffers."""
        for shard in (*self.trained_shards(), *self.untrained_shards()):
            if shard.write_stop > shard.write_start:
                yield shard.piece(shard.name, shard.data)

    @torch.no_grad()
    def gather(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yields every whole parameter in `dtype` on the device, through a buffer of bounded size; each is valid until
        the next one. Collective: exhaust it on every rank."""
        yield from self._gather_trained(dtype)
        for parameter in self.untrained():
            name = self.names[id(parameter)]
            if name in self._kept:
                part = self._kept[name].to(self.device, dtype)
                numel = parameter.numel()
                # from every rank's `rank_range`
                share = -(-numel // self.world_size)
                padded = part.new_zeros(share)
                padded[: part.numel()] = part
                out = part.new_empty(share * self.world_size)
                dist.all_gather_into_tensor(out, padded)
                yield name, out[:numel].view(parameter.shape)
            else:
                yield name, parameter.detach().to(dtype) if parameter.is_floating_point() else parameter.detach()

    def _gather_trained(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        return iter(())

    # ------------------------------------------------------------------ around a forward

    def before_forward(self) -> None:
        """Runs before every forward."""

    def after_forward(self) -> None:
        """Runs after every forward, also after a failed one."""

    def release(self) -> None:
        """Frees weights that a failed forward, or one without a backward, has left gathered."""


class TrainedEngine(Engine, ABC):
    """A boosted (model, optimizer) pair."""

    sync = True
    """True if this micro-batch is the last before the step"""

    @property
    def inner(self) -> Any:
        """The optimizer that the user built."""
        return self.optimizer.optim

    @property
    @abstractmethod
    def _mixin(self) -> Any:
        """Upstream's mixed precision mixin."""

    @property
    def scaler(self) -> Any:
        """Upstream's DynamicGradScaler under fp16, else None."""
        return getattr(self._mixin, 'grad_scaler', None)

    @property
    def loss_scale(self) -> float:
        return float(self.scaler.scale.item()) if self.scaler is not None else 1.0

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of the mean over ranks of `loss`."""

    @abstractmethod
    def norm(self) -> float:
        """Finishes reductions and returns the exact L2 norm, over all ranks, of the unscaled gradients."""

    @abstractmethod
    def step(self, norm: float, max_norm: float | None) -> None:
        """Steps with gradients clipped to `max_norm`, and clears them. `norm` is the finite result of `norm()`."""

    def overflow(self) -> None:
        """Clears the gradients and, in fp16, lowers the loss scale as upstream does."""
        self.discard()
        if self.scaler is not None:
            self.scaler.update(True)

    def _reduced_sqrt(self, square: Tensor) -> float:
        dist.all_reduce(square)
        return math.sqrt(square.item()) / self.loss_scale

    def state_pieces(self) -> Iterator[Piece]:
        """Yields this rank's pieces '<parameter>/<slot>'; numbers on the rank with the parameter's first element."""
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
        """Replaces the optimizer's states, after checking all of them; `members` are the names of its parameters."""
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
    """Upstream's dynamic loss scale, saved under the same names as a `LossScaler`."""

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
    """A trained model under LowLevelZeroOptimizer: whole weights in the compute dtype on every rank, masters and
    optimizer state sharded over ranks."""

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
        # Stage 2 keeps only this rank's share of a gradient, so it must reduce after every micro-batch.
        if self.sync or self.optimizer._partition_grads:
            self.optimizer.backward(loss)
        else:
            with self.optimizer.no_sync():
                self.optimizer.backward(loss)

    def accumulate(self, loss: Tensor) -> None:
        """Adds the gradient of `loss` to those of the working weights, without a reduction over ranks."""
        with self.optimizer.no_sync():
            loss.backward()

    @torch.no_grad()
    def summed_shards(self, parameters: list[Tensor], bucket_numel: int) -> dict[int, Tensor]:
        """Clears the gradients of working weights and returns this rank's part of their sums over ranks, by id."""
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
        """Sets the gradients of the next step."""
        for group, parameters in self.optimizer._working_param_groups.items():
            for parameter in parameters:
                if id(parameter) in shards:
                    store = self.optimizer.pid_to_grad_store[id(parameter)]
                    for _ in range(1 if self.optimizer._partition_grads else self.world_size):  # it indexes by rank
                        store.append_gradients_by_param_id(shards[id(parameter)], group, id(parameter))

    def norm(self) -> float:
        if not self.optimizer._partition_grads and any(p.grad is not None for p in self.trained()):
            self.optimizer._sync_grad()  # gradients of earlier micro-batches, under no_sync, that the last did not use
            if self.device.type == 'cuda':
                torch.cuda.synchronize()  # as upstream's backward does after a reduction on its own stream
        square = torch.zeros((), dtype=torch.float64, device=self.device)
        for group in range(self.optimizer.num_param_groups):
            for store in self.optimizer.pg_to_grad_store.values():
                for gradients in store._grads_of_params.get(group, {}).values():
                    square += torch.linalg.vector_norm(gradients[store._working_index], dtype=torch.float64) ** 2
        return self._reduced_sqrt(square)

    def step(self, norm: float, max_norm: float | None) -> None:
        # Replaces upstream's function, which divides by the loss scale after this step may have raised it.
        scale, mixin = self.loss_scale, self.optimizer.mixed_precision_mixin

        def unscale_and_clip(gradients: Iterable[Tensor], scaled_norm: float) -> None:
            if mixin is not None:
                mixin.get_grad_div_scale()  # marks the gradients as unscaled
            divisor = scale * max(1.0, (scaled_norm / scale + 1e-6) / max_norm) if max_norm else scale
            for gradient in gradients:
                gradient.data.mul_(1.0 / divisor)

        self.optimizer._unscale_and_clip_grads = unscale_and_clip
        self.optimizer.step()
        self.discard()

    def discard(self) -> None:
        self.optimizer.zero_grad()
        self.module.zero_grad(set_to_none=True)


def register_hooks(wrapped: nn.Module, engine: Engine, force_fp32: bool) -> None:
    """Registers the engine's hooks for every forward of a boosted model, and makes its `train` set the inner module.

    Outputs are converted to plain tensors: in Gemini's own tensor class, in-place operations such as `add_` do nothing.
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
