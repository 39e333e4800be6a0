"""Runs of a tiny trainer on a stream of samples, and what every such run must hold."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from in_process_workers import InProcessWorkers
from tiny_runs import ppo, weights

from chatgpt.rollout import RemoteEngine
from chatgpt.strategies import DDPStrategy
from chatgpt.trainer.checkpointing import schedules
from chatgpt.trainer.sample_queue import Schedule

WORDS = [f'a {word}' for word in 'one two three four five six seven eight nine ten eleven'.split()]
PHASES = 4


def make(*more: Any, slowness: Any = (), workers: int = 2, engine: Any = None, **settings: Any) -> Any:
    pool = InProcessWorkers(workers)
    pool.slowness = dict(slowness)
    engine = engine or RemoteEngine(pool, chunk_size=2, slice_tokens=2)
    given = {'max_staleness': 2, 'tis_cap': 2.0, 'lr': 3e-3, 'max_new_tokens': 8} | settings
    return ppo(engine=engine, callbacks=list(more), **given)


def fit(trainer: Any, phases: int = PHASES, *, schedule: Schedule | None = None) -> Any:
    if schedule is not None:
        trainer.collector.draws.replay(schedule)
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', message='only .* rollout workers')
        trainer.fit(WORDS, phases, 1, 1)  # an episode ends within a phase
    return trainer


def learned(*trainers: Any) -> list[Any]:
    return [
        [(e.index, e.response_ids.tolist(), e.logprobs.tolist(), e.version, versions(e)) for e in phase]
        for trainer in trainers
        for phase in trainer.log.experiences[: trainer.phase]
    ]


def versions(sample: Any) -> list[int]:
    return [sample.version] * sample.num_actions if sample.versions is None else sample.versions.tolist()


def check_counts(*trainers: Any, phases: int = PHASES) -> None:
    check_samples(learned(*trainers), phases)


def check_samples(found: list[Any], phases: int = PHASES) -> None:
    """Every prompt is learned once, no token is older than allowed, and none younger than the one before."""
    assert sorted(sample[0] for phase in found for sample in phase) == list(range(4 * phases))
    for number, phase in enumerate(found):
        for _, ids, _, first, each in phase:
            assert each[0] == first and each == sorted(each) and len(each) == len(ids)
            assert 0 <= number - each[0] <= 2 and each[-1] <= number


@contextmanager
def cluster() -> Iterator[str]:
    """Yields the address of a Ray with room for four actors."""
    import ray

    less = {'include_dashboard': False, 'log_to_driver': False, 'logging_level': 'error'}
    ray.init('local', num_cpus=4, object_store_memory=80 << 20, **less)
    try:
        yield ray.get_runtime_context().gcs_address
    finally:
        ray.shutdown()


def stream_engine(address: str) -> RemoteEngine:
    from chatgpt.rollout.ray_workers import RayWorkers

    return RemoteEngine(RayWorkers(2, resources={'CPU': 1}, address=address), chunk_size=2, slice_tokens=2)


def on_ranks(folder: str, address: str | None, followed: str | None) -> list[Any]:
    """A rank's part of a stream, free or following a checkpoint's schedules. It lies in a module that does not import
    Ray: a rank imports what it runs before its environment has the token that Ray asks for at import."""
    with DDPStrategy(seed=3, device='cpu') as strategy:
        if address is not None:
            with stream_engine(address) as engine:
                trainer = fit(make(strategy=strategy, engine=engine))
        else:
            trainer = fit(make(strategy=strategy), schedule=schedules(followed)[strategy.rank])
        trainer.save_checkpoint(folder)
        return [learned(trainer), trainer.log.phases, weights(trainer).tolist()]
