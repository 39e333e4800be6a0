"""A trainer that collects from a stream: parts of responses on workers of any speed, under a bound on staleness."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process_workers import InProcessWorkers
from stop_after import StopAfter
from tiny_runs import ppo, weights

from chatgpt.rollout import RemoteEngine
from chatgpt.trainer.callbacks import Callback
from chatgpt.trainer.checkpointing import schedules
from chatgpt.trainer.sample_queue import Schedule
from chatgpt.types import Prompt

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
        trainer.fit(WORDS, 1, phases, 1)
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
    """Every prompt is learned once, no token is older than allowed, and none younger than the one before."""
    found = learned(*trainers)
    assert sorted(sample[0] for phase in found for sample in phase) == list(range(4 * phases))
    for number, phase in enumerate(found):
        for _, ids, _, first, each in phase:
            assert each[0] == first and each == sorted(each) and len(each) == len(ids)
            assert 0 <= number - each[0] <= 2 and each[-1] <= number


def test_a_schedule_repeats_a_run_to_the_bit_on_other_workers_and_from_a_checkpoint(tmp_path):
    """Three runs and a resumed one, since each is compared with the first."""
    free = fit(make(slowness={0: 5.0}))
    check_counts(free)
    spans = [each for phase in learned(free) for *_, each in phase]
    assert any(len(set(each)) > 1 for each in spans), 'responses carry over into the next phase'
    order = [sample[0] for phase in learned(free) for sample in phase]
    assert order != sorted(order), 'a phase takes what ends first'
    (schedule,) = schedules(free.save_checkpoint(tmp_path / 'free'))
    assert schedule.requests == free.collector.draws.queue.schedule.requests and len(schedule.takes) == 4 * PHASES

    other = fit(make(slowness={1: 3.0}, workers=3))
    assert learned(other) != learned(free)
    again = fit(make(slowness={1: 3.0}, workers=3), schedule=schedule)
    assert learned(again) == learned(free) and again.log.phases == free.log.phases
    assert torch.equal(weights(again), weights(free))

    first = fit(make(StopAfter(2), slowness={1: 3.0}), schedule=schedule)
    folder = first.save_checkpoint(tmp_path / 'checkpoint')
    second = make(workers=1)
    second.load_checkpoint(folder)
    fit(second, schedule=schedule)
    assert learned(first, second) == learned(free)
    assert first.log.phases + second.log.phases == free.log.phases
    assert torch.equal(weights(second), weights(free))


class AtTimestep(Callback):
    """Does something once, when a timestep ends, in the middle of a phase."""

    def __init__(self, timestep: int, do: Any) -> None:
        self.timestep, self.do = timestep, do

    def on_episode_end(self, trainer: Any, episode: int) -> None:
        if trainer.timestep == self.timestep:
            self.do(trainer)


def stopped_and_resumed(folder: Path, stop: Any) -> tuple[Any, Any]:
    first = make(stop, slowness={0: 5.0})
    first.fit(WORDS, PHASES, 1, 1)
    assert first.phase < PHASES
    folder = first.save_checkpoint(folder)
    held = first.checkpoint_state()['in_flight']
    assert any('' in record['reasons'] for record in held), 'some responses have not ended'
    second = make()
    second.load_checkpoint(folder)
    second.fit(WORDS, PHASES, 1, 1)
    return first, second


def test_nothing_is_lost_and_nothing_twice_when_the_trainer_stops_in_a_phase(tmp_path):
    first, second = stopped_and_resumed(tmp_path / 'c', AtTimestep(3, lambda trainer: trainer.request_stop()))
    check_counts(first, second)


def test_a_worker_that_dies_changes_nothing_and_one_that_joins_loses_nothing():
    free = fit(make())
    schedule = free.collector.draws.queue.schedule
    disturbed = make()
    disturbed.engine.workers.die_on = {5: 1, 13: 1}
    with pytest.warns(UserWarning, match='generates its .* prompts again'):
        fit(disturbed, schedule=schedule)
    assert learned(disturbed) == learned(free) and disturbed.engine.num_replaced == 2

    class Joins(Callback):
        def on_phase_end(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
            if step == 1:
                trainer.engine.add_worker()

    grown = fit(make(Joins(), slowness={0: 5.0, 1: 5.0}))
    check_counts(grown)
    assert 2 in {worker for worker, _ in grown.engine.workers.answered}


class Evaluates(Callback):
    """Gives the workers weights of its own between phases, and in the middle of one."""

    def on_phase_end(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
        trainer.collector.generate([Prompt(ids=torch.tensor([5, 6]))], indices=[0])

    def on_episode_end(self, trainer: Any, episode: int) -> None:
        if trainer.timestep == 2:
            self.on_phase_end(trainer, 0, {})


def test_a_schedule_has_what_was_answered_where_all_workers_died_and_others_had_weights_in_between():
    """Requests that were lost are not in it, and those before an evaluation are followed before it."""
    first = make(Evaluates(), workers=2, slowness={0: 5.0})
    first.engine.workers.die_on = {5: 2, 13: 2}
    with pytest.warns(UserWarning, match='generates its .* prompts again'):
        fit(first)
    check_counts(first)
    assert first.engine.num_replaced == 4
    again = fit(make(Evaluates(), slowness={1: 3.0}, workers=3), schedule=first.collector.draws.queue.schedule)
    assert learned(again) == learned(first) and torch.equal(weights(again), weights(first))


def test_groups_stay_together_and_stop_strings_and_minimal_lengths_hold_across_parts():
    """`min_new_tokens` is longer than a part, and a stop string spans two of them."""
    settings = {'num_samples_per_prompt': 2, 'experience_batch_size': 2, 'advantage_estimator': 'grpo'}
    settings |= {'min_new_tokens': 3, 'stop_strings': ['e', 'ab', 'ou', 'na']}
    trainer = fit(make(slowness={0: 3.0}, **settings))
    check_counts(trainer)
    for phase in trainer.log.experiences:
        assert all(len([e for e in phase if e.group == group]) == 2 for group in {e.group for e in phase})
        for e in phase:
            stop, ids = trainer.sampling.stop, e.response_ids.tolist()
            ends = [n for n in range(3, len(ids) + 1) if stop(ids[:n])]
            assert len(ids) >= 3 and ends in ([], [len(ids)]) and (e.finish_reason != 'stop' or ends)


def test_without_staleness_parts_are_not_used_and_a_schedule_is_refused():
    pool = InProcessWorkers()
    trainer = ppo(engine=RemoteEngine(pool, chunk_size=2, slice_tokens=2), max_new_tokens=8)
    assert trainer.collector.draws.slice_tokens is None
    with pytest.raises(ValueError, match='a schedule is of an engine with slice_tokens'):
        trainer.collector.draws.replay(Schedule())
    with pytest.raises(ValueError, match='slice_tokens=2 with chunk_size=None'):
        RemoteEngine(pool, slice_tokens=2)
    with pytest.raises(ValueError, match='takes more of them'):
        RemoteEngine(pool).add_worker()


@pytest.mark.system
def test_ray_actors_serve_a_stream_beside_the_trainer_and_lose_nothing():
    """One is killed and one joins. The schedule is then followed by workers in this process."""
    ray = pytest.importorskip('ray')
    from chatgpt.rollout.ray_workers import RayWorkers

    less = {'include_dashboard': False, 'log_to_driver': False, 'logging_level': 'error'}
    ray.init('local', num_cpus=4, object_store_memory=80 << 20, **less)

    class Disturbs(Callback):
        def on_phase_end(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
            if step == 1:
                trainer.engine.add_worker()
            if step == 2:
                os.kill(ray.get(trainer.engine.workers.actors[0].pid.remote()), signal.SIGKILL)

    try:
        with RemoteEngine(RayWorkers(2, resources={'CPU': 1}), chunk_size=2, slice_tokens=2) as engine:
            free = make(Disturbs(), engine=engine)
            with warnings.catch_warnings():
                warnings.filterwarnings('ignore', message='rollout worker 0 died')
                fit(free)
            assert engine.num_replaced >= 1 and engine.workers.num_workers == 3
    finally:
        ray.shutdown()
    check_counts(free)
    again = fit(make(), schedule=free.collector.draws.queue.schedule)
    assert learned(again) == learned(free) and again.log.phases == free.log.phases
    assert torch.equal(weights(again), weights(free))
