"""A trainer that collects from a stream: parts of responses on workers of any speed, under a bound on staleness."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process_workers import InProcessWorkers
from stop_after import StopAfter
from stream_runs import PHASES, check_counts, check_samples, fit, learned, make
from tiny_runs import ppo, weights

from chatgpt.rollout import RemoteEngine
from chatgpt.rollout.engine import EngineAround
from chatgpt.strategies import DDPStrategy
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer.callbacks import Callback
from chatgpt.trainer.checkpointing import schedules
from chatgpt.trainer.sample_queue import Schedule
from chatgpt.types import Prompt


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
    fit(first)
    assert first.phase < PHASES
    folder = first.save_checkpoint(folder)
    held = first.checkpoint_state()['in_flight']
    assert any('' in record['reasons'] for record in held), 'some responses have not ended'
    second = make()
    second.load_checkpoint(folder)
    fit(second)
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


def test_fresh_responses_keep_their_minimal_length_beside_continued_ones(tmp_path):
    settings: Any = {'min_new_tokens': 4, 'max_new_tokens': 8, 'eos_token_ids': tuple(range(2, 40))}
    parts = RemoteEngine(InProcessWorkers(2), chunk_size=3, slice_tokens=5)
    first = make(StopAfter(2), slowness={0: 5.0}, engine=parts, **settings)
    fit(first)
    again = make(engine=RemoteEngine(InProcessWorkers(2)), **settings)
    again.load_checkpoint(first.save_checkpoint(tmp_path))
    fit(again)
    assert all(len(ids) >= 4 for phase in learned(first, again) for _, ids, *_ in phase)


class Fails(InProcessWorkers):
    """Workers that compute beside the trainer, of which one raises when `fails`."""

    beside, fails = True, False

    def wait(self, handle: Any) -> Any:
        if self.fails:
            self.fails = False
            raise FloatingPointError('in a worker')
        return super().wait(handle)


@pytest.mark.filterwarnings('error::pytest.PytestUnhandledThreadExceptionWarning')
def test_an_error_of_a_worker_is_that_of_the_run_also_where_a_checkpoint_comes_first(tmp_path):
    pool = Fails(2)

    class Waits(Callback):
        def on_make_experience_end(self, trainer: Any, experiences: Any) -> None:
            pool.fails = True
            stream = trainer.collector.draws
            end = time.monotonic() + 60
            while stream._error is None and time.monotonic() < end:
                time.sleep(0.01)

        def on_phase_end(self, trainer: Any, step: int, metrics: Any) -> None:
            trainer.save_checkpoint(tmp_path)

    trainer = make(Waits(), engine=RemoteEngine(pool, chunk_size=1, slice_tokens=1, weight_transfer='store'))
    with pytest.raises(FloatingPointError, match='in a worker'):
        fit(trainer)


class Around(EngineAround):
    """An engine that changes nothing."""


def test_an_engine_around_one_that_generates_in_parts_changes_nothing():
    engine = Around(RemoteEngine(InProcessWorkers(2), chunk_size=2, slice_tokens=2))
    assert learned(fit(make(engine=engine), 2)) == learned(fit(make(), 2))


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


def on_two_ranks(folder: str, stop: int | None, schedules_of: str | None = None) -> dict[str, Any]:
    """Runs on one rank with a slow worker and one without; until a timestep, or under the schedules of a checkpoint."""
    with DDPStrategy(seed=3, device='cpu') as strategy:
        more = [] if stop is None else [AtTimestep(stop, lambda trainer: trainer.request_stop())]
        slowness = {} if strategy.rank or schedules_of else {0: 5.0}
        trainer = make(*more, strategy=strategy, slowness=slowness)
        given = None if schedules_of is None else schedules(schedules_of)[strategy.rank]
        fit(trainer, schedule=given)
        trainer.save_checkpoint(folder)
        queue = trainer.collector.draws.queue
        own = queue.schedule.requests, queue.schedule.takes
        return {'learned': learned(trainer), 'metrics': trainer.log.phases, 'weights': weights(trainer), 'own': own}


def test_two_ranks_have_queues_of_their_own_and_each_follows_its_schedule(tmp_path):
    free = run_distributed(on_two_ranks, 2, str(tmp_path / 'free'), None)
    assert free[0]['learned'] == free[1]['learned'] and free[0]['metrics'] == free[1]['metrics']
    check_samples(free[0]['learned'])
    parts = [{index for _, request in each['own'][0] for index, _ in request} for each in free]
    assert not parts[0] & parts[1] and parts[0] | parts[1] == set(range(4 * PHASES))
    assert [len(each['own'][1]) for each in free] == [2 * PHASES] * 2
    again = run_distributed(on_two_ranks, 2, str(tmp_path / 'again'), None, str(tmp_path / 'free'))
    for a, b in zip(free, again, strict=True):
        assert a['learned'] == b['learned'] and a['metrics'] == b['metrics'] and a['own'] == b['own']
        assert torch.equal(a['weights'], b['weights'])


@pytest.mark.parametrize('ranks', [1, 2])
def test_two_ranks_that_stop_in_a_phase_go_on_with_what_both_had_in_flight(tmp_path, ranks):
    first = run_distributed(on_two_ranks, 2, str(tmp_path / 'stopped'), 3)[0]['learned']
    assert 0 < len(first) < PHASES
    if ranks == 2:
        rest = run_distributed(resumed_on_two_ranks, 2, str(tmp_path / 'stopped'))
        assert rest[0] == rest[1]
        check_samples(first + rest[0])
    else:
        second = make()
        second.load_checkpoint(tmp_path / 'stopped')
        check_samples(first + learned(fit(second)))


def resumed_on_two_ranks(folder: str) -> list[Any]:
    with DDPStrategy(seed=3, device='cpu') as strategy:
        trainer = make(strategy=strategy)
        trainer.load_checkpoint(folder)
        return learned(fit(trainer))
