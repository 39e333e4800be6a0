"""Log-probs of given tokens and entropy, from logits or, in bounded memory, from hidden states.

Letters: N tokens, D width, V vocabulary, C rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

WithEntropy = bool | Literal['detached']
"""whether to compute the entropy too; 'detached' computes it without a graph, for metrics"""

CHUNK_ELEMENTS_CPU = 2**22
"""C · V of a chunk on a CPU: 16 MiB in fp32, near the size of the caches"""
CHUNK_ELEMENTS_ACCELERATOR = 2**26
"""C · V of a chunk on an accelerator: 256 MiB in fp32, enough rows to amortise reading the head's weight"""


def logprobs_of(logits: Tensor, ids: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature)[ids].

    Args:
        logits: (..., V), any float dtype; computed in fp32 (fp64 stays fp64).
        ids: (...) int64.
        temperature: must be that of sampling, or the ratio to the behaviour log-probs is not 1.

    Returns:
        (...) fp32.
    """
    _check_temperature(temperature)
    return _select(_log_softmax(logits, temperature), ids)


def entropy_of(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """−Σ_v p(v) log p(v) of p = softmax(logits / temperature), in nats. (..., V) → (...) fp32; logits of −inf add 0."""
    _check_temperature(temperature)
    return _entropy(_log_softmax(logits, temperature))


def entropy_graph(with_entropy: WithEntropy) -> AbstractContextManager[Any]:
    """Returns the context to compute the entropy in: 'detached' switches gradients off."""
    return torch.set_grad_enabled(torch.is_grad_enabled() and with_entropy is True)


def chunked_logprobs(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    ids: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    vocab_size: int | None = None,
    with_entropy: WithEntropy = False,
) -> tuple[Tensor, Tensor | None]:
    """Returns log-probs of `ids` (and the entropy) from hidden states, without allocating the (N, V) logits.

    The head is applied to chunks of rows. With gradients enabled, each chunk is recomputed in the backward pass, so
    memory does not grow with N. If all rows fit into one chunk, nothing is recomputed.

    Args:
        hidden: (N, D) states that predict the tokens.
        head: (C, D) → (C, V) logits; rows are independent, and there is no randomness.
        ids: (N,) int64.
        temperature: divides the logits.
        chunk_size: rows of a chunk; None bounds C · V by `CHUNK_ELEMENTS_CPU` or `CHUNK_ELEMENTS_ACCELERATOR`.
        vocab_size: V, used only without `chunk_size`. None reads `head.out_features`, or applies the head to one row.
        with_entropy: also compute the entropy; 'detached' without gradients.

    Returns:
        log-probs (N,) fp32, and entropy (N,) fp32 or None.
    """
    _check_temperature(temperature)
    if hidden.dim() != 2 or ids.shape != hidden.shape[:1]:
        raise ValueError(f'hidden must be (N, D) and ids (N,); got {tuple(hidden.shape)} and {tuple(ids.shape)}')

    def of_chunk(states: Tensor, chunk_ids: Tensor) -> tuple[Tensor, ...]:
        logp = _log_softmax(head(states), temperature)
        chosen = _select(logp, chunk_ids)
        if not with_entropy:
            return (chosen,)
        with entropy_graph(with_entropy):
            return chosen, _entropy(logp)

    if chunk_size is None:
        chunk_size = rows_per_chunk(hidden, head, vocab_size)
    results = map_row_chunks(of_chunk, hidden, ids, chunk_size=chunk_size)
    return results[0], results[1] if with_entropy else None


def map_row_chunks(fn: Callable[..., tuple[Tensor, ...]], *inputs: Tensor, chunk_size: int) -> tuple[Tensor, ...]:
    """Applies `fn` to chunks of rows and concatenates the results; each chunk is recomputed in the backward pass.

    For a head with a wide intermediate and a small result, such as a Q head over the vocabulary.

    Args:
        fn: takes a chunk of each input and returns a tuple of tensors with as many rows. Must not use random numbers.
        inputs: tensors with N rows each.
        chunk_size: rows of a chunk, at least 1. With N <= chunk_size, `fn` is called directly.
    """
    if chunk_size < 1:
        raise ValueError(f'chunk_size={chunk_size} must be at least 1')
    num_rows = inputs[0].shape[0]
    if num_rows <= chunk_size:
        return fn(*inputs)
    pieces = []
    for chunk in zip(*(x.split(chunk_size) for x in inputs), strict=True):
        if torch.is_grad_enabled():
            pieces.append(checkpoint(fn, *chunk, use_reentrant=False, preserve_rng_state=False))
        else:
            pieces.append(fn(*chunk))
    return tuple(torch.cat(parts) for parts in zip(*pieces, strict=True))


def rows_per_chunk(hidden: Tensor, head: Callable[[Tensor], Tensor], vocab_size: int | None = None) -> int:
    """Returns the largest number of rows such that rows · V is within the bound of the device; at least 1."""
    if vocab_size is None:
        vocab_size = getattr(head, 'out_features', None)
    if vocab_size is None:
        if hidden.shape[0] == 0:
            return 1
        # Not under no_grad: autocast would cache a weight without gradient.
        vocab_size = head(hidden[:1]).shape[-1]
    return max(1, chunk_elements(hidden) // int(vocab_size))


def kind_of_device(x: Tensor) -> str:
    """Returns 'cpu', 'cuda' and so on, which chooses the chunk size and the kernel of log-probs. The planner replaces
    this function to get those of the planned device."""
    return x.device.type


def chunk_elements(x: Tensor) -> int:
    """Returns C · V of a chunk on the device of x."""
    return CHUNK_ELEMENTS_CPU if kind_of_device(x) == 'cpu' else CHUNK_ELEMENTS_ACCELERATOR


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature != 1.0:
        logits = logits / temperature
    return torch.log_softmax(logits, dim=-1)


def _select(logp: Tensor, ids: Tensor) -> Tensor:
    return logp.gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def _entropy(logp: Tensor) -> Tensor:
    # The clamp makes 0 · −inf 0, in the gradient too.
    return -(logp.exp() * logp.clamp_min(torch.finfo(logp.dtype).min)).sum(dim=-1)


def _check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise ValueError(f'temperature={temperature!r} must be positive')
