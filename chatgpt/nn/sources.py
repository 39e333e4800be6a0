"""Where a module's first weights come from, and how to get them one tensor at a time.

A model built on the meta device has shapes and no numbers. It carries a `WeightsSource`: a folder or hub name with
weight files, or the seed of a fresh model. `initial_tensors` yields its tensors by name, holding no more than one
transformer block at a time, so that a sharded strategy can fill its shards. A fresh model's numbers come from (seed,
block name), so they are the same whether the whole model is built at once or one block after another.

Left out: deciding who keeps which shard.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as hf_init

from chatgpt.nn.peft_format import MergedAdapter
from chatgpt.nn.stored import StoredTensors
from chatgpt.nn.unfit import check_finite, check_fit, not_tied, open_weights

FILES = ('model.safetensors', 'pytorch_model.bin')
"""of a whole model, best first; with `.index.json` behind it the list of its shards"""


@dataclass(frozen=True, kw_only=True)
class WeightsSource:
    """The record that a loaded model carries as `weights_source`, and that `deepcopy` keeps."""

    kind: Literal['pretrained', 'config']
    path: str = ''
    """folder or hub name, when pretrained"""
    seed: int = 0
    """of a fresh model's weights; also of what a pretrained one lacks, such as adapters"""
    revision: str | None = None
    subfolder: str = ''
    adapter: str = ''
    """folder of a PEFT adapter that is added to the weights as they are read"""
    prefix: str = ''
    """of the names in the model that was first built: a trunk taken out of a causal LM keeps that model's draws"""
    cache_dir: str | None = None
    local_files_only: bool = False
    dtype: torch.dtype | None = None
    """of most numbers in the files; in which a trained model is saved"""
    wide: frozenset[str] = frozenset()
    """names in the files of tensors in a wider dtype than that"""


# --- seeds ----------------------------------------------------------------------------------------------------------


def draw_seed() -> int:
    """A seed from torch's global CPU generator, so that `manual_seed` decides what follows."""
    return int(torch.randint(0, 2**31 - 1, (), device='cpu'))


@contextmanager
def seeded(*key: Any) -> Iterator[None]:
    """Inside, torch's CPU generator follows from `key` alone; outside it is as it was."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(int.from_bytes(digest, 'little') >> 1)
    try:
        with torch.device('cpu'):
            yield
    finally:
        torch.default_generator.set_state(state)


# --- files ----------------------------------------------------------------------------------------------------------


def weight_files(source: WeightsSource) -> list[Path]:
    """The files with the weights of a pretrained source, downloaded when it is a hub name: safetensors where there are
    such, else pickled ones.

    Raises ValueError when there are none, for an index that points out of its folder, and for one that names a tensor
    or file which is not there.
    """
    for whole in FILES:  # in transformers' order
        if (single := _cached(source, whole)) is not None:
            return [single]
        if (index := _cached(source, f'{whole}.index.json')) is not None:
            return _shards(source, index)
    raise ValueError(f'{source.path}: it holds no weights: neither {FILES[0]} nor {FILES[1]}, whole or in shards')


def _shards(source: WeightsSource, index: Path) -> list[Path]:
    try:
        listed = json.loads(index.read_text(encoding='utf-8'))
        places: dict[str, str] = listed['weight_map']
        listed['metadata']  # transformers reads it
    except (KeyError, TypeError, ValueError):
        raise ValueError(
            f'{index}: not a list of shards (JSON with metadata and a weight_map); copy or download it again'
        ) from None
    files = []
    for name in sorted(set(places.values())):
        if Path(name).name != name:
            raise ValueError(f'{index}: it names the file {name!r}; a shard must lie in the same folder')
        file = _cached(source, name)
        if file is None:
            raise ValueError(f'{source.path}: the shard {name} that {index.name} names is missing')
        held = set(open_weights(file).keys())
        lost = sorted(tensor for tensor, place in places.items() if place == name and tensor not in held)
        if lost:
            raise ValueError(
                f'{file}: it holds no tensor for {lost[0]}, which {index.name} names; copy or download it again'
            )
        files.append(file)
    return files


def _cached(source: WeightsSource, name: str) -> Path | None:
    if Path(source.path).is_dir():
        path = Path(source.path, source.subfolder, name)
        return path if path.is_file() else None
    from transformers.utils.hub import cached_file

    found = cached_file(
        source.path,
        name,
        revision=source.revision,
        subfolder=source.subfolder,
        cache_dir=source.cache_dir,
        local_files_only=source.local_files_only,
        _raise_exceptions_for_missing_entries=False,
    )
    return None if found is None else Path(found)


def read_source_tensor(source: WeightsSource, name: str) -> Tensor:
    """One tensor by its name in the files. Raises ValueError when it is not there."""
    for file in weight_files(source):
        handle = open_weights(file)
        if name in handle.keys():
            tensor = handle.get_tensor(name)
            check_finite(tensor, name, {name: file}.__getitem__)
            return tensor
    raise ValueError(f'{source.path}: no tensor {name!r} in its weight files')


# --- filling --------------------------------------------------------------------------------------------------------


@dataclass
class _Unit:
    """Modules that are filled together: one transformer block, or one module outside the blocks."""

    name: str
    owner: PreTrainedModel
    modules: list[tuple[str, nn.Module]]
    """children first, with their full names"""
    above: list[tuple[PreTrainedModel, nn.Module]]
    """modules that hold it, each with its owner, innermost first"""


def _units(model: PreTrainedModel) -> Iterator[_Unit]:
    def walk(
        module: nn.Module, name: str, owner: PreTrainedModel, above: list[tuple[PreTrainedModel, nn.Module]]
    ) -> Iterator[_Unit]:
        owner = module if isinstance(module, PreTrainedModel) else owner
        here = [(owner, module), *above]
        for child_name, child in module.named_children():
            full = f'{name}.{child_name}' if name else child_name
            if isinstance(module, nn.ModuleList):
                yield _Unit(full, owner, list(_children_first(child, full)), here)
            else:
                yield from walk(child, full, owner, here)
        if not isinstance(module, nn.ModuleList) and (module._parameters or module._buffers):
            yield _Unit(name, owner, [(name, module)], above)

    yield from walk(model, '', model, [])


def _children_first(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        yield from _children_first(child, f'{name}.{child_name}')
    yield name, module


class Uninitialised(ValueError):
    """A tensor that only the model's constructor gives its numbers, and that none of the files holds."""


class _Materializer:
    """Gives the meta tensors of a model their numbers, unit by unit."""

    def __init__(self, model: PreTrainedModel, source: WeightsSource) -> None:
        if not type(model).__module__.startswith('transformers.'):
            raise ValueError(
                f'{type(model).__name__} comes with code of its own; it cannot be built on the meta device'
            )
        self.model, self.source = model, source
        self.files = StoredTensors(weight_files(source), source.path, model) if source.kind == 'pretrained' else None
        self.aliases: dict[int, list[str]] = {}
        self.originals = []  # kept alive, so that an id stays one tensor's
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.aliases.setdefault(id(parameter), []).append(name)
            self.originals.append(parameter)
        self.done: dict[int, nn.Parameter | None] = {}
        self.unit_of: dict[int, _Unit] = {}
        self.metas: dict[int, nn.Parameter] = {}
        """by id of a parameter with numbers, the one on the meta device that it stands for"""
        if self.files is not None:
            self._check_fit(self.files)
        self.adapter = MergedAdapter(model, source.adapter) if source.adapter else None

    def _check_fit(self, files: StoredTensors) -> None:
        """Compare names and shapes before a number is read."""
        missing, misshaped = [], []
        for names, parameter in zip(self.aliases.values(), {id(p): p for p in self.originals}.values(), strict=True):
            if names[0].endswith(('.lora_A', '.lora_B')):
                continue
            found = next((name for name in names if name in files), None)
            if found is None:
                missing.append(names[0])
            elif (shape := files.shape(found)) is not None and shape != tuple(parameter.shape):
                misshaped.append((files.name_of(found), shape, parameter.shape))
        persistent = set(self.model.state_dict())
        missing += [n for n, _ in self.model.named_buffers() if n in persistent and n not in files]
        check_fit(self.model, files.file_of, missing, files.unexpected, misshaped)

    def fill(self, unit: _Unit) -> list[tuple[str, Tensor]]:
        """Make the unit's meta tensors real. Returns each under its first name."""
        fresh: list[tuple[str, Tensor]] = []
        loaded: list[Tensor] = []
        for module_name, module in unit.modules:
            prefix = f'{module_name}.' if module_name else ''
            for name, parameter in list(module._parameters.items()):
                if parameter is None or not parameter.is_meta:
                    continue
                if id(parameter) in self.done:  # tied: it was filled under its first name
                    if (known := self.done[id(parameter)]) is not None:
                        module._parameters[name] = known
                        loaded.append(known)
                    continue
                real = nn.Parameter(_unset(parameter), requires_grad=parameter.requires_grad)
                self.done[id(parameter)] = module._parameters[name] = real
                self.unit_of[id(parameter)] = unit
                self.metas[id(real)] = parameter
                names = self.aliases[id(parameter)]
                fresh.append((names[0], real))
                if name not in ('lora_A', 'lora_B') and self._load(real, names):
                    loaded.append(real)
            for name, buffer in list(module._buffers.items()):
                if buffer is None or not buffer.is_meta:
                    continue
                module._buffers[name] = made = _unset(buffer)
                fresh.append((prefix + name, made))
                if name not in module._non_persistent_buffers_set and self._load(made, [prefix + name]):
                    loaded.append(made)
        self._initialise(unit, loaded)
        stored = {id(tensor) for tensor in loaded}
        for name, tensor in fresh:
            if id(tensor) not in stored and tensor.is_floating_point() and bool(tensor.isnan().any()):
                raise Uninitialised(
                    f'{type(self.model).__name__}: its constructor gives {name} its numbers, and transformers cannot '
                    'give them later; build it outside of the meta device (a strategy that does not shard its models)'
                )
        return fresh

    def keep_only(self, unit: _Unit) -> None:
        """Let go of the modules and parameters that were filled with the unit and are no longer in it."""
        inside = set(unit.modules[-1][1].modules())
        unit.modules[:] = [(name, module) for name, module in unit.modules if module in inside]
        alive = {id(p) for p in unit.modules[-1][1].parameters()}
        for name in [n for n, p in self.done.items() if p is not None and self.unit_of.get(n) is unit]:
            known = self.done[name]
            if known is not None and id(known) not in alive:
                self.done[name] = None
                del self.metas[id(known)]

    def release(self, unit: _Unit) -> None:
        """Let the memory of the unit's tensors go."""
        for _, module in unit.modules:
            for name, parameter in module._parameters.items():
                # The very one it had, so that tied weights stay tied.
                if parameter is not None and not parameter.is_meta:
                    module._parameters[name] = self.metas[id(parameter)]
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = torch.empty_like(buffer, device='meta')
        self.done = dict.fromkeys(self.done)

    @torch.no_grad()
    def _load(self, target: Tensor, names: list[str]) -> bool:
        """Whether the files hold it."""
        files = self.files
        held = [name for name in names if files is not None and name in files]
        if files is None or not held:
            return False
        found, stored = held[0], files.get(held[0])
        for other in held[1:]:
            if not torch.equal(files.get(other), stored):
                raise not_tied(files.file_of(other), found, other)
        if stored.shape != target.shape:
            check_fit(self.model, files.file_of, (), (), [(found, stored.shape, target.shape)])
        target.copy_(stored)
        if isinstance(target, nn.Parameter):
            check_finite(target, files.name_of(found), lambda _: files.file_of(found))
            if self.adapter is not None:
                self.adapter.add_to(names[0], target)
        return True

    @torch.no_grad()
    def _initialise(self, unit: _Unit, loaded: list[Tensor]) -> None:
        """transformers' own initialisation, which passes over tensors that carry its flag.

        A model may set what its blocks hold, so modules above have their turn too: what has its numbers keeps them.
        """
        for tensor in loaded:
            tensor._is_hf_initialized = True  # type: ignore[attr-defined]
        guard = getattr(hf_init, 'guard_torch_init_functions', nullcontext)
        with seeded(self.source.seed, self.source.prefix + unit.name), guard():
            for _, module in unit.modules:
                unit.owner._init_weights(module)
            for owner, module in unit.above:
                owner._init_weights(module)
        for name, module in unit.modules:
            if hasattr(module, 'reset_lora_parameters'):
                reset_adapter(module, self.source.seed, name)
            for own in [*module._parameters.values(), *module._buffers.values()]:
                if own is not None:
                    own._is_hf_initialized = True  # type: ignore[attr-defined]


def _unset(like: Tensor) -> Tensor:
    """A tensor on the CPU whose numbers cannot be taken for initialised ones, where its dtype has such a number."""
    made = torch.zeros_like(like, device='cpu')
    return made.fill_(math.nan) if made.is_floating_point() else made


def all_to_meta(model: nn.Module) -> None:
    """Move what was made with numbers although the device was meta (`torch.normal` with a size). Ties are kept."""
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not parameter.is_meta:
                bare = nn.Parameter(torch.empty_like(parameter, device='meta'), requires_grad=parameter.requires_grad)
                module._parameters[name] = moved.setdefault(id(parameter), bare)


def reset_adapter(layer: Any, seed: int, name: str) -> None:
    """Draw an adapted layer's factors from (seed, its name)."""
    if not layer.lora_A.is_meta:
        with seeded(seed, name, 'lora'):
            layer.reset_lora_parameters()


def fill_model(
    model: PreTrainedModel, source: WeightsSource, settle: Callable[[str, nn.Module], None] | None = None
) -> None:
    """Give a model on the meta device its numbers, on the CPU, in place. Tied weights stay tied.

    settle: called with the name and the module of each transformer block, and of each module outside of them, once it
        has its numbers. Parameters that it replaces are let go.
    """
    materializer = _Materializer(model, source)
    for unit in _units(model):
        materializer.fill(unit)
        if settle is not None:
            settle(unit.name, unit.modules[-1][1])
            materializer.keep_only(unit)
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.__dict__.pop('_is_hf_initialized', None)
    model.tie_weights()


# --- one tensor after another ---------------------------------------------------------------------------------------

_Named = Iterator[tuple[str, Tensor]]


def initial_tensors(module: nn.Module) -> _Named:
    """(name, CPU tensor) for every parameter and buffer of `module`, as it starts life. Tied parameters come once,
    under their first name.

    `module` is an Actor, Critic, RewardModel or transformers model; it is not changed, and may be sharded or filled
    while the iterator runs: call this while it is still whole. Tensors that are not on the meta device are yielded as
    they are. Buffers come too, non-persistent ones included. Tensors keep the dtype that the module gives them.

    Raises ValueError at once for a module on the meta device whose numbers come from nowhere.
    """
    skeleton = copy.deepcopy(module)
    steps: list[Callable[[], _Named]] = []
    _plan(skeleton, '', steps, {m: n for n, m in skeleton.named_modules()})
    return _run(steps)


def _run(steps: list[Callable[[], _Named]]) -> _Named:
    for step in steps:
        yield from step()


def _plan(module: nn.Module, name: str, steps: list[Callable[[], _Named]], names: dict[nn.Module, str]) -> None:
    if not any(t.is_meta for t in [*module.parameters(), *module.buffers()]):
        steps.append(lambda: _as_it_is(module, name))
        return
    source = getattr(module, 'weights_source', None)
    if isinstance(module, PreTrainedModel) and source is not None:
        steps.append(lambda: _stream(module, source, {'': f'{name}.' if name else ''}))
        return
    if hasattr(module, 'exchange') and hasattr(module, 'first_block'):
        steps.append(lambda: _branch(module, names))
        return
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    kept = getattr(module, 'initial_state', {})
    draws = hasattr(module, 'reset_parameters') and not kept
    if any(tensor.is_meta and n not in kept for n, tensor in own) and not draws:
        raise ValueError(
            f'{name or type(module).__name__}: it is on the meta device and has no record of where its weights come '
            'from; load it through chatgpt.nn (pretrained= or config=), or build it outside of the meta device'
        )
    if own or draws:
        steps.append(lambda: _small(module, name, draws))
    if not draws:  # else it fills its children itself
        for child_name, child in module.named_children():
            _plan(child, f'{name}.{child_name}' if name else child_name, steps, names)


def _as_it_is(module: nn.Module, name: str) -> _Named:
    for n, tensor in [*module.named_parameters(prefix=name), *module.named_buffers(prefix=name)]:
        yield n, tensor.detach()


def _small(module: nn.Module, name: str, draws: bool) -> _Named:
    """A head or a single buffer: kept tensors, tensors that are already real, or what `reset_parameters` draws."""
    prefix = f'{name}.' if name else ''
    kept = getattr(module, 'initial_state', {})
    if draws and any(p.is_meta for p in module.parameters()):
        module.to_empty(device='cpu')
        with seeded(name):  # for a head that has no seed of its own
            module.reset_parameters()  # type: ignore[operator]
    for n, tensor in [*module.named_parameters(recurse=draws), *module.named_buffers(recurse=draws)]:
        yield prefix + n, kept[n] if n in kept else tensor.detach()


def _stream(model: PreTrainedModel, source: WeightsSource, renamed: dict[str, str]) -> _Named:
    """A model's tensors; only those whose name starts with a key of `renamed`, which gives way to its value."""

    def wanted(name: str) -> Iterator[str]:
        return (new + name.removeprefix(old) for old, new in renamed.items() if name.startswith(old))

    materializer = _Materializer(model, source)
    for unit in _units(model):
        if any(f'{unit.name}.'.startswith(old) for old in renamed):
            for name, tensor in materializer.fill(unit):
                for new_name in wanted(name):
                    yield new_name, tensor.detach()
            materializer.release(unit)


def _branch(branch: Any, names: dict[nn.Module, str]) -> _Named:
    """Hydra's copy of the top blocks: at the start it holds the tensors of the blocks it was copied from."""
    models = {n: m for m, n in names.items() if isinstance(m, PreTrainedModel) and hasattr(m, 'weights_source')}
    for slot in branch._slots:
        original, mine = names[slot.parent._modules[slot.name]], names[slot.own._modules[slot.own_name]]
        prefix = next(n for n in models if original.startswith(f'{n}.' if n else ''))
        below = original.removeprefix(f'{prefix}.' if prefix else '')
        yield from _stream(models[prefix], models[prefix].weights_source, {f'{below}.': f'{mine}.'})  # type: ignore[arg-type]
