"""The functions of `trl.core` that scripts import."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from chatgpt.functional.logprobs import entropy_of, logprobs_of
from chatgpt.rollout import SamplingParams
from chatgpt.rollout.sampling import TokenSampler

WANDB_PADDING = -1


class LengthSampler:
    """A sampler of numbers of tokens in [min_value, max_value), with numpy's global generator as in TRL."""

    def __init__(self, min_value: int, max_value: int) -> None:
        if not min_value < max_value:
            raise ValueError(
                f'LengthSampler({min_value}, {max_value}): the second number is excluded and must be above'
            )
        self.values = list(range(min_value, max_value))

    def __call__(self) -> int:
        return int(np.random.choice(self.values))


def set_seed(seed: int) -> None:
    """Seeds the generators of Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@torch.no_grad()
def respond_to_batch(
    model: Callable[[Tensor], Any], queries: Tensor, txt_len: int = 20, top_k: int = 0, top_p: float = 1.0
) -> Tensor:
    """Samples `txt_len` tokens after each of (B, P) prompts of equal length, ignoring end tokens: (B, txt_len) int64.

    Args:
        model: maps ids to a tuple or output with the logits (B, S, V) first.
    """
    sampler = TokenSampler(SamplingParams(max_new_tokens=txt_len, top_k=top_k, top_p=top_p), queries.device)
    ids = queries
    for _ in range(txt_len):
        logits = model(ids)[0][:, -1]
        uniform = torch.rand((len(ids), 1), dtype=torch.float64, device=ids.device)
        ids = torch.cat([ids, sampler(logits, uniform).token[:, None]], dim=1)
    return ids[:, -txt_len:]


def padded(sequences: SequenceOf[Tensor], pad_id: int, *, on_left: bool) -> tuple[Tensor, Tensor]:
    """Pads sequences of ids; returns ids and attention mask, (rows, width) int64."""
    side = 'left' if on_left else 'right'

    def pad(rows: list[Tensor], value: int) -> Tensor:
        return pad_sequence(rows, batch_first=True, padding_value=value, padding_side=side)

    return pad(list(sequences), pad_id), pad([torch.ones_like(ids) for ids in sequences], 0)


@torch.no_grad()
def generate_to_end(model: Any, queries: SequenceOf[Tensor], settings: Mapping[str, Any]) -> list[Tensor]:
    """Returns responses of a transformers model to queries (P,), by its `generate`, each up to and including its end
    token, or without padding; of an encoder-decoder they begin with the start token. `settings` are keywords of
    `generate`."""
    decoder_only = not model.config.is_encoder_decoder
    ids, mask = padded(queries, settings.get('pad_token_id') or 0, on_left=decoder_only)
    was_training = model.training
    out = model.eval().generate(ids, attention_mask=mask, **settings)
    model.train(was_training)
    end = settings.get('eos_token_id', model.generation_config.eos_token_id)
    ends = torch.tensor([x for x in ([end] if isinstance(end, int) else end or []) if x >= 0], device=ids.device)
    pad, found = settings.get('pad_token_id', model.generation_config.pad_token_id), []
    for row in out[:, ids.shape[1] :] if decoder_only else out:
        where = torch.isin(row, ends).nonzero().reshape(-1)
        where = where if decoder_only else where[where > 0]  # the start token may be an end token
        if not len(where):  # a criterion may have stopped it
            where = (row != pad).nonzero().reshape(-1)[-1:] if pad is not None else where
        found.append(row[: int(where[0]) + 1] if len(where) else row)
    return found


# ---------------------------------------------------------------- tensors


def logprobs_from_logits(logits: Tensor, labels: Tensor | None, gather: bool = True) -> Tensor:
    """Returns the log softmax of logits (B, S, V) at the labels, (B, S), or with `gather=False` everywhere."""
    if not gather or labels is None:
        return torch.log_softmax(logits, dim=-1)
    return logprobs_of(logits, labels)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Returns the entropy of logits (..., V) in nats, shape (...)."""
    return entropy_of(logits)


def masked_mean(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """Returns the mean of the values with a nonzero mask, along `axis` if given."""
    if axis is None:
        return (values * mask).sum() / mask.sum()
    return (values * mask).sum(axis) / mask.sum(axis)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Returns the variance of the values with a nonzero mask. Raises ValueError if there are none."""
    count = mask.sum()
    if count == 0:
        raise ValueError('masked_var: the mask is 0 everywhere; a variance needs values')
    variance = masked_mean((values - masked_mean(values, mask)) ** 2, mask)
    return variance * count / (count - 1) if unbiased else variance


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Returns (x − mean) / sqrt(var + 1e-8) with the masked moments; `shift_mean=False` adds the mean back.

    `chatgpt.functional.masking.whiten` with `shift_mean=False` scales the mean, too.
    """
    mean, var = masked_mean(values, mask), masked_var(values, mask)
    whitened = (values - mean) * torch.rsqrt(var + 1e-8)
    return whitened if shift_mean else whitened + mean


def whiten(values: Tensor, shift_mean: bool = True) -> Tensor:
    """Returns `masked_whiten` with a mask of ones."""
    return masked_whiten(values, torch.ones_like(values), shift_mean)


def clip_by_value(x: Tensor, tensor_min: Tensor | float, tensor_max: Tensor | float) -> Tensor:
    """Clamps x to [tensor_min, tensor_max], each a number or a tensor."""
    return torch.clamp(x, torch.as_tensor(tensor_min).to(x), torch.as_tensor(tensor_max).to(x))


def top_k_top_p_filtering(
    logits: Tensor, top_k: int = 0, top_p: float = 1.0, filter_value: float = -float('inf'), min_tokens_to_keep: int = 1
) -> Tensor:
    """Replaces logits (B, V) outside the top k, then outside the nucleus of mass top_p, by `filter_value`."""
    k = max(top_k, min_tokens_to_keep) if top_k > 0 else 0
    sampler = TokenSampler(SamplingParams(max_new_tokens=1, top_k=k, top_p=top_p), logits.device)
    kept, _ = sampler.filter(torch.log_softmax(logits.float(), dim=-1))
    return logits.masked_fill(torch.isneginf(kept), filter_value)


# ---------------------------------------------------------------- dicts of statistics


def flatten_dict(nested: Mapping[str, Any], sep: str = '/') -> dict[str, Any]:
    """Flattens nested dicts; keys are joined by `sep`."""
    flat: dict[str, Any] = {}
    for name, value in nested.items():
        if sep in name:
            raise ValueError(f'flatten_dict: the key {name!r} holds the separator {sep!r}')
        if isinstance(value, Mapping):
            flat |= {f'{name}{sep}{inner}': v for inner, v in flatten_dict(value, sep).items()}
        else:
            flat[name] = value
    return flat


def stack_dicts(stats_dicts: SequenceOf[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Stacks for each key the flattened tensors of all dicts as rows, padded with `WANDB_PADDING`."""
    return {
        name: pad_sequence(
            [torch.flatten(stats[name]) for stats in stats_dicts], batch_first=True, padding_value=WANDB_PADDING
        )
        for name in stats_dicts[0]
    }


def convert_to_scalar(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Converts tensors and arrays of one element to numbers; other values are unchanged."""
    return {name: v.item() if hasattr(v, 'shape') and tuple(v.shape) in ((), (1,)) else v for name, v in stats.items()}


def stats_to_np(stats_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Converts tensors to numpy arrays (bfloat16 to float32) and numbers to floats."""
    found: dict[str, Any] = {}
    value: Any
    for name, value in stats_dict.items():
        if isinstance(value, Tensor):
            value = value.detach().cpu()
            value = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
        found[name] = float(value) if isinstance(value, (int, float, np.number)) else value
    return found


class PPODecorators:
    """`empty_device_cache()`, which scripts use around their own functions; it has no effect."""

    optimize_device_cache = False

    @classmethod
    @contextmanager
    def empty_device_cache(cls) -> Any:
        """Does nothing."""
        yield
