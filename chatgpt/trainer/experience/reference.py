"""The frozen reference of a policy: a separate model, the actor with its adapter off, the actor's frozen branch, or
none."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from chatgpt.batching import collate
from chatgpt.functional.losses import sequence_logprobs
from chatgpt.nn.sweep import Communicator, read_back, sweep
from chatgpt.types import Batch, Sequence


class Reference:
    """The reference of KL penalties and preference losses.

    Args:
        actor: the prepared policy; `bare` is the same without the strategy's wrapper.
        initial_model: a frozen model, as prepared; None if the actor is its own reference, or there is none.
    """

    def __init__(self, strategy: Communicator, actor: nn.Module, bare: Any, initial_model: nn.Module | None) -> None:
        self.strategy, self.actor, self.bare, self.initial_model = strategy, actor, bare, initial_model
        self.exists = initial_model is not None or bool(getattr(bare, 'has_reference', False))
        self.comes_with_policy = initial_model is None and hasattr(bare, 'ref_branch')
        """True if one forward of the actor, `with_reference=True`, returns both"""

    def facts(self) -> dict[str, str]:
        """Returns the folder or hub name of a separate model, of which a resume reports a change."""
        if self.initial_model is None:
            return {}
        config = getattr(getattr(self.strategy.unwrap(self.initial_model), 'model', None), 'config', None)
        return {'initial_model': str(getattr(config, 'name_or_path', ''))}

    def forward(self, batch: Batch, **options: Any) -> Any:
        """Returns the `PolicyOutput` of a batch on the device, without gradients; `options` are those of
        `Actor.forward`."""
        with torch.no_grad(), self.strategy.autocast():
            if self.initial_model is not None:
                return self.initial_model(batch, **options)
            with self.bare.reference():
                return self.actor(batch, **options)

    def onload(self) -> Any:
        """Context in which a separate model is on the device."""
        return nullcontext() if self.initial_model is None else self.strategy.onload(self.initial_model)

    def sums(self, batch: Batch) -> Tensor:
        """Returns the sums of log-probs of each response over the tokens that count, (B,)."""
        logprobs = self.forward(batch).logprobs
        return sequence_logprobs(logprobs, batch.action_mask, batch.action_rows, batch.num_sequences)

    def sums_of(self, sequences: list[Sequence], max_tokens: int) -> list[float]:
        """Returns these sums for a list of sequences, the same list on every rank. Each rank computes a share, and an
        object that occurs several times is computed once."""
        first = {id(s): i for i, s in reversed(list(enumerate(sequences)))}
        once = sorted(first.values())
        cuts = self.strategy.sums.share([sequences[i].num_tokens for i in once], max_tokens)
        done = [*sweep(self.strategy, cuts, lambda at: collate([sequences[once[i]] for i in at]), self.sums)]
        mine: list[tuple[int, float]] = []
        for (at, _), values in zip(done, read_back([values for _, values in done]), strict=True):
            mine += zip([once[i] for i in at], values.tolist(), strict=False)
        found = dict(pair for rank in self.strategy.all_gather_object(mine) for pair in rank)
        return [found[first[id(s)]] for s in sequences]
