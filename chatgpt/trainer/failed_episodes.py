"""What a run does about environments that failed: their episodes teach nothing, or pay a penalty; a phase of nothing
else ends the run.

With 'mask' no token of a failed episode counts, and its rewards enter no baseline of its group and no statistics of
scores. An overlong response is the policy's own doing, so its score stays in its group's baseline; what an environment
gave before it broke says nothing of the policy, and in the baseline it would push the advantages of its siblings, as
was noticed of rollouts that timed out in github.com/NVIDIA-NeMo/RL/pull/4029.

With 'penalise' the last token of the policy is paid `failure_reward` on top of what the environment gave before, for
policies that can break an environment themselves, as with code that hangs. An episode that failed in `reset` has no
token to pay: it is left out either way.

Left out: the penalty itself (`ScoreShaper`), and how failures come about (`chatgpt.environments.runner`).
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence as SequenceOf

import torch

from chatgpt.types import Experience, Sample


class EpisodesFailed(RuntimeError):
    """Not one episode of a phase was played as the environment's contract says."""


def mask_failed(samples: SequenceOf[Sample]) -> None:
    """From now on no token of an episode that failed counts."""
    for sample in samples:
        if sample.failed:
            sample.response_mask = torch.zeros_like(sample.response_mask)


def compared(experiences: SequenceOf[Experience]) -> list[Experience]:
    """Without failed episodes none of whose tokens counts: what advantages are estimated from."""
    return [e for e in experiences if not e.left_out]


def check_failed(experiences: SequenceOf[Experience], phase: int, *, tell: bool) -> bool:
    """Whether any failed; warns of why, since the metrics only count them.

    Args:
        phase: its number.
        tell: one rank does, of the first phase that has failures.

    Raises:
        EpisodesFailed: all of them failed; says how often how, and of one why.
    """
    failed = [e.episode for e in experiences if e.episode is not None and e.failed]
    if not failed:
        return False
    counts = ', '.join(f'{count} {end}' for end, count in Counter(episode.end for episode in failed).most_common())
    first = failed[0].message
    if len(failed) == len(experiences):
        raise EpisodesFailed(f'all {len(failed)} episodes of phase {phase} failed ({counts}); the first: {first}')
    if tell:
        warnings.warn(
            f'{len(failed)} of {len(experiences)} episodes of phase {phase} failed ({counts}); the first: {first}; '
            'later ones are counted in environment/failed_share',
            stacklevel=2,
        )
    return True
