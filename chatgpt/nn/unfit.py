"""Weights that should not be trained on: damaged files, NaN, and names or shapes that do not fit the model of the
config.

Files and tensors are named in each error. What a model may lack or leave unread is known here too: heads that belong to
another use of the same trunk, and buffers that older versions of transformers saved.

Left out: where files come from (`sources`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

HEADS = re.compile(
    r'(\w*head\w*|score|classifier|cls|pooler|embed_out|qa_outputs|summary|mtp|visual|vision\w*|audio\w*|multi_modal\w*)\.'
)
"""first part of a name beside the trunk: another use's head, or another sense of a multimodal model"""
BUFFERS = re.compile(
    r'(^|\.)((attn|attention|self_attention)\.(bias|masked_bias)|rotary_emb\.inv_freq|position_ids|version|'
    r'final_logits_bias)$'
)
"""what older files hold and is computed today, and a part of BART's head"""
PICKLED = ('pytorch_model.bin', 'pytorch_model.bin.index.json')


def open_weights(file: str | Path) -> Any:
    """A safetensors file, open for reading single tensors. ValueError in one line when it is damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework='pt', device='cpu')
    except SafetensorError as error:
        size = Path(file).stat().st_size
        raise ValueError(
            f'{file}: a damaged safetensors file of {size} bytes ({error}); copy or download it again'
        ) from None


def read_weights(file: str | Path) -> dict[str, Tensor]:
    """All tensors of a small safetensors file, such as a head's. ValueError when it is damaged, or holds NaN."""
    handle = open_weights(file)
    tensors = {name: handle.get_tensor(name) for name in handle.keys()}
    for name, tensor in tensors.items():
        check_finite(tensor, name, lambda _: file)
    return tensors


def check_finite(tensor: Tensor, name: str, file_of: Callable[[str], Any]) -> None:
    """ValueError for NaN or infinite numbers; `file_of` says where the tensor is from.

    One pass, without a temporary of the tensor's size.
    """
    if not tensor.is_floating_point() or not tensor.numel() or tensor.element_size() < 2:
        return
    low, high = (float(x) for x in torch.aminmax(tensor.detach()))
    if not (math.isfinite(low) and math.isfinite(high)):
        what = 'NaN' if math.isnan(low) or math.isnan(high) else 'infinite numbers'
        raise ValueError(
            f'{file_of(name)}: {name} holds {what}; these weights are broken, take an earlier checkpoint or the '
            'original'
        )


def no_weights(folder: str, subfolder: str = '') -> ValueError:
    """What to say of a folder or hub name that has no safetensors file."""
    where = Path(folder, subfolder)
    pickled = next((name for name in PICKLED if (where / name).is_file()), None)
    if pickled is None:
        return ValueError(f'{folder}: no model.safetensors there; weights are read from safetensors files only')
    config = where / 'config.json'
    kind = (json.loads(config.read_text()).get('architectures') if config.is_file() else None) or [
        'AutoModelForCausalLM'
    ]
    command = f'from transformers import {kind[0]} as M; p = {str(where)!r}; M.from_pretrained(p).save_pretrained(p)'
    return ValueError(
        f'{folder}: it holds only pickled weights ({pickled}), which are never read because a pickle can run code; if '
        f'you trust it, convert them once: python -c "{command}"'
    )


def candidates(model: Any, name: str) -> tuple[str, str, str]:
    """What a model's tensor may be called in a file: by its own name, or with or without the trunk's prefix."""
    prefix = f'{model.base_model_prefix}.'
    return name, prefix + name, name.removeprefix(prefix)


def may_lack(model: nn.Module, name: str) -> bool:
    """Whether nothing here reads that tensor (a BERT's pooler, when the model is a bare trunk), or it follows from the
    config: Marian's sines, which only its trunk expects in a file."""
    return name.startswith('pooler.') or 'Sinusoidal' in type(model.get_submodule(name.rpartition('.')[0])).__name__


def is_known(model: Any, name: str) -> bool:
    """Whether a file may hold that tensor although the model has no place for it."""
    ignored = getattr(model, '_keys_to_ignore_on_load_unexpected', None) or ()
    beside = name.removeprefix(f'{model.base_model_prefix}.')
    return bool(HEADS.match(beside) or BUFFERS.search(name)) or any(re.search(pattern, name) for pattern in ignored)


def check_fit(
    model: nn.Module,
    file_of: Callable[[str], Any],
    missing: Iterable[str],
    unexpected: Iterable[str],
    misshaped: Iterable[tuple[str, Any, Any]],
) -> None:
    """ValueError for the first misfit, wrong shapes before missing and unexpected names. `file_of` says where a tensor
    is or should be."""
    kind, advice = (
        type(model).__name__,
        'config.json and the weights are of different models, or the weights are incomplete',
    )
    for name, found, wanted in sorted(misshaped):
        raise ValueError(f'{file_of(name)}: {name} is {tuple(found)}, the model wants {tuple(wanted)}; {advice}')
    if lacking := sorted(name for name in missing if not may_lack(model, name)):
        raise ValueError(f'{file_of(lacking[0])}: it holds no tensor for {_first(lacking)} of {kind}; {advice}')
    if strange := sorted(name for name in unexpected if not is_known(model, name)):
        raise ValueError(f'{file_of(strange[0])}: it holds {_first(strange)}, for which {kind} has no place; {advice}')


def _first(names: list[str]) -> str:
    return names[0] + (f' (and {len(names) - 1} more)' if len(names) > 1 else '')
