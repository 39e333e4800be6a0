"""The frozen reference of a policy: a model of its own, the actor with its adapter off, the actor's frozen branch, or
none."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from chatgpt.batching import collate
from chatgpt.functional.losses import sequence_logprobs
from chatgpt.nn.sweep import Communicator, cuts_of_share, sweep
from chatgpt.types import Batch, Sequence


class Reference:
    """What KL penalties and preference losses compare a policy with.

    Args:
        actor: the prepared policy, and `bare` the same without what the strategy has put around it.
        initial_model: a frozen model, as prepared; None where the actor is its own reference, if it can be.
    """

    def __init__(self, strategy: Communicator, actor: nn.Module, bare: Any, initial_model: nn.Module | None) -> None:
        self.strategy, self.actor, self.bare, self.initial_model = strategy, actor, bare, initial_model
        self.exists = initial_model is not None or bool(getattr(bare, 'has_reference', False))
        self.comes_with_policy = initial_model is None and hasattr(bare, 'ref_branch')
        """one forward of the actor, `with_reference=True`, gives both"""

    def forward(self, batch: Batch, **options: Any) -> Any:
        """The `PolicyOutput` of a batch on the device, without gradients; `options` are those of `Actor.forward`."""
        with torch.no_grad(), self.strategy.autocast():
            if self.initial_model is not None:
                return self.initial_model(batch, **options)
            with self.bare.reference():
                return self.actor(batch, **options)

    def onload(self) -> Any:
        """A context in which a model of its own is on the device."""
        return nullcontext() if self.initial_model is None else self.strategy.onload(self.initial_model)

    def sums(self, batch: Batch) -> Tensor:
        """(B,) log-probs of whole responses, of the tokens that count."""
        logprobs = self.forward(batch).logprobs
        return sequence_logprobs(logprobs, batch.action_mask, batch.action_rows, batch.num_sequences)

    def sums_of(self, sequences: list[Sequence], max_tokens: int) -> list[float]:
        """The same of any number of sequences, the same list on every rank; computed in shares, and once where one
        object stands several times."""
        first = {id(s): i for i, s in reversed(list(enumerate(sequences)))}
        once = sorted(first.values())
        cuts = cuts_of_share(self.strategy, [sequences[i].num_tokens for i in once], max_tokens)
        mine: list[tuple[int, float]] = []
        for at, values in sweep(self.strategy, cuts, lambda at: collate([sequences[once[i]] for i in at]), self.sums):
            mine += zip([once[i] for i in at], values.tolist(), strict=False)
        found = dict(pair for rank in self.strategy.all_gather_object(mine) for pair in rank)
        return [found[first[id(s)]] for s in sequences]
