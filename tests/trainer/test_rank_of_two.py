"""A rank of two processes (`tensor_parallel=2`): per-process operations use process groups, per-rank ones run once."""

from __future__ import annotations

import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_runs
import torch
from in_process_workers import InProcessWorkers

import chatgpt
from chatgpt.data import PromptSet
from chatgpt.environments.games import Countdown
from chatgpt.launch import relaunch, rollouts
from chatgpt.launch.runs import PPORun
from chatgpt.nn import Actor, AutoActor
from chatgpt.rollout import Abilities, Call, CheckedEngine, LocalEngine, RemoteEngine, SamplingParams
from chatgpt.strategies import FSDPStrategy, NaiveStrategy
from chatgpt.strategies.checkpoint import CheckpointError, CheckpointReader
from chatgpt.testing import tiny_causal_lm
from chatgpt.testing.fakes import tiny_config
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer.callbacks import SaveCheckpoint
from chatgpt.trainer.callbacks.base import TrainerView
from chatgpt.trainer.callbacks.run_record import describe
from chatgpt.trainer.collect import Collector
from chatgpt.trainer.metrics import rank_metrics
from chatgpt.trainer.prompt_evaluation import PromptEvaluation
from chatgpt.trainer.run_control import agreed, check_ranks
from chatgpt.types import Prompt


def ppo(strategy: Any, **more: Any) -> Any:
    reward = None if 'environment' in more else lambda prompts, responses: [1.0] * len(responses)
    return tiny_runs.ppo(strategy, reward, config=tiny_config('llama', heads=4, positions=48), **more)


def error_of(call: Any, *args: Any, **kw: Any) -> str:
    try:
        call(*args, **kw)
    except Exception as error:
        return f'{type(error).__name__}: {error}'
    return 'no error'


def sign_alone(strategy: Any, folder: str) -> str:
    """Calls `sign` while the second process cannot read the folder of the first."""
    reads = relaunch._read
    if strategy.processes.rank == 1:
        relaunch._read = lambda save_path: {}  # type: ignore[assignment]
    try:
        return error_of(relaunch.sign, folder, strategy)
    finally:
        relaunch._read = reads


def resumed(trainer: Any, folder: str) -> str:
    """Calls `load_checkpoint` while the second process cannot read the folder of the first."""
    reads = CheckpointReader.verify

    def skipped(self: Any, rank: int = 0, world_size: int = 1) -> None:
        raise CheckpointError('the folder is not there')

    trainer.save_checkpoint(Path(folder, 'checkpoint'))
    if trainer.strategy.processes.rank == 1:
        CheckpointReader.verify = skipped  # type: ignore[method-assign]
    try:
        return error_of(trainer.load_checkpoint, Path(folder, 'checkpoint'))
    finally:
        CheckpointReader.verify = reads  # type: ignore[method-assign]


class OwnModel(CheckedEngine):
    """An engine with its own model, which samples another token on each process."""

    abilities = Abilities(copies_weights=True)

    def __init__(self, token: int) -> None:
        self.token, self.taken = token, 0

    def transfer(self, model: Any, tensors: Any) -> None: ...

    def check_weights(self) -> None: ...

    def answer(self, call: Any, limits: list[int]) -> list[Any]:
        zeros = [torch.zeros(1) for _ in range(3)]
        return [call.sample(i, torch.tensor([self.token]), *zeros, 'length') for i in range(len(limits))]


class AnswersLater(OwnModel):
    abilities = Abilities(copies_weights=True, answers_ahead=True)

    def submit(self, call: Any) -> list[Any]:
        return self.generate(call)

    def take(self, ticket: list[Any]) -> list[Any]:
        return ticket

    def cancel(self, ticket: list[Any]) -> None: ...


def sampled_tokens(strategy: Any, kind: Any) -> tuple[list[int], list[int]]:
    """Returns tokens from a collector of such an engine: for given prompts, and for the next ones."""
    engine, prompts = kind(5 + strategy.processes.rank), [Prompt(ids=torch.tensor([3]), text='a') for _ in range(2)]
    policy = nullcontext(Actor(tiny_causal_lm('gpt2')))
    collector = Collector(strategy, engine, SamplingParams(max_new_tokens=1), policy=lambda **_: policy, batch_size=2)
    collector.set_prompts(PromptSet(prompts))
    now = collector.generate(prompts, indices=range(2))
    (later,) = collector.collect(1, version=0) or [[]]
    return [int(s.response_ids) for s in now], [int(s.response_ids) for s in later]


def results_of_process(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with FSDPStrategy(seed=3, precision='fp32', tensor_parallel=2, device='cpu') as strategy:
        second = strategy.processes.rank == 1
        found['ranks'] = strategy.rank, strategy.world_size, strategy.processes.world_size
        found['stops'] = [agreed(flag, strategy) for flag in (second, not second, False)]
        found['agree'] = [error_of(check_ranks, strategy, {'seed': seed}, 'here') for seed in (3, 3 + second)]
        callback: Any = SaveCheckpoint(interval=None, minutes=1.0)
        due = []
        for minutes in ((2, 0), (0, 2)):  # since the last one, by the clocks of both processes
            callback._saved_at = time.monotonic() - 60 * minutes[second]
            due.append(callback._is_due(SimpleNamespace(strategy=strategy)))
        found['due'] = due
        found['timing'] = rank_metrics(strategy, 1.0 + second)
        found['leader'] = strategy.ranks.from_leader(strategy.processes.rank)
        trainer: TrainerView = ppo(strategy)
        found['record'] = {k: describe(trainer).strategy.get(k) for k in ('world_size', 'processes')}
        found['environment'] = [
            error_of(ppo, strategy, environment=Countdown),
            error_of(chatgpt.train, 'no such model', environment=Countdown, strategy=strategy),
            error_of(PromptEvaluation(['a one'], environment=Countdown), trainer),
        ]
        found['sign'] = sign_alone(strategy, folder)
        found['resume'] = resumed(trainer, folder)
        found['sampled_tokens'] = [sampled_tokens(strategy, kind) for kind in (OwnModel, AnswersLater)]
    return found


@pytest.fixture(scope='module')
def results(tmp_path_factory) -> list[dict[str, Any]]:
    found = run_distributed(results_of_process, 2, str(tmp_path_factory.mktemp('rank')))
    assert [f['ranks'] for f in found] == [(0, 1, 2), (0, 1, 2)]
    return found


def test_decisions_of_both_processes_agree(results):
    assert [f['stops'] for f in results] == [[True, True, False]] * 2  # a signal to one process
    assert [f['due'] for f in results] == [[True, False]] * 2  # the first clock decides when a checkpoint is due
    assert [f['timing'] for f in results] == [{}, {}]  # with one rank there is no slowest
    assert [f['record'] for f in results] == [{'world_size': 1, 'processes': 2}] * 2
    assert [f['leader'] for f in results] == [0, 0]
    for found in results:  # engines with their own models return the samples of the first process
        assert found['sampled_tokens'] == [([5, 5], [5, 5])] * 2


def test_refusals_occur_on_both_processes(results):
    other = 'RankMismatchError: the ranks do not run the same run, seen here: on rank 1 seed is 4 instead of 3 (as on'
    for found in results:
        assert found['agree'][0] == 'no error' and found['agree'][1].startswith(other)
        for error in found['environment']:
            assert error.startswith('ValueError: environment does not go with tensor_parallel or sequence_parallel: ')
        assert 'is not shared: what rank 0 on ' in found['sign'] and 'is not seen by rank 1 on ' in found['sign']
        assert found['resume'] == 'CheckpointError: the folder is not there'


SAMPLING = {'max_new_tokens': 8, 'eos_token_ids': ()}


def prompts(numbers: range) -> list[Any]:
    return [Prompt(ids=torch.tensor([5, 3 + i]), text=str(i)) for i in numbers]


def actor_of(strategy: Any) -> Any:
    return strategy.prepare(AutoActor(config=tiny_config('llama', heads=4, positions=48)))


def sampled_by_workers() -> dict[str, Any]:
    """Returns samples of the workers of a rank: two of the first rank, one of the second, each with its own limit."""
    workers, sampling = InProcessWorkers(2), SamplingParams(**SAMPLING)
    rollouts._engine = lambda args: RemoteEngine(workers)
    with FSDPStrategy(seed=3, precision='fp32', tensor_parallel=2, device='cpu') as strategy:
        actor = actor_of(strategy)
        mine = range(strategy.rank, 3, strategy.world_size)
        with rollouts.rollout_engine(PPORun(rollout_workers=2), strategy) as engine:
            collector = Collector(strategy, engine, sampling, policy=partial(strategy.full_model, actor))
            samples = collector.generate(prompts(mine), indices=mine, limits=[4 + i for i in mine])
            found = {
                'started': len(workers.workers),
                'sampled_tokens': {s.index: s.response_ids.tolist() for s in samples},
            }
            with strategy.full_model(actor, whole=True) as full:
                engine.begin(full)
                empty = [Prompt(ids=torch.tensor([], dtype=torch.int64))]
                found['error'] = error_of(engine.generate, Call.of(empty, sampling, seed=0, indices=[0]))
                engine.end()
    return found


def test_a_rank_has_one_set_of_workers():
    ranks = run_distributed(sampled_by_workers, 4)
    with NaiveStrategy(seed=3, device='cpu', precision='fp32') as strategy:
        engine = LocalEngine()
        engine.begin(actor_of(strategy))
        alone = engine.generate(Call.of(prompts(range(3)), SamplingParams(**SAMPLING), seed=3, indices=range(3)))
        want = {s.index: s.response_ids.tolist()[: 4 + s.index] for s in alone}
    assert [r['started'] for r in ranks] == [2, 0, 2, 0]
    assert [r['sampled_tokens'] for r in ranks] == [{0: want[0], 2: want[2]}] * 2 + [{1: want[1]}] * 2
    for r in ranks:
        assert r['error'].startswith('ValueError: generate: prompt 0 is empty')
