"""Weights and optimizer states of a ColossalAI engine as pieces, and back.

Every piece is read into this rank's own shard, a bounded part at a time, so a checkpoint of any layout fills any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from chatgpt.strategies import states
from chatgpt.strategies.checkpoint.layout import CheckpointMismatch, Piece, TensorReader
from chatgpt.strategies.colossalai.engines import Engine, Shard, TrainedEngine
from chatgpt.strategies.precision import LossScaler

_ADAM_SLOTS = ('exp_avg', 'exp_avg_sq', 'step')


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    """The persistent buffers."""
    return {n: t for n, t in states.named_tensors(module)[0].items() if not isinstance(t, nn.Parameter)}


def model_pieces(engine: Engine) -> Iterator[Piece]:
    """This rank's pieces of all parameters: fp32 masters, and exact values of what is not trained. Buffers are not
    among them."""
    for shard in (*engine.trained_shards(), *engine.untrained_shards()):
        if shard.write_stop > shard.write_start:
            yield _piece(shard, shard.name, shard.data)


def load_model_pieces(engine: Engine, reader: TensorReader, strict: bool) -> None:
    """Fill masters, untrained parameters and buffers, and make the working weights from them. A collective."""
    tensors, aliases = states.named_tensors(engine.module)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    stored = states.match_names(shapes, aliases, reader, strict=strict)
    if isinstance(engine, TrainedEngine):
        engine.discard()
    for shard in engine.trained_shards():
        if shard.name in stored:
            _read_into(shard.data, reader, stored[shard.name], shard.start)
    for parameter in engine.untrained():
        name = engine.names[id(parameter)]
        if name in stored:
            engine.set_untrained(parameter, reader.read(stored[name], 0, parameter.numel()))
    for name, buffer in buffers_of(engine.module).items():
        if name in stored:
            states.copy_from(reader, stored[name], buffer)
    engine.refresh()


def optimizer_pieces(engine: TrainedEngine) -> Iterator[Piece]:
    """This rank's pieces '<parameter>/<slot>'. A number is written by the rank that holds the parameter's first
    element."""
    for shard in engine.trained_shards():
        if shard.state_key is None or shard.write_stop == shard.write_start:
            continue
        for slot, value in engine.inner.state.get(shard.state_key, {}).items():
            name = f'{shard.name}/{slot}'
            if isinstance(value, Tensor) and value.dim() > 0:
                yield _piece(shard, name, value.reshape(-1))
            elif shard.write_start == 0 and isinstance(value, (Tensor, int, float)) and not isinstance(value, bool):
                yield Piece(name, (), 0, 1, torch.as_tensor(value, dtype=torch.float32).reshape(1))


def load_optimizer_pieces(engine: TrainedEngine, members: set[str], reader: TensorReader) -> None:
    """Replace the optimizer's states; `members` are the names of its parameters. Checks all before it changes any."""
    slots = states.slots_by_parameter(reader.names())
    _check_slots(engine, members, slots, reader)
    engine.discard()
    engine.inner.state.clear()
    for shard in engine.trained_shards():
        if shard.state_key is None:
            continue
        for slot in slots.get(shard.name, []):
            name = f'{shard.name}/{slot}'
            if reader.shape(name) == ():
                engine.inner.state[shard.state_key][slot] = _number(engine.inner, shard, reader.read(name, 0, 1))
                continue
            size = max(shard.state_key.numel(), shard.data.numel())  # ZeRO pads to equal shares
            value = torch.zeros(size, dtype=torch.float32, device=shard.data.device)
            _read_into(value[: shard.data.numel()], reader, name, shard.start)
            engine.inner.state[shard.state_key][slot] = value


def _check_slots(
    engine: TrainedEngine, members: set[str], slots: Mapping[str, list[str]], reader: TensorReader
) -> None:
    unexpected = sorted(set(slots) - members)
    if unexpected:
        raise CheckpointMismatch(f'the optimizer state does not fit: parameters unexpected {", ".join(unexpected[:5])}')
    shapes = {engine.names[id(p)]: tuple(p.shape) for p in engine.module.parameters()}
    ours = _is_colossalai(engine.inner)
    for parameter, names in slots.items():
        for slot in names:
            name, shape = f'{parameter}/{slot}', tuple(reader.shape(f'{parameter}/{slot}'))
            if shape not in ((), shapes[parameter]):
                raise CheckpointMismatch(f'{name}: wrong shape: checkpoint {shape}, parameter {shapes[parameter]}')
            if ours and slot not in _ADAM_SLOTS:
                raise CheckpointMismatch(
                    f'{name}: {type(engine.inner).__name__} has no {slot!r}, only {", ".join(_ADAM_SLOTS)}'
                )


def _is_colossalai(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith('colossalai.')


def _number(optimizer: Optimizer, shard: Shard, value: Tensor) -> Any:
    """A scalar slot in the optimizer's own kind: ColossalAI counts steps in an int, torch in a tensor."""
    if _is_colossalai(optimizer):
        return int(value)
    on_device = any(group.get('fused') or group.get('capturable') for group in optimizer.param_groups)
    return value.reshape(()).to(shard.data.device if on_device else 'cpu', copy=True)


def _piece(shard: Shard, name: str, data: Tensor) -> Piece:
    """The part of a shard's data that this process writes."""
    part = data[shard.write_start - shard.start : shard.write_stop - shard.start].detach()
    return Piece(name, shard.shape, shard.write_start, shard.write_stop, part)


def _read_into(out: Tensor, reader: TensorReader, name: str, start: int) -> None:
    """Fill `out` with elements from `start` on, a bounded part at a time."""
    for offset in range(0, out.numel(), states.CHUNK):
        stop = min(offset + states.CHUNK, out.numel())
        out[offset:stop].copy_(reader.read(name, start + offset, start + stop))


class UpstreamScaler(LossScaler):
    """Upstream's dynamic loss scale under the names that other strategies save theirs by."""

    def __init__(self, upstream: Any) -> None:
        self.upstream = upstream

    def to_json(self) -> dict[str, float]:
        scaler = self.upstream
        return {
            'scale': float(scaler.scale.item()),
            'num_finite': scaler._growth_step,
            'num_overflows': scaler._hysteresis_step,
        }

    def from_json(self, state: dict[str, Any]) -> None:
        self.upstream._scale.fill_(float(state['scale']))
        self.upstream._growth_step = int(state['num_finite'])
        self.upstream._hysteresis_step = int(state.get('num_overflows', 0))
