"""One response, token by token as it is drawn: for a chat in a terminal. Left out: batches (the engines)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from chatgpt.nn.dropout import in_eval_mode
from chatgpt.nn.encoder_decoder import start_token
from chatgpt.nn.trunk import base_model, is_encoder_decoder, text_config
from chatgpt.rollout.engine import Call
from chatgpt.rollout.randomness import sample_keys, uniforms
from chatgpt.rollout.sampling import SamplingParams, TokenSampler
from chatgpt.types import Prompt

if TYPE_CHECKING:
    from chatgpt.nn import Actor


def stream_tokens(
    actor: Actor, prompt_ids: Tensor, sampling: SamplingParams, *, seed: int, index: int = 0
) -> Iterator[int]:
    """The ids of one response as they are drawn, the end token included. Draws are those of the engines for (seed,
    index).

    Dropout is off until the response ends or the generator is closed.

    Args:
        prompt_ids: (P,) int64, P >= 1.

    Raises:
        ValueError: an empty prompt, no room for a response, or more tokens than the model has positions.
    """
    (limit,) = Call.of([Prompt(ids=prompt_ids)], sampling, seed, [index]).limits(text_config(actor.model.config))
    with in_eval_mode(actor):
        yield from _decode(actor, prompt_ids, sampling, limit, seed, index)


@torch.inference_mode()
def _decode(
    actor: Actor, prompt_ids: Tensor, sampling: SamplingParams, limit: int, seed: int, index: int
) -> Iterator[int]:
    device = next(actor.parameters()).device
    sampler = TokenSampler(sampling, device)
    key = sample_keys(seed, torch.tensor([index], dtype=torch.int64, device=device))
    reading = _reading_apart if is_encoder_decoder(actor.model) else _reading_on
    first, states_of = reading(actor, prompt_ids.to(device))
    ids = first[None]
    past: list[int] = []
    while len(past) < limit:
        hidden = states_of(ids)
        position = torch.tensor([len(past)], device=device)
        uniform = uniforms(key[:, None], position).view(1, 1) if sampling.do_sample else None
        too_short = (
            torch.tensor([len(past) < sampling.min_new_tokens], device=device) if sampling.eos_token_ids else None
        )
        token = int(sampler(actor.head(hidden[:, -1]), uniform, too_short).token)
        past.append(token)
        yield token
        if token in sampling.eos_token_ids:
            return
        if sampling.stop is not None and len(past) >= sampling.min_new_tokens and sampling.stop(past):
            return
        ids = torch.tensor([[token]], device=device)


def _reading_on(actor: Actor, prompt_ids: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """What a decoder reads first, (P,) ids, and its states (1, n, D) of the next ids (1, n)."""
    from transformers import DynamicCache

    cache = DynamicCache()

    def states_of(ids: Tensor) -> Tensor:
        start = cache.get_seq_length()
        positions = torch.arange(start, start + ids.shape[1], device=ids.device)[None]
        return actor.trunk(ids, position_ids=positions, past_key_values=cache, use_cache=True)

    return prompt_ids, states_of


def _reading_apart(actor: Actor, prompt_ids: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The same of an encoder-decoder, whose decoder first reads the start token."""
    from transformers import DynamicCache, EncoderDecoderCache

    base: Any = base_model(actor.model)
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    seen = base.get_encoder()(input_ids=prompt_ids[None]).last_hidden_state

    def states_of(ids: Tensor) -> Tensor:
        decoder = base.get_decoder()
        return decoder(
            input_ids=ids, encoder_hidden_states=seen, past_key_values=cache, use_cache=True
        ).last_hidden_state

    return prompt_ids.new_tensor([start_token(actor.model.config)]), states_of
