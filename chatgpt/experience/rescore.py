"""Does a reward model give a response the same score in other company?

It should: what stands beside a response in a batch, and how far that is padded, must not be seen. Left out: what to do
about it (docs/doctor.md).
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch

from chatgpt.experience.scorers import RewardModelScorer
from chatgpt.sweep import Communicator
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
