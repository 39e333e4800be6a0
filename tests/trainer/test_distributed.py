"""The same run on one process and on two: prompts, samples and scores are equal, losses and weights up to rounding."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch.optim import AdamW

from chatgpt.strategies import DDPStrategy, NaiveStrategy
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer.run_control import RankMismatchError, check_ranks

LR = 1e-3
PHASES, EPOCHS = 3, 2


def train(kind: str, options: dict[str, Any]) -> dict[str, Any]:
    """A few phases of PPO; what came of it, on rank 0."""
    from chatgpt.nn import GPTActor, GPTCritic
    from chatgpt.testing.fakes import char_tokenizer, tiny_config
    from chatgpt.trainer import PPOTrainer
    from chatgpt.trainer import strategies as s
    from chatgpt.trainer.callbacks import Callback, ProgressBar

    log: dict[str, Any] = {'metrics': [], 'samples': [], 'calls': []}

    class Log(Callback):
        def on_make_experience_end(self, trainer: Any, experiences: list[Any]) -> None:
            log['samples'] += [(e.index, e.response_ids.tolist(), e.score) for e in experiences]

        def on_phase_end(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
            log['metrics'].append({k: v for k, v in metrics.items() if not k.startswith('perf/')})

    def reward(prompts: list[str], responses: list[str]) -> list[float]:
        log['calls'].append(len(prompts))
        return [float(sum(c in 'aeiou0123456789' for c in r)) for r in responses]

    strategy: Any = getattr(s, kind)(seed=3, device='cpu', **options)
    with strategy:
        config = tiny_config('gpt2', positions=48)
        with strategy.model_init_context():
            actor, critic = GPTActor(config=config), GPTCritic(config=config)
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
            callbacks=[Log(), ProgressBar(enabled=False)],
            experience_batch_size=8,
            train_batch_size=4,
            max_epochs=EPOCHS,
            max_new_tokens=8,
            max_tokens_per_batch=48,
            score_scaling='running',
            whiten_rewards=True,
        )
        trainer.fit([f'a {w}' for w in 'one two three four five six seven'.split()], 1, PHASES, 1)
        log['weights'] = {n: strategy.full_state_dict(m) for n, m in trainer.models().items()}
    return log


@pytest.fixture(scope='module')
def naive() -> dict[str, Any]:
    return train('NaiveStrategy', {})


@pytest.mark.parametrize(
    ('kind', 'options'),
    [('DDPStrategy', {}), ('FSDPStrategy', {}), ('FSDPStrategy', {'cpu_offload': True, 'meta_init': True})],
)
def test_two_processes_equal_one(kind, options, naive):
    ranks = run_distributed(train, 2, kind, options)
    two = ranks[0]
    assert [s[:2] for s in two['samples']] == [s[:2] for s in naive['samples']]
    assert [s[2] for s in two['samples']] == [s[2] for s in naive['samples']]
    for a, b in zip(naive['metrics'], two['metrics'], strict=True):
        assert a.keys() == b.keys()
        for name in (
            'ppo/policy_loss',
            'ppo/value_loss',
            'ppo/actor_grad_norm',
            'ppo/critic_grad_norm',
            'rollout/kl_mean',
        ):
            assert math.isclose(a[name], b[name], rel_tol=1e-4, abs_tol=2e-6), (name, a[name], b[name])
    steps = PHASES * EPOCHS * 2
    for model, weights in naive['weights'].items():
        for name, weight in weights.items():
            assert (weight - two['weights'][model][name]).abs().max() < 0.05 * LR * steps, (model, name)


def test_both_ranks_hold_the_same_buffer_and_the_reward_function_is_called_once(naive):
    first, second = run_distributed(train, 2, 'DDPStrategy', {})
    assert first['samples'] == second['samples']
    assert first['metrics'] == second['metrics']
    assert first['calls'] == [8] * PHASES  # the whole batch of a timestep, once
    assert second['calls'] == []


# ---------------------------------------------------------------------- ranks that differ


def run(difference: str | None) -> str:
    """A short PPO run in which rank 1 differs in one thing; what came of it."""
    from chatgpt.nn import Actor, Critic
    from chatgpt.testing import tiny_causal_lm
    from chatgpt.trainer import PPOTrainer

    with DDPStrategy(device='cpu') as strategy:
        odd = strategy.rank == 1
        actor, critic = Actor(tiny_causal_lm('gpt2')), Critic(tiny_causal_lm('gpt2'))
        (actor, actor_optim), (critic, critic_optim) = strategy.prepare(
            (actor, AdamW(actor.parameters(), lr=1e-3)), (critic, AdamW(critic.parameters(), lr=1e-3))
        )
        trainer = PPOTrainer(
            strategy,
            actor,
            critic,
            lambda prompts, responses: [1.0] * len(prompts),
            None,
            actor_optim,
            critic_optim,
            kl_coef=0.0,
            experience_batch_size=2,
            train_batch_size=2,
            max_new_tokens=3,
            gamma=0.9 if difference == 'gamma' and odd else 1.0,
        )
        if difference == 'position':
            learners = trainer.learners

            def counted() -> object:
                trainer.collector.draws.prompts_drawn += int(odd)
                return learners()

            trainer.learners = counted  # type: ignore[method-assign]
        prompts = [torch.tensor([5, 6, 7 + int(difference == 'prompts' and odd)]), torch.tensor([9, 4])]
        try:
            trainer.fit(prompts, max_timesteps=2, update_timesteps=1)
        except RankMismatchError as error:
            return str(error)
        return f'{trainer.phase} phases'


@pytest.mark.parametrize(
    ('difference', 'words'),
    [
        ('gamma', ('at the start of phase 1', 'on rank 1 config.gamma is 0.9 instead of 1.0 (as on rank 0)')),
        ('prompts', ('at the start of phase 1', 'on rank 1 prompts')),
        ('position', ('before the start of phase 2', 'on rank 1 prompts_drawn is 3 instead of 2')),
        (None, ('2 phases',)),
    ],
)
def test_a_rank_that_differs_is_named_on_every_rank(difference, words):
    first, second = run_distributed(run, 2, difference)
    assert first == second
    for word in words:
        assert word in first


def test_one_process_compares_nothing():
    check_ranks(NaiveStrategy(), {'anything': 1}, 'anywhere')
