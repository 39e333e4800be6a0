"""Sampling settings, and the step from logits to tokens and log-probs.

The order is transformers': end tokens masked by `min_new_tokens`, temperature, top-k, top-p. Settings of beam search
and penalties are kept in `SamplingParams.extra` for the engine that calls `model.generate`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from chatgpt.names import hint
from chatgpt.rollout.stop import StopStrings

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

DEFAULT_NEW_TOKENS = 64

# GenerationConfig fields that change nothing at these values, so they are accepted
_NEUTRAL: dict[str, float] = {
    **dict.fromkeys(('num_beams', 'num_beam_groups', 'num_return_sequences', 'use_cache'), 1),
    **dict.fromkeys(('repetition_penalty', 'encoder_repetition_penalty', 'length_penalty', 'guidance_scale'), 1),
    **dict.fromkeys(('no_repeat_ngram_size', 'encoder_no_repeat_ngram_size', 'min_length', 'diversity_penalty'), 0),
    **dict.fromkeys(('min_p', 'epsilon_cutoff', 'eta_cutoff'), 0),
    'typical_p': 1,
}
# fields that do not affect sampling
_WITHOUT_EFFECT = {'bos_token_id', 'transformers_version'}
# fields that would change the output of an engine
_OWNED_BY_ENGINE = {'num_return_sequences', 'return_dict_in_generate'} | {
    f'output_{name}' for name in ('scores', 'logits', 'attentions', 'hidden_states')
}


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling settings of a `Call`. Raises ValueError for invalid values.

    >>> SamplingParams(max_new_tokens=48, temperature=0.7, top_p=0.9, eos_token_ids=(1,)).room(prompt_length=16)
    48
    """

    max_new_tokens: int | None = None
    max_length: int | None = None
    """maximum length of prompt + response; it or `max_new_tokens` is required"""
    min_new_tokens: int = 0
    """before this number of tokens, end tokens are masked, `stop` is not called, and stop strings are ignored"""
    do_sample: bool = True
    """False selects the most likely token; temperature and filters then only affect the recorded log-probs"""
    temperature: float = 1.0
    top_k: int = 0
    """0 disables the top-k filter"""
    top_p: float = 1.0
    """1 disables the top-p filter"""
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int = 0
    """any valid token; never read"""
    stop: Callable[[Sequence[int]], bool] | None = None
    """called with the response ids after every token; for stop strings a `StopStrings`"""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """further GenerationConfig fields, for `HFEngine`; `LocalEngine` rejects them"""

    def __post_init__(self) -> None:
        if self.max_new_tokens is None and self.max_length is None:
            raise ValueError('sampling: neither max_new_tokens nor max_length is given; give at least one')
        for name, low in (
            ('max_new_tokens', 1),
            ('max_length', 2),
            ('min_new_tokens', 0),
            ('top_k', 0),
            ('pad_token_id', 0),
        ):
            value = getattr(self, name)
            if value is None and name.startswith('max_'):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise ValueError(f'sampling: {name}={value!r}; give an integer of at least {low}')
        if not _is_number(self.temperature) or not 0 < self.temperature < math.inf:
            raise ValueError(
                f'sampling: temperature={self.temperature!r}; give a number above 0, or do_sample=False for greedy '
                'decoding'
            )
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise ValueError(f'sampling: top_p={self.top_p!r}; give a number above 0 and at most 1 (1 is no filter)')
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f'sampling: min_new_tokens={self.min_new_tokens} is above max_new_tokens={self.max_new_tokens}; lower '
                'it'
            )
        if not isinstance(self.eos_token_ids, tuple) or not all(
            isinstance(t, int) and t >= 0 for t in self.eos_token_ids
        ):
            raise ValueError(f'sampling: eos_token_ids={self.eos_token_ids!r}; give a tuple of token ids')
        if self.stop is not None and not callable(self.stop):
            raise ValueError(
                f'sampling: stop={self.stop!r}; give a function of the response ids, such as StopStrings(tokenizer, '
                'strings)'
            )
        if isinstance(self.stop, StopStrings):
            object.__setattr__(self, 'stop', self.stop.not_before(self.min_new_tokens))

    def room(self, prompt_length: int) -> int:
        """Returns the maximum number of new tokens after a prompt of this length; below 1 if none fits."""
        limits = [self.max_new_tokens] if self.max_new_tokens is not None else []
        if self.max_length is not None:
            limits.append(self.max_length - prompt_length)
        return min(limits)

    @classmethod
    def from_generation_kwargs(cls, tokenizer: Any = None, **kwargs: Any) -> SamplingParams:
        """Makes settings from fields of transformers' GenerationConfig and of this class.

        `eos_token_id` may be one id or a list; None keeps a default. `stop_strings` needs `tokenizer`. Other fields
        (`num_beams=4`, `repetition_penalty=1.2`, ...) are kept in `extra` unless their value has no effect. Raises
        ValueError for an unknown keyword, with the nearest known ones.
        """
        own = set(cls.__dataclass_fields__) - {'extra'}
        known = own | _generation_config_fields()
        settings: dict[str, Any] = {}
        extra: dict[str, Any] = {}
        for name, value in kwargs.items():
            if name not in known:
                near = hint(name, sorted(known)) or '; give a field of transformers.GenerationConfig'
                raise ValueError(f'generation setting {name!r} is unknown{near}')
            if value is None or name in _WITHOUT_EFFECT:
                continue
            if name == 'stop_strings':
                if tokenizer is None:
                    raise ValueError(
                        f'generation setting stop_strings={value!r} needs a tokenizer; give one, or stop=<function of '
                        'ids>'
                    )
                settings['stop'] = StopStrings(tokenizer, value)
            elif name in ('eos_token_id', 'eos_token_ids'):
                settings['eos_token_ids'] = (value,) if isinstance(value, int) else tuple(value)
            elif name == 'top_k' and isinstance(value, float) and value.is_integer():  # TRL writes 0.0
                settings[name] = int(value)
            elif name == 'min_length' and value == -1:  # none, in TRL
                continue
            elif name in own:
                settings[name] = value
            elif value is not False and value != _NEUTRAL.get(name):
                if name in _OWNED_BY_ENGINE:
                    raise ValueError(f"generation setting {name}={value!r} is the engine's own business; leave it out")
                extra[name] = value
        return cls(**settings, extra=extra)


from_generation_kwargs = SamplingParams.from_generation_kwargs


def generation_fields() -> frozenset[str]:
    """Returns all keywords of `SamplingParams.from_generation_kwargs`."""
    return frozenset(SamplingParams.__dataclass_fields__) - {'extra'} | _generation_config_fields()


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@cache
def _generation_config_fields() -> frozenset[str]:
    from transformers import GenerationConfig

    return frozenset(name for name in vars(GenerationConfig()) if not name.startswith('_'))


class Draw(NamedTuple):
    """The next tokens of n rows, with their recorded numbers."""

    token: Tensor
    """(n,) int64"""
    logprob: Tensor
    """(n,) fp32, scaled by temperature, unfiltered"""
    filtered_logprob: Tensor
    """(n,) fp32, renormalised over the tokens that the filters keep"""
    edge_distance: Tensor | None
    """(n,) fp32; None for greedy decoding"""


class TokenSampler:
    """Selects tokens from logits, with the same settings for every row and step.

    With a filter, `edge_distance` is at most the distance to the filter's threshold (the probability gap at the k-th
    token, the cumulative mass around `top_p`), because a token that crosses it moves the edges of all others.
    """

    def __init__(self, sampling: SamplingParams, device: torch.device | str) -> None:
        import torch

        self.sampling = sampling
        self.end_ids = torch.tensor(sampling.eos_token_ids, dtype=torch.int64, device=device)
        self.has_filter = sampling.top_k > 0 or sampling.top_p < 1.0

    def is_end(self, token: Tensor) -> Tensor:
        """Returns a (n,) bool mask of end tokens."""
        if len(self.sampling.eos_token_ids) == 1:
            return token == self.sampling.eos_token_ids[0]
        return (token[:, None] == self.end_ids).any(dim=1)

    def __call__(self, logits: Tensor, uniform: Tensor | None, no_end_mask: Tensor | None = None) -> Draw:
        """Selects the next tokens. logits: (n, V), any float dtype. uniform: (n, 1) float64, or None for greedy
        decoding. no_end_mask: (n,) bool, True for rows shorter than `min_new_tokens`."""
        import torch

        from chatgpt.rollout.randomness import edge_distances, inverse_cdf

        scaled = logits.float()
        if self.sampling.temperature != 1.0:
            scaled = scaled / self.sampling.temperature
        logprobs = torch.log_softmax(scaled, dim=-1)
        if no_end_mask is None and not self.has_filter:
            filtered, margin = logprobs, None
        else:
            filtered, margin = self.filter(logprobs, no_end_mask)
        if uniform is None:
            token = filtered.argmax(dim=-1, keepdim=True)
            edge = None
        else:
            probs = filtered.exp()
            token, room = inverse_cdf(probs, uniform)
            edge = edge_distances(room, probs.gather(1, token)).squeeze(1)
            if margin is not None:
                edge = torch.minimum(edge, margin)
        chosen = filtered.gather(1, token).squeeze(1)
        unfiltered = chosen if filtered is logprobs else logprobs.gather(1, token).squeeze(1)
        return Draw(token.squeeze(1), unfiltered, chosen, edge)

    def filter(self, logprobs: Tensor, no_end_mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Returns (n, V) log-probs of the filtered distribution, -inf for removed tokens, and the (n,) distance to the
        filters' thresholds."""
        import torch

        kept, margin = logprobs, None
        if no_end_mask is not None and len(self.end_ids) > 0:
            kept = kept.index_fill(1, self.end_ids, -math.inf)
            kept = torch.where(no_end_mask[:, None], kept, logprobs)
        if 0 < self.sampling.top_k < kept.shape[1]:
            top = kept.topk(self.sampling.top_k + 1, dim=-1).values
            last, next_one = top[:, -2], top[:, -1]
            margin = (last.exp() - next_one.exp()).float()
            # ties with the k-th token are kept, as in transformers: a choice among them would depend on the device
            kept = kept.masked_fill(kept < last[:, None], -math.inf)
        kept = torch.log_softmax(kept, dim=-1)
        if self.sampling.top_p < 1.0:
            kept, nucleus_margin = self._nucleus(kept)
            margin = nucleus_margin if margin is None else torch.minimum(margin, nucleus_margin)
        return kept, margin

    def _nucleus(self, logprobs: Tensor) -> tuple[Tensor, Tensor]:
        """Keeps the smallest set of most likely tokens with a mass of at least top_p (Holtzman et al. 2019, section
        3.1), renormalised."""
        import torch

        top_p = self.sampling.top_p
        ordered, order = logprobs.sort(dim=-1, descending=True, stable=True)
        mass = ordered.exp().cumsum(dim=-1, dtype=torch.float64)
        before = mass - ordered.exp()
        keep = before < top_p
        keep[:, 0].fill_(True)
        last = keep.sum(dim=-1, keepdim=True) - 1
        first_out = (last + 1).clamp_(max=logprobs.shape[1] - 1)
        # the last token kept is removed when `before` passes top_p, the next one enters when `mass` falls below it, and
        # the two change places when their probabilities become equal
        gap = (ordered.gather(1, last).exp() - ordered.gather(1, first_out).exp()).double()
        gap = torch.where(first_out == last, torch.ones_like(gap), gap)
        crossing = torch.minimum((before.gather(1, last) - top_p).abs(), (mass.gather(1, last) - top_p).abs())
        margin = torch.minimum(gap, crossing).squeeze(1).float()
        kept_mask = torch.zeros_like(keep).scatter_(1, order, keep)
        return torch.log_softmax(logprobs.masked_fill(~kept_mask, -math.inf), dim=-1), margin


def end_tokens(model: Any, tokenizer: Any) -> tuple[int, ...] | None:
    """Returns the end tokens of a response: the tokenizer's, then those of the model's generation config.

    Chat models end a turn with another token than a text. A single token that comes from the model config, not from
    generation_config.json, may be a default of the model family that this tokenizer does not share, so it is used only
    if the tokenizer has no end token.
    """
    settings = getattr(model, 'generation_config', None)
    stated = getattr(settings, 'eos_token_id', None)
    also = [] if stated is None else [stated] if isinstance(stated, int) else list(stated)
    own = getattr(tokenizer, 'eos_token_id', None)
    if own is not None:
        vocab_size = getattr(getattr(model, 'config', None), 'vocab_size', None) or math.inf
        if isinstance(stated, int) and getattr(settings, '_from_model_config', False):
            also = []
        also = [own, *(token for token in also if token < vocab_size)]
    return tuple(dict.fromkeys(also)) or None


def sampling_for(
    actor: nn.Module, tokenizer: Any, kwargs: Mapping[str, Any]
) -> tuple[SamplingParams, StopStrings | None]:
    """Makes sampling parameters from generation keywords, with end and padding tokens of the tokenizer or the model as
    defaults."""
    given = dict(kwargs)
    stop_strings = given.pop('stop_strings', None)
    model = getattr(actor, 'model', None)
    if given.get('eos_token_id') is None and given.get('eos_token_ids') is None:
        given['eos_token_id'] = end_tokens(model, tokenizer)
    if given.get('pad_token_id') is None:
        given['pad_token_id'] = getattr(tokenizer, 'pad_token_id', None)
        if given['pad_token_id'] is None:
            given['pad_token_id'] = getattr(getattr(model, 'generation_config', None), 'pad_token_id', None)
    if given.get('max_new_tokens') is None and given.get('max_length') is None:
        given['max_new_tokens'] = DEFAULT_NEW_TOKENS
    sampling = SamplingParams.from_generation_kwargs(**given)
    if not stop_strings:
        return sampling, None
    if sampling.stop is not None:
        raise ValueError('stop and stop_strings are both given; give one')
    if tokenizer is None:
        raise ValueError('stop_strings needs a tokenizer')
    matcher = StopStrings(tokenizer, [stop_strings] if isinstance(stop_strings, str) else list(stop_strings))
    matcher = matcher.not_before(sampling.min_new_tokens)
    return replace(sampling, stop=matcher), matcher
