"""Files of weights: opened and checked, the names in them, and written; `chatgpt.nn.weights` fills models from them."""

from __future__ import annotations

import json
import math
import os
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from chatgpt.hub import checked_path
from chatgpt.nn.computed import ComputedTensors
from chatgpt.nn.quantized import FourBitFile, Part, in_four_bits

HEADS = re.compile(
    r'(language_model\.)?(\w*head\w*|\w*predictions|score|classifier|cls|pooler|embed_out|qa_outputs|summary|pred_layer|mtp'
    r'|visual|vision\w*|audio\w*|multi_modal\w*|generator_\w+|discriminator_\w+|lm_loss)\.|(decoder|output)\.(weight|bias)$'
)
"""first part of names outside the trunk: heads of other tasks, or other modalities of a multimodal model"""
BUFFERS = re.compile(
    r'(^|\.)((attn|attention|self_attention)\.(bias|masked_bias|causal_mask)|rotary_emb\.inv_freq|position_ids|version|'
    r'final_logits_bias)$'
)
"""tensors of older files that are computed today, and a part of BART's head"""


_DTYPES = {'F64': torch.float64, 'F32': torch.float32, 'F16': torch.float16, 'BF16': torch.bfloat16}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


class _Unpickled(dict[str, Tensor]):
    """The tensors of a pickled file, with the interface of a safetensors file."""

    def get_tensor(self, name: str) -> Tensor:
        return self[name]

    def get_slice(self, name: str) -> Part:
        return Part(list(self[name].shape), _CODES.get(self[name].dtype, str(self[name].dtype)))


def _unpickle(file: str | Path) -> _Unpickled:
    """Reads only tensors, so that no code runs."""
    try:
        # memory-mapped if the format allows it; older files are read whole
        found = torch.load(file, map_location='cpu', weights_only=True, mmap=zipfile.is_zipfile(file))
    except Exception as error:  # unpickling may raise anything
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
    """Opens a safetensors file, or a pickled file of tensors only, to read single tensors. Raises ValueError of one
    line if it is damaged or holds other objects."""
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
    """Reads all tensors of a small file, such as a head's. Raises ValueError if it is damaged or holds NaN."""
    handle = open_weights(file)
    tensors = {name: handle.get_tensor(name) for name in handle.keys()}
    for name, tensor in tensors.items():
        check_finite(tensor, name, lambda _: file)
    return tensors


def check_finite(tensor: Tensor, name: str, file_of: Callable[[str], Any]) -> None:
    """Raises ValueError for NaN or infinite numbers; `file_of` returns the tensor's file. One pass, without a temporary
    of the tensor's size.
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


OTHER_MODEL = 'config.json and the weights are of different models, or the weights are incomplete'


def candidates(model: Any, name: str) -> tuple[str, str, str]:
    """Returns the possible names of a model's tensor in a file: its own, and with or without the trunk's prefix."""
    prefix = f'{model.base_model_prefix}.'
    return name, prefix + name, name.removeprefix(prefix)


def may_lack(model: nn.Module, name: str) -> bool:
    """Returns True if a file need not hold that tensor: it is unused (BERT's pooler) or can be computed (Marian's
    sinusoids)."""
    computed = getattr(model, '_keys_to_ignore_on_load_missing', None) or ()
    sines = 'Sinusoidal' in type(model.get_submodule(name.rpartition('.')[0])).__name__
    return name.startswith('pooler.') or sines or any(re.search(pattern, name) for pattern in computed)


def is_known(model: Any, name: str) -> bool:
    """Returns True if a file may hold that tensor although the model does not have it."""
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
    """Raises ValueError for the first mismatch, wrong shapes before missing and unexpected names. `file_of` returns the
    file where a tensor is or should be."""
    kind, advice = type(model).__name__, OTHER_MODEL
    for name, found, wanted in sorted(misshaped):
        raise ValueError(f'{file_of(name)}: {name} is {tuple(found)}, the model wants {tuple(wanted)}; {advice}')
    if lacking := sorted(name for name in missing if not may_lack(model, name)):
        raise ValueError(f'{file_of(lacking[0])}: it holds no tensor for {_first(lacking)} of {kind}; {advice}')
    if strange := sorted(name for name in unexpected if not is_known(model, name)):
        raise ValueError(f'{file_of(strange[0])}: it holds {_first(strange)}, for which {kind} has no place; {advice}')


def _first(names: list[str]) -> str:
    return names[0] + (f' (and {len(names) - 1} more)' if len(names) > 1 else '')


# --- writing --------------------------------------------------------------------------------------------------------

HEAD_FILE = 'value_head.safetensors'
Q_HEADS_FILE = 'ilql_heads.safetensors'


def stored_file(source: str | os.PathLike[str], name: str, **hub: Any) -> Path | None:
    """Returns the file `name` in a model's folder, or under a hub name, which is downloaded; None if there is none.
    Raises ValueError for neither a folder nor a hub name.

    Args:
        hub: options of the hub (`chatgpt.nn.loading.HUB_OPTIONS`).
    """
    source = checked_path(source, hub)
    if Path(source).is_dir():
        path = Path(source, hub.get('subfolder') or '', name)
        return path if path.is_file() else None
    from transformers.utils.hub import cached_file

    try:
        found = cached_file(source, name, _raise_exceptions_for_missing_entries=False, **hub)
    except OSError as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f'cannot read {name} of the hub name {source!r}: {reason}') from None
    return None if found is None else Path(found)


def share_by_umask(folder: str | os.PathLike[str], pattern: str = '*.safetensors') -> None:
    """Gives matching files of `folder` the permissions of a new file."""
    probe = Path(folder, f'.rights-{os.getpid()}')
    handle = os.open(probe, os.O_CREAT | os.O_WRONLY, 0o666)
    mode = os.fstat(handle).st_mode & 0o777
    os.close(handle)
    probe.unlink()
    for path in Path(folder).glob(pattern):
        path.chmod(mode)


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Writes a safetensors file of copies on the CPU."""
    from safetensors.torch import save_file

    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path, metadata=metadata)
    share_by_umask(path.parent, path.name)


def remove_heads(folder: str | os.PathLike[str]) -> None:
    """Removes the heads of a model that was saved there before, which loading would attach to the new model."""
    for name in (HEAD_FILE, Q_HEADS_FILE):
        Path(folder, name).unlink(missing_ok=True)


_NEW_HEADS = re.compile(r'(score|v_head)\.')


def stored_dtype(files: Iterable[Path]) -> tuple[torch.dtype | None, frozenset[str]]:
    """Returns the dtype of most numbers in safetensors files, None without floating tensors, and the names of the
    tensors with a wider one."""
    kinds: dict[str, torch.dtype] = {}
    sizes: Counter[torch.dtype] = Counter()
    for file in files:
        handle = open_weights(file)
        for name in handle.keys():
            part = handle.get_slice(name)
            if (dtype := _DTYPES.get(part.get_dtype())) is not None:
                kinds[name] = dtype
                sizes[dtype] += torch.Size(part.get_shape()).numel()
    if not sizes:
        return None, frozenset()
    most = max(sizes, key=lambda dtype: sizes[dtype])
    return most, frozenset(n for n, dtype in kinds.items() if dtype.itemsize > most.itemsize)


def to_dtype(
    model: Any, state: Mapping[str, Tensor], dtype: torch.dtype, wide: Collection[str] = (), *, widen: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yields names and tensors of a transformers model's `state`, floating ones in `dtype`; tied ones stay one tensor.
    Tensors with names in files that are in `wide`, new heads, what transformers keeps in fp32, and without `widen`
    tensors in 16 bits keep their dtype."""
    strict = getattr(model, '_keep_in_fp32_modules_strict', None) or ()
    computed = state.computed if isinstance(state, ComputedTensors) else {}
    made: dict[Any, Tensor] = {}

    def stays(name: str, tensor: Tensor) -> bool:
        return (
            not tensor.is_floating_point()
            or (not widen and tensor.element_size() <= dtype.itemsize)
            or _NEW_HEADS.match(name) is not None
            or any(part in strict for part in name.split('.'))
            or not set(candidates(model, name)).isdisjoint(wide)
        )

    def put(name: str, tensor: Tensor) -> Tensor:
        if stays(name, tensor):
            return tensor
        if name in computed:
            return tensor.detach().to(dtype)
        memory = tensor.data_ptr(), tuple(tensor.shape), tensor.stride()
        key = (name,) if tensor.is_meta or not tensor.numel() else memory
        if key not in made:
            made[key] = tensor.detach().to(dtype)
        return made[key]

    return ((name, put(name, tensor)) for name, tensor in state.items())


def write_dtype(folder: str | Path, dtype: torch.dtype) -> None:
    """Writes `dtype` into the folder's config."""
    path = Path(folder, 'config.json')
    config = json.loads(path.read_text(encoding='utf-8'))
    config['dtype'] = str(dtype).removeprefix('torch.')
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + '\n', encoding='utf-8')
