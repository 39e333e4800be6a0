"""The queue of a stream on a simulated clock: what it hands out, what a phase takes, and how a schedule repeats it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from chatgpt.trainer.sample_queue import Entry, SampleQueue, Schedule

BENCHMARKS = Path(__file__).resolve().parents[2] / 'benchmarks'
sys.path[:0] = [str(BENCHMARKS)]

from streams import Simulation  # noqa: E402


def queue(n: int, *sizes: int, groups: int = 0, k: int = 1, **given: Any) -> SampleQueue:
    made = SampleQueue(n, **given)
    made.begin(0, sizes)
    for group in range(groups):
        made.add(group, [Entry(k * group + j, group) for j in range(k)])
    return made


def handed(q: SampleQueue, rows: int = 1) -> list[int]:
    return [entry.index for entry in q.hand_out(rows)]


def taken(q: SampleQueue) -> int | None:
    group = q.take()
    return None if group is None else group[0].group


def test_what_is_due_first_goes_out_first_and_a_group_is_begun_as_a_whole():
    q = queue(1, 2, 2, groups=4, k=2)
    assert handed(q, 3) == [0, 1, 2]
    q.give_back(0, 5, False)
    q.give_back(1, 5, True)
    # the rest of a begun response, and of a begun group, before a fresh group
    assert handed(q, 3) == [0, 3, 4]
    assert q.schedule.requests == [(0, ((0, 0), (1, 0), (2, 0))), (0, ((0, 5), (3, 0), (4, 0)))]
    assert (q.entries[0].version, q.entries[0].num_tokens, q.entries[6].version) == (0, 5, None)
    apart = queue(1, 2, 2, groups=4, apart=True)
    assert handed(apart) == [0]
    apart.give_back(0, 1, False)
    assert handed(apart, 4) == [0] and handed(apart, 4) == [1, 2, 3]


def test_no_more_groups_are_begun_than_the_phases_in_time_take():
    q = queue(1, 2, 1, 9, groups=8)  # the third phase is too late for these weights
    assert handed(q, 8) == [0, 1, 2] and handed(q, 8) == []
    for index in range(3):
        q.give_back(index, 1, True)
    assert [taken(q), taken(q)] == [0, 1] and handed(q, 8) == []
    q.begin(1, [1, 9])
    assert handed(q, 8) == [3, 4, 5, 6, 7]


def test_a_phase_takes_what_has_ended_unless_what_is_due_would_come_late():
    q = queue(1, 1, 1, 1, groups=3)
    assert handed(q, 2) == [0, 1]
    q.give_back(1, 1, True)
    assert taken(q) == 1  # 0 can wait for the next phase
    q.begin(1, [1, 1])
    assert handed(q) == [2]
    q.give_back(2, 1, True)
    assert taken(q) is None  # 0 is due in this one
    q.give_back(0, 1, True)
    assert taken(q) == 0
    q.begin(2, [1])
    assert taken(q) == 2
    assert q.schedule.takes == [(0, 1), (1, 0), (2, 2)]
    late = queue(1, 1, 1, groups=1)
    handed(late)
    late.give_back(0, 1, True)
    late.begin(2, [1])
    assert late.misfits()
    with pytest.raises(RuntimeError, match='samples of phase 1 came to phase 3, with max_staleness=1'):
        late.take()


def test_a_dropped_phase_returns_its_groups_and_its_part_of_the_schedule():
    q = queue(1, 1, 1, groups=2)
    handed(q, 2)
    q.give_back(0, 3, True)
    assert taken(q) == 0 and set(q.groups) == {1}
    q.untake()
    assert set(q.groups) == {0, 1} and q.entries[0].ended
    q.reset(q.entries[0])
    assert (q.entries[0].version, q.entries[0].num_tokens) == (None, 0)
    q.schedule.cut(0)
    assert (q.schedule.requests, q.schedule.takes) == ([], [])
    assert Schedule.of(q.schedule.state()).requests == []


def test_a_schedule_waits_for_its_tokens_and_weights_and_names_what_does_not_fit():
    recorded = Schedule([(0, ((1, 0),)), (0, ((1, 4),)), (1, ((0, 0),))], [(0, 1), (1, 0)])
    restored = Schedule.of(recorded.state())
    assert (restored.requests, restored.takes) == (recorded.requests, recorded.takes)
    q = queue(1, 1, 1, groups=2)
    q.replayed = recorded
    assert handed(q, 9) == [1] and handed(q, 9) == []
    q.give_back(1, 4, False)
    assert q.must_send(1) and handed(q, 9) == [1] and not q.must_send(1)
    assert handed(q, 9) == []  # 0 goes out with the next weights
    q.give_back(1, 6, True)
    assert taken(q) == 1
    q.begin(1, [1])
    assert handed(q, 9) == [0]
    other = queue(1, 1, 1, groups=2)
    other.replayed = recorded
    handed(other)
    other.give_back(1, 3, False)
    with pytest.raises(ValueError, match='does not fit this run: with weights 0 it asks for samples 1 to 1'):
        other.hand_out(1)
    other.begin(1, [1])
    with pytest.raises(ValueError, match='phase 1 takes group 1, and here phase 2 takes another'):
        other.take()


def check(run: Simulation) -> None:
    """Every sample of the run is learned once, at most `max_staleness` phases after its first weights."""
    groups = [group for _, group in run.queue.schedule.takes]
    assert sorted(groups) == list(range(run.batch * run.phases))
    assert all(0 <= age <= run.max_staleness for phase in run.ages for age in phase)
    given = [(index, start) for _, parts in run.queue.schedule.requests for index, start in parts]
    assert len(given) == len(set(given)), 'a part is generated once'


FEW: dict[str, Any] = {'batch': 16, 'phases': 8}


def test_a_stream_makes_many_more_updates_than_a_synchronous_run_with_a_long_tail():
    for workers in (2, 4):
        synchronous = Simulation(workers, 0, **FEW)
        before = synchronous.run()
        check(synchronous)
        assert sorted(synchronous.queue.schedule.takes) == [(i // 16, i) for i in range(16 * 8)]
        stream = Simulation(workers, 2, slice_tokens=100, **FEW)
        assert before / stream.run() > 1.7
        check(stream)
        assert max(age for phase in stream.ages for age in phase) == 2


@pytest.mark.parametrize('changes', [{'slowness': {0: 8.0}}, {'joining': [900.0, 2500.0]}, {'killed': {0: 350.0}}])
def test_a_slow_a_new_and_a_killed_worker_lose_nothing(changes):
    run = Simulation(2, 2, slice_tokens=100, **FEW, **changes)
    steps = run.run()
    if 'joining' in changes:
        assert steps < Simulation(2, 2, slice_tokens=100, **FEW).run()
    check(run)
    assert any(len(workers) > 1 for workers in run.takers.values()), 'workers continue responses of others'
    if 'slowness' in changes:  # the other one does the work
        counts = [sum(w in workers for workers in run.takers.values()) for w in (0, 1)]
        assert counts[1] > 3 * counts[0]


def test_a_schedule_decides_on_any_workers():
    run = Simulation(2, 2, slice_tokens=100, slowness={0: 3.0}, **FEW)
    run.run()
    again = Simulation(4, 2, slice_tokens=100, slowness={1: 2.0}, replayed=run.queue.schedule, **FEW)
    again.run()
    assert (again.queue.schedule.requests, again.queue.schedule.takes) == (
        run.queue.schedule.requests,
        run.queue.schedule.takes,
    )
    assert again.ages == run.ages
    other = Simulation(4, 2, slice_tokens=100, slowness={1: 2.0}, **FEW)
    other.run()
    assert other.queue.schedule.takes != run.queue.schedule.takes
