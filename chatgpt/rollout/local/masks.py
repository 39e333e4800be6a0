"""Attention masks over the slots of the cache, with the attention windows of a model's layers.

The cache keeps every token, so windows are applied by masks. transformers takes one mask for all layers, or, for models
with layers of several kinds, a dict by kind (`layer_types` of the config). `windows_disagree` compares the result with
a plain forward of sequences longer than the window.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

MaskForm = Literal['additive', 'boolean']


class Windows(NamedTuple):
    """The attention windows of a model."""

    sliding: int | None
    """number of tokens that 'sliding_attention' attends to, including the current one"""
    chunk: int | None
    """number of tokens of a chunk; 'chunked_attention' does not attend to earlier chunks"""
    kinds: tuple[str, ...]
    """kinds of layers; () if all are of one kind"""

    @property
    def sizes(self) -> list[int]:
        """The sizes of the windows, in ascending order."""
        return sorted(w for w in (self.sliding, self.chunk) if w is not None)

    @property
    def example_lengths(self) -> tuple[int, ...]:
        """Prompt lengths for a check of decoding: longer than each window, one that reaches it while decoding, and a
        short one."""
        return (*(size + 3 for size in self.sizes), max(1, self.sizes[0] - 1), 3)


def windows_of(config: Any) -> Windows | None:
    """Returns the windows of a text model's config, or None if all layers have full attention."""
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
    """Returns a mask of the valid slots 0 .. lengths[i] of row i, which include the new token: additive (n, 1, 1,
    width) or boolean (n, width)."""
    beyond = torch.arange(width, device=lengths.device) > lengths[:, None]
    return ~beyond if form == 'boolean' else _additive(beyond, dtype)


def window_masks(lengths: Tensor, width: int, windows: Windows, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
    """Returns additive masks, as `decode_mask`, for layers with windows: one for all layers, or a dict by kind."""
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
