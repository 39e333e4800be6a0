"""A critic that learns apart from the actor: in passes of its own, and alone in the warm-up (docs/critic.md).

In the first `critic_warmup_phases` learning phases the actor waits. Its weights do not change, so the rollouts of all
these phases are of one policy: they are kept, and the critic passes over all of them in every phase of the warm-up.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from chatgpt.strategies.checkpoint import Piece, TensorReader
from chatgpt.trainer.callbacks.base import Callback, TrainerView
from chatgpt.trainer.config import PPOConfig
from chatgpt.trainer.schedule import FitPlan
from chatgpt.types import Experience, Sequence

GROUP = 'critic_warmup'
"""name of the kept rollouts in a checkpoint"""


@dataclass(kw_only=True, slots=True)
class ValueTarget(Sequence):
    """A sequence with what a critic learns from it."""

    index: int
    """sample number"""
    values: Tensor
    """(A,) fp32, of the critic when the sequence was collected"""
    returns: Tensor
    """(A,) fp32, the targets"""

    @classmethod
    def of(cls, experience: Experience) -> ValueTarget:
        fields = ('prompt_ids', 'response_ids', 'response_mask', 'index', 'values', 'returns')
        return cls(**{name: getattr(experience, name) for name in fields})


class CriticCourse(Callback):
    """The optimizer steps of a critic that learns apart from the actor, and the rollouts of its warm-up. A callback,
    so that both are in checkpoints."""

    def __init__(self, config: PPOConfig) -> None:
        self.config = config
        self.num_updates = 0
        """finished optimizer steps of the critic, without skipped ones"""
        self.fit_updates = 0
        """value of `num_updates` when the current `fit` began"""
        self.total_updates: int | None = None
        self.kept: list[ValueTarget] = []
        """rollouts of the phases of the warm-up so far, the same on every rank; empty after it"""
        self._is_loaded = False

    def expect(self, plan: FitPlan, first_phase: int, *, resumes: bool) -> None:
        """Sets the end of a `fit`, as `Trainer.expect_updates`. first_phase: learning phases before it."""
        if not resumes:
            self.fit_updates = self.num_updates
        self.total_updates = self.fit_updates + plan.num_critic_updates(self.config, first_phase)

    def count(self, stepped: bool) -> None:
        self.num_updates += stepped

    def metrics(self, phase: int) -> dict[str, float]:
        """Returns `ppo/...` of a phase, counted from 0; {} if the critic learns from the actor's train batches."""
        if not self.config.critic_apart:
            return {}
        warms_up = float(phase < self.config.critic_warmup_phases)
        return {'ppo/num_critic_updates': float(self.num_updates), 'ppo/critic_warmup': warms_up}

    def targets(self, experiences: SequenceOf[Experience]) -> list[ValueTarget]:
        """Returns the kept rollouts, followed by those of this phase."""
        return [*self.kept, *map(ValueTarget.of, experiences)]

    def keep(self, experiences: SequenceOf[Experience], phase: int) -> None:
        """Ends learning phase number `phase`, counted from 1: keeps its rollouts for the next one of the warm-up, or
        drops all."""
        self.kept = self.targets(experiences) if phase < self.config.critic_warmup_phases else []

    # ------------------------------------------------------------------ in checkpoints

    def state_dict(self) -> dict[str, Any]:
        return {'num_updates': self.num_updates, 'fit_updates': self.fit_updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_updates, self.fit_updates = int(state['num_updates']), int(state['fit_updates'])
        self._is_loaded = True

    def on_resume(self, trainer: TrainerView, path: Path) -> None:
        if not self._is_loaded:  # until then the critic has learned from the actor's train batches
            self.num_updates = self.fit_updates = trainer.num_updates

    def checkpoint_pieces(self, trainer: TrainerView) -> dict[str, list[Piece]]:
        if not self.kept:
            return {}
        owns = trainer.strategy.rank == 0 and trainer.strategy.ranks.leads
        pieces = [Piece.whole(name, flat) for name, flat in flattened(self.kept).items()] if owns else []
        return {GROUP: pieces}

    def load_checkpoint_pieces(self, trainer: TrainerView, name: str, reader: TensorReader) -> bool:
        if name != GROUP:
            return False
        found = {each: reader.read(each, 0, reader.shape(each)[0]).clone() for each in sorted(reader.names())}
        self.kept = unflattened(found)
        return True


def flattened(targets: SequenceOf[ValueTarget]) -> dict[str, Tensor]:
    """Returns targets as 1-D tensors by name: numbers of each, and their tensors one after another."""
    names = ('prompt_ids', 'response_ids', 'values', 'returns')
    return {name: torch.cat([getattr(t, name).cpu() for t in targets]) for name in names} | {
        'response_mask': torch.cat([t.response_mask.cpu() for t in targets]).to(torch.uint8),
        'index': torch.tensor([t.index for t in targets]),
        'num_prompt': torch.tensor([len(t.prompt_ids) for t in targets]),
        'num_response': torch.tensor([len(t.response_ids) for t in targets]),
    }


def unflattened(flat: Mapping[str, Tensor]) -> list[ValueTarget]:
    """The inverse of `flattened`."""
    prompts, responses = flat['num_prompt'].tolist(), flat['num_response'].tolist()
    parts = {name: flat[name].split(responses) for name in ('response_ids', 'response_mask', 'values', 'returns')}
    prompt_ids = flat['prompt_ids'].split(prompts)
    return [
        ValueTarget(
            index=index,
            prompt_ids=prompt_ids[i],
            response_ids=parts['response_ids'][i],
            response_mask=parts['response_mask'][i].bool(),
            values=parts['values'][i],
            returns=parts['returns'][i],
        )
        for i, index in enumerate(flat['index'].tolist())
    ]
