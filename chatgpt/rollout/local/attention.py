"""Attention of one new token per row over the slots of a cache, and the table of ways to decode.

- `plain`: the model's own, with a mask of valid slots. That of `chatgpt.nn.packing` repeats no keys for query heads.
- `varlen`: FlashAttention for variable lengths (`torch.nn.attention.varlen`) on CUDA in 16 bits, from torch 2.12 on,
  which reads only the valid slots of a row. A row of the cache is one page, so its width is a multiple of 256.

`find_attention` compares the states that are decoded over pages with a plain forward.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from chatgpt.nn.packing import packs
from chatgpt.nn.trunk import base_model
from chatgpt.rollout.local.masks import MaskForm, Windows, decode_mask, window_masks

AttentionForm = Literal['plain', 'varlen']
FORMS: tuple[AttentionForm, ...] = get_args(AttentionForm)


class Way(NamedTuple):
    """How tokens are decoded on a kind of device."""

    fixed: bool
    """in steps of fixed shape, on CUDA as captured graphs"""
    attention: AttentionForm
    """if the model, its dtype, the GPU and torch support it and it agrees with a plain forward; else 'plain'"""


WAYS = {'cuda': Way(True, 'varlen'), 'cpu': Way(False, 'plain')}
"""the way of each kind of device, unless the caller names another"""

PAGE = 256
"""FlashAttention requires a multiple of this as the number of slots of a page"""


def way_of(device: torch.device) -> Way:
    return WAYS.get(device.type, WAYS['cpu'])


class PagedAttention:
    """FlashAttention over the first `counts[i]` slots of row i, with each row as a page. counts: (n,) int32."""

    def __init__(self, counts: Tensor) -> None:
        rows = torch.arange(len(counts) + 1, dtype=torch.int32, device=counts.device)
        self.counts, self.rows = counts, rows

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
        """Takes the arguments of `chatgpt.nn.packing.grouped_attention` and ignores the mask.

        Without groups, kernels that divide the slots of a row into splits write every row's result onto the first row
        (pytorch#194167), so there is one split."""
        attend, slots = paged_varlen(), key.shape[2]
        assert attend is not None
        out = attend(
            query[:, :, 0],
            key.transpose(1, 2),
            value.transpose(1, 2),
            self.rows,
            self.rows * slots,
            1,
            slots,
            scale=scaling,
            enable_gqa=True,
            seqused_k=self.counts,
            block_table=self.rows[:-1, None],
            num_splits=1 if query.shape[1] == key.shape[1] else None,
        )
        return out[:, None]


@cache
def paged_varlen() -> Callable[..., Any] | None:
    """Returns torch's FlashAttention for variable lengths if it supports pages (torch 2.12 on), else None."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    names = {'scale', 'enable_gqa', 'seqused_k', 'block_table', 'num_splits'}
    return varlen_attn if names <= inspect.signature(varlen_attn).parameters.keys() else None


def step_keywords(
    form: AttentionForm, lengths: Tensor, width: int, mask_form: MaskForm, dtype: torch.dtype, windows: Windows | None
) -> dict[str, Any]:
    """Returns the keyword arguments of a decode step's forward for this attention.

    lengths: (n,) int64, number of tokens stored before the new one. width: number of slots that a mask covers.
    """
    if form == 'varlen':
        # transformers passes on a mask of four dimensions unchanged, and this attention ignores it
        unread = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=lengths.device)
        return {'attention_mask': unread, 'attend': PagedAttention((lengths + 1).int())}
    if windows is not None:
        return {'attention_mask': window_masks(lengths, width, windows, dtype)}
    return {'attention_mask': decode_mask(lengths, width, mask_form, dtype)}


def why_no_pages(actor: Any) -> str:
    """Returns why attention over pages does not support a model on its device, or ''."""
    parameter = next(actor.parameters())
    if not packs(base_model(actor.model)):
        return f'{type(actor.model).__name__} has an attention of its own kind, or with windows, biases or soft caps'
    if not parameter.is_cuda or parameter.dtype not in (torch.float16, torch.bfloat16):
        return f'it needs CUDA and 16 bits, and the policy is {parameter.dtype} on {parameter.device.type}'
    return '' if torch.cuda.get_device_capability(parameter.device) >= (8, 0) else 'the GPU is older than Ampere'


def find_attention(wanted: str, actor: Any, disagrees: Callable[[AttentionForm], str]) -> AttentionForm:
    """Returns the form of attention for decode steps. Raises ValueError if the wanted form is not supported.

    Args:
        wanted: one of `FORMS`, or 'auto' for that of `WAYS`, with a warning if it is missing in this torch or does not
            agree.
        disagrees: tries a form and returns why its states differ from a plain forward, or ''.
    """
    form = way_of(next(actor.parameters()).device).attention if wanted == 'auto' else wanted
    if form == 'plain':
        return 'plain'
    why = unsupported = why_no_pages(actor)
    if not why:
        lacks = f'torch {torch.__version__} has no varlen_attn with pages'
        why = lacks if paged_varlen() is None else disagrees('varlen')
    if why and wanted != 'auto':
        raise ValueError(f"LocalEngine: attention={wanted!r} cannot be had: {why}; use attention='auto'")
    if why and not unsupported:
        warnings.warn(f"LocalEngine: attention='plain', which reads every slot: {why}", stacklevel=2)
    return 'plain' if why else 'varlen'
