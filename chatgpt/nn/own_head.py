"""Logits from hidden states through a causal LM's own forward, for heads that are more than a linear map.

Gemma 2 caps its logits, Cohere scales them. The model's own forward runs while its base model is replaced to return the
given states, so logits can be computed for any states, in chunks and without the trunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from chatgpt.nn.layouts import layout_of
from chatgpt.nn.trunk import base_model, in_eval_mode
from chatgpt.nn.weights import seeded

NUM_CHECK_TOKENS = 4
LARGE_LOGIT = 100.0
"""logits are also compared at this size: a soft cap does not change the small logits of a new model"""
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


class _GivenStates:
    """Replaces a base model's output: only the states, by name and by index 0."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        if name.startswith('__'):
            raise AttributeError(name)


@contextmanager
def _returning(modules: list[nn.Module], hidden: Tensor) -> Iterator[None]:
    """Inside this context, calling any of `modules` returns `hidden` without computing anything."""
    own = [vars(module).get('forward') for module in modules]
    for module in modules:
        module.forward = lambda *args, **kwargs: _GivenStates(hidden)  # type: ignore[assignment]
    try:
        yield
    finally:
        for module, forward in zip(modules, own, strict=True):
            if forward is None:
                del module.forward
            else:
                module.forward = forward


@torch.compiler.disable  # it replaces a forward temporarily, which a compiled step cannot undo
def own_logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Returns logits (..., V) for final hidden states (..., D), by the causal LM's own forward after its trunk."""
    rows = hidden.reshape(1, -1, hidden.shape[-1])
    ids = torch.zeros(rows.shape[:2], dtype=torch.int64, device=hidden.device)
    with _returning(layout_of(model).trunks(model), rows):
        logits = model.forward(input_ids=ids, use_cache=False, return_dict=True).logits
    return logits.reshape(*hidden.shape[:-1], logits.shape[-1])


@torch.no_grad()
def head_is_linear(model: PreTrainedModel) -> bool:
    """Returns True if the model's logits are its output embeddings applied to the last hidden state.

    Compares both on a few tokens, on random states with logits of about 100, and on a state of zeros. Raises ValueError
    if the model's own forward does not compute its logits from the last hidden state alone.
    """
    base, linear = base_model(model), model.get_output_embeddings()
    with in_eval_mode(model):
        device, vocab = next(base.parameters()).device, model.config.get_text_config().vocab_size
        ids = (torch.arange(3, 3 + NUM_CHECK_TOKENS, device=device) % vocab)[None]
        layout = layout_of(model)
        hidden = layout.states(model, ids)
        whole = model.forward(**layout.inputs(ids), return_dict=True).logits
        tolerance = TOLERANCE.get(hidden.dtype, 1e-2)
        try:
            follow = _close(own_logits(model, hidden), whole, tolerance)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, AttributeError, IndexError):  # it reads more than the last hidden states
            follow = False
        if not follow:
            raise ValueError(
                f'{type(model).__name__}: its logits do not follow from its last hidden state, so log-probs cannot be '
                'computed from it; use a model whose head follows its base model'
            )
        if linear is None or linear.weight.shape[-1] != hidden.shape[-1]:  # RemBERT widens the states first
            return False
        generator = torch.Generator().manual_seed(0)
        states = torch.randn(NUM_CHECK_TOKENS, hidden.shape[-1], generator=generator).to(linear.weight)
        states = states * (LARGE_LOGIT / linear(states).abs().max().clamp_min(1e-6))
        states = torch.cat([hidden[0].to(states), states, torch.zeros_like(states[:1])])
        own = own_logits(model, states)
        return own.shape == linear(states).shape and all(
            _close(a, b, tolerance) for a, b in zip(own, linear(states), strict=True)
        )


@torch.no_grad()
def head_is_linear_by_form(model: PreTrainedModel) -> bool | None:
    """`head_is_linear` for a model on the meta device: runs its forward with a small linear layer as output layer.
    Returns None if that fails.
    """
    real = model.get_output_embeddings()
    generator = torch.Generator().manual_seed(0)
    with seeded('head check'):
        small = nn.Linear(real.in_features, NUM_CHECK_TOKENS, bias=False)
        states = torch.randn(NUM_CHECK_TOKENS, real.in_features, generator=generator)
        states = states * (LARGE_LOGIT / small(states).abs().max().clamp_min(1e-6))
    model.set_output_embeddings(small)
    try:
        return _close(own_logits(model, states), small(states), TOLERANCE[torch.float32])
    except (RuntimeError, NotImplementedError, TypeError, AttributeError, IndexError):
        return None
    finally:
        model.set_output_embeddings(real)


def _close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    a, b = a.double(), b.double()
    return bool((a - b).abs().max() <= tolerance * b.abs().max().clamp_min(1e-6))
