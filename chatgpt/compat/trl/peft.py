"""PEFT's LoRA as our LoRA: a `LoraConfig` puts our adapters into a model, a `PeftModel` has its adapters taken over.

PEFT is imported only for the layers it adapts by default, and its objects come from the script.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from chatgpt.nn.files import save_tensors
from chatgpt.nn.loading import add_lora
from chatgpt.nn.peft_format import CONFIG_FILE, PLAIN_LORA, WEIGHTS_FILE, import_peft
from chatgpt.nn.unfit import read_weights

HEADS = ('score', 'classifier')
"""of sequence classifiers, trained in full here as `modules_to_save` asks of PEFT"""

_NEUTRAL: dict[str, tuple[Any, ...]] = PLAIN_LORA | {
    'init_lora_weights': (True, 'gaussian'),
    'layers_to_transform': (None,),
    'layers_pattern': (None,),
    'exclude_modules': (None,),
    'loftq_config': (None, {}),
    'megatron_config': (None,),
    'eva_config': (None,),
    'corda_config': (None,),
}
"""fields of LoraConfig, and the values that leave plain LoRA"""


def adapted(model: Any, peft_config: Any, *, heads: Sequence[str] = ()) -> Any:
    """The transformers model with our adapters in it: those of a PEFT model, or new ones as `peft_config` says.

    Args:
        model: a transformers model, changed in place, or a PEFT model with one adapter.
        peft_config: a `LoraConfig`, a dict of its fields, or None.
        heads: modules that are trained in full here, so `modules_to_save` may name them.

    Raises:
        ValueError: a method that is not LoRA, a field that cannot be honoured, both a PEFT model and a config.
    """
    if hasattr(model, 'peft_config') and hasattr(model, 'get_base_model'):
        if peft_config is not None:
            raise ValueError('peft_config: the model is a PEFT model already; give one of the two')
        if len(model.peft_config) != 1:
            raise ValueError(f'model: a PEFT model with the adapters {", ".join(model.peft_config)}; it must have one')
        with tempfile.TemporaryDirectory(prefix='chatgpt-adapter-') as folder:
            model.save_pretrained(folder)
            _leave_heads_out(Path(folder), heads)
            model = model.unload()
            import_peft(model, folder)
        return model
    if peft_config is not None:
        add_lora(model, **lora_arguments(peft_config, model, heads=heads))
    return model


def _leave_heads_out(folder: Path, heads: Sequence[str]) -> None:
    """Of a saved adapter, the heads that PEFT trains in full: `unload` leaves them in the model."""
    path = folder / CONFIG_FILE
    config = json.loads(path.read_text())
    saved = config.get('modules_to_save') or []
    if not saved or not set(saved) <= set(heads):
        return
    path.write_text(json.dumps(config | {'modules_to_save': None}))
    tensors = read_weights(folder / WEIGHTS_FILE)
    kept = {name: t for name, t in tensors.items() if not any(f'.{head}.' in name for head in saved)}
    save_tensors(kept, folder / WEIGHTS_FILE, metadata={'format': 'pt'})


def lora_arguments(peft_config: Any, model: Any, *, heads: Sequence[str] = ()) -> dict[str, Any]:
    """Arguments of `chatgpt.nn.loading.add_lora`: rank, bias and options. Raises ValueError as `adapted` does."""
    values: Mapping[str, Any] = peft_config if isinstance(peft_config, Mapping) else vars(peft_config)
    kind = values.get('peft_type', 'LORA')
    if str(getattr(kind, 'value', kind)) != 'LORA':
        raise ValueError(f'peft_config: {kind} is not served here; use a LoraConfig')
    for name, neutral in _NEUTRAL.items():
        value = values.get(name)
        if name == 'modules_to_save' and value and set(value) <= set(heads):
            continue
        if name in values and value not in neutral:
            raise ValueError(f'peft_config: {name}={value!r} cannot be honoured here; leave it out')
    rank = int(values.get('r', 8))
    alpha = float(values.get('lora_alpha', 8))
    if values.get('use_rslora'):
        alpha *= math.sqrt(rank)  # rsLoRA (Kalajdzievski 2023) scales by alpha / sqrt(r)
    options = {
        'alpha': alpha,
        'dropout': float(values.get('lora_dropout', 0.0)),
        'targets': _targets(values.get('target_modules'), model),
    }
    return {'rank': rank, 'bias': str(values.get('bias', 'none')), 'options': options}


def _targets(given: Any, model: Any) -> Any:
    """Names of layers; None, which PEFT calls 'all-linear', is every linear layer of the blocks."""
    if given == 'all-linear':
        return None
    if given:
        return given if isinstance(given, str) else sorted(given)
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as known

    family = model.config.model_type
    if family not in known:
        raise ValueError(f'peft_config: PEFT knows no layers of {family}; give target_modules')
    return list(known[family])
