"""What an actor's forward returns: a NamedTuple, because DDP and FSDP look for tensors in it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class PolicyOutput(NamedTuple):
    """Per-action results of a batch, flat: N is the number of actions of all its sequences."""

    logprobs: Tensor
    """(N,) fp32, log π(action | state) at the temperature asked for"""
    entropy: Tensor | None = None
    """(N,) fp32, in nats"""
    values: Tensor | None = None
    """(N,) fp32, when the actor carries a value head"""
    logits: Tensor | None = None
    """(N, V) in the model's dtype, not divided by the temperature; only on request"""
    reference: PolicyOutput | None = None
    """of a hydra's frozen branch on the same trunk; only on request"""
