"""PPO whose samples come from workers: the colocated run to the bit, or samples of weights that are old by as much as
was allowed."""

from __future__ import annotations

import json
import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process_workers import InProcessWorkers
from phase_log import Log

from chatgpt.nn import GPTActor, GPTCritic
from chatgpt.rollout import HFEngine, LocalEngine, RemoteEngine
from chatgpt.strategies import DDPStrategy, NaiveStrategy
from chatgpt.testing.fakes import char_tokenizer, tiny_config
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer import PPOConfig, PPOTrainer
from chatgpt.trainer.callbacks import Callback, SaveCheckpoint
from chatgpt.trainer.draws import Pipeline
from chatgpt.types import Experience

WORDS = [f'a {word}' for word in 'one two three four five six seven eight nine ten eleven'.split()]


class SampleLog(Log):
    def __init__(self) -> None:
        super().__init__()
        self.samples: list[list[tuple[Any, ...]]] = []
        """of each phase, what identifies a sample"""
        self.ages: list[list[int]] = []

    def on_make_experience_end(self, trainer: Any, experiences: list[Experience]) -> None:
        self.samples.append(
            [(e.index, e.group, e.prompt_text, e.response_ids.tolist(), e.logprobs.tolist()) for e in experiences]
        )
        self.ages.append([trainer.phase - e.version for e in experiences])

    def indices(self) -> list[int]:
        return [s[0] for phase in self.samples for s in phase]


def vowels(prompts: list[str], responses: list[str]) -> list[float]:
    return [float(sum(c in 'aeiou' for c in r)) for r in responses]


def make(
    engine: Any = None, *, strategy: Any = None, more: Any = (), lora_rank: int = 0, **kw: Any
) -> tuple[PPOTrainer, SampleLog]:
    strategy = strategy or NaiveStrategy(seed=3, device='cpu')
    config = tiny_config('gpt2', positions=48)
    actor, critic = GPTActor(config=config, lora_rank=lora_rank), GPTCritic(config=config)
    initial = None if lora_rank else deepcopy(actor)
    optimizers = [
        torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=3e-3, eps=1e-5) for m in (actor, critic)
    ]
    (actor, a), (critic, c), initial = strategy.prepare((actor, optimizers[0]), (critic, optimizers[1]), initial)
    log = SampleLog()
    settings: dict[str, Any] = {
        'experience_batch_size': 4,
        'train_batch_size': 4,
        'max_new_tokens': 6,
        'kl_target': 3.0,
        'score_scaling': 'running',
        'tokenizer': char_tokenizer(),
        'callbacks': [log, *more],
        'engine': engine,
    }
    return PPOTrainer(strategy, actor, critic, vowels, initial, a, c, **settings | kw), log


def weights(trainer: PPOTrainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for m in trainer.models().values() for p in m.parameters()])


STALE: dict[str, Any] = {'tis_cap': 2.0}


# ---------------------------------------------------------------------- staleness 0


@pytest.mark.parametrize(
    ('workers', 'update', 'kw'),
    [
        (1, 1, {}),
        (2, 2, {}),
        (3, 2, {'lora_rank': 2}),
        (
            2,
            2,
            {
                'advantage_estimator': 'grpo',
                'num_samples_per_prompt': 4,
                'dynamic_sampling_rounds': 2,
                'max_new_tokens': 2,
            },
        ),
    ],
)
def test_without_staleness_it_is_the_colocated_run_to_the_bit(tmp_path, workers, update, kw):
    files = []
    for name, engine in (('local', None), ('remote', RemoteEngine(InProcessWorkers(workers)))):
        trainer, log = make(engine, run_dir=tmp_path / name, **kw)
        with warnings.catch_warnings():
            warnings.filterwarnings('ignore', message='only .* rollout workers')
            trainer.fit(WORDS, 1, 5, update)
        rows = [json.loads(line) for line in (tmp_path / name / 'metrics.jsonl').read_text().splitlines()]
        rows = [{k: v for k, v in row.items() if not k.startswith(('perf/', 'time'))} for row in rows]
        files.append((rows, log.samples, weights(trainer)))
        assert {age for phase in log.ages for age in phase} == {0}
    (rows, samples, local), (remote_rows, remote_samples, remote) = files
    assert rows == remote_rows and len(rows) == -(-5 // update)
    assert samples == remote_samples
    assert torch.equal(local, remote)


def test_a_hand_driven_generate_works_too():
    (here, _), (there, _) = make(), make(RemoteEngine(InProcessWorkers()))
    for a, b in zip(here.generate(WORDS[:4]), there.generate(WORDS[:4]), strict=True):
        assert torch.equal(a, b)


# ---------------------------------------------------------------------- staleness n


@pytest.mark.parametrize(('n', 'update', 'phases'), [(1, 1, 5), (2, 1, 5), (2, 2, 4), (9, 1, 4)])
def test_samples_are_as_old_as_was_allowed_and_every_prompt_counts_once(n, update, phases, monkeypatch):
    in_flight, ask = [], Pipeline.ask

    def counted(pipeline: Pipeline, *given: Any) -> None:
        ask(pipeline, *given)
        in_flight.append(len(pipeline.waiting))

    monkeypatch.setattr(Pipeline, 'ask', counted)
    pool = InProcessWorkers(2)
    trainer, log = make(RemoteEngine(pool), max_staleness=n, **STALE)
    timesteps = phases * update - (update - 1)  # the last phase is a remainder
    trainer.fit(WORDS, 1, timesteps, update)
    assert len(log.phases) == phases
    # phase p learns from what was asked for at phase p - n, or at the start
    assert [set(ages) for ages in log.ages] == [{min(phase, n)} for phase in range(phases)]
    assert log.indices() == list(range(4 * timesteps))
    assert [m['rollout/staleness_max'] for m in log.phases] == [min(phase, n) for phase in range(phases)]
    # back-pressure: never more than n + 1 phases, and nothing beyond the end of the run
    assert max(in_flight) == min((n + 1) * update, timesteps)
    assert pool.most_queued <= (n + 1) * update
    assert sorted(i for _, indices in pool.answered for i in indices) == list(range(4 * timesteps))
    assert (trainer.collector.draws.samples_drawn, len(trainer.collector.draws.waiting)) == (4 * timesteps, 0)


def test_a_stale_run_repeats_itself_and_differs_from_a_fresh_one_after_the_first_phase():
    def run(n: int, workers: int) -> tuple[SampleLog, torch.Tensor]:
        trainer, log = make(RemoteEngine(InProcessWorkers(workers)), max_staleness=n, **STALE)
        with warnings.catch_warnings():
            warnings.filterwarnings('ignore', message='only .* rollout workers')
            trainer.fit(WORDS, 1, 4, 1)
        return log, weights(trainer)

    (fresh, _), (a, first), (b, second) = run(0, 1), run(1, 1), run(1, 3)
    assert a.phases == b.phases and torch.equal(first, second)
    assert a.samples[0] == fresh.samples[0]
    assert a.samples[1] != fresh.samples[1]
    assert fresh.phases[1]['ppo/tis_weight'] == pytest.approx(1.0, abs=1e-5)
    assert abs(a.phases[1]['ppo/tis_weight'] - 1.0) > 1e-4
    assert all(
        m['ppo/first_ratio_error'] < 1e-4 for m in a.phases
    )  # the ratio is to the weights that learning began with


def test_dynamic_sampling_draws_on_what_is_in_flight():
    kw = {'advantage_estimator': 'grpo', 'num_samples_per_prompt': 2, 'dynamic_sampling_rounds': 3, 'max_new_tokens': 2}
    pool = InProcessWorkers()
    trainer, log = make(RemoteEngine(pool), max_staleness=1, **STALE, **kw)
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', message='dynamic sampling gave up')
        trainer.fit(WORDS, 1, 4, 1)
    assert sum(m['rollout/dynamic_rounds'] for m in log.phases) > 0
    assert {age for ages in log.ages for age in ages} == {0, 1}
    drawn = sorted(i for _, indices in pool.answered for i in indices)
    assert drawn == list(range(trainer.collector.draws.samples_drawn))
    assert len(set(log.indices())) == len(log.indices())


def test_a_worker_that_dies_changes_nothing():
    def run(die_on: dict[int, int]) -> tuple[list[dict[str, float]], torch.Tensor, RemoteEngine]:
        pool = InProcessWorkers(2)
        pool.die_on = die_on
        engine = RemoteEngine(pool)
        trainer, log = make(engine, max_staleness=2, **STALE)
        trainer.fit(WORDS, 1, 5, 1)
        assert log.indices() == list(range(20))
        return log.phases, weights(trainer), engine

    undisturbed = run({})
    with pytest.warns(UserWarning, match='generates its .* prompts again'):
        disturbed = run({5: 1, 9: 2})
    assert disturbed[0] == undisturbed[0]
    assert torch.equal(disturbed[1], undisturbed[1])
    assert disturbed[2].num_replaced == 3


# ---------------------------------------------------------------------- checkpoints


class StopAt(Callback):
    """Ask for a stop in the middle of collecting a phase."""

    def __init__(self, timestep: int) -> None:
        self.timestep = timestep

    def on_episode_end(self, trainer: Any, episode: int) -> None:
        if trainer.timestep == self.timestep:
            trainer.request_stop()


def resumed(folder: Path, n: int, update: int, total: int, stop: Any, **kw: Any) -> tuple[SampleLog, torch.Tensor]:
    """A run that `stop` ends, and its continuation from the checkpoint; their logs joined."""
    first, log = make(RemoteEngine(InProcessWorkers(2)), max_staleness=n, more=[stop], **STALE)
    first.fit(WORDS, total, 1, update)
    assert first.timestep < total
    folder = first.save_checkpoint(folder / 'checkpoint')
    held = json.loads((folder / 'state.json').read_text())['trainer'].get('in_flight', [])
    assert len(held) == min(n * update, total - first.timestep)
    del log.samples[first.phase :], log.ages[first.phase :]  # of a phase that was dropped
    second, more = make(**{'engine': RemoteEngine(InProcessWorkers(2)), 'max_staleness': n, **STALE} | kw)
    second.load_checkpoint(folder)
    again = (
        second.checkpoint_state()
    )  # saved before it went on, it is the same checkpoint, but for an engine that has nothing in flight
    assert again.get('in_flight', []) == ([] if not isinstance(second.collector.draws, Pipeline) else held)
    second.fit(WORDS, total, 1, update)
    assert 'in_flight' not in second.checkpoint_state()
    log.phases += more.phases
    log.samples += more.samples
    log.ages += more.ages
    return log, weights(second)


class StopAfter(Callback):
    def __init__(self, phase: int) -> None:
        self.phase = phase

    def on_phase_end(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
        if step == self.phase:
            trainer.request_stop()


@pytest.mark.parametrize(('n', 'update'), [(0, 2), (1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize('stop', [StopAfter(2), StopAt(5)], ids=['between phases', 'in a phase'])
def test_a_resumed_run_continues_to_the_bit_with_what_was_in_flight(tmp_path, n, update, stop):
    straight, log = make(RemoteEngine(InProcessWorkers(2)), max_staleness=n, **STALE)
    straight.fit(WORDS, 7, 1, update)
    with warnings.catch_warnings():
        warnings.simplefilter('error', UserWarning)
        got, at_end = resumed(tmp_path, n, update, 7, stop)
    assert got.samples == log.samples
    assert got.phases == log.phases
    assert got.ages == log.ages
    assert torch.equal(at_end, weights(straight))


@pytest.mark.parametrize(
    'kw',
    [{'max_staleness': 0}, {'temperature': 0.5}, {'engine': LocalEngine(), 'max_staleness': 0}],
    ids=['no staleness', 'another temperature', 'a local engine'],
)
def test_under_other_settings_the_prompts_in_flight_are_asked_for_again(tmp_path, kw):
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        log, _ = resumed(tmp_path, 2, 1, 6, StopAfter(2), **kw)
    assert log.indices() == list(range(24))
    assert set(log.ages[2]) == {0}  # by the weights of now


def test_what_a_checkpoint_holds_of_samples_in_flight(tmp_path):
    trainer, _ = make(
        RemoteEngine(InProcessWorkers()), max_staleness=1, run_dir=tmp_path, more=[SaveCheckpoint(interval=1)], **STALE
    )
    trainer.fit(WORDS, 3, 1, 1)
    states = [
        json.loads((p / 'state.json').read_text())['trainer'] for p in sorted((tmp_path / 'checkpoints').glob('step-*'))
    ]
    assert states
    for state in states:
        ahead = state.get('in_flight', [])
        assert state['samples_drawn'] == 4 * state['phase']
        assert [r['first_sample'] for r in ahead] == ([4 * state['phase']] if state['phase'] < 3 else [])
        assert all(r['version'] == state['phase'] - 1 for r in ahead)


def test_a_second_fit_begins_with_nothing_in_flight():
    trainer, log = make(RemoteEngine(InProcessWorkers()), max_staleness=2, more=[StopAfter(2)], **STALE)
    trainer.fit(WORDS, 6, 1, 1)
    assert len(trainer.collector.draws.waiting) == 2
    trainer.fit(WORDS, 2, 1, 1)
    assert log.indices() == list(range(16))
    assert [set(a) for a in log.ages] == [{0}, {1}, {0}, {1}]


# ---------------------------------------------------------------------- ranks


def on_two_ranks(folder: str) -> tuple[list[dict[str, float]], list[int], list[float]]:
    with DDPStrategy(seed=3, device='cpu') as strategy:
        trainer, log = make(
            RemoteEngine(InProcessWorkers(2)), strategy=strategy, max_staleness=1, more=[StopAfter(2)], **STALE
        )
        trainer.fit(WORDS, 4, 1, 1)
        trainer.save_checkpoint(folder)
        return log.phases, log.indices(), weights(trainer).tolist()


def test_two_ranks_ask_their_own_workers_and_one_rank_goes_on_with_their_samples(tmp_path):
    first, second = run_distributed(on_two_ranks, 2, str(tmp_path / 'checkpoint'))
    assert first == second
    assert first[1] == list(range(8))
    single, log = make(RemoteEngine(InProcessWorkers(2)), max_staleness=1, more=[StopAfter(2)], **STALE)
    single.fit(WORDS, 4, 1, 1)
    for a, b in zip(first[0], log.phases, strict=True):
        assert a['rollout/score_mean'] == b['rollout/score_mean']
        assert a['ppo/policy_loss'] == pytest.approx(b['ppo/policy_loss'], rel=1e-4, abs=1e-6)
    going_on, more = make(RemoteEngine(InProcessWorkers(1)), max_staleness=1, **STALE)
    going_on.load_checkpoint(tmp_path / 'checkpoint')
    going_on.fit(WORDS, 4, 1, 1)
    assert more.indices() == list(range(8, 16))
    assert [set(a) for a in more.ages] == [{1}, {1}]


# ---------------------------------------------------------------------- refusals


def test_what_staleness_needs_is_named():
    with pytest.raises(ValueError, match='max_staleness=1 learns from samples of older weights, which tis_cap weighs'):
        PPOConfig(max_staleness=1).validate(1)
    with pytest.raises(ValueError, match='max_staleness=-1 must not be negative'):
        PPOConfig(max_staleness=-1).validate(1)
    for engine in (None, LocalEngine(), HFEngine()):
        with pytest.raises(
            ValueError, match='needs an engine that generates while the trainer learns, such as RemoteEngine'
        ):
            make(engine, max_staleness=1, **STALE)
