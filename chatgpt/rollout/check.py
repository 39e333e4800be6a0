"""Whether a model's cached decode with slots agrees with its plain forward, found out on a few tokens.

Three prompts of unequal length are prefilled and continued token by token, and the hidden states are compared with one
plain forward of each whole sequence. Also says in which form the model takes the mask of valid slots: as an additive (n, 1, 1, K)
tensor, which costs least, or as a boolean (n, K) one, which models that derive positions from it (ALiBi) and flash kernels need.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from chatgpt.rollout.slot_cache import SlotCache

MaskForm = Literal['additive', 'boolean']

_PROMPT_LENGTHS = (3, 6, 4)
_NUM_STEPS = 3


def decode_mask(lengths: Tensor, width: int, form: MaskForm, dtype: torch.dtype) -> Tensor:
    """Slots 0 .. lengths[i] of row i are valid: the stored tokens and the one being written. (n, 1, 1, width) or (n, width)."""
    beyond = torch.arange(width, device=lengths.device) > lengths[:, None]
    if form == 'boolean':
        return ~beyond
    return torch.zeros(beyond.shape, dtype=dtype, device=lengths.device).masked_fill_(beyond, torch.finfo(dtype).min)[
        :, None, None
    ]


def model_config(actor: Any) -> Any:
    """The configuration of the text model inside an actor."""
    config = actor.model.config
    return config.get_text_config() if hasattr(config, 'get_text_config') else config


def attention_window(config: Any) -> int | None:
    """The shortest attention window of any layer, None where all layers attend to everything."""
    if getattr(config, 'use_sliding_window', True) is False:
        return None
    kinds = getattr(config, 'layer_types', None)
    if kinds is not None and all(kind == 'full_attention' for kind in kinds):
        return None
    windows = [
        getattr(config, name, None) for name in ('sliding_window', 'window_size', 'attention_window', 'attention_chunk_size')
    ]
    return min((w for w in windows if isinstance(w, int) and w > 0), default=None)


def _example(vocab_size: int, device: torch.device) -> list[Tensor]:
    """Token ids without a pattern, the same on every rank."""
    longest = max(_PROMPT_LENGTHS) + _NUM_STEPS
    ids = (torch.arange(len(_PROMPT_LENGTHS) * longest, device=device) * 7919 + 13) % vocab_size
    return [row[: length + _NUM_STEPS] for row, length in zip(ids.view(-1, longest), _PROMPT_LENGTHS, strict=True)]


def _cached_states(actor: Any, sequences: list[Tensor], form: MaskForm) -> list[Tensor]:
    """Hidden states of the last prompt token and the tokens after it, per sequence, by prefill and decode."""
    device, rows, longest = sequences[0].device, len(sequences), max(_PROMPT_LENGTHS)
    lengths = torch.tensor(_PROMPT_LENGTHS, device=device)
    cache = SlotCache(rows, longest + _NUM_STEPS)
    input_ids = torch.zeros(rows, longest, dtype=torch.int64, device=device)
    for i, length in enumerate(_PROMPT_LENGTHS):
        input_ids[i, :length] = sequences[i][:length]
    row_index = torch.arange(rows, device=device)
    cache.prefill(row_index, None)
    positions = torch.arange(longest, device=device).expand(rows, longest)
    hidden = actor.trunk(input_ids, position_ids=positions, past_key_values=cache)
    states = [[hidden[i, length - 1]] for i, length in enumerate(_PROMPT_LENGTHS)]
    for step in range(_NUM_STEPS):
        width = longest + step + 1
        token = torch.stack([s[length + step] for s, length in zip(sequences, _PROMPT_LENGTHS, strict=True)])
        cache.decode(row_index, lengths, width, same_length=False)
        mask = decode_mask(lengths, width, form, hidden.dtype)
        hidden = actor.trunk(token[:, None], position_ids=lengths[:, None], attention_mask=mask, past_key_values=cache)
        for i in range(rows):
            states[i].append(hidden[i, 0])
        lengths = lengths + 1
    return [torch.stack(row) for row in states]


def find_mask_form(actor: Any) -> MaskForm:
    """The first mask form under which cached decode and plain forward agree. Raises ValueError where none does,
    FloatingPointError where the plain forward is not finite.

    The tolerance is relative to the largest hidden state: 1e-3 in fp32, 5e-2 in 16 bits; a wrong mask or position is off by far more.
    """
    config = model_config(actor)
    sequences = _example(config.vocab_size, next(actor.parameters()).device)
    plain = []
    for ids, length in zip(sequences, _PROMPT_LENGTHS, strict=True):
        positions = torch.arange(len(ids), device=ids.device)[None]
        plain.append(actor.trunk(ids[None], position_ids=positions)[0, length - 1 :].float())
    scale = max(float(p.abs().max()) for p in plain)
    if not math.isfinite(scale):
        raise FloatingPointError('LocalEngine: the hidden states of the policy are not finite; check its weights and precision')
    tolerance = 1e-3 if next(actor.parameters()).dtype == torch.float32 else 5e-2
    found = []
    for form in ('additive', 'boolean'):
        try:
            cached = _cached_states(actor, sequences, form)
        except torch.OutOfMemoryError:
            raise
        except (ValueError, TypeError, RuntimeError, IndexError, AttributeError, NotImplementedError, KeyError) as error:
            found.append(f'{form} mask: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ""}')
            continue
        difference = max(float((c.float() - p).abs().max()) for c, p in zip(cached, plain, strict=True))
        if difference <= tolerance * scale:
            return form
        found.append(f'{form} mask: hidden states differ by {difference:.1e} of {scale:.1e}')
    name = type(actor.model).__name__
    raise ValueError(
        f"LocalEngine: cached decode of {name} does not agree with its plain forward ({'; '.join(found)}); use engine='hf'"
    )
