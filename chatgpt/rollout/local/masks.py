"""Which slots of the cache a token may see: all that its row holds, or the last of them where layers have a window.

The cache keeps every token, so a window is a matter of the mask. transformers takes the mask of every layer as one
tensor, or, from models whose layers differ, as a dict by kind of layer (`layer_types` of the config).
`windows_disagree` compares what comes out with the plain forward of sequences that are longer than the window.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

MaskForm = Literal['additive', 'boolean']


class Windows(NamedTuple):
    """The attention windows of a model."""

    sliding: int | None
    """tokens that a layer of 'sliding_attention' sees, its own included"""
    chunk: int | None
    """tokens of one chunk: 'chunked_attention' sees none of those before"""
    kinds: tuple[str, ...]
    """of layers; () where all are of one kind"""

    @property
    def sizes(self) -> list[int]:
        """The shortest first."""
        return sorted(w for w in (self.sliding, self.chunk) if w is not None)

    @property
    def example_lengths(self) -> tuple[int, ...]:
        """Prompts to check a decode of a few tokens with: longer than each window, one that reaches it while decoding,
        and a short one."""
        return (*(size + 3 for size in self.sizes), max(1, self.sizes[0] - 1), 3)


def windows_of(config: Any) -> Windows | None:
    """Those of a text model's config, None where all layers attend to everything."""
    if getattr(config, 'use_sliding_window', True) is False:
        return None
    kinds = tuple(dict.fromkeys(getattr(config, 'layer_types', None) or ()))
    if kinds and all(kind == 'full_attention' for kind in kinds):
        return None

    def size(*names: str) -> int | None:
        found = [getattr(config, name, None) for name in names]
        return min((w for w in found if isinstance(w, int) and w > 0), default=None)

    sliding, chunk = size('sliding_window', 'window_size', 'attention_window'), size('attention_chunk_size')
    return None if sliding is None and chunk is None else Windows(sliding, chunk, kinds)


def decode_mask(lengths: Tensor, width: int, form: MaskForm, dtype: torch.dtype) -> Tensor:
    """Slots 0 .. lengths[i] of row i are valid: the stored tokens and the one being written. (n, 1, 1, width) or (n,
    width)."""
    beyond = torch.arange(width, device=lengths.device) > lengths[:, None]
    return ~beyond if form == 'boolean' else _additive(beyond, dtype)


def window_masks(lengths: Tensor, width: int, windows: Windows, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
    """As `decode_mask`, additive, for layers with windows: one for all layers, or by kind of layer."""
    slots = torch.arange(width, device=lengths.device)
    beyond, last = slots > lengths[:, None], lengths[:, None]
    masks = {'full_attention': beyond}
    if windows.sliding is not None:
        masks['sliding_attention'] = beyond | (slots <= last - windows.sliding)
    if windows.chunk is not None:
        masks['chunked_attention'] = beyond | (slots // windows.chunk < last // windows.chunk)
    if not windows.kinds:
        return _additive(masks['sliding_attention' if windows.sliding is not None else 'chunked_attention'], dtype)
    return {kind: _additive(mask, dtype) for kind, mask in masks.items()}


def _additive(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    zeros = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return zeros.masked_fill_(hidden, torch.finfo(dtype).min)[:, None, None]
