"""Log-probs under a reference: a frozen model, or the actor with its adapter or trained branch off."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from chatgpt.batching import collate
from chatgpt.functional.losses import sequence_logprobs
from chatgpt.sweep import cuts_of_share, sweep
from chatgpt.trainer.strategies.base import Strategy
from chatgpt.types import Batch, Sequence


def has_reference(actor: nn.Module) -> bool:
    """Whether an (unwrapped) actor can serve as its own reference: adapter off, or a frozen branch."""
    return bool(getattr(actor, 'has_reference', False))


class ReferenceModel:
    """A frozen model, or the actor itself.

    Raises:
        ValueError: there is neither a frozen model nor an actor that is its own reference.
    """

    def __init__(self, strategy: Strategy, actor: nn.Module, initial_model: nn.Module | None, name: str) -> None:
        self.strategy, self.actor, self.initial_model = strategy, actor, initial_model
        if initial_model is None and not has_reference(strategy.unwrap(actor)):
            raise ValueError(f'{name} compares with a reference: pass initial_model, or an actor with lora_rank > 0')

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Tensor:
        """(B,) sums over the tokens that count, of a batch on the device."""
        bare: Any = self.strategy.unwrap(self.actor)
        with bare.reference() if self.initial_model is None else nullcontext(), self.strategy.autocast():
            out = (self.initial_model or self.actor)(batch)
        return sequence_logprobs(out.logprobs, batch.action_mask, batch.action_rows, batch.num_sequences)

    def of(self, sequences: list[Sequence], max_tokens: int) -> list[float]:
        """Of any number of sequences, the same list on every rank; computed in shares, and once where one object stands
        several times."""
        first = {id(s): i for i, s in reversed(list(enumerate(sequences)))}
        once = sorted(first.values())
        cuts = cuts_of_share(self.strategy, [sequences[i].num_tokens for i in once], max_tokens)
        mine: list[tuple[int, float]] = []
        for positions, values in sweep(self.strategy, cuts, lambda at: collate([sequences[once[i]] for i in at]), self):
            mine += zip([once[i] for i in positions], values.tolist(), strict=False)
        found = dict(pair for rank in self.strategy.all_gather_object(mine) for pair in rank)
        return [found[first[id(s)]] for s in sequences]
