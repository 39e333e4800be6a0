"""Weights that should not be trained on: damaged files, NaN, and names or shapes that do not fit the model of the
config.

Files and tensors are named in each error. What a model may lack or leave unread is known here too: heads that belong to
another use of the same trunk, and buffers that older versions of transformers saved.

Left out: where files come from (`sources`).
"""

from __future__ import annotations

import math
import re
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from chatgpt.nn.quantized import FourBitFile, in_four_bits

HEADS = re.compile(
    r'(language_model\.)?(\w*head\w*|\w*predictions|score|classifier|cls|pooler|embed_out|qa_outputs|summary|pred_layer|mtp'
    r'|visual|vision\w*|audio\w*|multi_modal\w*|generator_\w+|discriminator_\w+|lm_loss)\.|(decoder|output)\.(weight|bias)$'
)
"""first part of a name beside the trunk: another use's head, or another sense of a multimodal model"""
BUFFERS = re.compile(
    r'(^|\.)((attn|attention|self_attention)\.(bias|masked_bias)|rotary_emb\.inv_freq|position_ids|version|'
    r'final_logits_bias)$'
)
"""what older files hold and is computed today, and a part of BART's head"""


class _Part:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def get_dtype(self) -> str:
        return _CODES.get(self.tensor.dtype, str(self.tensor.dtype))


_CODES = {torch.float64: 'F64', torch.float32: 'F32', torch.float16: 'F16', torch.bfloat16: 'BF16'}


class _Unpickled:
    """The tensors of a pickled file, read as those of a safetensors file are."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def keys(self) -> list[str]:
        return list(self.tensors)

    def get_tensor(self, name: str) -> Tensor:
        return self.tensors[name]

    def get_slice(self, name: str) -> _Part:
        return _Part(self.tensors[name])


def _unpickle(file: str | Path) -> _Unpickled:
    """Nothing but tensors is read, so no code runs."""
    try:
        # mapped into memory where the format allows it; older files are read whole
        found = torch.load(file, map_location='cpu', weights_only=True, mmap=zipfile.is_zipfile(file))
    except Exception as error:  # what unpickling may raise is not bounded
        if 'nsupported' in str(error) or 'GLOBAL' in str(error):
            raise ValueError(
                f'{file}: it holds more than tensors, which is not read because a pickle can run code; save the '
                'weights alone, as a state dict or as safetensors'
            ) from None
        size = Path(file).stat().st_size
        raise ValueError(f'{file}: a damaged file of {size} bytes; copy or download it again') from None
    if not isinstance(found, dict) or not all(isinstance(t, Tensor) for t in found.values()):
        raise ValueError(f'{file}: it holds no state dict (tensors by their names); save model.state_dict() alone')
    return _Unpickled(found)


def open_weights(file: str | Path) -> Any:
    """A safetensors file, or a pickled one of tensors alone, open for reading single tensors. ValueError in one line
    when it is damaged or holds more."""
    from safetensors import SafetensorError, safe_open

    if Path(file).suffix == '.bin':
        return _unpickle(file)
    try:
        handle = safe_open(file, framework='pt', device='cpu')
    except SafetensorError as error:
        size = Path(file).stat().st_size
        raise ValueError(
            f'{file}: a damaged safetensors file of {size} bytes ({error}); copy or download it again'
        ) from None
    return FourBitFile(handle, file) if in_four_bits(handle.keys()) else handle


def read_weights(file: str | Path) -> dict[str, Tensor]:
    """All tensors of a small file, such as a head's. ValueError when it is damaged, or holds NaN."""
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


def not_tied(file: Any, one: str, other: str) -> ValueError:
    """For two names of one parameter that stand for two tensors in the files."""
    return ValueError(
        f'{file}: {one} and {other} differ, and config.json says that they are one (tie_word_embeddings); set that to '
        'false there if the model is meant so'
    )


def candidates(model: Any, name: str) -> tuple[str, str, str]:
    """What a model's tensor may be called in a file: by its own name, or with or without the trunk's prefix."""
    prefix = f'{model.base_model_prefix}.'
    return name, prefix + name, name.removeprefix(prefix)


def may_lack(model: nn.Module, name: str) -> bool:
    """Whether nothing here reads that tensor (a BERT's pooler, when the model is a bare trunk), or it is computed where
    a file has none: by transformers, or from the config, as Marian's sines, which only its trunk expects in a file."""
    computed = getattr(model, '_keys_to_ignore_on_load_missing', None) or ()
    sines = 'Sinusoidal' in type(model.get_submodule(name.rpartition('.')[0])).__name__
    return name.startswith('pooler.') or sines or any(re.search(pattern, name) for pattern in computed)


def is_known(model: Any, name: str) -> bool:
    """Whether a file may hold that tensor although the model has no place for it."""
    ignored = getattr(model, '_keys_to_ignore_on_load_unexpected', None) or ()
    beside = name.removeprefix(f'{model.base_model_prefix}.')
    return bool(HEADS.match(beside) or BUFFERS.search(name)) or any(re.search(pattern, name) for pattern in ignored)


def fits(
    model: nn.Module, missing: Iterable[str], unexpected: Iterable[str], misshaped: Iterable[tuple[str, Any, Any]]
) -> bool:
    """Whether `check_fit` has nothing to say."""
    return not (
        list(misshaped)
        or any(not may_lack(model, name) for name in missing)
        or any(not is_known(model, name) for name in unexpected)
    )


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
