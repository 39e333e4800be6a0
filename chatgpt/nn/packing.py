"""The padding-free forward: the real tokens of a padded batch in one row, with attention within each sequence.

Everything but attention acts on single tokens. Attention is registered with transformers under our own name; ordinary
calls run 'sdpa'. A call with a `Packing` runs FlashAttention for variable lengths (`torch.nn.attention.varlen`) on CUDA
in 16 bits, and elsewhere SDPA over groups of sequences of similar length, padded within their group. On a CPU,
attention over few keys is computed in fp32, because torch's 16-bit kernel is slower there.

A model runs packed if every layer attends to all earlier tokens. This is compared with the padded forward on a few
tokens when a role is built, or on the meta device after a strategy has loaded the weights (`check_loaded_packing`).
Other models (windows shorter than the batch, ALiBi, encoders, encoder-decoders) run padded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from chatgpt.batching import collate, packing_of
from chatgpt.nn.layouts import encoder_decoder_hidden, layout_of, scatter_states, separate_inputs
from chatgpt.nn.trunk import (
    accepts,
    batch_limit,
    in_eval_mode,
    is_meta,
    looks_ahead,
    name_of,
    needs_mask,
    positions_of,
    row_limit,
    run_trunk,
    text_config,
)
from chatgpt.types import Batch, PackedGroup, Packing, Sequence

ATTENTION = 'packed_sdpa'
"""name of our attention in transformers"""

NARROW = 256
"""up to this number of keys a CPU computes attention faster in fp32 than in 16 bits, casts included"""

CHECK_LENGTHS = (5, 3)

UNSUPPORTED_SETTINGS = ('attn_logit_softcapping', 'alibi', 'position_bias')
"""config fields that change attention in a way that this module does not support"""


def flat_hidden(model: nn.Module, batch: Batch) -> Tensor:
    """Returns the hidden states of a batch as (B*S, D), to index with `action_index` or `last_index`.

    Runs without padding if batch and model allow it; the states of padding are then zeros. Raises ValueError for
    sequences beyond `batch_limit`.
    """
    if layout_of(model).is_encoder_decoder:
        return encoder_decoder_hidden(model, batch)
    longest = batch.packing.max_length if batch.packing is not None else batch.input_ids.shape[1]
    limit = batch_limit(model.config)
    if limit is not None and longest > limit[0]:
        raise ValueError(f'a sequence of {longest} tokens is past {positions_of(model.config)}; give shorter ones')
    if packing := _packing_for(model, batch):
        return rows_joined(model, _packed_hidden(model, batch.input_ids, batch.position_ids, packing), batch)
    width = batch.input_ids.shape[1]
    if packs(model) and width <= (window_of(model) or width):
        return run_trunk(
            model,
            batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=_no_mask(batch.input_ids.device),
            whole_rows=True,
        ).flatten(0, 1)
    mask = batch.attention_mask if needs_mask(model) else None
    # Encoders number positions in their own way (RoBERTa begins after its padding id).
    positions = None if looks_ahead(model) else batch.position_ids
    return run_trunk(model, batch.input_ids, position_ids=positions, attention_mask=mask).flatten(0, 1)


def _packing_for(model: nn.Module, batch: Batch) -> Packing | None:
    """Returns the packing with which `model` runs the batch, or None if it runs padded."""
    packing = batch.packing
    if (group := sequence_group(model)) is not None:
        if model.training:
            check_parts_learn(model)
        rows, width = batch.input_ids.shape
        packing = packing or packing_of([width] * rows, width, always=True)
        assert packing is not None
        return replace(packing.to(batch.input_ids.device), group=group)
    if packing is None or not packs(model) or packing.max_length > (window_of(model) or packing.max_length):
        return None
    # With dropout, equal prefixes have states of their own.
    return every_token(packing) if packing.state_index is not None and model.training and _drops(model) else packing


def sequence_group(model: nn.Module) -> Any:
    """Returns the processes that compute each packed row of a base model together, with equal parts of its tokens; None
    if this process computes whole rows."""
    return getattr(model, 'sequence_group', None)


def check_parts_learn(model: nn.Module) -> None:
    """Raises ValueError for a base model with a `sequence_group` and dropout, in train mode or not."""
    if sequence_group(model) is not None and _drops(model):
        raise ValueError(
            f'sequence_parallel: {name_of(model.config)} learns with dropout, whose masks the parts of a sequence '
            'would repeat; set its rates to 0, or leave sequence_parallel out'
        )


def own_actions(model: nn.Module, batch: Batch) -> Batch:
    """Returns the batch with this process's equal part of `action_index` and `action_ids`: all of them without a
    `sequence_group`."""
    if (group := sequence_group(model)) is None:
        return batch
    own = group.own_index(batch.num_actions, batch.action_ids.device)
    return replace(batch, action_index=batch.action_index[own], action_ids=batch.action_ids[own])


def of_all_actions(model: nn.Module, numbers: Any, batch: Batch) -> Any:
    """Returns the tensors of a tuple, nested or None, for all actions (N, ...), given those of `own_actions`."""
    if (group := sequence_group(model)) is None or numbers is None:
        return numbers
    if isinstance(numbers, Tensor):
        return group.gather(numbers, batch.num_actions) if len(numbers) else numbers
    joined = (of_all_actions(model, part, batch) for part in numbers)
    return type(numbers)(*joined) if hasattr(numbers, '_fields') else tuple(joined)


def every_token(packing: Packing) -> Packing:
    """Returns a copy with which a model computes every token."""
    return replace(packing, computed_index=None, state_index=None)


def _drops(model: nn.Module) -> bool:
    """Returns True if a forward in train mode has dropout: of modules, or of rates in attributes, as in OPT."""
    for module in model.modules():
        rates = (value for name, value in vars(module).items() if 'drop' in name and isinstance(value, float))
        if isinstance(module, nn.Dropout) and module.p > 0 or any(rate > 0 for rate in rates):
            return True
    return False


def _copied(states: Tensor, index: Tensor) -> Tensor:
    """Returns `states[index]` with a gradient whose order of summation is fixed: on CUDA that of `index_select` is not,
    and on a CPU that of indexing is slow."""
    return states.index_select(0, index) if states.device.type == 'cpu' else states[index]


def _no_mask(device: torch.device) -> Tensor:
    """Returns a 4-D mask, which transformers passes on unchanged and `packed_attention` does not read; without one
    transformers makes a (T, T) mask or waits for the device. It has size 0, so that attention that reads it fails."""
    return torch.zeros(1, 1, 1, 0, dtype=torch.bool, device=device)


def rows_joined(model: nn.Module, hidden: Tensor, batch: Batch) -> Tensor:
    """Returns (B*S, D) from the output of a part of `model` for a batch: (B, S, D), the (1, T, D) of a packed run, or
    the states of an encoder-decoder's decoder."""
    if layout_of(model).is_encoder_decoder:
        return scatter_states(hidden, batch)
    packing = _packing_for(model, batch)
    if packing is None:
        return hidden.flatten(0, 1)
    states = hidden[0] if packing.group is None else packing.group.gather(hidden[0], _num_computed(packing))
    if packing.state_index is not None:
        states = _copied(states, packing.state_index)
    return states.new_zeros(batch.input_ids.numel(), states.shape[-1]).index_copy(0, packing.token_index, states)


def _num_computed(packing: Packing) -> int:
    return len(packing.token_index if packing.computed_index is None else packing.computed_index)


def _packed_hidden(model: nn.Module, input_ids: Tensor, position_ids: Tensor, packing: Any) -> Tensor:
    """Returns the last hidden states (1, U, D) of the computed tokens of a (B, S) batch, row after row; in a group of
    this process's part."""
    index = packing.token_index
    if packing.computed_index is not None:
        index = index[packing.computed_index]
    if packing.group is not None:
        index = index[packing.group.own_index(len(index), index.device)]
    ids, positions = input_ids.flatten()[index][None], position_ids.flatten()[index][None]
    return run_trunk(model, ids, position_ids=positions, attention_mask=_no_mask(ids.device), packing=packing)


def packs(model: nn.Module) -> bool:
    """Returns True if `model` (a base model) runs packed batches."""
    config: Any = model.config
    return bool(config._attn_implementation == ATTENTION)


def window_of(model: nn.Module) -> int | None:
    """Returns the attention window of a model with sliding-window layers; a longer batch runs padded."""
    config = text_config(model.config)
    kinds = getattr(config, 'layer_types', None)
    if getattr(config, 'use_sliding_window', True) is False or (kinds and 'sliding_attention' not in kinds):
        return None
    return getattr(config, 'sliding_window', None)


# ---------------------------------------------------------------- attention


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    packing: Packing | None = None,
    whole_rows: bool = False,
    attend: Callable[..., Tensor] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention with transformers' interface: query (B, H, S, d), key and value (B, H_kv, S, d) → (B, S, H, d).

    With a `packing`, B is 1 and S the number of computed tokens, in a group those of this process; causal within each
    sequence. With `whole_rows`, causal within each row. Neither reads the mask. If given, `attend(query, key, value,
    mask, scaling)` is called instead.
    """
    if attend is not None:
        if any(kwargs.get(name) is not None for name in ('softcap', 'position_bias', 's_aux')):
            raise ValueError('this attention knows neither soft caps nor position biases nor sinks')
        return attend(query, key, value, attention_mask, scaling), None
    ours = attention_mask is not None and attention_mask.numel() == 0
    if ours and packing is None and not whole_rows:
        raise ValueError(
            f"{_named(module)} does not hand on how sequences are packed; load it with attn_implementation='eager'"
        )
    if (packing is not None or whole_rows) and not ours and attention_mask is not None:
        raise ValueError(
            f'{_named(module)} makes an attention mask of its own, which a packed batch cannot follow; load it '
            "with attn_implementation='eager'"
        )
    if whole_rows:
        attention_mask = None
    if packing is not None and packing.group is not None:
        # each process has all tokens of some heads while it attends
        group, count = packing.group, _num_computed(packing)
        query, key, value = group.to_heads(query, key, value, count)
        whole = {'dropout': dropout, 'scaling': scaling, 'packing': replace(packing, group=None), **kwargs}
        return group.to_tokens(packed_attention(module, query, key, value, attention_mask, **whole)[0]), None
    dtype = query.dtype
    widest = key.shape[2] if packing is None else packing.max_length
    if query.device.type == 'cpu' and dtype in (torch.float16, torch.bfloat16) and widest <= NARROW:
        query, key, value = query.float(), key.float(), value.float()
        if attention_mask is not None and attention_mask.is_floating_point():
            attention_mask = attention_mask.float()
    # autocast would undo the cast
    with torch.autocast('cpu', enabled=False) if query.dtype != dtype else nullcontext():
        return _attend(module, query, key, value, attention_mask, dropout, scaling, packing, **kwargs).to(dtype), None


def _named(attention: Any) -> str:
    config = getattr(attention, 'config', None)
    own = type(attention).__name__
    return own if config is None else f'{own} of {name_of(config)}'


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    packing: Packing | None,
    **kwargs: Any,
) -> Tensor:
    if packing is None:
        asked: Any = module
        own = not dropout and kwargs.get('softcap') is None and kwargs.get('position_bias') is None
        if own and query.shape[2] == 1 and attention_mask is not None and attention_mask.shape[1] == 1:
            return grouped_attention(query, key, value, attention_mask, scaling)
        if key.shape[1] != query.shape[1] and _lacks_groups(query):
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
            asked = SimpleNamespace(is_causal=getattr(module, 'is_causal', True))  # has no groups
        return sdpa_attention_forward(
            asked, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )[0]
    if kwargs.get('softcap') is not None or kwargs.get('position_bias') is not None:
        raise ValueError(
            "packed attention knows neither soft caps nor position biases; load it with attn_implementation='eager'"
        )
    kind = query.device.type
    if torch.is_autocast_enabled(kind) and query.dtype != torch.float64:
        # SDPA does the same: rotary embeddings return queries and keys in fp32, which FlashAttention does not support.
        query, key, value = (x.to(torch.get_autocast_dtype(kind)) for x in (query, key, value))
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (T, heads, d)
    if packing.state_index is not None:
        q, k, v = (_copied(x, packing.state_index) for x in (q, k, v))
    if not dropout and _fits_varlen(q, k, v):
        out = _varlen_attention(q, k, v, packing, scaling)
    else:
        if k.shape[1] != q.shape[1]:
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        out = torch.cat([_group_attention(q, k, v, group, dropout, scaling) for group in packing.groups])
    return (out if packing.computed_index is None else out.index_select(0, packing.computed_index))[None]


def grouped_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """Maps query (n, H, 1, d), key and value (n, H_kv, K, d) and a mask (n, 1, 1, K) to (n, 1, H, d). The query heads
    of a group are queries of a single key head, so keys and values are not repeated."""
    n, heads, _, width = query.shape
    groups = query.reshape(n, key.shape[1], heads // key.shape[1], width)
    out = scaled_dot_product_attention(groups, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(n, 1, heads, value.shape[-1])


def _group_attention(
    q: Tensor, k: Tensor, v: Tensor, group: PackedGroup, dropout: float, scaling: float | None
) -> Tensor:
    """Computes attention of one group's sequences; returns (T', H, d) of its tokens."""
    rows, width, index = group.rows, group.width, group.index

    def padded(x: Tensor) -> Tensor:
        own = x[group.start : group.stop]
        if index is not None:
            own = own.new_zeros(rows * width, *own.shape[1:]).index_copy(0, index, own)
        return own.unflatten(0, (rows, width)).transpose(1, 2)  # (rows, H, width, d)

    # Padding is after the real tokens of its row, so causal attention does not see it.
    out = scaled_dot_product_attention(
        padded(q), padded(k), padded(v), dropout_p=dropout, scale=scaling, is_causal=True
    )
    flat = out.transpose(1, 2).flatten(0, 1)
    return flat if index is None else flat.index_select(0, index)


def _lacks_groups(query: Tensor) -> bool:
    """Returns True if only SDPA's maths kernel, which stores the (T, T) scores, takes fewer key heads than query heads:
    on CUDA in fp32, for more than one query per row."""
    if not query.is_cuda or query.shape[2] == 1:
        return False
    dtype = torch.get_autocast_dtype('cuda') if torch.is_autocast_enabled('cuda') else query.dtype
    return dtype == torch.float32


def _fits_varlen(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Returns True if FlashAttention 2 applies: CUDA, 16 bits, heads of one width, and torch's own conditions for it
    (sm80 or newer, widths up to 256, and where the backward has too little shared memory, as on sm86 and sm89 above
    192, no gradients)."""
    d = q.shape[-1]
    if not q.is_cuda or q.dtype not in (torch.float16, torch.bfloat16) or not q.dtype == k.dtype == v.dtype:
        return False
    return d == k.shape[-1] == v.shape[-1] and d % 8 == 0 and _varlen() is not None and _flash_allows(q, k, v)


def _flash_allows(q: Tensor, k: Tensor, v: Tensor) -> bool:
    params: Any = torch.backends.cuda.SDPAParams
    rows = (x.transpose(0, 1)[None] for x in (q, k, v))
    asked = params(*rows, None, 0.0, True, k.shape[1] != q.shape[1])
    return torch.backends.cuda.can_use_flash_attention(asked)


@cache
def _varlen() -> Any:
    """Returns torch's FlashAttention for variable lengths and its parameters' names, or None."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn, frozenset(inspect.signature(varlen_attn).parameters)


def _varlen_attention(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scaling: float | None) -> Tensor:
    """Calls FlashAttention, which reads the key head of each group of query heads; torch 2.11 has no flag for it."""
    attend, names = _varlen()
    keywords = {'enable_gqa': k.shape[1] != q.shape[1]} if 'enable_gqa' in names else {}
    cu, longest = packing.cu_seqlens, packing.max_length
    tensors = (x.contiguous() for x in (q, k, v))
    return attend(*tensors, cu, cu, longest, longest, window_size=(-1, 0), scale=scaling, **keywords)


AttentionInterface.register(ATTENTION, packed_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


# ---------------------------------------------------------------- which models


def enable_packing(model: nn.Module) -> bool:
    """Makes `model` (a base model) run packed batches if it supports them. Returns True if it does. Ordinary calls do
    not change."""
    config: Any = model.config
    if layout_of(model).is_encoder_decoder:
        separate_inputs(model)
        return False
    if packs(model):
        return True
    if not _can_by_form(model):
        return False
    config._attn_implementation = ATTENTION
    if is_meta(model) or _agrees(model):
        return True
    config._attn_implementation = 'sdpa'
    return False


def _can_by_form(model: nn.Module) -> bool:
    config = text_config(model.config)
    kinds = set(getattr(config, 'layer_types', None) or ['full_attention'])
    parameters = inspect.signature(type(model).forward).parameters.values()
    return (
        getattr(model.config, '_attn_implementation', None) == 'sdpa'
        and bool(getattr(model, '_supports_attention_backend', False))
        and accepts(model, 'position_ids')
        and any(p.kind is p.VAR_KEYWORD for p in parameters)
        and not needs_mask(model)
        and kinds <= {'full_attention', 'sliding_attention'}
        and row_limit(config) is None
        and not any(getattr(config, name, None) for name in UNSUPPORTED_SETTINGS)
    )


def check_batch_independence(model: nn.Module) -> None:
    """Compares the states of two short sequences in one batch with those of each alone, and with another last token.

    Raises ValueError if a token's state depends on other sequences, on padding, or, unless the model is known to be
    bidirectional, on later tokens. Does nothing on the meta device (see `check_loaded_packing`).
    """
    if is_meta(model):
        return
    with in_eval_mode(model), torch.no_grad():
        records = _records(model)
        device = next(model.parameters()).device
        try:
            together = flat_hidden(model, collate(records).to(device))
            width = max(CHECK_LENGTHS) + 1
            rows = together.view(len(records), width, -1)
            alone = [flat_hidden(model, collate([record]).to(device)) for record in records]
            pairs = [(rows[i, : len(own)], own) for i, own in enumerate(alone)]
            if not looks_ahead(model):
                other = replace(records[0], response_ids=records[0].response_ids.roll(1))
                pairs.append((flat_hidden(model, collate([other]).to(device))[:1], alone[0][:1]))
        except torch.OutOfMemoryError:
            raise
        except (TypeError, RuntimeError, AttributeError, IndexError, NotImplementedError):
            return  # its first real forward raises the model's own error
        if not all(close(got, want) for got, want in pairs):
            raise ValueError(
                f'{type(model).__name__} gives a token other numbers when padding, other sequences or later tokens '
                'stand beside it, so that neither log-probs nor values nor scores would mean anything'
            )


@torch.no_grad()
def check_loaded_packing(
    module: nn.Module,
    device: torch.device,
    *,
    in_fp32: bool = False,
    forward: Callable[..., Any] | None = None,
    release: Callable[[], None] | None = None,
) -> bool:
    """Runs the checks that need weights, for an actor, critic or reward model that was built on the meta device. If a
    packed forward differs from the padded one, batches run padded from now on. Call it on all ranks that hold a part of
    the module.

    Args:
        device: of the computation.
        in_fp32: True if weights are gathered in fp32.
        forward: called instead of the module, if given.
        release: frees what forwards have left gathered; None for FSDP's way.

    Returns True if it packs; raises as `check_batch_independence`.
    """
    model: Any = getattr(module, 'model', None)
    if not hasattr(model, 'config'):
        return False
    trunks: list[Any] = [m for m in module.modules() if hasattr(m, 'config') and packs(m)]
    records = _records(model)
    forward, release = forward or module, release or partial(reshard, module)

    def numbers(given: list[Sequence]) -> list[Tensor]:
        return _tensors(forward(collate(given).to(device)))

    with in_eval_mode(module):
        try:
            packed = numbers(records) if trunks else None
        except torch.OutOfMemoryError:
            raise
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, NotImplementedError):
            packed = None
            release()
        for trunk in trunks:
            trunk.config._attn_implementation = 'sdpa'
        plain = numbers(records)
        alone = [torch.cat(parts) for parts in zip(*(numbers([record]) for record in records), strict=True)]
        pairs = list(zip(plain, alone, strict=True))
        if len(plain[0]) > len(records) and not looks_ahead(model):  # one number per action
            later = replace(records[0], response_ids=torch.cat([records[0].response_ids[:1], records[1].response_ids]))
            later = replace(later, response_mask=torch.ones(len(later.response_ids), dtype=torch.bool))
            pairs += [(got[:1], want[:1]) for got, want in zip(numbers([later]), plain, strict=True)]
    release()
    if not all(close(got, want) for got, want in pairs):
        raise ValueError(
            f'{type(model).__name__} gives a token other numbers when padding or other sequences stand beside it, so '
            'that neither log-probs nor values nor scores would mean anything'
        )
    if packed is None or not all(close(a, b, 1e-4 if in_fp32 else 2e-2) for a, b in zip(packed, plain, strict=True)):
        return False
    for trunk in trunks:
        trunk.config._attn_implementation = ATTENTION
    return True


def check_batch(module: Any, device: torch.device) -> Batch:
    """Returns two short sequences for an actor, critic or reward model."""
    return collate(_records(module.model)).to(device)


def reshard(module: nn.Module) -> None:
    """Reshards a module: a forward leaves its outermost part gathered, and an interrupted one leaves more."""
    for part in module.modules():
        if hasattr(part, 'reshard'):
            part.reshard()  # type: ignore[operator]


def _records(model: nn.Module) -> list[Sequence]:
    """Returns two short sequences without a pattern; for an encoder half of each."""
    records = []
    for number, length in enumerate(CHECK_LENGTHS):
        ids = ((torch.arange(length + 1) + number * 11) * 7919 + 13) % text_config(model.config).vocab_size
        prompt = (length + 1) // 2 if layout_of(model).is_encoder_decoder else 1
        mask = torch.ones(len(ids) - prompt, dtype=torch.bool)
        records.append(Sequence(prompt_ids=ids[:prompt], response_ids=ids[prompt:], response_mask=mask))
    return records


def _tensors(output: Any) -> list[Tensor]:
    return [output] if isinstance(output, Tensor) else [x for x in output if isinstance(x, Tensor)]


def close(got: Tensor, want: Tensor, tolerance: float = 2e-2) -> bool:
    """Compares by default up to the rounding of 16 bits, in which weights may be gathered. Numbers that are not finite
    are reported elsewhere."""
    off = (got.double() - want.double()).abs().max()
    return bool(off <= tolerance * want.double().abs().max().clamp_min(1e-6)) or not bool(off.isfinite())


@torch.no_grad()
def _agrees(model: nn.Module) -> bool:
    """Returns True if a packed forward of two short sequences gives the hidden states of the padded one."""
    first = next(model.parameters())
    batch = collate(_records(model)).to(first.device)
    assert batch.packing is not None
    try:
        with in_eval_mode(model):
            plain = run_trunk(model, batch.input_ids, position_ids=batch.position_ids).flatten(0, 1)
            packed = _packed_hidden(model, batch.input_ids, batch.position_ids, batch.packing)[0]
            off = (packed.double() - plain[batch.packing.token_index].double()).abs().max()
            tolerance = 1e-4 if first.dtype == torch.float32 else 2e-2
            return bool(off <= tolerance * plain.double().abs().max().clamp_min(1e-6))
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, NotImplementedError):
        return False
