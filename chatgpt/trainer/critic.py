"""A critic that learns apart from the actor: in passes of its own, and alone in the warm-up (docs/critic.md).

In the first `critic_warmup_phases` learning phases the actor waits. Its weights do not change, so the rollouts of all
these phases are of one policy: they are kept, and the critic passes over all of them in every phase of the warm-up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from chatgpt.strategies.checkpoint import Piece, TensorReader
from chatgpt.strategies.ranks import Ranks
from chatgpt.trainer.callbacks.base import Callback, TrainerView
from chatgpt.trainer.config import PPOConfig
from chatgpt.trainer.schedule import FitPlan
from chatgpt.types import Experience, Sequence, tensors_to

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
    rank: int = 0
    """the rank that holds its tensors (`chatgpt.nn.records`)"""

    @classmethod
    def of(cls, experience: Experience) -> ValueTarget:
        fields = ('prompt_ids', 'response_ids', 'response_mask', 'index', 'values', 'returns', 'rank')
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
        """Returns the kept rollouts, followed by those of this phase, all on the device of these."""
        new = [ValueTarget.of(e) for e in experiences]
        device = next((t.values.device for t in new if not t.values.is_meta), None)
        return [*(self.kept if device is None else (tensors_to(t, device) for t in self.kept)), *new]

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
        return {GROUP: list(pieces_of(self.kept, trainer.strategy.ranks)) if trainer.strategy.ranks.leads else []}

    def load_checkpoint_pieces(self, trainer: TrainerView, name: str, reader: TensorReader) -> bool:
        if name != GROUP:
            return False
        self.kept = read_targets(reader, trainer.strategy.ranks)
        return True


TOKENS = {
    'prompt_ids': 'num_prompt',
    'response_ids': 'num_response',
    'values': 'num_response',
    'returns': 'num_response',
}
"""tensors of a target that its rank holds, and the tensor of their lengths; in a checkpoint, one after another"""


def pieces_of(targets: SequenceOf[ValueTarget], ranks: Ranks) -> Iterator[Piece]:
    """Yields this rank's pieces of 1-D tensors by name: what its targets hold, and on rank 0 the numbers and masks of
    all."""
    lengths = {
        'num_prompt': [len(t.prompt_ids) for t in targets],
        'num_response': [len(t.response_ids) for t in targets],
    }
    if ranks.rank == 0:
        yield from (Piece.whole(name, torch.tensor(counts)) for name, counts in lengths.items())
        yield Piece.whole('index', torch.tensor([t.index for t in targets]))
        yield Piece.whole('response_mask', torch.cat([t.response_mask.cpu() for t in targets]).to(torch.uint8))
    for own, run in groupby(range(len(targets)), lambda i: targets[i].rank == ranks.rank):
        at = list(run)
        for name, counted in TOKENS.items() if own else ():
            data = torch.cat([getattr(targets[i], name).cpu() for i in at])
            start = sum(lengths[counted][: at[0]])
            yield Piece(name, (sum(lengths[counted]),), start, start + len(data), data)


def read_targets(reader: TensorReader, ranks: Ranks) -> list[ValueTarget]:
    """Returns the targets of `pieces_of`, written on any number of ranks, dealt to these."""

    def whole(name: str) -> Tensor:
        return reader.read(name, 0, reader.shape(name)[0]).clone()

    lengths = {name: whole(name).tolist() for name in ('num_prompt', 'num_response')}
    masks = whole('response_mask').bool().split(lengths['num_response'])
    dtypes = {name: reader.read(name, 0, 0).dtype for name in TOKENS}
    starts, targets = dict.fromkeys(TOKENS, 0), []
    for i, index in enumerate(whole('index').tolist()):
        rank, tensors = i * ranks.world_size // len(masks), {}
        for name, counted in TOKENS.items():
            start, starts[name] = starts[name], starts[name] + lengths[counted][i]
            tensors[name] = (
                reader.read(name, start, starts[name]).clone()
                if rank == ranks.rank
                else torch.empty(lengths[counted][i], dtype=dtypes[name], device='meta')
            )
        targets.append(ValueTarget(index=index, response_mask=masks[i], rank=rank, **tensors))
    return targets
