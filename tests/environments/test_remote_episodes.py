"""Episodes whose environments run where rollout workers are: those of a local engine to the bit, also when old, when a
worker dies, and from a checkpoint that holds some in flight."""

from __future__ import annotations

import json
import os
import pickle
import random
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process_workers import InProcessWorkers
from scripted_engine import played

from chatgpt.environments import Environment, EnvironmentSettings
from chatgpt.nn import Actor, GPTActor, GPTCritic
from chatgpt.rollout import LocalEngine, RemoteEngine
from chatgpt.rollout.episodes import EpisodeEngine
from chatgpt.rollout.wire import pack_samples, unpack_samples
from chatgpt.strategies import DDPStrategy, NaiveStrategy
from chatgpt.testing import byte_tokenizer, tiny_causal_lm, tiny_config
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer import PPOTrainer
from chatgpt.trainer.callbacks import Callback, ProgressBar
from chatgpt.types import Prompt, Sample

TOKENIZER = byte_tokenizer()
SETTINGS = EnvironmentSettings(max_turns=3, max_turn_tokens=4)
SAMPLING = {'max_new_tokens': 60, 'eos_token_ids': tuple(range(2, len(TOKENIZER), 3))}
STALE: dict[str, Any] = {'tis_cap': 2.0}


class Shop(Environment):
    """Two named rewards; the first observation holds the data row's word, and one step in five goes wrong."""

    def reset(self, seed: int, word: str = '', **columns: Any) -> str:
        self.random, self.turns = random.Random(seed), 0
        return f'{word}{self.random.randint(0, 9)}:'

    def step(self, response: str) -> Any:
        self.turns += 1
        if self.random.randint(0, 4) == 0:
            raise RuntimeError('sold out')
        over = self.turns == self.random.randint(1, 3)
        return 'x' * (1 + len(response) % 3), {'sale': 0.1 * self.turns, 'tone': 1 / 3}, over, False, {'success': over}


def prompts(num: int = 8) -> list[Prompt]:
    ids = [torch.tensor(list(f'go {i}'.encode())) for i in range(num)]
    return [Prompt(ids=x, text=f'go {i}', columns={'word': f'w{i}'}) for i, x in enumerate(ids)]


def episodes(engine: Any, *, num: int = 8) -> list[Sample]:
    torch.manual_seed(0)
    actor = Actor(tiny_causal_lm('gpt2', vocab_size=len(TOKENIZER)))
    given = {'seed': 5, 'indices': range(20, 20 + num), 'groups': [i // 2 for i in range(num)], **SAMPLING}
    return played(engine, Shop, TOKENIZER, actor=actor, prompts=prompts(num), settings=SETTINGS, **given)


def assert_same(a: list[Sample], b: list[Sample]) -> None:
    assert len(a) == len(b) > 0
    for x, y in zip(a, b, strict=True):
        for name in Sample.__dataclass_fields__:
            u, v = getattr(x, name), getattr(y, name)
            if name == 'version':
                continue
            if name == 'episode':
                assert (u.turns, u.end, u.message, u.success) == (v.turns, v.end, v.message, v.success)
            elif isinstance(u, torch.Tensor):
                assert u.dtype == v.dtype and torch.equal(u, v), name
            else:
                assert u == v, name


def test_workers_play_the_episodes_of_a_local_engine_to_the_bit():
    here = episodes(LocalEngine())
    assert {s.episode.end for s in here} >= {'terminated', 'error'}
    assert any(not s.response_mask.all() for s in here)
    pool = InProcessWorkers(2)
    with RemoteEngine(pool) as engine:
        assert_same(here, episodes(engine))
    pool = InProcessWorkers(2)
    pool.die_on = {23: 1}
    with RemoteEngine(pool) as engine, pytest.warns(UserWarning, match='rollout worker . died'):
        assert_same(here, episodes(engine))


def test_chunks_are_the_same_episodes_to_rounding():
    here = episodes(LocalEngine())
    with RemoteEngine(InProcessWorkers(2), chunk_size=3) as engine:
        there = episodes(engine)
    for a, b in zip(here, there, strict=True):
        assert a.response_ids.tolist() == b.response_ids.tolist() and a.episode.turns == b.episode.turns
        torch.testing.assert_close(a.logprobs, b.logprobs)


class Told(Environment):
    """Says what `reset` was told of its data row."""

    def reset(self, seed: int, prompt: Any = None, **columns: Any) -> str:
        return f'{prompt[0]["content"]} and {columns["word"]}'

    def step(self, response: str) -> Any:
        return '', 1.0, True, False, {}


def test_an_environment_on_a_worker_is_told_of_its_whole_data_row():
    def first(engine: Any) -> str:
        actor, said = (
            Actor(tiny_causal_lm('gpt2', vocab_size=len(TOKENIZER))),
            {'role': 'user', 'content': 'a question'},
        )
        row = Prompt(ids=torch.tensor([65]), messages=[said], columns={'word': 'a word'})
        (sample,) = played(engine, Told, TOKENIZER, actor=actor, prompts=[row], settings=SETTINGS, **SAMPLING)
        return sample.prompt_text

    with RemoteEngine(InProcessWorkers()) as engine:
        assert first(engine) == first(LocalEngine()) == 'Aa question and a word'


def test_what_is_packed_is_what_was_there():
    here = episodes(LocalEngine())
    packed = pickle.loads(pickle.dumps(pack_samples(here, version=3)))
    again = unpack_samples(packed, prompts(), range(20, 28), [i // 2 for i in range(8)], 1.0)
    assert_same(here, again)
    assert {s.version for s in again} == {3}


def test_what_cannot_be_sent_is_told_before_any_worker_starts():
    lock = threading.Lock()

    def factory() -> Any:
        return lock

    pool = InProcessWorkers()
    with pytest.raises(ValueError, match='cannot be sent to rollout workers'):
        EpisodeEngine(RemoteEngine(pool), factory, TOKENIZER)
    assert not pool.workers
    engine = RemoteEngine(pool)
    engine.begin(Actor(tiny_causal_lm('gpt2', vocab_size=len(TOKENIZER))))
    with pytest.raises(ValueError, match='another environment, or none'):
        EpisodeEngine(engine, Shop, TOKENIZER)
    engine = RemoteEngine(InProcessWorkers())
    EpisodeEngine(engine, Shop, TOKENIZER)
    EpisodeEngine(engine, Shop, TOKENIZER)
    with pytest.raises(ValueError, match='another environment, or none'):
        EpisodeEngine(engine, Told, TOKENIZER)


# ---------------------------------------------------------------------- training


class Log(ProgressBar):
    def __init__(self) -> None:
        super().__init__(enabled=False)
        self.samples: list[list[tuple[Any, ...]]] = []
        self.ages: list[set[int]] = []

    def on_make_experience_end(self, trainer: Any, experiences: list[Any]) -> None:
        self.ages.append({trainer.phase - e.version for e in experiences})
        self.samples.append(
            [
                (
                    e.index,
                    e.group,
                    e.prompt_text,
                    e.response_text,
                    e.prompt_ids.tolist(),
                    e.response_ids.tolist(),
                    e.response_mask.tolist(),
                    e.logprobs.tolist(),
                    e.score,
                    e.episode.turns,
                    e.episode.end,
                )
                for e in experiences
            ]
        )


class StopAfter(Callback):
    def __init__(self, phase: int) -> None:
        self.phase = phase

    def on_phase_end(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
        if step == self.phase:
            trainer.request_stop()


def make(engine: Any = None, *, strategy: Any = None, more: Any = (), **kw: Any) -> tuple[PPOTrainer, Log]:
    strategy = strategy or NaiveStrategy(seed=3, device='cpu')
    config = tiny_config('gpt2', vocab_size=len(TOKENIZER))
    actor, critic = GPTActor(config=config), GPTCritic(config=config)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=3e-3, eps=1e-5) for m in (actor, critic)]
    (actor, a), (critic, c) = strategy.prepare((actor, optimizers[0]), (critic, optimizers[1]))
    log = Log()
    settings: dict[str, Any] = {
        'environment': Shop,
        'environment_settings': SETTINGS,
        'experience_batch_size': 4,
        'train_batch_size': 4,
        'kl_coef': 0.0,
        'max_new_tokens': 60,
        'eos_token_id': list(SAMPLING['eos_token_ids']),
        'tokenizer': TOKENIZER,
        'callbacks': [log, *more],
        'engine': engine,
    }
    return PPOTrainer(strategy, actor, critic, None, None, a, c, **settings | kw), log


def weights(trainer: PPOTrainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for m in trainer.models().values() for p in m.parameters()])


def tasks() -> list[Prompt]:
    return prompts(7)


@pytest.mark.parametrize('n', [0, 1, 2])
def test_a_resumed_run_continues_to_the_bit_with_episodes_in_flight(tmp_path, n):
    straight, log = make(RemoteEngine(InProcessWorkers(2)), max_staleness=n, **STALE)
    straight.fit(tasks(), 5, 1, 1)
    assert log.ages == [{min(phase, n)} for phase in range(5)]
    if n == 0:
        local, here = make(**STALE)
        local.fit(tasks(), 5, 1, 1)
        assert here.samples == log.samples and torch.equal(weights(local), weights(straight))
    first, before = make(RemoteEngine(InProcessWorkers(2)), max_staleness=n, more=[StopAfter(2)], **STALE)
    first.fit(tasks(), 5, 1, 1)
    folder = first.save_checkpoint(tmp_path / 'checkpoint')
    held = json.loads((Path(folder) / 'state.json').read_text())['trainer'].get('in_flight', [])
    assert len(held) == n
    assert all(len(record['episodes']) == 4 for record in held)
    assert not n or not all(mask for record in held for mask in record['masks'])
    second, after = make(RemoteEngine(InProcessWorkers(2)), max_staleness=n, **STALE)
    second.load_checkpoint(folder)
    with warnings.catch_warnings():
        warnings.simplefilter('error', UserWarning)
        warnings.filterwarnings('ignore', message='.* episodes of phase .* failed')
        second.fit(tasks(), 5, 1, 1)
    assert before.samples + after.samples == log.samples
    assert torch.equal(weights(second), weights(straight))


def on_two_ranks(folder: str) -> Any:
    with DDPStrategy(seed=3, device='cpu') as strategy:
        trainer, log = make(
            RemoteEngine(InProcessWorkers(1)), strategy=strategy, max_staleness=1, more=[StopAfter(2)], **STALE
        )
        trainer.fit(tasks(), 4, 1, 1)
        trainer.save_checkpoint(folder)
        return log.samples


def test_two_ranks_have_workers_of_their_own_and_one_rank_goes_on_with_their_episodes(tmp_path):
    ranks = run_distributed(on_two_ranks, 2, str(tmp_path / 'checkpoint'))
    single, log = make(RemoteEngine(InProcessWorkers(1)), max_staleness=1, **STALE)
    single.fit(tasks(), 4, 1, 1)
    for phase, wanted in enumerate(log.samples[:2]):
        assert ranks[0][phase] == ranks[1][phase], 'callbacks see those of all ranks'
        # all but log-probs, which differ in their last bits
        assert [(*s[:7], *s[8:]) for s in ranks[0][phase]] == [(*s[:7], *s[8:]) for s in wanted]
    going_on, more = make(RemoteEngine(InProcessWorkers(1)), max_staleness=1, **STALE)
    going_on.load_checkpoint(tmp_path / 'checkpoint')
    going_on.fit(tasks(), 4, 1, 1)
    assert [[s[0] for s in phase] for phase in more.samples] == [[8, 9, 10, 11], [12, 13, 14, 15]]
    assert [s[5] for s in more.samples[0]] == [s[5] for s in log.samples[2]], 'drawn by the weights of the second phase'


# ---------------------------------------------------------------------- Ray


@pytest.fixture
def cluster() -> Iterator[Any]:
    ray = pytest.importorskip('ray')
    before = dict(os.environ)
    ray.init(
        'local',
        num_cpus=3 * torch.get_num_threads(),
        include_dashboard=False,
        object_store_memory=80 << 20,
        log_to_driver=False,
        logging_level='error',
    )
    # actors find this module's environment by value, as they do that of a script
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield ray
    ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    ray.shutdown()
    for name in os.environ.keys() - before.keys():
        del os.environ[name]


@pytest.mark.system
def test_ray_actors_play_episodes_and_a_killed_one_changes_nothing(cluster):
    from chatgpt.rollout.ray_workers import RayWorkers

    local, log = make(RemoteEngine(InProcessWorkers(2)), max_staleness=1, **STALE)
    local.fit(tasks(), 4, 1, 1)

    class Kill(Callback):
        def on_phase_end(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
            if step == 2:
                os.kill(cluster.get(engine.workers.actors[0].pid.remote()), signal.SIGKILL)

    with RemoteEngine(RayWorkers(2)) as engine:
        trainer, there = make(engine, max_staleness=1, more=[Kill()], **STALE)
        with pytest.warns(UserWarning, match='rollout worker 0 died'):
            trainer.fit(tasks(), 4, 1, 1)
    assert there.samples == log.samples
    assert torch.equal(weights(trainer), weights(local))
