"""NLPO's masked policy: in every state the policy is restricted to the likely tokens of an older copy of it.

    π_masked(v | s) = π(v | s) / Σ_{u in M(s)} π(u | s) for v in M(s), else 0
    M(s): smallest set of tokens with mask-policy mass >= top_p

Source: Ramamurthy et al. 2022, "Is reinforcement learning (not) for natural language processing?", section 4.2 and
algorithm 1. `PPOTrainer` copies the policy's weights to the mask policy.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from chatgpt.functional.logprobs import WithEntropy, entropy_graph, entropy_of, logprobs_of
from chatgpt.nn.actor import PolicyOutput
from chatgpt.types import Batch


def likely_tokens(logits: Tensor, top_p: float, temperature: float = 1.0) -> Tensor:
    """Returns the mask of the smallest set of most likely tokens with total probability >= `top_p`, (..., V) bool;
    never empty."""
    probs = torch.softmax(logits.float() / temperature, dim=-1)
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1, dtype=torch.float64) - ordered
    keep = before < top_p
    keep[..., 0] = True
    return torch.zeros_like(keep).scatter_(-1, order, keep)


def masked_output(
    policy: Any,
    mask_model: Any,
    batch: Batch,
    *,
    top_p: float,
    temperature: float,
    with_entropy: WithEntropy = True,
) -> PolicyOutput:
    """Computes log-probs and entropy of π_masked for the actions of a batch. Allocates (N, V) logits of both models.

    An action outside of M(s), which the masked policy cannot sample, gets log π(a) − log(π(M(s)) + π(a)): M(s) is
    widened by it.
    """
    out = policy(batch, temperature=temperature, with_logits=True)
    with torch.no_grad():
        mask = likely_tokens(mask_model(batch, temperature=temperature, with_logits=True).logits, top_p, temperature)
        mask = mask.scatter(-1, batch.action_ids[:, None], True)
    logits = out.logits.float().masked_fill(~mask, -1e9)  # finite: −inf times 0 would be NaN in the entropy
    with entropy_graph(with_entropy):
        entropy = entropy_of(logits, temperature) if with_entropy else None
    logprobs = logprobs_of(logits, batch.action_ids, temperature)
    return PolicyOutput(logprobs, entropy, out.values, value_logits=out.value_logits)


class MaskedPolicy(nn.Module):
    """The model that an engine generates with: both models, with one cache for both.

    Args:
        actor, mask_actor: whole `Actor`s of one architecture.
    """

    changes_logits = True
    """`head` is not the head of `model`"""

    def __init__(self, actor: Any, mask_actor: Any, top_p: float, temperature: float) -> None:
        super().__init__()
        self.actor, self.mask_actor, self.top_p, self.temperature = actor, mask_actor, top_p, temperature

    @property
    def model(self) -> Any:
        return self.actor.model

    @property
    def config(self) -> Any:
        return self.actor.config

    def trunk(self, input_ids: Tensor, *, cache: Any = None, **kwargs: Any) -> Tensor:
        """Returns hidden states of the policy and of the mask policy, concatenated: (B, S, 2 D)."""
        first = self.actor.trunk(input_ids, cache=cache, **kwargs)
        num_layers = self.actor.config.get_text_config().num_hidden_layers
        shifted = None if cache is None else _Shifted(cache, num_layers)
        return torch.cat([first, self.mask_actor.trunk(input_ids, cache=shifted, **kwargs)], dim=-1)

    def head(self, hidden: Tensor) -> Tensor:
        """Returns logits (..., V), −inf outside of M(s)."""
        own, other = hidden.chunk(2, dim=-1)
        likely = likely_tokens(self.mask_actor.head(other), self.top_p, self.temperature)
        return self.actor.head(own).masked_fill(~likely, -math.inf)


class _Shifted(Cache):
    """A view of a cache for the second model: its layers come after those of the first."""

    def __init__(self, cache: Any, offset: int) -> None:
        self._cache, self._offset = cache, offset

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        return self._cache.update(key_states, value_states, layer_idx + self._offset, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__['_cache'], name)

    def get_seq_length(self, layer_idx: int = 0, *args: Any) -> int:
        return self._cache.get_seq_length(layer_idx + self._offset, *args)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._cache.get_mask_sizes(query_length, layer_idx + self._offset)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self._cache.get_query_offset(layer_idx + self._offset)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self._cache.get_max_length(layer_idx)

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return self._cache.get_max_cache_shape(layer_idx)
