"""PPO with an engine that generates elsewhere: without staleness it equals the colocated run, with staleness its
samples are as old as allowed."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process_workers import InProcessWorkers
from stop_after import StopAfter
from tiny_runs import ppo, weights

from chatgpt.rollout import HFEngine, LocalEngine, RemoteEngine
from chatgpt.strategies import DDPStrategy
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer import PPOConfig, checkpointing
from chatgpt.trainer.callbacks import Callback
from chatgpt.trainer.stream import Stream

WORDS = [f'a {word}' for word in 'one two three four five six seven eight nine ten eleven'.split()]


class Ages(Callback):
    def __init__(self) -> None:
        self.phases: list[set[int]] = []

    def on_make_experience_end(self, trainer: Any, experiences: list[Any]) -> None:
        self.phases.append({trainer.phase - e.version for e in experiences})


def make(engine: Any = None, *, strategy: Any = None, more: Any = (), **settings: Any) -> Any:
    given = {'kl_target': 3.0, 'score_scaling': 'running', 'lr': 3e-3} | settings
    ages = Ages()
    trainer = ppo(strategy, engine=engine, callbacks=[ages, *more], **given)
    trainer.ages = ages.phases
    return trainer


def make_stale(n: int, workers: Any = 2, **settings: Any) -> Any:
    pool = InProcessWorkers(workers) if isinstance(workers, int) else workers
    return make(RemoteEngine(pool), max_staleness=n, tis_cap=2.0, **settings)


def fit(trainer: Any, timesteps: int, update: int = 1) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', message='only .* rollout workers|dynamic sampling gave up')
        trainer.fit(WORDS, 1, timesteps, update)
    return trainer


def samples(*trainers: Any) -> list[Any]:
    """Returns identifiers of the samples of each phase of a run, or of a run and its continuation."""
    return [
        [(e.index, e.group, e.prompt_text, e.response_ids.tolist(), e.logprobs.tolist()) for e in phase]
        for trainer in trainers
        for phase in trainer.log.experiences
    ]


def indices(*trainers: Any) -> list[int]:
    return [sample[0] for phase in samples(*trainers) for sample in phase]


# ---------------------------------------------------------------------- staleness 0

GROUPS = {'advantage_estimator': 'grpo', 'num_samples_per_prompt': 4, 'dynamic_sampling_rounds': 2, 'max_new_tokens': 2}


@pytest.mark.parametrize(('workers', 'settings'), [(1, {}), (3, {'lora_rank': 2}), (2, GROUPS)])
def test_without_staleness_it_is_the_colocated_run_to_the_bit(workers, settings):
    engine = RemoteEngine(InProcessWorkers(workers))
    local, remote = (fit(make(e, **settings), 5, 2) for e in (None, engine))
    assert local.log.phases == remote.log.phases and len(local.log.phases) == 3
    assert local.ages == remote.ages == [{0}] * 3
    assert samples(local) == samples(remote)
    assert torch.equal(weights(local), weights(remote))
    if settings != GROUPS:
        by_hand = (trainer.generate(WORDS[:2]) for trainer in (local, remote))
        assert all(torch.equal(a, b) for a, b in zip(*by_hand, strict=True))


@pytest.mark.parametrize(('n', 'update', 'phases'), [(1, 1, 5), (2, 2, 4), (9, 1, 4)])
def test_samples_are_as_old_as_allowed_and_every_prompt_is_used_once(n, update, phases, monkeypatch):
    in_flight, send = [], Stream._send

    def counted(stream: Stream) -> None:
        send(stream)
        in_flight.append(len(stream.queue.groups) // stream.share)

    monkeypatch.setattr(Stream, '_send', counted)
    pool = InProcessWorkers(2)
    timesteps = phases * update - (update - 1)  # the last phase is a remainder
    trainer = fit(make_stale(n, pool), timesteps, update)
    # phase p learns from timesteps submitted in phase p - n, or at the start
    assert trainer.ages == [{min(phase, n)} for phase in range(phases)]
    assert indices(trainer) == list(range(4 * timesteps))
    assert [m['rollout/staleness_max'] for m in trainer.log.phases] == [min(phase, n) for phase in range(phases)]
    # back-pressure: at most n + 1 phases, and none beyond the end of the run
    assert max(in_flight) == min((n + 1) * update, timesteps)
    assert pool.most_queued <= (n + 1) * update
    assert sorted(i for _, indices in pool.answered for i in indices) == list(range(4 * timesteps))
    assert (trainer.collector.draws.samples_drawn, len(trainer.collector.draws.queue.entries)) == (4 * timesteps, 0)


def test_a_stale_run_repeats_itself_and_differs_from_a_fresh_one_after_the_first_phase():
    fresh, a, b = (fit(make_stale(n, workers), 3) for n, workers in ((0, 1), (1, 1), (1, 3)))
    assert a.log.phases == b.log.phases and torch.equal(weights(a), weights(b))
    assert samples(a)[0] == samples(fresh)[0] and samples(a)[1] != samples(fresh)[1]
    assert fresh.log.phases[1]['ppo/tis_weight'] == pytest.approx(1.0, abs=1e-5)
    assert abs(a.log.phases[1]['ppo/tis_weight'] - 1.0) > 1e-4
    # the ratio is relative to the weights at the start of learning
    assert all(m['ppo/first_ratio_error'] < 1e-4 for m in a.log.phases)


def test_dynamic_sampling_uses_timesteps_in_flight():
    pool = InProcessWorkers()
    trainer = fit(make_stale(1, pool, **GROUPS | {'num_samples_per_prompt': 2, 'dynamic_sampling_rounds': 3}), 4)
    assert sum(m['rollout/dynamic_rounds'] for m in trainer.log.phases) > 0
    assert set().union(*trainer.ages) == {0, 1}
    drawn = sorted(i for _, indices in pool.answered for i in indices)
    assert drawn == list(range(trainer.collector.draws.samples_drawn))
    assert len(set(indices(trainer))) == len(indices(trainer))


def run_with_deaths(n: int, workers: int, die_on: dict[int, int]) -> Any:
    pool = InProcessWorkers(workers)
    pool.die_on = die_on
    return fit(make_stale(n, pool), 5)


@pytest.mark.parametrize(('n', 'workers', 'die_on'), [(2, 3, {5: 1, 9: 1}), (0, 1, {5: 1, 9: 2}), (0, 2, {9: 3})])
def test_a_worker_that_dies_changes_nothing(n, workers, die_on):
    """Other workers have its weights, or, while a phase without staleness collects, the trainer."""
    undisturbed = run_with_deaths(n, workers, {})
    with pytest.warns(UserWarning, match='generates its .* prompts again'):
        disturbed = run_with_deaths(n, workers, dict(die_on))
    assert disturbed.log.phases == undisturbed.log.phases and indices(disturbed) == list(range(20))
    assert torch.equal(weights(disturbed), weights(undisturbed))
    assert disturbed.engine.num_replaced == sum(die_on.values())


def test_where_all_workers_die_what_they_had_is_asked_for_again_with_the_newest_weights():
    """The worker dies of a sample that was asked for two phases before the one that learns from it."""
    with pytest.warns(UserWarning, match='generates its .* prompts again'):
        trainer = run_with_deaths(2, 1, {13: 1})
    assert sorted(indices(trainer)) == list(range(20)) and trainer.engine.num_replaced == 1
    assert indices(trainer)[-4:] == [12, 13, 14, 15]  # others were there before
    assert trainer.ages == [{0}, {1}, {2}, {1}, {0}]


def test_a_resume_after_such_a_death_learns_each_sample_once(tmp_path):
    def run(more: Any, workers: Any) -> Any:
        return make_stale(1, workers, more=more)

    def dying() -> Any:
        pool = InProcessWorkers(1)
        pool.die_on = {5: 1}
        return pool

    with pytest.warns(UserWarning, match='generates its .* prompts again'):
        whole, first = fit(run([], dying()), 5), fit(run([StopAfter(2)], dying()), 5)
    assert indices(first)[-4:] == [8, 9, 10, 11]  # out of their order
    again = run([], 2)
    again.load_checkpoint(first.save_checkpoint(tmp_path))
    assert indices(first, fit(again, 5)) == indices(whole) and sorted(indices(whole)) == list(range(20))


def dying_on_rank_0() -> list[int]:
    with DDPStrategy(seed=3, device='cpu', timeout_s=60) as strategy:
        pool = InProcessWorkers(1)
        pool.die_on = {5: 1} if strategy.rank == 0 else {}
        return indices(fit(make_stale(1, pool, strategy=strategy), 5))


def test_a_death_on_one_rank_changes_the_order_of_its_samples_alone():
    for found in run_distributed(dying_on_rank_0, 2):
        assert found != list(range(20)) and sorted(found) == list(range(20))


class StopAt(Callback):
    def __init__(self, timestep: int) -> None:
        self.timestep = timestep

    def on_episode_end(self, trainer: Any, episode: int) -> None:
        if trainer.timestep == self.timestep:
            trainer.request_stop()


def plain(value: Any, *_: Any) -> Any:
    """Returns a state as JSON alone, as checkpoints of 0.1.0 have it."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, list) else value


def resumed(
    folder: Path, n: int, update: int, total: int, stop: Any, *, lists: bool = False, **changes: Any
) -> tuple[Any, Any]:
    first = make_stale(n, more=[stop])
    first.fit(WORDS, total, 1, update)
    assert first.timestep < total
    folder = first.save_checkpoint(folder / 'checkpoint')
    held = plain(first.checkpoint_state().get('in_flight', []))
    text = (folder / 'state.json').read_text()
    assert len(json.loads(text)['trainer'].get('in_flight', [])) == len(held)
    assert ('"ids": [' in text) == (lists and held != [])
    assert len(held) == min(n * update, total - first.timestep)
    del first.log.experiences[first.phase :], first.ages[first.phase :]  # of a dropped phase
    second = make(**{'engine': RemoteEngine(InProcessWorkers(2)), 'max_staleness': n, 'tis_cap': 2.0} | changes)
    second.load_checkpoint(folder)
    # saved before it continues, it is the same checkpoint, except for an engine with nothing in flight
    again = plain(second.checkpoint_state().get('in_flight', []))
    assert again == (held if isinstance(second.collector.draws, Stream) else [])
    second.fit(WORDS, total, 1, update)
    assert 'in_flight' not in second.checkpoint_state()
    return first, second


@pytest.mark.parametrize(('n', 'update', 'lists'), [(0, 2, False), (1, 2, False), (2, 1, False), (2, 1, True)])
def test_a_resumed_run_continues_to_the_bit_with_what_was_in_flight(tmp_path, monkeypatch, n, update, lists):
    if lists:
        monkeypatch.setattr(checkpointing, '_without_tensors', plain)
    straight = make_stale(n)
    straight.fit(WORDS, 7, 1, update)
    for name, stop in (('between phases', StopAfter(2)), ('in a phase', StopAt(5))):
        with warnings.catch_warnings():
            warnings.simplefilter('error', UserWarning)
            first, second = resumed(tmp_path / name, n, update, 7, stop, lists=lists)
        assert samples(first, second) == samples(straight)
        assert first.log.phases + second.log.phases == straight.log.phases
        assert first.ages + second.ages == straight.ages
        assert torch.equal(weights(second), weights(straight))


@pytest.mark.parametrize(
    'changes',
    [{'max_staleness': 0}, {'temperature': 0.5}, {'engine': LocalEngine(), 'max_staleness': 0}],
    ids=['no staleness', 'another temperature', 'a local engine'],
)
def test_under_other_settings_the_prompts_in_flight_are_submitted_again(tmp_path, changes):
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        first, second = resumed(tmp_path, 2, 1, 5, StopAfter(2), **changes)
    assert indices(first, second) == list(range(20))
    assert second.ages[0] == {0}  # from the present weights


def test_a_second_fit_begins_with_nothing_in_flight():
    trainer = make_stale(2, 1, more=[StopAfter(2)])
    trainer.fit(WORDS, 6, 1, 1)
    assert len(trainer.collector.draws.queue.entries) == 2 * 4
    trainer.fit(WORDS, 2, 1, 1)
    assert indices(trainer) == list(range(16))
    assert trainer.ages == [{0}, {1}, {0}, {1}]


def on_two_ranks(folder: str) -> tuple[list[dict[str, float]], list[int], list[float]]:
    with DDPStrategy(seed=3, device='cpu') as strategy:
        trainer = make_stale(1, strategy=strategy, more=[StopAfter(2)])
        trainer.fit(WORDS, 4, 1, 1)
        trainer.save_checkpoint(folder)
        return trainer.log.phases, indices(trainer), weights(trainer).tolist()


def test_two_ranks_use_their_own_workers_and_one_rank_continues_with_their_samples(tmp_path):
    first, second = run_distributed(on_two_ranks, 2, str(tmp_path / 'checkpoint'))
    assert first == second and first[1] == list(range(8))
    single = make_stale(1, more=[StopAfter(2)])
    single.fit(WORDS, 4, 1, 1)
    for a, b in zip(first[0], single.log.phases, strict=True):
        assert a['rollout/score_mean'] == b['rollout/score_mean']
        assert a['ppo/policy_loss'] == pytest.approx(b['ppo/policy_loss'], rel=1e-4, abs=1e-6)
    resumed_on_one = make_stale(1, 1)
    resumed_on_one.load_checkpoint(tmp_path / 'checkpoint')
    resumed_on_one.fit(WORDS, 4, 1, 1)
    assert indices(resumed_on_one) == list(range(8, 16)) and resumed_on_one.ages == [{1}, {1}]


def test_requirements_of_staleness_are_named():
    for given, text in (
        ({'max_staleness': 1, 'tis_cap': 0}, '1 learns from samples of older weights, which tis_cap weighs'),
        ({'max_staleness': 1, 'recompute_logprobs': False}, '1 learns from samples of older weights'),
        ({'max_staleness': -1}, '-1 must not be neg'),
    ):
        with pytest.raises(ValueError, match=f'max_staleness={text}'):
            PPOConfig(**given).validate(1)
    for engine in (None, LocalEngine(), HFEngine()):
        with pytest.raises(ValueError, match='needs an engine that generates while the trainer learns, such as Remote'):
            make(engine, max_staleness=1, tis_cap=2.0)
