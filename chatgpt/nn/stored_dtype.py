"""In which dtype a folder holds its weights, and putting trained weights into it.

Training keeps fp32; a model that came from a folder in 16 bits goes back into one. Heads that are trained here, and
what the folder or transformers keeps in fp32 (routers' corrections, decays of a state space), stay in fp32.

Left out: checkpoints, which are exact (`chatgpt.checkpoint`).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from chatgpt.nn.unfit import candidates, open_weights

_KINDS = {'F64': torch.float64, 'F32': torch.float32, 'F16': torch.float16, 'BF16': torch.bfloat16}
_NEW_HEADS = re.compile(r'(score|v_head)\.')


def stored_dtype(files: Iterable[Path]) -> tuple[torch.dtype | None, frozenset[str]]:
    """The dtype of most numbers of safetensors files, and the names of the tensors that have a wider one. None where no
    tensor is floating."""
    kinds: dict[str, torch.dtype] = {}
    sizes: Counter[torch.dtype] = Counter()
    for file in files:
        handle = open_weights(file)
        for name in handle.keys():
            part = handle.get_slice(name)
            if (dtype := _KINDS.get(part.get_dtype())) is not None:
                kinds[name] = dtype
                sizes[dtype] += torch.Size(part.get_shape()).numel()
    if not sizes:
        return None, frozenset()
    most = max(sizes, key=lambda dtype: sizes[dtype])
    return most, frozenset(n for n, dtype in kinds.items() if dtype.itemsize > most.itemsize)


def to_dtype(
    model: Any, state: Mapping[str, Tensor], dtype: torch.dtype, wide: Collection[str] = (), *, widen: bool = False
) -> dict[str, Tensor]:
    """`state` of a transformers model with floating tensors in `dtype`; tied ones stay one tensor.

    Args:
        wide: names in the files of what keeps its dtype.
        widen: also tensors of 16 bits; else they stay.
    """
    strict = getattr(model, '_keep_in_fp32_modules_strict', None) or ()
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
        memory = tensor.data_ptr(), tuple(tensor.shape), tensor.stride()
        key = (name,) if tensor.is_meta or not tensor.numel() else memory
        if key not in made:
            made[key] = tensor.detach().to(dtype)
        return made[key]

    return {name: put(name, tensor) for name, tensor in state.items()}


def say_dtype(folder: str | Path, dtype: torch.dtype) -> None:
    """Write it into the folder's config."""
    path = Path(folder, 'config.json')
    config = json.loads(path.read_text(encoding='utf-8'))
    config['dtype'] = str(dtype).removeprefix('torch.')
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + '\n', encoding='utf-8')
