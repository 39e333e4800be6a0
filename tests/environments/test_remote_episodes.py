"""Episodes in rollout workers: bitwise those of a local engine, also with staleness, when a worker dies, and after a
resume with episodes in flight."""

from __future__ import annotations

import os
import pickle
import random
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import episode_runs
import pytest
import torch
from chat_families import CHATML
from episode_runs import Log, same_to_rounding
from in_process_workers import InProcessWorkers
from scripted_engine import played
from stop_after import StopAfter

from chatgpt.data import load_prompts
from chatgpt.data.formats import note_turns, template_of
from chatgpt.environments import Environment, EnvironmentSettings, seed_of
from chatgpt.nn import Actor
from chatgpt.rollout import EngineAround, LocalEngine, RemoteEngine
from chatgpt.rollout.episodes import EpisodeEngine
from chatgpt.strategies import DDPStrategy
from chatgpt.testing import byte_tokenizer, tiny_causal_lm
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer import PPOTrainer
from chatgpt.trainer.callbacks import Callback
from chatgpt.types import Prompt, Sample

TOKENIZER = byte_tokenizer()
SETTINGS = EnvironmentSettings(max_turns=3, max_turn_tokens=4)
ENDS = tuple(range(2, len(TOKENIZER), 3))


class Shop(Environment):
    """Two named rewards; the first observation contains the data row's word, and one step in five fails."""

    def reset(self, seed: int, word: str = '', prompt: Any = None, **columns: Any) -> str:
        self.random, self.turns = random.Random(seed), 0
        return f'{prompt[0]["content"] if prompt else ""}{word}{self.random.randint(0, 9)}:'

    def step(self, response: str) -> Any:
        self.turns += 1
        if self.random.randint(0, 4) == 0:
            raise RuntimeError('sold out')
        over = self.turns == self.random.randint(1, 3)
        return 'x' * (1 + len(response) % 3), {'sale': 0.1 * self.turns, 'tone': 1 / 3}, over, False, {'success': over}


def prompts(num: int = 7) -> list[Prompt]:
    ids = [torch.tensor(list(f'go {i}'.encode())) for i in range(num)]
    return [Prompt(ids=x, text=f'go {i}', columns={'word': f'w{i}'}) for i, x in enumerate(ids)]


def actor(**sizes: Any) -> Actor:
    torch.manual_seed(0)
    return Actor(tiny_causal_lm('gpt2', vocab_size=len(TOKENIZER), **sizes))


def episodes(engine: Any) -> list[Sample]:
    given = {'seed': 5, 'indices': range(20, 28), 'groups': [i // 2 for i in range(8)]}
    given |= {'max_new_tokens': 60, 'eos_token_ids': ENDS, 'settings': SETTINGS}
    records = prompts(8)
    records[0].messages = [{'role': 'user', 'content': 'a question'}]
    return played(engine, Shop, TOKENIZER, actor=actor(), prompts=records, **given)


def assert_same(a: list[Sample], b: list[Sample]) -> None:
    assert len(a) == len(b) > 0
    for x, y in zip(a, b, strict=True):
        for name in Sample.__dataclass_fields__.keys() - {'version'}:
            u, v = getattr(x, name), getattr(y, name)
            if name == 'episode':
                assert (u.turns, u.end, u.message, u.success) == (v.turns, v.end, v.message, v.success)
            elif isinstance(u, torch.Tensor):
                assert u.dtype == v.dtype and torch.equal(u, v), name
            else:
                assert u == v, name


def test_workers_play_the_episodes_of_a_local_engine_to_the_bit():
    here = episodes(LocalEngine())
    assert {s.episode.end for s in here} >= {'terminated', 'error'}
    assert any(not s.response_mask.all() for s in here) and 'a questionw0' in here[0].prompt_text
    with RemoteEngine(InProcessWorkers(2)) as engine:
        assert_same(here, episodes(engine))
    pool = InProcessWorkers(2)
    pool.die_on = {23: 1}
    with RemoteEngine(pool) as engine, pytest.warns(UserWarning, match='rollout worker . died'):
        assert_same(here, episodes(engine))


def test_what_cannot_be_sent_is_an_error_before_any_worker_starts():
    lock, pool = threading.Lock(), InProcessWorkers()
    with pytest.raises(ValueError, match='cannot be sent to rollout workers'):
        EpisodeEngine(RemoteEngine(pool), lambda: lock, TOKENIZER)
    with pytest.raises(ValueError, match='slice_tokens=8 cuts responses .* an environment plays whole episodes: make'):
        EpisodeEngine(RemoteEngine(pool, chunk_size=2, slice_tokens=8), Shop, TOKENIZER)
    assert not pool.workers
    begun, of_another = RemoteEngine(pool), RemoteEngine(InProcessWorkers())
    begun.begin(actor())
    EpisodeEngine(of_another, Environment, TOKENIZER)
    EpisodeEngine(of_another, Environment, TOKENIZER)
    for engine in (begun, of_another):
        with pytest.raises(ValueError, match='another environment, or none'):
            EpisodeEngine(engine, Shop, TOKENIZER)


class Sent(InProcessWorkers):
    """Workers that get a pickled copy of the environment and its tokenizer, as those in other processes do."""

    def start(self, spec: Any, engine_options: Any, around: Any = None) -> None:
        super().start(spec, engine_options, pickle.loads(pickle.dumps(around)))


HUMAN = ('\n\nHuman: ', '\n\nAssistant:')
IM = ('<|im_start|>user\n', '<|im_end|>\n<|im_start|>assistant\n')


@pytest.mark.parametrize('choice', ['given', 'noted', 'messages'])
@pytest.mark.parametrize(('template', 'around'), [(CHATML, IM), (None, HUMAN)], ids=['own', 'adopted'])
def test_workers_use_the_template_and_the_choice_of_this_process(template, around, choice):
    """The template is the tokenizer's own, or the one that reading the prompts adopted for it."""
    tokenizer, row = byte_tokenizer(), {'prompt': 'go 1', 'word': 'w'}
    tokenizer.chat_template = template
    if choice == 'noted':
        note_turns(tokenizer)
    elif choice == 'messages':
        row['prompt'] = [{'role': 'user', 'content': 'go 1'}]
    records = list(load_prompts([row] * 2, tokenizer, apply_chat_template=True if choice == 'given' else None))
    assert tokenizer.chat_template == template and template_of(tokenizer) is not None
    given = {'actor': actor(positions=256), 'prompts': records, 'max_new_tokens': 160, 'eos_token_ids': ENDS}
    with RemoteEngine(Sent(2)) as engine:
        _, there = (played(engine, Shop, tokenizer, settings=SETTINGS, **given) for _ in range(2))
    assert_same(played(LocalEngine(), Shop, tokenizer, settings=SETTINGS, **given), there)
    for sample in there:
        digit = random.Random(seed_of(0, sample.group)).randint(0, 9)
        assert sample.prompt_text == f'go 1go 1w{digit}:'.join(around) and sample.last_turn == f'go 1go 1w{digit}:'
    assert any(len(s.episode.turns) > 1 for s in there)


def test_an_engine_that_ranks_call_together_plays_no_episodes():
    class Together(EngineAround):
        def __init__(self, engine: Any) -> None:
            super().__init__(engine)
            self.abilities = replace(engine.abilities, spans_ranks=True)

    with pytest.raises(ValueError, match='number of turns on each rank.* leave vllm_tensor_parallel out, or use roll'):
        EpisodeEngine(Together(LocalEngine()), Shop, TOKENIZER)
    with RemoteEngine(InProcessWorkers()) as engine:  # its workers play them
        EpisodeEngine(Together(engine), Shop, TOKENIZER)


def make(engine: Any = None, *, more: Any = (), **given: Any) -> tuple[PPOTrainer, Log]:
    log = Log()
    sizes = {'experience_batch_size': 4, 'num_samples_per_prompt': 1, 'max_new_tokens': 60, 'eos_token_id': list(ENDS)}
    config = sizes | {'engine': engine, 'settings': SETTINGS, 'callbacks': [log, *more], 'tis_cap': 2.0}
    return episode_runs.make(None, Shop, **config | given), log


def remote(workers: int = 2, **given: Any) -> tuple[PPOTrainer, Log]:
    return make(RemoteEngine(InProcessWorkers(workers)), **given)


def weights(trainer: PPOTrainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for m in trainer.models().values() for p in m.parameters()])


@pytest.mark.parametrize('n', [0, 2])
def test_a_resumed_run_continues_to_the_bit_with_episodes_in_flight(tmp_path, n):
    straight, log = remote(max_staleness=n)
    straight.fit(prompts(), 4, 1, 1)
    assert log.ages == [{min(phase, n)} for phase in range(4)]
    if n == 0:
        local, here = make()
        local.fit(prompts(), 4, 1, 1)
        assert here.phases == log.phases and torch.equal(weights(local), weights(straight))
    first, before = remote(max_staleness=n, more=[StopAfter(2)])
    first.fit(prompts(), 4, 1, 1)
    folder = first.save_checkpoint(tmp_path / 'checkpoint')
    held = first.checkpoint_state().get('in_flight', [])
    assert len(held) == n
    assert all(len(record['episodes']) == 4 for record in held)
    assert not n or not all(mask for record in held for mask in record['masks'])
    second, after = remote(max_staleness=n)
    second.load_checkpoint(folder)
    with warnings.catch_warnings():
        warnings.simplefilter('error', UserWarning)
        warnings.filterwarnings('ignore', message='.* episodes of phase .* failed')
        second.fit(prompts(), 4, 1, 1)
    assert before.phases + after.phases == log.phases
    assert torch.equal(weights(second), weights(straight))


def on_two_ranks(folder: str) -> Any:
    with DDPStrategy(seed=3, device='cpu') as strategy:
        trainer, log = remote(1, strategy=strategy, max_staleness=1, more=[StopAfter(2)])
        trainer.fit(prompts(), 3, 1, 1)
        trainer.save_checkpoint(folder)
        return log.phases


def test_two_ranks_have_their_own_workers_and_one_rank_resumes_with_their_episodes(tmp_path):
    ranks = run_distributed(on_two_ranks, 2, str(tmp_path / 'checkpoint'))
    single, log = remote(1, max_staleness=1)
    single.fit(prompts(), 3, 1, 1)
    assert ranks[0] == ranks[1], 'callbacks see those of all ranks'
    same_to_rounding(ranks[0], log.phases[:2])
    going_on, more = remote(1, max_staleness=1)
    going_on.load_checkpoint(tmp_path / 'checkpoint')
    going_on.fit(prompts(), 3, 1, 1)
    same_to_rounding(more.phases, log.phases[2:])  # sampled with the weights of the second phase


@pytest.fixture
def cluster() -> Iterator[Any]:
    ray = pytest.importorskip('ray')
    before = dict(os.environ)
    less = {'include_dashboard': False, 'log_to_driver': False, 'logging_level': 'error'}
    ray.init('local', num_cpus=3 * torch.get_num_threads(), object_store_memory=80 << 20, **less)
    # pickles this module's environment by value, as for a script
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield ray
    ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    ray.shutdown()
    for name in os.environ.keys() - before.keys():
        del os.environ[name]


@pytest.mark.system
def test_ray_actors_play_episodes_and_a_killed_one_changes_nothing(cluster):
    from chatgpt.rollout.ray_workers import RayWorkers

    local, log = remote(max_staleness=1)
    local.fit(prompts(), 4, 1, 1)

    class Kill(Callback):
        def on_phase_end(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
            if step == 2:
                os.kill(cluster.get(engine.workers.actors[0].pid.remote()), signal.SIGKILL)

    with RemoteEngine(RayWorkers(2)) as engine:
        trainer, there = make(engine, max_staleness=1, more=[Kill()])
        with pytest.warns(UserWarning, match='rollout worker 0 died'):
            trainer.fit(prompts(), 4, 1, 1)
    assert there.phases == log.phases
    assert torch.equal(weights(trainer), weights(local))
