"""LoRA adapters in PEFT's file format: `adapter_config.json` and `adapter_model.safetensors`.

`export_peft` writes a folder that `peft.PeftModel.from_pretrained(base, folder)` loads; `import_peft` reads one into a
model, and `MergedAdapter` adds one to the weights of its base. peft itself is not needed. In the file a factor is named
`base_model.model.<layer>.lora_A.weight`, and a trained bias of an adapted layer
`base_model.model.<layer>.base_layer.bias`.

peft 0.19 and later convert names as transformers does for a folder of the same model, so names are written as in such
folders. In a mixture of experts, peft applies `gate_proj` in `target_modules` to the fused experts, so linear layers of
that name (of a shared expert, of a dense block) are written as `target_parameters`, which peft takes literally.

DoRA, ranks by layer and saved modules raise an error: plain LoRA on linear layers cannot represent them.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.pytorch_utils import Conv1D

from chatgpt.nn.layouts import layout_of
from chatgpt.nn.lora import (
    convert_to_lora,
    has_lora,
    load_lora_state_dict,
    lora_layers,
    lora_state_dict,
    weight_shape,
)
from chatgpt.nn.quantized import NF4Linear
from chatgpt.nn.tensor_files import candidates, read_weights, remove_heads, save_tensors
from chatgpt.nn.trunk import check_whole

CONFIG_FILE = 'adapter_config.json'
WEIGHTS_FILE = 'adapter_model.safetensors'
PICKLED_FILE = 'adapter_model.bin'
_PREFIX = 'base_model.model.'

NOT_PLAIN = (
    'use_dora use_qalora use_bdlora lora_bias rank_pattern alpha_pattern modules_to_save target_parameters '
    'trainable_token_indices layer_replication alora_invocation_tokens arrow_config kasa_config monteclora_config'
).split()
"""settings that, unless empty, give the tensors another meaning than W + scaling * B A"""


def _hf_model(module: nn.Module) -> nn.Module:
    """Returns the transformers model, which `module` is or has as `.model`."""
    inner = getattr(module, 'model', None)
    return inner if not isinstance(module, PreTrainedModel) and isinstance(inner, PreTrainedModel) else module


def export_peft(
    module: nn.Module,
    folder: str | os.PathLike[str],
    *,
    base_model: str | None = None,
    task_type: str | None = None,
    state: Mapping[str, Tensor] | None = None,
) -> None:
    """Writes the adapters of `module`, a transformers model or a module with one as `.model`, to `folder`. Removes
    heads of an earlier adapter there, unless the folder also holds a whole model.

    Args:
        base_model: name or path that peft loads the base from; None for the source of this model.
        task_type: peft's; None for that of the model's output head.
        state: full weights by the names of `module`, if the module itself does not hold them.

    Raises ValueError without adapters, if `folder` is a file, or for a layer that peft does not adapt in such a model
    or looks up under another name.
    """
    model, path = _hf_model(module), Path(folder)
    if state is None:
        check_whole(model)
    layers = lora_layers(model)
    if not layers:
        raise ValueError(f'export_peft: {type(module).__name__} has no adapters; call convert_to_lora first')
    if base_model is None:
        _check_base(model)
    if path.exists() and not path.is_dir():
        raise ValueError(f'export_peft: {path} is a file; give a folder')
    first = next(iter(layers.values()))
    of_experts = _NamesInFiles(model).of_experts
    parameters = sorted(f'{n}.weight' for n in layers if n.rpartition('.')[2] in of_experts)
    modules = {n for n in layers if f'{n}.weight' not in parameters}
    short = {n.rpartition('.')[2] for n in modules}  # peft matches the end of a name
    picked = {n for n, _ in model.named_modules() if n.rpartition('.')[2] in short}
    if task_type is None:
        has_head = isinstance(model, PreTrainedModel) and model.get_output_embeddings() is not None
        task_type = layout_of(model).task_type if has_head else 'FEATURE_EXTRACTION'
    config = {
        'peft_type': 'LORA',
        'task_type': task_type,
        'base_model_name_or_path': base_model or getattr(model, 'name_or_path', None) or None,
        'inference_mode': True,
        'r': first.r,
        'lora_alpha': first.lora_alpha,
        # peft does not allow dropout with target_parameters
        'lora_dropout': 0.0 if parameters else float(getattr(first.lora_dropout, 'p', 0.0)),
        'bias': first.bias_mode,
        'fan_in_fan_out': any(layer.weight_is_transposed for layer in layers.values()),
        'target_modules': sorted(short if picked == modules else modules),
    }
    if parameters:
        config['target_parameters'] = parameters
    stored = _names_for_peft(model, layers)
    own = lora_state_dict(model)
    if state is not None:
        prefix = '' if model is module else 'model.'
        own = {name: state[prefix + name] for name in own}
    tensors = {_PREFIX + stored[name]: tensor.clone() for name, tensor in own.items()}
    path.mkdir(parents=True, exist_ok=True)
    if not (path / 'config.json').is_file() and not any(path.glob('model*.safetensors')):
        remove_heads(path)
    save_tensors(tensors, path / WEIGHTS_FILE, metadata={'format': 'pt'})
    (path / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + '\n', encoding='utf-8')


_NOT_IN_MAMBA = ('out_proj', 'conv1d')
_MAMBA = ('falcon_h1', 'mamba', 'mamba2', 'falcon_mamba', 'nemotron_h')


def check_export(module: nn.Module) -> None:
    """Raises ValueError for an adapter that `export_peft` cannot write, to call before training."""
    model = _hf_model(module)
    _check_base(model)
    _names_for_peft(model, lora_layers(model))


def _check_base(model: nn.Module) -> None:
    if getattr(getattr(model, 'weights_source', None), 'adapter', None) is not None:
        raise ValueError(
            'export_peft: the model began with another adapter folded into its base, which the new one would leave '
            'out; save it whole, or write the folded base with save_pretrained and train an adapter on that folder'
        )


def _names_for_peft(model: nn.Module, layers: Iterable[str]) -> dict[str, str]:
    """Maps names of trained parameters in the model to those in an adapter's file. Raises ValueError if peft does not
    adapt a layer, or looks it up under another name."""
    kind = getattr(getattr(model, 'config', None), 'model_type', None)
    refused = [name for name in layers if name.rpartition('.')[2] in _NOT_IN_MAMBA]
    if kind in _MAMBA and refused:
        raise ValueError(
            f'export_peft: peft refuses an adapter on {refused[0]} in a model of type {kind}; leave '
            f'{refused[0].rpartition(".")[2]} out of targets, or save the whole model with save_pretrained'
        )
    own = lora_state_dict(model)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad and name not in own]
    if trained:
        raise ValueError(
            f'export_peft: {trained[0]} is trained beside the adapters, and an adapter would leave it out; save the '
            'whole model with save_pretrained'
        )
    names = _NamesInFiles(model)
    return {name: names.stored(_to_peft(name, layers)) for name in own}


class _NamesInFiles:
    """transformers' names of a model's tensors in files, which may differ from the names in the model.

    `of_experts`: last names of linear layers that mean fused experts in files, such as `gate_proj`.
    """

    def __init__(self, model: nn.Module) -> None:
        conversions = get_model_conversion_mapping(model) if isinstance(model, PreTrainedModel) else []
        self.model = model
        self.renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
        sources = [p for c in conversions if isinstance(c, WeightConverter) for p in c.source_patterns]
        names = {p.removesuffix('.weight').rpartition('.')[2] for p in sources if '.experts.' in p}
        self.of_experts = names | {'gate'} if names else names
        self.modules = set(dict(model.named_modules()))

    def _renamed(self, name: str) -> str:
        return str(rename_source_key(_PREFIX + name, self.renamings, [])[0]).removeprefix(_PREFIX)

    def in_model(self, stored: str) -> str:
        """Returns the name in the model for a tensor of an adapter."""
        if not self.renamings or self.modules & set(candidates(self.model, _layer_of(stored))):
            return stored
        return self._renamed(stored)

    def stored(self, name: str) -> str:
        """Returns the name in files that is read as `name`. Raises ValueError if there is none."""
        other = name
        if self._renamed(name) != name:
            other = _PREFIX + name
            for renaming in reversed(self.renamings):
                other = renaming.reverse_transform().rename_source_key(other)[0]
            other = other.removeprefix(_PREFIX)
        if self._renamed(other) != name:
            raise ValueError(
                f'export_peft: peft would look for {name} of {type(self.model).__name__} under another name; leave '
                f'{_layer_of(name)} out of targets, or save the whole model with save_pretrained'
            )
        return other


def _layer_of(name: str) -> str:
    return re.split(r'\.(?:lora_[AB]|base_layer|bias)\b', name)[0]


def _to_peft(name: str, layers: Iterable[str]) -> str:
    layer, _, parameter = name.rpartition('.')
    if parameter in ('lora_A', 'lora_B'):
        return f'{name}.weight'
    return f'{layer}.base_layer.{parameter}' if layer in set(layers) else name


def _from_peft(name: str) -> str:
    name = name.removeprefix(_PREFIX).removesuffix('.weight') if '.lora_' in name else name.removeprefix(_PREFIX)
    return name.replace('.base_layer.', '.')


def import_peft(module: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Loads an adapter that peft or `export_peft` wrote. A model without adapters is converted first, by the config.

    The adapted layers are read from the tensor names, so any form of `target_modules` works.

    Raises ValueError for a folder without the two files, an adapter that is not plain LoRA, a model with adapters of
    another rank or scaling, or names and shapes that do not fit the model.
    """
    model = _hf_model(module)
    config, alpha, state = _read(Path(folder), model)
    rank, targets = config['r'], _targets(state)
    if not has_lora(model):
        _check_fit(model, rank, targets, state)
        convert_to_lora(
            model,
            rank,
            alpha=alpha,
            dropout=config.get('lora_dropout', 0.0),
            bias=config.get('bias', 'none'),
            targets=[name.replace('.', r'\.') for name in targets],  # regular expressions for these names
        )
    first = next(iter(lora_layers(model).values()))
    if first.r != rank or not math.isclose(first.scaling, alpha / rank):
        raise ValueError(
            f'import_peft: the adapter has rank {rank} and scaling {alpha / rank:g}, the model rank {first.r} '
            f'and scaling {first.scaling:g}; convert with rank={rank}, alpha={alpha:g}'
        )
    load_lora_state_dict(model, state)


def _check_fit(model: nn.Module, rank: int, targets: Iterable[str], state: dict[str, Tensor]) -> None:
    """Raises ValueError for an adapter that does not fit `model`, before the model is converted."""
    modules = dict(model.named_modules())
    kind = type(model).__name__
    for name in targets:
        layer: Any = modules.get(name)
        shape = weight_shape(layer) if hasattr(layer, 'weight') or isinstance(layer, NF4Linear) else ()
        if len(shape) != 2:
            raise ValueError(f'import_peft: the adapter is for a layer {name}, which {kind} does not have')
        transposed = isinstance(layer, Conv1D) or getattr(layer, 'is_transposed', False)
        fan_out, fan_in = reversed(shape) if transposed else shape
        for key, shape in ((f'{name}.lora_A', (rank, fan_in)), (f'{name}.lora_B', (fan_out, rank))):
            if tuple(state[key].shape) != shape:
                raise ValueError(f'import_peft: {key} is {tuple(state[key].shape)}, but {kind} needs {shape}')


def _targets(state: dict[str, Tensor]) -> list[str]:
    return [name.removesuffix('.lora_A') for name in state if name.endswith('.lora_A')]


def _weights_of(folder: Path) -> Path:
    """Returns the file with an adapter's tensors: safetensors, unless there is only a pickled one."""
    pickled = folder / PICKLED_FILE
    return pickled if pickled.is_file() and not (folder / WEIGHTS_FILE).is_file() else folder / WEIGHTS_FILE


def _read(folder: Path, model: nn.Module) -> tuple[dict[str, Any], float, dict[str, Tensor]]:
    """Returns the config, alpha and the tensors by the names of `model`."""
    weights = _weights_of(folder)
    for name in (CONFIG_FILE, weights.name):
        if not (folder / name).is_file():
            raise ValueError(f'{folder}: it has no {name}; give a folder that peft or export_peft wrote')
    config = json.loads((folder / CONFIG_FILE).read_text(encoding='utf-8'))
    if config.get('peft_type') != 'LORA':
        raise ValueError(f'{folder}: peft_type is {config.get("peft_type")!r}; only LORA can be read')
    parameters = config.get('target_parameters') or []
    if all(name.endswith('.weight') for name in parameters):  # linear layers, as export_peft writes them
        config.pop('target_parameters', None)
    for key in NOT_PLAIN:
        if config.get(key):
            raise ValueError(
                f'{folder}: {key}={config[key]!r} is not plain LoRA and cannot be read; export the adapter without it'
            )
    init = config.get('init_lora_weights', True)
    if isinstance(init, str) and init.lower() not in ('gaussian', 'eva', 'orthogonal'):
        raise ValueError(
            f'{folder}: init_lora_weights={init!r} changes the base too; let peft write it as plain LoRA first '
            '(save_pretrained with path_initial_model_for_weight_conversion)'
        )
    rank = config.get('r')
    if not isinstance(rank, int) or rank < 1:
        raise ValueError(f'{folder}: r={rank!r} in {CONFIG_FILE}; it must be a positive integer')
    alpha = float(config.get('lora_alpha', 8))
    if config.get('use_rslora'):
        alpha *= math.sqrt(rank)  # rsLoRA (Kalajdzievski 2023) scales by alpha / sqrt(r)
    names = _NamesInFiles(model)
    state = {names.in_model(_from_peft(n)): tensor for n, tensor in read_weights(weights).items()}
    for name in state:
        other = name[:-1] + {'A': 'B', 'B': 'A'}.get(name[-1], '')
        if name.endswith(('.lora_A', '.lora_B')) and other not in state:
            raise ValueError(f'{weights}: it holds no tensor for {other}, which {name} needs')
    if not _targets(state):
        raise ValueError(f'{weights}: it holds no lora_A tensors; is this a LoRA adapter?')
    return config, alpha, state


def _targeted(model: nn.Module, config: Mapping[str, Any]) -> Iterator[str]:
    """Yields the linear layers that an adapter's config names, by PEFT's rules: the whole name matches the expression,
    or the name ends with one of the list, in the blocks of `layers_to_transform`."""
    targets, excluded, blocks = (config.get(k) for k in ('target_modules', 'exclude_modules', 'layers_to_transform'))
    blocks = [blocks] if isinstance(blocks, int) else blocks

    def matches(name: str, wanted: Any) -> bool:
        if isinstance(wanted, str):
            return re.fullmatch(wanted, name) is not None
        return any(name == end or name.endswith(f'.{end}') for end in wanted or ())

    for name, module in model.named_modules():
        numbers = [int(part) for part in name.split('.') if part.isdigit()]
        if not isinstance(module, (nn.Linear, Conv1D)) or matches(name, excluded) or targets == 'all-linear':
            continue
        if matches(name, targets) and (blocks is None or (numbers and numbers[0] in blocks)):
            yield name


# --- an adapter's folder as a model ---------------------------------------------------------------------------------


def remove_adapter(folder: str | os.PathLike[str]) -> None:
    """Removes an earlier adapter, which transformers would apply to the model that is written there now."""
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        Path(folder, name).unlink(missing_ok=True)


def adapter_base(folder: str | os.PathLike[str]) -> str | None:
    """Returns the base model's name for an adapter's folder; None for any other folder or hub name.

    Raises ValueError if the adapter's config does not name its base.
    """
    path = Path(folder, CONFIG_FILE)
    if not path.is_file() or any(
        Path(folder, name).is_file() for name in ('model.safetensors', 'model.safetensors.index.json')
    ):
        return None
    base = json.loads(path.read_text(encoding='utf-8')).get('base_model_name_or_path')
    if not isinstance(base, str) or not base:
        raise ValueError(
            f'{path}: it names no base_model_name_or_path; add the hub name or folder of the model that it adapts'
        )
    return base


class MergedAdapter:
    """An adapter in PEFT's format to add to a model's own weights, one tensor at a time: W + scaling * B A. Raises
    ValueError for an adapter that does not fit `model`."""

    def __init__(self, model: PreTrainedModel, folder: str) -> None:
        config, alpha, state = _read(Path(folder), model)
        self.file, self.scaling = _weights_of(Path(folder)), alpha / config['r']
        own = {name: parameter.shape for name, parameter in model.named_parameters()}
        self.conv1d = {f'{name}.weight' for name, module in model.named_modules() if isinstance(module, Conv1D)}
        self.low_rank: dict[str, tuple[Tensor, Tensor]] = {}
        self.replaced: dict[str, Tensor] = {}
        for name, tensor in state.items():
            layer, _, part = name.rpartition('.')
            if part == 'lora_B':
                continue
            parameter = f'{layer}.weight' if part == 'lora_A' else name
            mine = next((c for c in candidates(model, parameter) if c in own), None)
            if mine is None:
                if model.base_model is model and parameter.startswith('lm_head.'):
                    continue  # a head that a base model does not have
                raise ValueError(
                    f'{self.file}: it adapts {parameter}, which {type(model).__name__} does not have as a weight of '
                    'its own'
                )
            if part != 'lora_A':
                self.replaced[mine] = tensor
                shape = tuple(tensor.shape)
            else:
                self.low_rank[mine] = tensor, state[f'{layer}.lora_B']
                fan = state[f'{layer}.lora_B'].shape[0], tensor.shape[1]
                shape = fan[::-1] if mine in self.conv1d else fan
            if shape != tuple(own[mine]):
                raise ValueError(
                    f"{self.file}: {name} is for a tensor {shape}, {mine} is {tuple(own[mine])}; is this the adapter's "
                    'base?'
                )

        missing = sorted({f'{name}.weight' for name in _targeted(model, config)} - set(self.low_rank))
        if missing:
            more = f' (and {len(missing) - 1} more)' if len(missing) > 1 else ''
            raise ValueError(
                f'{self.file}: it holds no tensors for {missing[0].removesuffix(".weight")}{more}, which '
                f'target_modules of {CONFIG_FILE} names; is the file whole?'
            )

    def add_to(self, name: str, weight: Tensor) -> None:
        """Adds the adapter to the model's weight of that name, in place."""
        if name in self.replaced:
            weight.copy_(self.replaced[name])
        if name in self.low_rank:
            a, b = (t.to(weight.device, torch.float32) for t in self.low_rank[name])
            delta = self.scaling * (b @ a)
            weight.add_(delta.T if name in self.conv1d else delta)
