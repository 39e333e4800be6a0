"""Streaming of a single response, for a chat in a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from chatgpt.nn.layouts import layout_of
from chatgpt.nn.trunk import in_eval_mode, text_config
from chatgpt.rollout.call import Call
from chatgpt.rollout.randomness import sample_keys, uniforms
from chatgpt.rollout.sampling import SamplingParams, TokenSampler
from chatgpt.types import Prompt

if TYPE_CHECKING:
    from chatgpt.nn import Actor


def stream_tokens(
    actor: Actor, prompt_ids: Tensor, sampling: SamplingParams, *, seed: int, index: int = 0
) -> Iterator[int]:
    """Yields the token ids of a response as they are sampled, including the end token, with the same draws as the
    engines for (seed, index). Dropout is off until the response ends or the generator is closed.

    Args:
        prompt_ids: (P,) int64, P >= 1.

    Raises:
        ValueError: an empty prompt, no room for a response, a sequence longer than the model's positions, or settings
            of transformers that only `HFEngine` knows.
        FloatingPointError: logits that are not finite.
    """
    call = Call.of([Prompt(ids=prompt_ids)], sampling, seed=seed, indices=[index])
    if sampling.extra:
        raise ValueError(f'stream_tokens cannot do {", ".join(sampling.extra)}; leave it out')
    (limit,) = call.checked(text_config(actor.model.config))
    with in_eval_mode(actor):
        yield from _decode(actor, call, limit)


@torch.inference_mode()
def _decode(actor: Actor, call: Call, limit: int) -> Iterator[int]:
    device, sampling = next(actor.parameters()).device, call.sampling
    sampler = TokenSampler(sampling, device)
    key = sample_keys(call.seed, torch.tensor(call.indices, dtype=torch.int64, device=device))
    first, states_of = layout_of(actor.model).reader(actor, call.prompts[0].ids.to(device))
    ids = first[None]
    past: list[int] = []
    while len(past) < limit:
        hidden = states_of(ids)
        position = torch.tensor([len(past)], device=device)
        uniform = uniforms(key[:, None], position).view(1, 1) if sampling.do_sample else None
        too_short = (
            torch.tensor([len(past) < sampling.min_new_tokens], device=device) if sampling.eos_token_ids else None
        )
        draw = sampler(actor.head(hidden[:, -1]), uniform, too_short)
        if not draw.logprob.isfinite():
            raise call.not_finite(0, len(past))
        token = int(draw.token)
        past.append(token)
        yield token
        if token in sampling.eos_token_ids:
            return
        if sampling.stop is not None and len(past) >= sampling.min_new_tokens and sampling.stop(past):
            return
        ids = torch.tensor([[token]], device=device)
