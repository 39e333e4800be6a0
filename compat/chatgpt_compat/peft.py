"""Converts PEFT's LoRA to this library's: adapters of a `LoraConfig`, or the adapters of a `PeftModel`.

PEFT is imported only to look up the layers that it adapts by default.
"""

from __future__ import annotations

import json
import math
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from chatgpt.nn import add_lora, export_peft, has_lora, import_peft

HEADS = ('score', 'classifier')
"""heads of sequence classifiers, trained in full here, as PEFT does with `modules_to_save`"""
SUPPORTED = ('r', 'lora_alpha', 'lora_dropout', 'target_modules', 'bias', 'use_rslora')
INFORMATIVE = (
    *('peft_type', 'task_type', 'inference_mode', 'base_model_name_or_path', 'revision', 'auto_mapping'),
    *('peft_version', 'fan_in_fan_out', 'megatron_core', 'runtime_config'),
)
"""fields of LoraConfig that do not change the computation"""


def adapted(model: Any, peft_config: Any, *, heads: Sequence[str] = ()) -> Any:
    """Returns the transformers model with our adapters, changed in place: those of a PEFT model, or new ones by
    `peft_config`, a `LoraConfig` or a dict of its fields. `modules_to_save` may name the `heads`, which are trained in
    full here. The model and a given PEFT model get the methods of `METHODS`. Raises ValueError for a PEFT model with a
    `peft_config`, and for a setting that is not supported.
    """
    if hasattr(model, 'peft_config') and hasattr(model, 'get_base_model'):
        if peft_config is not None:
            raise ValueError('peft_config: the model is a PEFT model already; give one of the two')
        if len(model.peft_config) != 1:
            raise ValueError(f'model: a PEFT model with the adapters {", ".join(model.peft_config)}; it must have one')
        with tempfile.TemporaryDirectory(prefix='chatgpt-adapter-') as folder:
            model.save_pretrained(folder)
            _leave_heads_out(Path(folder), heads)
            wrapper, model = model, model.unload()
            import_peft(model, folder)
        with_methods(wrapper, model)
    if peft_config is not None:
        lora = lora_arguments(peft_config, model, heads=heads)
        add_lora(model, lora['lora_rank'], lora['lora_train_bias'], lora['lora_options'])
    return with_methods(model, model) if has_lora(model) else model


def with_methods(owner: Any, model: Any) -> Any:
    """Returns `owner` with the methods of a PEFT model, on our adapters in `model`. A deep copy has its own."""
    for name, method in METHODS.items():
        setattr(owner, name, partial(method, model))
    return owner


def _layers(model: Any) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if hasattr(module, 'lora_A')}


def _save(
    model: Any, save_directory: Any, is_main_process: bool = True, state_dict: Any = None, *args: Any, **kwargs: Any
) -> None:
    """Writes the adapter in PEFT's format; given weights, or what no adapter can hold (a trained head), as a whole
    model."""
    if state_dict is None and has_lora(model):
        try:
            if is_main_process:
                export_peft(model, save_directory)
            return
        except ValueError:
            folded = {f'{name}.weight': layer.folded_weight() for name, layer in _layers(model).items()}
            state_dict = {n: t for n, t in model.state_dict().items() if '.lora_' not in n} | folded
    type(model).save_pretrained(model, save_directory, is_main_process, state_dict, *args, **kwargs)


def _merge_and_unload(model: Any, *_: Any, **__: Any) -> Any:
    """Returns the model with the adapters merged into plain layers, changed in place."""
    for name, layer in _layers(model).items():
        layer.merge()
        plain: Any = Conv1D(layer.nf, layer.nx) if isinstance(layer, Conv1D) else None
        if plain is None:
            plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device='meta')
        plain.weight, plain.bias = layer.weight, layer.bias
        parent, _dot, child = name.rpartition('.')
        setattr(model.get_submodule(parent), child, plain)
    return model


def _print_trainable(model: Any) -> None:
    every = [(p.numel(), p.requires_grad) for p in model.parameters()]
    trained, total = sum(n for n, is_trained in every if is_trained), sum(n for n, _ in every)
    print(f'trainable params: {trained:,d} || all params: {total:,d} || trainable%: {100 * trained / total:.4f}')


@contextmanager
def _disable_adapter(model: Any) -> Iterator[None]:
    layers = [(layer, layer.adapter_on) for layer in _layers(model).values()]
    try:
        for layer, _ in layers:
            layer.adapter_on = False
        yield
    finally:
        for layer, was_on in layers:
            layer.adapter_on = was_on


METHODS: dict[str, Any] = {
    'save_pretrained': _save,
    'merge_and_unload': _merge_and_unload,
    'print_trainable_parameters': _print_trainable,
    'disable_adapter': _disable_adapter,
}
"""method of PEFT's models → a function of the transformers model with our adapters"""


def _leave_heads_out(folder: Path, heads: Sequence[str]) -> None:
    """Removes from a saved adapter the heads that PEFT trains in full: `unload` leaves them in the model."""
    path, weights = folder / 'adapter_config.json', folder / 'adapter_model.safetensors'
    config = json.loads(path.read_text())
    saved = config.get('modules_to_save') or []
    if saved and set(saved) <= set(heads):
        path.write_text(json.dumps(config | {'modules_to_save': None}))
        tensors = load_file(weights)
        kept = {name: t for name, t in tensors.items() if not any(f'.{head}.' in name for head in saved)}
        save_file(kept, weights, metadata={'format': 'pt'})


def lora_values(peft_config: Any, *, heads: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the supported fields of a `LoraConfig` or a dict of its fields. Raises ValueError for another method than
    LoRA, and for a field that is not supported."""
    is_dict = isinstance(peft_config, Mapping)
    values, plain = (dict(peft_config), {}) if is_dict else (vars(peft_config), vars(type(peft_config)()))
    kind = values.get('peft_type', 'LORA')
    if str(getattr(kind, 'value', kind)) != 'LORA':
        raise ValueError(f'peft_config: {kind} is not served here; use a LoraConfig')
    for name, value in values.items():
        if name in (*SUPPORTED, *INFORMATIVE) or not value or value == plain.get(name):
            continue
        if name == 'modules_to_save' and set(value) <= set(heads):
            continue
        if name == 'init_lora_weights' and value in (True, 'gaussian'):
            continue
        raise ValueError(f'peft_config: {name}={value!r} cannot be honoured here; leave it out')
    return {name: values[name] for name in SUPPORTED if values.get(name) is not None}


def lora_arguments(peft_config: Any, model: Any, *, heads: Sequence[str] = ()) -> dict[str, Any]:
    """Returns `lora_rank`, `lora_train_bias` and `lora_options` of the model classes. Raises as `adapted`."""
    values = lora_values(peft_config, heads=heads)
    rank, alpha = int(values.get('r', 8)), float(values.get('lora_alpha', 8))
    if values.get('use_rslora'):
        alpha *= math.sqrt(rank)  # rsLoRA (Kalajdzievski 2023) scales by alpha / sqrt(r)
    return {
        'lora_rank': rank,
        'lora_train_bias': str(values.get('bias', 'none')),
        'lora_options': {
            'alpha': alpha,
            'dropout': float(values.get('lora_dropout', 0.0)),
            'targets': _targets(values.get('target_modules'), model),
        },
    }


def _targets(given: Any, model: Any) -> Any:
    """Returns names of layers; None, PEFT's 'all-linear', stands for every linear layer of the blocks."""
    if given == 'all-linear':
        return None
    if given and not isinstance(given, str):
        layers = [name for name, _ in model.named_modules()]
        there = [t for t in sorted(given) if any(name == t or name.endswith(f'.{t}') for name in layers)]
        if there and len(there) < len(given):
            names = ', '.join(sorted(set(given) - set(there)))
            warnings.warn(f'peft_config: target_modules {names} match no layer of this model', stacklevel=3)
        return there or sorted(given)
    if given:
        return given
    try:
        from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as known
    except ImportError:
        raise ValueError('peft_config: without the package peft, target_modules must be given') from None
    family = model.config.model_type
    if family not in known:
        raise ValueError(f'peft_config: PEFT knows no layers of {family}; give target_modules')
    return list(known[family])
