"""Runs under tensor and under sequence parallelism: two and four processes have the draws of one, and its losses and
weights up to rounding; checkpoints move to other layouts and back; saved models are whole."""

from __future__ import annotations

import math
import os
import shutil
import signal
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import tiny_runs
import torch
from tiny_runs import check_outcome, close, near, offline, preference, sequence
from torch.multiprocessing.spawn import ProcessExitedException
from transformers import AutoModelForCausalLM

from chatgpt.nn import AutoActor, RewardModel
from chatgpt.strategies.checkpoint import CheckpointReader, latest
from chatgpt.testing.fakes import tiny_config
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer import DPOTrainer, RewardModelTrainer, SFTTrainer, strategies
from chatgpt.trainer.callbacks import Callback, SaveCheckpoint

LR = 1e-3
STEP = 0.05 * LR
TWO, FOUR = {'tensor_parallel': 2}, {'tensor_parallel': 2, 'meta_init': True}
TOKENS_IN_TWO, TOKENS_IN_FOUR = {'sequence_parallel': 2}, {'sequence_parallel': 4, 'meta_init': True}


def make_strategy(kind: str, options: dict[str, Any]) -> Any:
    return getattr(strategies, kind)(seed=3, precision='fp32', device='cpu', **options)


def config(family: str = 'llama') -> Any:
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
    """Runs phases of PPO with an actor, a critic and an initial model; returns the results. The last checkpoint and the
    actor are saved in `folder`, a checkpoint of each phase in `run_dir`. All processes are killed while they learn in
    phase `dies_in`."""

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
        rank = strategy.rank, strategy.is_rank_0, strategy.world_size
        bytes_of = sum(own(p) for p in strategy.unwrap(trainer.actor).parameters())
        return tiny_runs.outcome(strategy, trainer, rank=rank, own=bytes_of)


def own(parameter: Any) -> int:
    local = parameter.to_local() if hasattr(parameter, 'to_local') else parameter
    return local.numel() * local.element_size()


def same(got: dict[str, Any], want: dict[str, Any]) -> None:
    for model, weights in want['weights'].items():
        for name, weight in weights.items():
            assert torch.equal(weight, got['weights'][model][name]), (model, name)


def stored(*folders: Path) -> list[dict[str, torch.Tensor]]:
    """Returns everything in checkpoints except random generators, by name."""
    readers = [CheckpointReader(folder) for folder in folders]
    return [
        {n: r.read(n, 0, math.prod(r.shape(n))) for n in sorted(r.names()) if not n.startswith('rng/')} for r in readers
    ]


@pytest.fixture(scope='module')
def naive(tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp('naive')
    return {**ppo('NaiveStrategy', {}, folder=str(folder)), 'folder': folder}


@pytest.mark.parametrize(
    ('world_size', 'options', 'of_rank'), [(2, TWO, 2), (4, FOUR, 2), (4, TOKENS_IN_TWO, 2), (4, TOKENS_IN_FOUR, 4)]
)
def test_a_run_equals_that_of_one_process(world_size, options, of_rank, naive, tmp_path):
    ranks = run_distributed(ppo, world_size, 'FSDPStrategy', options, 2, str(tmp_path))
    check_outcome(ranks[0], naive, STEP * 8)
    assert [r['rank'] for r in ranks] == [(n // of_rank, n == 0, world_size // of_rank) for n in range(world_size)]
    for r in ranks[1:]:
        assert r['samples'] == ranks[r['rank'][0] * of_rank]['samples'] and r['metrics'] == ranks[0]['metrics']
    assert max(r['own'] for r in ranks) < 1.03 * naive['own'] / world_size  # norms are whole on both of a rank
    for name, weight in AutoModelForCausalLM.from_pretrained(tmp_path / 'model').state_dict().items():
        assert torch.equal(weight, ranks[0]['weights']['actor'][f'model.{name}']), name


def resume_and_save(options: dict[str, Any], folder: str, resume: str) -> dict[str, Any]:
    return ppo('FSDPStrategy', options, 2, folder, resume)


@pytest.mark.parametrize('together', [TWO, TOKENS_IN_TWO])
def test_a_checkpoint_moves_between_layouts(together, naive, tmp_path):
    """One process → two of one rank → FSDP on two ranks → one process, without further learning."""
    first, second = tmp_path / 'tensor', tmp_path / 'data'
    for options, folder, resume in ((together, first, naive['folder']), ({}, second, first)):
        (got, _) = run_distributed(resume_and_save, 2, options, str(folder), str(resume / 'checkpoint'))
        same(got, naive)
        assert got['samples'] == []
    whole, *others = stored(*(folder / 'checkpoint' for folder in (naive['folder'], first, second)))
    slots = [n for n in whole if n.startswith('actor_optim/') and 'exp_avg' in n]
    assert len(slots) > 20 and all(other.keys() == whole.keys() for other in others)
    assert all(torch.equal(whole[name], other[name]) for name in slots for other in others)
    same(ppo('NaiveStrategy', {}, resume=str(second / 'checkpoint')), naive)


@pytest.mark.system
def test_a_killed_run_of_two_by_two_resumes(tmp_path):
    """On the same layout to the bits of an undisturbed run; on one process with the same draws."""
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
    check_outcome(ppo('NaiveStrategy', {}, phases, '', 'auto', 'llama', str(alone)), later[0], STEP * 4 * phases)


@pytest.mark.slow
def test_queries_keys_and_values_in_one_tensor(tmp_path):
    """GPT-2's fused projection, split over 2 x 2 processes: equals the run of one process, which reads their
    checkpoint."""
    want = ppo('NaiveStrategy', {}, 1, family='gpt2')
    ranks = run_distributed(ppo, 4, 'FSDPStrategy', FOUR, 1, str(tmp_path), '', 'gpt2')
    check_outcome(ranks[0], want, STEP * 4)
    same(ppo('NaiveStrategy', {}, 1, resume=str(tmp_path / 'checkpoint'), family='gpt2'), ranks[0])


def learned(kind: str, options: dict[str, Any]) -> dict[str, Any]:
    texts = [sequence([3 + i % 4], [6 + i % 3, 5, 9, 2][: 2 + i % 3]) for i in range(8)]
    pairs = [preference([3 + i % 4], [6 + i % 3, 5, 2], [6 + i % 3, 9 + i % 4, 7, 2]) for i in range(8)]
    found: dict[str, Any] = {'weights': {}}
    with make_strategy(kind, options) as strategy:
        for name, cls in (('sft', SFTTrainer), ('dpo', DPOTrainer), ('reward', RewardModelTrainer)):
            torch.manual_seed(5)
            model: Any = AutoActor(config=config())
            if name == 'reward':
                model = RewardModel(model.model)
            more = {'initial_model': strategy.prepare(deepcopy(model))} if name == 'dpo' else {}
            data = texts if name == 'sft' else pairs
            trainer = offline(cls, strategy, model, data, lr=LR, max_tokens_per_batch=24, **more)
            trainer.fit()
            found[name] = trainer.log.phases
            found['weights'][name] = {n: t.clone() for n, t in strategy.full_state_dict(trainer.model).items()}
    return found


@pytest.mark.parametrize('options', [TWO, TOKENS_IN_TWO])
def test_other_methods_learn_what_one_process_learns(options):
    want = learned('NaiveStrategy', {})
    ranks = run_distributed(learned, 2, 'FSDPStrategy', options)
    for found in (want, *ranks):  # policy and reference are equal, so accuracy depends on rounding
        del found['dpo'][0]['dpo/accuracy']
    for got in ranks:
        for name in ('sft', 'dpo', 'reward'):
            close(got[name], want[name], abs=2e-5)
    near(ranks[0]['weights'], want['weights'], atol=0.05 * LR * 2)
