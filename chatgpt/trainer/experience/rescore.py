"""Whether a reward model gives a response the same score alone as in a batch, whose other rows and padding it must not
see. docs/doctor.md says what to do where it does not."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch

from chatgpt.nn.sweep import Communicator
from chatgpt.trainer.experience.scorers import RewardModelScorer
from chatgpt.types import Experience

NUM_RESCORED = 4
"""responses: as many forwards of one sequence, which is little beside a phase"""
RESCORE_EVERY = 50
"""learning phases"""


def rescored(scorer: RewardModelScorer, experiences: SequenceOf[Experience], strategy: Communicator) -> float:
    """The greatest difference between the scores that a few responses have and those that each gets alone.

    The same list on every rank; a collective, as scoring is. Draws nothing from torch's generators that a run would
    miss, even where the reward model has dropout.
    """
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        again = [scorer.score([e], strategy)[0] for e in experiences[:NUM_RESCORED]]
    return max(abs(float(new) - e.score) for new, e in zip(again, experiences, strict=False))
