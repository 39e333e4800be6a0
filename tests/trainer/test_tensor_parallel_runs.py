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

from chatgpt.testing.processes import run_distributed

LR = 1e-3
TWO, FOUR = {'tensor_parallel': 2}, {'tensor_parallel': 2, 'meta_init': True}


def make_strategy(kind: str, options: dict[str, Any]) -> Any:
    from chatgpt.trainer import strategies as s

    return getattr(s, kind)(seed=3, precision='fp32', device='cpu', **options)


def config(family: str = 'llama') -> Any:
    from chatgpt.testing.fakes import tiny_config

    return tiny_config(family, heads=4, positions=48)


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
    from chatgpt.nn import AutoActor, AutoCritic
    from chatgpt.testing.fakes import char_tokenizer
    from chatgpt.trainer import PPOTrainer
    from chatgpt.trainer.callbacks import Callback, ProgressBar, SaveCheckpoint

    log: dict[str, Any] = {'metrics': [], 'samples': []}

    class Log(Callback):
        def on_learn_epoch_start(self, trainer: Any, epoch: int) -> None:
            if trainer.phase + 1 == dies_in and epoch == 1:
                os.kill(os.getpid(), signal.SIGKILL)

        def on_make_experience_end(self, trainer: Any, experiences: list[Any]) -> None:
            log['samples'] += [(e.index, e.response_ids.tolist(), e.score) for e in experiences]

        def on_phase_end(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
            log['metrics'].append({k: v for k, v in metrics.items() if not k.startswith('perf/')})

    def reward(prompts: list[str], responses: list[str]) -> list[float]:
        return [float(sum(c in 'aeiou0123456789' for c in r)) for r in responses]

    with make_strategy(kind, options) as strategy:
        with strategy.model_init_context():
            actor, critic = AutoActor(config=config(family)), AutoCritic(config=config(family))
            initial = deepcopy(actor)
        (actor, actor_optim), (critic, critic_optim), initial = strategy.prepare(
            (actor, torch.optim.AdamW(actor.parameters(), lr=LR, eps=1e-5)),
            (critic, torch.optim.AdamW(critic.parameters(), lr=LR, eps=1e-5)),
            initial,
        )
        trainer = PPOTrainer(
            strategy,
            actor,
            critic,
            reward,
            initial,
            actor_optim,
            critic_optim,
            tokenizer=char_tokenizer(),
            callbacks=[Log(), ProgressBar(enabled=False), *([SaveCheckpoint()] if run_dir else [])],
            run_dir=run_dir,
            experience_batch_size=8,
            train_batch_size=4,
            max_epochs=2,
            max_new_tokens=8,
            max_tokens_per_batch=48,
            entropy_coef=0.01,
        )
        if resume:
            trainer.load_checkpoint(resume)
        trainer.fit([f'a {w}' for w in 'one two three four five six seven'.split()], 1, phases, 1)
        log['rank'], log['is_rank_0'], log['world'] = strategy.rank, strategy.is_rank_0, strategy.world_size
        log['own'] = sum(own(p) for p in strategy.unwrap(actor).parameters())
        log['weights'] = {n: strategy.full_state_dict(m) for n, m in trainer.models().items()}
        if folder:
            trainer.save_checkpoint(Path(folder) / 'checkpoint')
            trainer.save_pretrained(Path(folder) / 'model')
    return log


def own(parameter: Any) -> int:
    """Bytes of a process's part."""
    local = parameter.to_local() if hasattr(parameter, 'to_local') else parameter
    return local.numel() * local.element_size()


def check_equal(got: dict[str, Any], want: dict[str, Any], steps: int) -> None:
    assert got['samples'] == want['samples']
    for a, b in zip(want['metrics'], got['metrics'], strict=True):
        assert a.keys() == b.keys()
        for name in ('ppo/policy_loss', 'ppo/value_loss', 'ppo/actor_grad_norm', 'ppo/critic_grad_norm'):
            assert math.isclose(a[name], b[name], rel_tol=1e-4, abs_tol=2e-6), (name, a[name], b[name])
    for model, weights in want['weights'].items():
        for name, weight in weights.items():
            assert (weight - got['weights'][model][name]).abs().max() < 0.05 * LR * steps, (model, name)


@pytest.fixture(scope='module')
def naive(tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp('naive')
    return {**ppo('NaiveStrategy', {}, folder=str(folder)), 'folder': folder}


@pytest.mark.parametrize('world_size', [2, 4])
def test_a_run_is_that_of_one_process(world_size, naive, tmp_path):
    ranks = run_distributed(ppo, world_size, 'FSDPStrategy', TWO if world_size == 2 else FOUR, 2, str(tmp_path))
    check_equal(ranks[0], naive, 8)
    assert [r['rank'] for r in ranks] == [number // 2 for number in range(world_size)]
    assert [r['is_rank_0'] for r in ranks] == [True] + [False] * (world_size - 1)
    assert {r['world'] for r in ranks} == {world_size // 2}
    for r in ranks[1:]:
        assert r['samples'] == ranks[r['rank'] * 2]['samples'] and r['metrics'] == ranks[0]['metrics']
    whole = naive['own']
    assert max(r['own'] for r in ranks) < 1.03 * whole / world_size  # norms are whole on both of a rank
    from transformers import AutoModelForCausalLM

    saved = AutoModelForCausalLM.from_pretrained(tmp_path / 'model').state_dict()
    for name, weight in saved.items():
        assert torch.equal(weight, ranks[0]['weights']['actor'][f'model.{name}']), name


def moved(options: dict[str, Any], folder: str, resume: str) -> dict[str, Any]:
    return ppo('FSDPStrategy', options, 2, folder, resume)


def same(got: dict[str, Any], want: dict[str, Any]) -> None:
    for model, weights in want['weights'].items():
        for name, weight in weights.items():
            assert torch.equal(weight, got['weights'][model][name]), (model, name)


def test_a_checkpoint_goes_round(naive, tmp_path):
    """One process → two of one rank → FSDP on two ranks → one process, each with nothing left to learn."""
    from chatgpt.strategies.checkpoint import CheckpointReader

    first, second = tmp_path / 'tensor', tmp_path / 'data'
    for options, folder, resume in (({'tensor_parallel': 2}, first, naive['folder']), ({}, second, first)):
        (got, _) = run_distributed(moved, 2, options, str(folder), str(resume / 'checkpoint'))
        same(got, naive)
        assert got['samples'] == []
    readers = [CheckpointReader(folder / 'checkpoint') for folder in (naive['folder'], first, second)]
    stored = [{n for n in reader.names() if not n.startswith('rng/')} for reader in readers]
    assert stored[0] == stored[1] == stored[2]
    slots = sorted(n for n in stored[0] if n.startswith('actor_optim/') and 'exp_avg' in n)
    assert len(slots) > 20
    for name in slots:
        whole = [reader.read(name, 0, math.prod(reader.shape(name))) for reader in readers]
        assert torch.equal(whole[0], whole[1]) and torch.equal(whole[0], whole[2]), name
    same(ppo('NaiveStrategy', {}, resume=str(second / 'checkpoint')), naive)


@pytest.mark.system
def test_a_run_of_two_by_two_that_is_killed_goes_on(tmp_path):
    """On the same layout to the bits of one that was not; on one process with the same draws."""
    from torch.multiprocessing.spawn import ProcessExitedException

    from chatgpt.strategies.checkpoint import CheckpointReader, latest

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
    ends = [CheckpointReader(folder / 'checkpoints/step-00000003') for folder in (straight, killed)]
    assert ends[0].names() == ends[1].names()
    for name in ends[0].names():
        a, b = (reader.read(name, 0, math.prod(reader.shape(name))) for reader in ends)
        assert torch.equal(a, b), name
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
    from chatgpt.data import TokenizedPreference
    from chatgpt.nn import AutoActor, RewardModel
    from chatgpt.trainer import DPOTrainer, RewardModelTrainer, SFTTrainer
    from chatgpt.trainer.callbacks import ProgressBar
    from chatgpt.types import Sequence

    class Log(ProgressBar):
        def __init__(self) -> None:
            super().__init__(enabled=False)
            self.phases: list[dict[str, float]] = []

        def on_phase_end(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
            self.phases.append({k: v for k, v in metrics.items() if not k.startswith('perf/')})

    def sequence(i: int) -> Sequence:
        ids = torch.tensor([6 + i % 3, 5, 9, 2][: 2 + i % 3])
        return Sequence(
            prompt_ids=torch.tensor([3 + i % 4]), response_ids=ids, response_mask=torch.ones(len(ids), dtype=torch.bool)
        )

    def preference(i: int) -> TokenizedPreference:
        answers = [torch.tensor([6 + i % 3, 5, 2]), torch.tensor([6 + i % 3, 9 + i % 4, 7, 2])]
        masks = [torch.ones_like(a, dtype=torch.bool) for a in answers]
        return TokenizedPreference(prompt_ids=torch.tensor([3 + i % 4]), responses=answers, response_masks=masks)

    found: dict[str, Any] = {}
    settings = {'train_batch_size': 4, 'log_interval': 1, 'max_tokens_per_batch': 24}
    with make_strategy(kind, options) as strategy:
        for name in ('sft', 'dpo', 'reward'):
            torch.manual_seed(5)
            model: Any = AutoActor(config=config())
            if name == 'reward':
                model = RewardModel(model.model)
            optimizer = strategy.make_optimizer(model.parameters(), lr=LR, eps=1e-4)
            initial = strategy.prepare(deepcopy(model)) if name == 'dpo' else None
            model, optimizer = strategy.prepare((model, optimizer))
            log = Log()
            more: dict[str, Any] = {'callbacks': [log], **settings}
            records: Any = [(sequence if name == 'sft' else preference)(i) for i in range(8)]
            if name == 'sft':
                SFTTrainer(strategy, model, optimizer, records, **more).fit()
            elif name == 'dpo':
                DPOTrainer(strategy, model, optimizer, records, initial_model=initial, **more).fit()
                found['drawn'] = of_workers(strategy, model)
            else:
                RewardModelTrainer(strategy, model, optimizer, records, **more).fit()
            found[name] = log.phases
            found[f'{name} weights'] = {n: t.clone() for n, t in strategy.full_state_dict(model).items()}
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


@pytest.mark.parametrize(('kind', 'options'), [('FSDPStrategy', TWO)])
def test_other_methods_learn_what_one_process_learns(kind, options):
    want = learned('NaiveStrategy', {})
    ranks = run_distributed(learned, 2, kind, options)
    for got in ranks:
        assert got['drawn'] == want['drawn']
        for name in ('sft', 'dpo', 'reward'):
            for step, (a, b) in enumerate(zip(got[name], want[name], strict=True)):
                assert a.keys() == b.keys()
                if (name, step) == ('dpo', 0):  # the policy is the reference: rounding decides which text is preferred
                    a, b = ({k: v for k, v in m.items() if k != 'dpo/accuracy'} for m in (a, b))
                off = {k: (a[k], b[k]) for k in b if a[k] != pytest.approx(b[k], rel=1e-4, abs=2e-5)}
                assert not off, (name, off)
    for name in ('sft', 'dpo', 'reward'):
        for key, weight in want[f'{name} weights'].items():
            assert float((ranks[0][f'{name} weights'][key] - weight).abs().max()) < 0.05 * LR * 2, (name, key)
