"""Weights in files: reads them tensor by tensor, checks them, loads them into models, and writes them.

A model on the meta device has a `WeightsSource`: a folder or hub name with weight files, or the seed of a new model.
`initial_tensors` yields its tensors by name, one transformer block at a time, so that a sharded strategy can fill its
shards; `fill_model` fills the model itself. The weights of a new model depend only on (seed, block name), so both give
the same. Names and layouts in files are converted by transformers' own tables. Invalid weights are errors that name
file and tensor. Checkpoints are written by `chatgpt.strategies.checkpoint`.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as hf_init
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from chatgpt.nn.tensor_files import OTHER_MODEL, check_finite, check_fit, is_known, open_weights, stored_file


def draw_seed() -> int:
    """Returns a seed from torch's global CPU generator, so that `manual_seed` determines it."""
    return int(torch.randint(0, 2**31 - 1, (), device='cpu'))


@contextmanager
def seeded(*key: Any) -> Iterator[None]:
    """Inside this context torch's CPU generator is seeded by `key`; its state is restored on exit."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(int.from_bytes(digest, 'little') >> 1)
    try:
        with torch.device('cpu'):
            yield
    finally:
        torch.default_generator.set_state(state)


# --- tensors by the names of a model --------------------------------------------------------------------------------


@dataclass
class _Recipe:
    """The conversion of `parts` of the files (names by the pattern that they match) into tensors of a model; without a
    converter one part is used unchanged. `first` is the name in the model of the first resulting tensor."""

    first: str
    converter: WeightConverter | None = None
    parts: dict[str, list[str]] = field(default_factory=dict)


class StoredTensors:
    """Random access to the tensors of `files` by the names of `model`. Errors that concern no single file name `path`.
    Raises ValueError for a damaged file."""

    def __init__(self, files: Sequence[Path], path: Any, model: PreTrainedModel) -> None:
        self.model = model
        self.default: Any = files[0] if len(files) == 1 else path
        self.where: dict[str, tuple[Path, Any]] = {}
        """by name in the files: the file, and its open handle"""
        for file in files:
            handle = open_weights(file)
            self.where |= dict.fromkeys(handle.keys(), (file, handle))
        self.unexpected: list[str] = []
        """names in the files that the model does not have"""
        self.recipes: dict[str, _Recipe] = {}
        """by name in the model"""
        self._find_recipes()

    def _find_recipes(self) -> None:
        transforms = get_model_conversion_mapping(self.model)
        renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        converters = [t for t in transforms if isinstance(t, WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        names = self.model.state_dict()
        prefix = self.model.base_model_prefix
        # Some renamings depend on an earlier layer's name, and experts are stacked in their order.
        for stored in sorted(self.where, key=dot_natural_key):
            name, pattern = rename_source_key(stored, renamings, converters, prefix, names)
            if name not in names:
                plain, _ = rename_source_key(stored, [], [], prefix, names)
                if plain in names:
                    name, pattern = plain, None
            if name not in names:
                if not is_known(self.model, name):
                    self.unexpected.append(stored)
            elif pattern is None:
                self.recipes[name] = _Recipe(name, None, {stored: [stored]})
            else:
                converter = by_pattern[pattern]
                recipe = self.recipes.setdefault(name, _Recipe(name, converter))
                recipe.parts.setdefault(pattern, []).append(stored)
                for other in converter.target_patterns[1:]:
                    self.recipes[name.replace(converter.target_patterns[0], other)] = recipe

    def __contains__(self, name: str) -> bool:
        return name in self.recipes

    def file_of(self, name: str) -> Any:
        """Returns the file that holds that tensor or its first part; if there is none, the only file or the path."""
        if name in self.recipes:
            name = next(iter(self.recipes[name].parts.values()))[0]
        return self.where[name][0] if name in self.where else self.default

    def name_of(self, name: str) -> str:
        """Returns the name of a tensor for errors: that in the files, if it has one."""
        recipe = self.recipes[name]
        return name if recipe.converter is not None else next(iter(recipe.parts))

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Returns the shape without reading the tensor; None if it needs a conversion."""
        if self.recipes[name].converter is not None:
            return None
        stored = self.name_of(name)
        return tuple(self.where[stored][1].get_slice(stored).get_shape())

    def get(self, name: str) -> Tensor:
        """Reads and converts the tensor. Raises ValueError if its parts do not fit together."""
        recipe = self.recipes[name]
        if recipe.converter is None:
            return self._read(self.name_of(name))
        converter = copy.deepcopy(recipe.converter)
        for pattern, stored in recipe.parts.items():
            for part in stored:
                converter.add_tensor(recipe.first, part, pattern, self._read(part))  # type: ignore[arg-type]
        try:
            made = converter.convert(recipe.first, model=self.model, config=self.model.config)[name]
        except (KeyError, RuntimeError, ValueError, IndexError) as error:
            raise ValueError(
                f'{self.file_of(name)}: {name} of {type(self.model).__name__} cannot be made from '
                f'{", ".join(sum(recipe.parts.values(), [])[:3])}: {(str(error).splitlines() or [""])[0]}; '
                f'{OTHER_MODEL}'
            ) from None
        return made[0] if isinstance(made, list) else made

    def _read(self, stored: str) -> Tensor:
        return self.where[stored][1].get_tensor(stored)


# --- sources of weights ---------------------------------------------------------------------------------------------

FILES = ('model.safetensors', 'pytorch_model.bin')
"""weight files in order of preference; with the suffix `.index.json` the list of shards"""


@dataclass(frozen=True, kw_only=True)
class WeightsSource:
    """The source of a model's weights, its attribute `weights_source`, which `deepcopy` keeps."""

    kind: Literal['pretrained', 'config']
    path: str = ''
    """folder or hub name of a pretrained model; '' for a new one"""
    seed: int = 0
    """of a new model's weights, and of those that a pretrained one lacks, such as adapters"""
    hub: Mapping[str, Any] = field(default_factory=dict)
    """`revision`, `subfolder`, `cache_dir` and `local_files_only` of transformers' loaders, if given"""
    adapter: Callable[[PreTrainedModel], Any] | None = None
    """returns the `chatgpt.nn.peft_format.MergedAdapter` to add to the weights as they are read"""
    prefix: str = ''
    """of the names in the model that was first built: the trunk of a causal LM is initialised by that model's names"""
    dtype: torch.dtype | None = None
    """of most numbers in the files; a trained model is saved in it"""
    wide: frozenset[str] = frozenset()
    """names in the files of tensors in a wider dtype than `dtype`"""


def reloaded_names(module: nn.Module) -> dict[str, str]:
    """Returns the frozen weights that building the model again reads from the files of a pretrained source, as {name:
    folder or hub name}. Weights with a folded adapter are not among them, for sums may round differently elsewhere."""
    found: dict[str, str] = {}
    for prefix, part in module.named_modules():
        source = getattr(part, 'weights_source', None)
        if source is not None and source.kind == 'pretrained' and source.adapter is None:
            found |= {n: source.path for n, p in part.named_parameters(prefix=prefix) if not p.requires_grad}
    return found


def weight_files(source: WeightsSource) -> list[Path]:
    """Returns the files with the weights of a pretrained source, and downloads those of a hub name: safetensors, else
    pickled ones. Raises ValueError if there are none, or an index names a file that is not in its folder."""
    for whole in FILES:  # in transformers' order
        if (single := stored_file(source.path, whole, **source.hub)) is not None:
            return [single]
        if (index := stored_file(source.path, f'{whole}.index.json', **source.hub)) is not None:
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
        file = stored_file(source.path, name, **source.hub)
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


def read_source_tensor(source: WeightsSource, name: str) -> Tensor:
    """Reads one tensor by its name in the files. Raises ValueError if it is missing."""
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
    """parent modules, each with its owner, innermost first"""


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
    """A tensor that is set only by the model's constructor, and is in none of the files."""


class _Materializer:
    """Loads or initialises the meta tensors of a model, unit by unit."""

    def __init__(self, model: PreTrainedModel, source: WeightsSource) -> None:
        if not type(model).__module__.startswith('transformers.'):
            raise ValueError(
                f'{type(model).__name__} comes with code of its own; it cannot be built on the meta device'
            )
        self.model, self.source = model, source
        self.files = StoredTensors(weight_files(source), source.path, model) if source.kind == 'pretrained' else None
        self.aliases: dict[int, list[str]] = {}
        self.originals = []  # kept alive, so that ids stay unique
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.aliases.setdefault(id(parameter), []).append(name)
            self.originals.append(parameter)
        self.tied: dict[int, nn.Parameter | None] = {}
        """by id of a parameter with several names: the filled parameter, None after its release"""
        self.metas: dict[int, nn.Parameter] = {}
        """by id of a filled parameter: the one on the meta device that it replaces"""
        if self.files is not None:
            self._check_fit(self.files)
        self.adapter = source.adapter(model) if source.adapter is not None else None

    def _check_fit(self, files: StoredTensors) -> None:
        """Compares names and shapes before any tensor is read."""
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
        """Fills the unit's meta tensors. Returns each under its first name."""
        fresh: list[tuple[str, Tensor]] = []
        loaded: list[Tensor] = []
        for module_name, module in unit.modules:
            prefix = f'{module_name}.' if module_name else ''
            for name, parameter in list(module._parameters.items()):
                if parameter is None or not parameter.is_meta:
                    continue
                if id(parameter) in self.tied:  # already filled under its first name
                    if (known := self.tied[id(parameter)]) is not None:
                        module._parameters[name] = known
                        loaded.append(known)
                    continue
                names = self.aliases[id(parameter)]
                real = nn.Parameter(_unset(parameter), requires_grad=parameter.requires_grad)
                module._parameters[name] = real
                self.metas[id(real)] = parameter
                if len(names) > 1:
                    self.tied[id(parameter)] = real
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

    def release(self, unit: _Unit) -> None:
        """Frees the memory of the unit's tensors."""
        for _, module in unit.modules:
            for name, parameter in module._parameters.items():
                # The same object as before, so that tied weights stay tied.
                if parameter is not None and not parameter.is_meta:
                    module._parameters[name] = self.metas[id(parameter)]
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = torch.empty_like(buffer, device='meta')
        self.tied = dict.fromkeys(self.tied)
        self.metas.clear()

    @torch.no_grad()
    def _load(self, target: Tensor, names: list[str]) -> bool:
        """Copies a tensor from the files. Returns False if they do not hold it."""
        files = self.files
        held = [name for name in names if files is not None and name in files]
        if files is None or not held:
            return False
        found, stored = held[0], files.get(held[0])
        for other in held[1:]:
            if not torch.equal(files.get(other), stored):
                raise ValueError(
                    f'{files.file_of(other)}: {found} and {other} differ, and config.json says that they are one '
                    '(tie_word_embeddings); set that to false there if the model is meant so'
                )
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
        """Runs transformers' own initialisation, which skips tensors with its flag.

        A model may initialise tensors of its blocks, so the parent modules run too; filled tensors keep their values.
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
    """Returns a tensor on the CPU filled with a value that marks it as not initialised, if its dtype has one."""
    made = torch.zeros_like(like, device='cpu')
    return made.fill_(math.nan) if made.is_floating_point() else made


def all_to_meta(model: nn.Module) -> None:
    """Moves tensors to the meta device that were made elsewhere in its context (`torch.normal` with a size). Ties are
    kept."""
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not parameter.is_meta:
                bare = nn.Parameter(torch.empty_like(parameter, device='meta'), requires_grad=parameter.requires_grad)
                module._parameters[name] = moved.setdefault(id(parameter), bare)


def reset_adapter(layer: Any, seed: int, name: str) -> None:
    """Initialises an adapted layer's factors from (seed, its name)."""
    if not layer.lora_A.is_meta:
        with seeded(seed, name, 'lora'):
            layer.reset_lora_parameters()


def fill_model(
    model: PreTrainedModel, source: WeightsSource, on_filled: Callable[[str, nn.Module], None] | None = None
) -> None:
    """Loads or initialises a model on the meta device, on the CPU, in place. Tied weights stay tied.

    on_filled: called with name and module of each transformer block, and of each module outside of them, after it is
        filled. Tensors that it replaces are freed before the next module is filled.
    """
    materializer = _Materializer(model, source)
    for unit in _units(model):
        materializer.fill(unit)
        if on_filled is not None:
            on_filled(unit.name, unit.modules[-1][1])
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.__dict__.pop('_is_hf_initialized', None)
    model.tie_weights()


# --- one tensor after another ---------------------------------------------------------------------------------------

_Named = Iterator[tuple[str, Tensor]]


def initial_tensors(module: nn.Module) -> _Named:
    """Yields (name, CPU tensor) with the initial value of every parameter and buffer of `module`, non-persistent
    buffers included. Tied parameters come once, under their first name. Tensors that are not on the meta device are
    yielded unchanged.

    `module` is an Actor, Critic, RewardModel or transformers model. It does not change, and may be sharded or filled
    while the iterator runs.

    Raises ValueError at the call for a module on the meta device without a `WeightsSource`.
    """
    skeleton = copy.deepcopy(module)
    steps: list[Callable[[], _Named]] = []
    _plan(skeleton, '', steps, {m: n for n, m in skeleton.named_modules()})
    return (named for step in steps for named in step())


def _plan(module: nn.Module, name: str, steps: list[Callable[[], _Named]], names: dict[nn.Module, str]) -> None:
    if not any(t.is_meta for t in [*module.parameters(), *module.buffers()]):
        own = [*module.named_parameters(prefix=name), *module.named_buffers(prefix=name)]
        steps.append(lambda: ((n, tensor.detach()) for n, tensor in own))
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
    if not draws:  # else it initialises its children itself
        for child_name, child in module.named_children():
            _plan(child, f'{name}.{child_name}' if name else child_name, steps, names)


def _small(module: nn.Module, name: str, draws: bool) -> _Named:
    """Yields the tensors of a head or single buffer: kept ones, filled ones, or those from `reset_parameters`."""
    prefix = f'{name}.' if name else ''
    kept = getattr(module, 'initial_state', {})
    if draws and any(p.is_meta for p in module.parameters()):
        module.to_empty(device='cpu')
        with seeded(name):  # for a head without its own seed
            module.reset_parameters()  # type: ignore[operator]
    for n, tensor in [*module.named_parameters(recurse=draws), *module.named_buffers(recurse=draws)]:
        yield prefix + n, kept[n] if n in kept else tensor.detach()


def _stream(model: PreTrainedModel, source: WeightsSource, renamed: dict[str, str]) -> _Named:
    """Yields a model's tensors with a name that starts with a key of `renamed`, which is replaced by its value."""

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
    """Yields the tensors of hydra's copy of the top blocks, which are initially those of the blocks."""
    models = {n: m for m, n in names.items() if isinstance(m, PreTrainedModel) and hasattr(m, 'weights_source')}
    for slot in branch._slots:
        original, mine = names[slot.parent._modules[slot.name]], names[slot.own._modules[slot.own_name]]
        prefix = next(n for n in models if original.startswith(f'{n}.' if n else ''))
        below = original.removeprefix(f'{prefix}.' if prefix else '')
        yield from _stream(models[prefix], models[prefix].weights_source, {f'{below}.': f'{mine}.'})  # type: ignore[arg-type]
