"""The rollout workers that the flags of a PPO run ask for. Left out: Ray itself (`chatgpt.rollout.ray_workers`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from chatgpt.launch.runs import PPORun, Run

PATIENCE = 0.8
"""share of `rank_timeout_s` that an actor has to answer; ranks that wait for this one give up after 0.9, and cannot
name the actor"""


def _workers(args: PPORun) -> Any:
    from chatgpt.rollout.ray_workers import RayWorkers

    return RayWorkers(args.rollout_workers, resources=args.rollout_resources, timeout_s=PATIENCE * args.rank_timeout_s)


def check_rollout_args(args: PPORun) -> None:
    """Raises ValueError for flags of rollout workers that do not fit together, before anything is started."""
    if args.rollout_workers < 0:
        raise ValueError(f'rollout_workers={args.rollout_workers} must not be negative')
    if not args.rollout_workers:
        for name in ('max_staleness', 'rollout_chunk_size', 'rollout_resources'):
            if getattr(args, name):
                raise ValueError(
                    f'{name}={getattr(args, name)} is about rollout workers, and there are none: give --rollout_workers'
                )
        return
    if args.rollout_chunk_size is not None and args.rollout_chunk_size < 1:
        raise ValueError(f'rollout_chunk_size={args.rollout_chunk_size} must be at least 1')
    if args.engine != 'local':
        raise ValueError(
            f'rollout workers generate with the local engine: --engine {args.engine} does not fit --rollout_workers'
        )
    if args.nlpo_top_p is not None:
        raise ValueError(
            'NLPO draws from two models at once, which rollout workers cannot: leave --rollout_workers out'
        )
    _workers(args)  # for its errors; starts nothing


@contextmanager
def rollout_engine(args: Run) -> Iterator[Any]:
    """The engine of the run's workers, which end with the context; None where it has none."""
    if not isinstance(args, PPORun) or not args.rollout_workers:
        yield None
        return
    from chatgpt.rollout import RemoteEngine

    with RemoteEngine(_workers(args), chunk_size=args.rollout_chunk_size) as engine:
        yield engine
