"""Runs under tensor parallelism: on two and on four processes the draws of one process, and its losses and weights up
to rounding; checkpoints move to other layouts and back; what is saved is whole."""

from __future__ import annotations

import math
import os
import shutil
import signal
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.spawn import ProcessExitedException

from chatgpt.strategies.checkpoint import CheckpointReader, latest
from chatgpt.testing.processes import run_distributed

LR = 1e-3
TWO, FOUR = {'tensor_parallel': 2}, {'tensor_parallel': 2, 'meta_init': True}


def make_strategy(kind: str, options: dict[str, Any]) -> Any:
    from chatgpt.trainer import strategies as s

    return getattr(s, kind)(seed=3, precision='fp32', device='cpu', **options)


def config(family: str = 'llama') -> Any:
    from chatgpt.testing.fakes import tiny_config

    return tiny_config(family, heads=4, positions=48)


def reward(prompts: list[str], responses: list[str]) -> list[float]:
    return [float(sum(c in 'aeiou0123456789' for c in r)) for r in responses]


def ppo(
    kind: str,
    options: dict[str, Any],
    phases: int = 2,
    folder: str = '',
    resume: str = '',
    family: str = 'llama',
    run_dir: str | None = None,
    dies_in: int = 0,
) -> dict[str, Any]:
    """Phases of PPO with an actor, a critic and an initial model; what came of it. A checkpoint after the last phase
    and the actor are saved in `folder`, one of each phase in `run_dir`. All processes are killed while they learn in
    phase `dies_in`."""
    import tiny_runs

    from chatgpt.trainer.callbacks import Callback, SaveCheckpoint

    class Die(Callback):
        def on_learn_epoch_start(self, trainer: Any, epoch: int) -> None:
            if trainer.phase + 1 == dies_in and epoch == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    callbacks = [Die(), *([SaveCheckpoint()] if run_dir else [])]
    sizes = {'experience_batch_size': 8, 'max_epochs': 2, 'max_new_tokens': 8, 'max_tokens_per_batch': 48}
    settings = sizes | {'entropy_coef': 0.01, 'lr': LR, 'run_dir': run_dir, 'callbacks': callbacks}
    with make_strategy(kind, options) as strategy:
        trainer = tiny_runs.ppo(strategy, reward, config=config(family), **settings)
        if resume:
            trainer.load_checkpoint(resume)
        trainer.fit([*tiny_runs.PROMPTS, 'a seven'], 1, phases, 1)
        if folder:
            trainer.save_checkpoint(Path(folder) / 'checkpoint')
            trainer.save_pretrained(Path(folder) / 'model')
        return {
            'metrics': trainer.log.phases,
            'samples': trainer.log.samples(),
            'rank': (strategy.rank, strategy.is_rank_0, strategy.world_size),
            'own': sum(own(p) for p in strategy.unwrap(trainer.actor).parameters()),
            'weights': {n: strategy.full_state_dict(m) for n, m in trainer.models().items()},
        }


def own(parameter: Any) -> int:
    """Bytes of a process's part."""
    local = parameter.to_local() if hasattr(parameter, 'to_local') else parameter
    return local.numel() * local.element_size()


def check_equal(got: dict[str, Any], want: dict[str, Any], steps: int) -> None:
    from tiny_runs import near

    assert got['samples'] == want['samples']
    for a, b in zip(want['metrics'], got['metrics'], strict=True):
        assert a.keys() == b.keys()
        for name in ('ppo/policy_loss', 'ppo/value_loss', 'ppo/actor_grad_norm', 'ppo/critic_grad_norm'):
            assert math.isclose(a[name], b[name], rel_tol=1e-4, abs_tol=2e-6), (name, a[name], b[name])
    near(got['weights'], want['weights'], atol=0.05 * LR * steps)


def same(got: dict[str, Any], want: dict[str, Any]) -> None:
    for model, weights in want['weights'].items():
        for name, weight in weights.items():
            assert torch.equal(weight, got['weights'][model][name]), (model, name)


def stored(*folders: Path) -> list[dict[str, torch.Tensor]]:
    """Everything that checkpoints hold but for random generators, by name."""
    readers = [CheckpointReader(folder) for folder in folders]
    return [
        {n: r.read(n, 0, math.prod(r.shape(n))) for n in sorted(r.names()) if not n.startswith('rng/')} for r in readers
    ]


@pytest.fixture(scope='module')
def naive(tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp('naive')
    return {**ppo('NaiveStrategy', {}, folder=str(folder)), 'folder': folder}


@pytest.mark.parametrize('world_size', [2, 4])
def test_a_run_is_that_of_one_process(world_size, naive, tmp_path):
    ranks = run_distributed(ppo, world_size, 'FSDPStrategy', TWO if world_size == 2 else FOUR, 2, str(tmp_path))
    check_equal(ranks[0], naive, 8)
    assert [r['rank'] for r in ranks] == [(n // 2, n == 0, world_size // 2) for n in range(world_size)]
    for r in ranks[1:]:
        assert r['samples'] == ranks[r['rank'][0] * 2]['samples'] and r['metrics'] == ranks[0]['metrics']
    assert max(r['own'] for r in ranks) < 1.03 * naive['own'] / world_size  # norms are whole on both of a rank
    from transformers import AutoModelForCausalLM

    for name, weight in AutoModelForCausalLM.from_pretrained(tmp_path / 'model').state_dict().items():
        assert torch.equal(weight, ranks[0]['weights']['actor'][f'model.{name}']), name


def moved(options: dict[str, Any], folder: str, resume: str) -> dict[str, Any]:
    return ppo('FSDPStrategy', options, 2, folder, resume)


def test_a_checkpoint_goes_round(naive, tmp_path):
    """One process → two of one rank → FSDP on two ranks → one process, each with nothing left to learn."""
    first, second = tmp_path / 'tensor', tmp_path / 'data'
    for options, folder, resume in ((TWO, first, naive['folder']), ({}, second, first)):
        (got, _) = run_distributed(moved, 2, options, str(folder), str(resume / 'checkpoint'))
        same(got, naive)
        assert got['samples'] == []
    whole, *others = stored(*(folder / 'checkpoint' for folder in (naive['folder'], first, second)))
    slots = [n for n in whole if n.startswith('actor_optim/') and 'exp_avg' in n]
    assert len(slots) > 20 and all(other.keys() == whole.keys() for other in others)
    assert all(torch.equal(whole[name], other[name]) for name in slots for other in others)
    same(ppo('NaiveStrategy', {}, resume=str(second / 'checkpoint')), naive)


@pytest.mark.system
def test_a_run_of_two_by_two_that_is_killed_goes_on(tmp_path):
    """On the same layout to the bits of one that was not; on one process with the same draws."""
    phases, job = 3, ('FSDPStrategy', TWO)
    straight, killed, alone = (tmp_path / name for name in ('straight', 'killed', 'alone'))
    want = run_distributed(ppo, 4, *job, phases, '', '', 'llama', str(straight))
    with pytest.raises(ProcessExitedException, match='SIGKILL'):
        run_distributed(ppo, 4, *job, phases, '', '', 'llama', str(killed), 2)
    newest = latest(killed / 'checkpoints')
    assert newest is not None and newest.name == 'step-00000001'
    shutil.copytree(killed, alone)

    later = [{**rank, 'metrics': rank['metrics'][1:], 'samples': rank['samples'][8:]} for rank in want]
    got = run_distributed(ppo, 4, *job, phases, '', 'auto', 'llama', str(killed))
    for a, b in zip(got, later, strict=True):
        assert (a['metrics'], a['samples']) == (b['metrics'], b['samples']) and len(a['samples']) == 2 * 8
    same(got[0], want[0])
    one, other = stored(*(folder / 'checkpoints/step-00000003' for folder in (straight, killed)))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    check_equal(ppo('NaiveStrategy', {}, phases, '', 'auto', 'llama', str(alone)), later[0], 4 * phases)


def test_queries_keys_and_values_in_one_tensor(tmp_path):
    """GPT-2's, in parts on 2 x 2 processes: the run of one process, which reads their checkpoint."""
    want = ppo('NaiveStrategy', {}, phases=1, family='gpt2')
    ranks = run_distributed(ppo, 4, 'FSDPStrategy', FOUR, 1, str(tmp_path), '', 'gpt2')
    check_equal(ranks[0], want, 4)
    same(ppo('NaiveStrategy', {}, phases=1, resume=str(tmp_path / 'checkpoint'), family='gpt2'), ranks[0])


# ---------------------------------------------------------------- other methods


def learned(kind: str, options: dict[str, Any]) -> dict[str, Any]:
    """Metrics and weights of SFT, DPO and a reward model; samples of workers that have a model of their own."""
    from tiny_runs import Log, preference, sequence, trained

    from chatgpt.nn import AutoActor, RewardModel
    from chatgpt.trainer import DPOTrainer, RewardModelTrainer, SFTTrainer

    texts = [sequence([3 + i % 4], [6 + i % 3, 5, 9, 2][: 2 + i % 3]) for i in range(8)]
    pairs = [preference([3 + i % 4], [6 + i % 3, 5, 2], [6 + i % 3, 9 + i % 4, 7, 2]) for i in range(8)]
    found: dict[str, Any] = {'weights': {}}
    with make_strategy(kind, options) as strategy:
        for name, cls in (('sft', SFTTrainer), ('dpo', DPOTrainer), ('reward', RewardModelTrainer)):
            torch.manual_seed(5)
            model: Any = AutoActor(config=config())
            if name == 'reward':
                model = RewardModel(model.model)
            log = Log()
            more = {'train_batch_size': 4, 'log_interval': 1, 'max_tokens_per_batch': 24, 'callbacks': [log]}
            if name == 'dpo':
                more['initial_model'] = strategy.prepare(deepcopy(model))
            model, optimizer = trained(strategy, model, LR, eps=1e-4)
            cls(strategy, model, optimizer, texts if name == 'sft' else pairs, **more).fit()
            if name == 'dpo':
                found['drawn'] = of_workers(strategy, model)
            found[name] = log.phases
            found['weights'][name] = {n: t.clone() for n, t in strategy.full_state_dict(model).items()}
    return found


def of_workers(strategy: Any, actor: Any) -> list[list[int]]:
    """What an engine draws that is given whole weights, through the collector."""
    from in_process_workers import InProcessWorkers

    from chatgpt.rollout import SamplingParams
    from chatgpt.rollout.remote import RemoteEngine
    from chatgpt.trainer.collect import Collector
    from chatgpt.types import Prompt

    with RemoteEngine(InProcessWorkers(1)) as engine:
        policy = partial(strategy.full_model, actor)
        collector = Collector(strategy, engine, SamplingParams(max_new_tokens=5), policy=policy)
        prompts = [Prompt(ids=torch.tensor([5, 3 + i]), text=str(i)) for i in range(3)]
        return [s.response_ids.tolist() for s in collector.generate(prompts, indices=range(3))]


def test_other_methods_learn_what_one_process_learns():
    from tiny_runs import close, near

    want = learned('NaiveStrategy', {})
    ranks = run_distributed(learned, 2, 'FSDPStrategy', TWO)
    for found in (want, *ranks):  # the policy is the reference: rounding decides which text is preferred
        del found['dpo'][0]['dpo/accuracy']
    for got in ranks:
        assert got['drawn'] == want['drawn']
        for name in ('sft', 'dpo', 'reward'):
            close(got[name], want[name], abs=2e-5)
    near(ranks[0]['weights'], want['weights'], atol=0.05 * LR * 2)
