"""The short runs of one_hash.py: every method, 20 optimizer steps on recorded or generated tokens.

python benchmarks/one_hash_runs.py JOBS.json       # a list of `Job`s, under any launcher
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import offline_trainer, ppo_trainer
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM

from chatgpt.data import TokenizedPreference
from chatgpt.nn import Actor, Critic, RewardModel
from chatgpt.nn.heads import critic_head
from chatgpt.strategies import ColossalAIStrategy, DDPStrategy, FSDPStrategy, NaiveStrategy
from chatgpt.testing.fakes import tiny_config
from chatgpt.trainer import DPOTrainer, PPOTrainer, RewardModelTrainer, SFTTrainer
from chatgpt.trainer.callbacks import Callback, SaveCheckpoint
from chatgpt.types import Sequence

OFFLINE = ('dpo', 'sft', 'reward model')
METHODS = ('ppo', 'shared trunk', 'lora', 'grpo', *OFFLINE)
STRATEGIES: dict[str, Any] = {
    'naive': NaiveStrategy,
    'ddp': DDPStrategy,
    'fsdp': FSDPStrategy,
    'zero1': partial(ColossalAIStrategy, stage=1),
    'zero2': partial(ColossalAIStrategy, stage=2),
}
UPDATES, PER_PHASE = 20, 4
FLIPPED_AT = KILLED_AT = 10
"""number of updates before; in the middle of the third phase"""
FLIPPED_BIT = 20
SMALL: dict[str, Any] = {'vocab_size': 64, 'hidden': 36, 'layers': 2, 'heads': 2, 'positions': 64}
LARGE: dict[str, Any] = {'vocab_size': 512, 'hidden': 128, 'layers': 2, 'heads': 4, 'positions': 128}
BATCH = {False: 16, True: 128}
"""sequences of a train batch; True: when measuring the cost, where an atom has a thousand tokens"""


@dataclass(frozen=True)
class Job:
    """One run."""

    method: str
    precision: str
    strategy: str
    folder: str
    seed: int = 1
    exact: bool = True
    updates: int = UPDATES
    kill: bool = False
    """kill the last rank by SIGKILL in the middle of a phase"""
    flip: bool = False
    """flip one bit of one gradient"""
    resume: bool = False


class Killed(Callback):
    def on_learn_batch_end(self, trainer: Any, metrics: Any) -> None:
        if trainer.num_updates == KILLED_AT and trainer.strategy.rank == trainer.strategy.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)


class Flipped(Callback):
    """Flips one bit of one element of one gradient, in one backward pass."""

    def on_learn_batch_start(self, trainer: Any) -> None:
        if trainer.num_updates != FLIPPED_AT:
            return
        model = next(iter(trainer.models().values()))
        parameter = next(p for p in reversed(list(model.parameters())) if p.requires_grad)

        def flip(gradient: Tensor) -> Tensor:
            handle.remove()
            changed = gradient.clone()
            at = int(changed.flatten().abs().argmax())
            changed.view(-1).view(torch.int32)[at] ^= 1 << FLIPPED_BIT
            return changed

        handle = parameter.register_hook(flip)


def run(job: Job, sizes: dict[str, Any] = SMALL) -> None:
    """Trains to the end, with a checkpoint after every phase."""
    callbacks: list[Any] = [SaveCheckpoint(interval=1)]
    callbacks += [Killed()] * job.kill + [Flipped()] * job.flip
    with strategy_of(job) as strategy:
        trainer = trainer_of(job, strategy, sizes, callbacks=callbacks, run_dir=job.folder)
        if job.resume:
            trainer.load_checkpoint('auto')
        fit(trainer, job.updates)


def strategy_of(job: Job) -> Any:
    exact = {'reproducible': 'exact'} if job.exact else {}
    return STRATEGIES[job.strategy](seed=job.seed, precision=job.precision, device='cpu', **exact)


def fit(trainer: Any, updates: int) -> None:
    if isinstance(trainer, PPOTrainer):
        trainer.fit(prompts(), 1, updates // PER_PHASE, 1)
    else:
        trainer.fit()


def trainer_of(job: Job, strategy: Any, sizes: dict[str, Any], **kwargs: Any) -> Any:
    torch.manual_seed(job.seed)
    kwargs |= {'max_grad_norm': 0.5}
    if job.method in OFFLINE:
        return offline(job, strategy, sizes, **kwargs)
    return online(job, strategy, sizes, **kwargs)


def offline(job: Job, strategy: Any, sizes: dict[str, Any], **kwargs: Any) -> Any:
    config = tiny_config('gpt2', **sizes, dropout=0.1 if job.method == 'sft' else 0.0)
    batch = BATCH[sizes is LARGE]
    kwargs |= {'train_batch_size': batch, 'max_epochs': job.updates // PER_PHASE, 'log_interval': PER_PHASE}
    count = batch * PER_PHASE
    make: Any
    if job.method == 'reward model':
        make, model, data = RewardModelTrainer, RewardModel(AutoModel.from_config(config)), pairs(count, sizes)
    elif job.method == 'sft':
        make, model, data = SFTTrainer, actor_of(config), sequences(count, sizes)
    else:
        make, model, data = DPOTrainer, actor_of(config), pairs(count, sizes)
        kwargs['initial_model'] = strategy.prepare(deepcopy(model))
    return offline_trainer(make, strategy, model, data, optimizer=partial(optimizer_of, strategy), **kwargs)


def online(job: Job, strategy: Any, sizes: dict[str, Any], **kwargs: Any) -> Any:
    config = tiny_config('gpt2', **sizes)
    actor = actor_of(config, lora_rank=4 if job.method == 'lora' else 0)
    reward = RewardModel(AutoModel.from_config(config))
    initial = None if job.method == 'lora' else deepcopy(actor)
    if job.method == 'shared trunk':
        actor.value_head = critic_head(sizes['hidden'])
    critic = Critic(AutoModel.from_config(config)) if job.method in ('ppo', 'lora') else None
    settings: dict[str, Any] = {
        'experience_batch_size': 2 * BATCH[sizes is LARGE],
        'train_batch_size': BATCH[sizes is LARGE],
        'max_epochs': PER_PHASE // 2,
        'max_new_tokens': 12 if sizes is SMALL else 80,
        'eos_token_id': 2,
        'score_scaling': 'running',
        'kl_target': 3.0,
    }
    if job.method == 'grpo':
        settings |= {'advantage_estimator': 'grpo', 'num_samples_per_prompt': 4}
        settings['experience_batch_size'] //= 4
        settings |= {'kl_in': 'loss', 'kl_target': None, 'score_scaling': 'none'}
    adam = partial(optimizer_of, strategy)
    return ppo_trainer(strategy, actor, critic, reward, initial, optimizer=adam, **settings | kwargs)


def actor_of(config: Any, **kw: Any) -> Any:
    return Actor(AutoModelForCausalLM.from_config(config), **kw)


def optimizer_of(strategy: Any, parameters: list[nn.Parameter]) -> Any:
    return strategy.make_optimizer(parameters, lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


def ids(generator: torch.Generator, length: int, sizes: dict[str, Any]) -> Tensor:
    return torch.randint(3, sizes['vocab_size'], (length,), generator=generator)


def prompts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [ids(generator, 1 + i % 7, SMALL) for i in range(48)]


def sequences(count: int, sizes: dict[str, Any]) -> list[Sequence]:
    generator, longest = torch.Generator().manual_seed(6), 18 if sizes is SMALL else 110
    return [
        Sequence(
            prompt_ids=ids(generator, 1 + i % 5, sizes),
            response_ids=ids(generator, n, sizes),
            response_mask=torch.arange(n) % 4 != 1,
        )
        for i, n in enumerate(torch.randint(1, longest, (count,), generator=generator).tolist())
    ]


def pairs(count: int, sizes: dict[str, Any]) -> list[TokenizedPreference]:
    generator, found = torch.Generator().manual_seed(7), []
    for i in range(count):
        answers = [ids(generator, 1 + (3 * i + j) % (11 if sizes is SMALL else 90), sizes) for j in range(2)]
        masks = [torch.ones_like(answer, dtype=torch.bool) for answer in answers]
        found.append(
            TokenizedPreference(prompt_ids=ids(generator, 1 + i % 4, sizes), responses=answers, response_masks=masks)
        )
    return found


def cost(method: str, precision: str, strategy: str, pairs_of_runs: int = 2) -> dict[str, list[float]]:
    """Returns CPU seconds of a phase, summed over ranks, of runs that alternate (ordinary, exact, ordinary, ...), and
    wall time under '..._s'. The first phase of a run is not counted, and nothing is written."""
    found: dict[str, list[float]] = {'ordinary': [], 'exact': [], 'ordinary_s': [], 'exact_s': []}
    for exact in (False, True) * pairs_of_runs:
        job = Job(method, precision, strategy, '', exact=exact, updates=PER_PHASE)
        with strategy_of(job) as made:
            trainer = trainer_of(job, made, LARGE)
            fit(trainer, PER_PHASE)
            made.barrier()
            cpu, wall = time.process_time(), time.perf_counter()
            fit(trainer, PER_PHASE)
            made.barrier()
            name = 'exact' if exact else 'ordinary'
            found[f'{name}_s'].append(time.perf_counter() - wall)
            own = torch.tensor(time.process_time() - cpu, dtype=torch.float64)
            found[name].append(float(made.all_reduce(own)))
    return found


def run_all(jobs: list[dict[str, Any]]) -> None:
    for job in jobs:
        run(Job(**job))


if __name__ == '__main__':
    run_all(json.loads(Path(sys.argv[1]).read_text()))
