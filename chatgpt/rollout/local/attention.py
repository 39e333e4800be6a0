"""Attention of one new token per row over the slots of a cache, in the fastest available form.

- `plain`: transformers' own, with a mask of valid slots; it may repeat keys and values for every query head.
- `grouped`: with the same mask; the query heads of a group are queries of a single key head.
- `varlen`: FlashAttention for variable lengths (`torch.nn.attention.varlen`) on CUDA in 16 bits, which reads only the
  valid slots of a row. A row of the cache is one page, so its width is a multiple of 256.

The latter two are passed to the attention of `chatgpt.nn.packing`; `find_attention` compares decoded states with a
plain forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from chatgpt.nn.packing import packs
from chatgpt.nn.trunk import base_model

AttentionForm = Literal['plain', 'grouped', 'varlen']
FORMS: tuple[AttentionForm, ...] = get_args(AttentionForm)

PAGE = 256
"""FlashAttention requires a multiple of this as the number of slots of a page"""


def grouped_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """Maps query (n, H, 1, d), key and value (n, H_kv, K, d) and an additive mask (n, 1, 1, K) to (n, 1, H, d)."""
    n, heads, _, width = query.shape
    groups = query.reshape(n, key.shape[1], heads // key.shape[1], width)
    out = scaled_dot_product_attention(groups, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(n, 1, heads, value.shape[-1])


class PagedAttention:
    """FlashAttention over the first `counts[i]` slots of row i, with each row as a page. counts: (n,) int32."""

    def __init__(self, counts: Tensor) -> None:
        rows = torch.arange(len(counts) + 1, dtype=torch.int32, device=counts.device)
        self.counts, self.rows = counts, rows

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
        """Takes the arguments of `grouped_attention` and ignores the mask."""
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
        )
        return out[:, None]


@cache
def paged_varlen() -> Callable[..., Any] | None:
    """Returns torch's FlashAttention for variable lengths if it supports pages (torch 2.11 on), else None."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    names = {'scale', 'enable_gqa', 'seqused_k', 'block_table'}
    return varlen_attn if names <= inspect.signature(varlen_attn).parameters.keys() else None


def step_keywords(form: AttentionForm, mask: Callable[[], Tensor], lengths: Tensor) -> dict[str, Any]:
    """Returns the keyword arguments of a decode step's forward for this attention.

    mask: makes the mask of valid slots. lengths: (n,) int64, number of tokens stored before the new one.
    """
    if form == 'plain':
        return {'attention_mask': mask()}
    if form == 'grouped':
        return {'attention_mask': mask(), 'attend': grouped_attention}
    # transformers passes on a mask of four dimensions unchanged, and this attention ignores it
    unread = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=lengths.device)
    return {'attention_mask': unread, 'attend': PagedAttention((lengths + 1).int())}


def why_not(form: AttentionForm, actor: Any) -> str:
    """Returns why this form is not supported for a model on its device, or ''. Does not run it."""
    if form == 'plain':
        return ''
    if not packs(base_model(actor.model)):
        return f'{type(actor.model).__name__} has an attention of its own kind, or with windows, biases or soft caps'
    if form == 'varlen':
        parameter = next(actor.parameters())
        if not parameter.is_cuda or parameter.dtype not in (torch.float16, torch.bfloat16):
            return f'it needs CUDA and 16 bits, and the policy is {parameter.dtype} on {parameter.device.type}'
        if torch.cuda.get_device_capability(parameter.device) < (8, 0):
            return 'the GPU is older than Ampere'
        if paged_varlen() is None:
            return f'torch {torch.__version__} has no varlen_attn with pages'
    return ''


def find_attention(
    wanted: str, actor: Any, *, calls_compiled: bool, disagrees: Callable[[AttentionForm], str]
) -> AttentionForm:
    """Returns the form of attention for decode steps. Raises ValueError if the wanted form is not supported.

    Args:
        wanted: one of `FORMS`, or 'auto': the last supported one on CUDA or if steps are compiled, else the plain one.
        disagrees: tries a form and returns why its states differ from a plain forward, or ''.
    """
    if wanted == 'auto':
        if next(actor.parameters()).is_cuda or calls_compiled:
            for form in reversed(FORMS[1:]):
                if not why_not(form, actor) and not disagrees(form):
                    return form
        return 'plain'
    form = next(f for f in FORMS if f == wanted)
    why = why_not(form, actor) or (disagrees(form) if form != 'plain' else '')
    if why:
        raise ValueError(f"LocalEngine: attention={wanted!r} cannot be had: {why}; use attention='auto'")
    return form
