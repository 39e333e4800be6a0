"""Attention of one new token per row over the slots of a cache, and the table of ways to decode.

- `plain`: transformers' own, with a mask of valid slots; it may repeat keys and values for every query head.
- `grouped`: with the same mask; the query heads of a group are queries of a single key head.
- `varlen`: FlashAttention for variable lengths (`torch.nn.attention.varlen`) on CUDA in 16 bits, from torch 2.12 on,
  which reads only the valid slots of a row. A row of the cache is one page, so its width is a multiple of 256.

The latter two are passed to the attention of `chatgpt.nn.packing`; `find_attention` compares decoded states with a
plain forward.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from chatgpt.nn.packing import packs
from chatgpt.nn.trunk import base_model

AttentionForm = Literal['plain', 'grouped', 'varlen']
FORMS: tuple[AttentionForm, ...] = get_args(AttentionForm)


class Way(NamedTuple):
    """How tokens are decoded on a kind of device."""

    fixed: bool
    """in steps of fixed shape, on CUDA as captured graphs"""
    attention: tuple[AttentionForm, ...]
    """the first that a model, its dtype, the GPU and torch support, and that agrees with a plain forward"""


WAYS = {
    'cuda': Way(True, ('varlen', 'grouped', 'plain')),
    'cpu': Way(False, ('plain',)),
    'cpu, compiled': Way(True, ('grouped', 'plain')),
}
"""the way of each kind of device, unless the caller names another"""

PAGE = 256
"""FlashAttention requires a multiple of this as the number of slots of a page"""


def way_of(device: torch.device, fixed_steps: bool | str) -> Way:
    """Returns the way for `LocalEngine`'s option `fixed_steps`."""
    kind = 'cuda' if device.type == 'cuda' else 'cpu, compiled' if fixed_steps == 'compiled' else 'cpu'
    way = WAYS[kind]
    return way if fixed_steps == 'auto' else way._replace(fixed=bool(fixed_steps))


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
        """Takes the arguments of `grouped_attention` and ignores the mask.

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
    return ''


def find_attention(wanted: str, actor: Any, way: Way, disagrees: Callable[[AttentionForm], str]) -> AttentionForm:
    """Returns the form of attention for decode steps. Raises ValueError if the wanted form is not supported.

    Args:
        wanted: one of `FORMS`, or 'auto' for the first of `way` that is supported, with a warning if a faster one is
            missing in this torch or does not agree.
        disagrees: tries a form and returns why its states differ from a plain forward, or ''.
    """
    missed = ''
    for form in way.attention if wanted == 'auto' else (next(f for f in FORMS if f == wanted),):
        why = why_not(form, actor)
        if not why and form != 'plain':
            lacks = form == 'varlen' and paged_varlen() is None
            why = f'torch {torch.__version__} has no varlen_attn with pages' if lacks else disagrees(form)
            missed = missed or (f'{form!r} cannot be had: {why}' if why else '')
        if why and wanted != 'auto':
            raise ValueError(f"LocalEngine: attention={wanted!r} cannot be had: {why}; use attention='auto'")
        if not why:
            break
    if missed:
        warnings.warn(f'LocalEngine: attention={form!r}, since {missed}', stacklevel=2)
    return form
