"""The same run on one process and on two: prompts, samples and scores are equal, losses and weights up to rounding."""

from __future__ import annotations

import math
from typing import Any

import torch
from tiny_runs import PROMPTS, near, ppo

from chatgpt.strategies import DDPStrategy, NaiveStrategy
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer import strategies
from chatgpt.trainer.run_control import RankMismatchError, check_ranks

LR, PHASES, EPOCHS = 1e-3, 3, 2
LAYOUTS = [('DDPStrategy', {}), ('FSDPStrategy', {}), ('FSDPStrategy', {'cpu_offload': True, 'meta_init': True})]
SIZES = {'experience_batch_size': 8, 'max_epochs': EPOCHS, 'max_new_tokens': 8, 'max_tokens_per_batch': 48}


def train(layouts: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """A few phases of PPO under each; what came of it."""
    found = []
    for kind, options in layouts:
        calls: list[int] = []

        def reward(prompts: list[str], responses: list[str], calls: list[int] = calls) -> list[float]:
            calls.append(len(prompts))
            return [float(sum(c in 'aeiou0123456789' for c in r)) for r in responses]

        with getattr(strategies, kind)(seed=3, device='cpu', **options) as strategy:
            trainer = ppo(strategy, reward, lr=LR, score_scaling='running', whiten_rewards=True, **SIZES)
            trainer.fit([*PROMPTS, 'a seven'], 1, PHASES, 1)
            weights = {n: strategy.full_state_dict(m) for n, m in trainer.models().items()}
        log = trainer.log
        found.append({'metrics': log.phases, 'samples': log.samples(), 'calls': calls, 'weights': weights})
    return found


def test_two_processes_equal_one():
    (naive,) = train([('NaiveStrategy', {})])
    for first, second in zip(*run_distributed(train, 2, LAYOUTS, init_group=True), strict=True):
        assert first['samples'] == second['samples'] == naive['samples']  # both ranks hold the same buffer
        assert first['metrics'] == second['metrics']
        # the reward function is called once, for the whole batch of a timestep
        assert (first['calls'], second['calls']) == ([8] * PHASES, [])
        for a, b in zip(naive['metrics'], first['metrics'], strict=True):
            assert a.keys() == b.keys()
            losses = ('policy_loss', 'value_loss', 'actor_grad_norm', 'critic_grad_norm')
            for name in (*(f'ppo/{loss}' for loss in losses), 'rollout/kl_mean'):
                assert math.isclose(a[name], b[name], rel_tol=1e-4, abs_tol=2e-6), (name, a[name], b[name])
        near(first['weights'], naive['weights'], atol=0.05 * LR * PHASES * EPOCHS * 2)


# ---------------------------------------------------------------------- ranks that differ


DIFFERENCES = {
    'gamma': ('at the start of phase 1', 'on rank 1 config.gamma is 0.9 instead of 1.0 (as on rank 0)'),
    'prompts': ('at the start of phase 1', 'on rank 1 prompts'),
    'position': ('before the start of phase 2', 'on rank 1 prompts_drawn is 3 instead of 2'),
    'nothing': ('2 phases',),
}


def differ() -> list[str]:
    """Short PPO runs in which rank 1 differs in one thing; what came of each."""
    return [short_run(difference) for difference in DIFFERENCES]


def short_run(difference: str) -> str:
    with DDPStrategy(device='cpu') as strategy:
        odd = strategy.rank == 1
        sizes = {'experience_batch_size': 2, 'train_batch_size': 2, 'max_new_tokens': 3}
        trainer = ppo(strategy, gamma=0.9 if difference == 'gamma' and odd else 1.0, **sizes)
        if difference == 'position':
            learners = trainer.learners

            def counted() -> object:
                trainer.collector.draws.prompts_drawn += int(odd)
                return learners()

            trainer.learners = counted
        prompts = [torch.tensor([5, 6, 7 + int(difference == 'prompts' and odd)]), torch.tensor([9, 4])]
        try:
            trainer.fit(prompts, max_timesteps=2, update_timesteps=1)
        except RankMismatchError as error:
            return str(error)
        return f'{trainer.phase} phases'


def test_a_rank_that_differs_is_named_on_every_rank():
    first, second = run_distributed(differ, 2, init_group=True)
    assert first == second
    for told, words in zip(first, DIFFERENCES.values(), strict=True):
        assert all(word in told for word in words), told


def test_one_process_compares_nothing():
    check_ranks(NaiveStrategy(), {'anything': 1}, 'anywhere')
