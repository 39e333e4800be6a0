"""Ranks that do not run the same run are found out at a phase boundary, with the values that differ."""

from __future__ import annotations

import pytest
import torch
from torch.optim import AdamW

from chatgpt.strategies import DDPStrategy, NaiveStrategy
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer.run_control import RankMismatchError, check_ranks


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
