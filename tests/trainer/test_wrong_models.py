"""Models in the wrong place, told by a trainer in one line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from chatgpt.nn import GPTActor, GPTCritic, RewardModel
from chatgpt.strategies import NaiveStrategy
from chatgpt.testing.fakes import tiny_config
from chatgpt.trainer import PPOTrainer, RewardModelTrainer, SFTTrainer
from chatgpt.types import Sequence


def actor() -> Any:
    return GPTActor(config=tiny_config('gpt2'))


def critic() -> Any:
    return GPTCritic(config=tiny_config('gpt2'))


def bare() -> Any:
    return AutoModelForCausalLM.from_config(tiny_config('gpt2'))


def frozen() -> Any:
    return actor().requires_grad_(False)


def one(prompts: list[str], responses: list[str]) -> list[float]:
    return [1.0] * len(prompts)


def adam(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ('models', 'message'),
    [
        ({'actor': bare}, r'actor is a GPT2LMHeadModel of transformers; wrap it as Actor\(actor\)'),
        ({'critic': bare}, r'critic is a GPT2LMHeadModel of transformers; wrap it as Critic\(critic\)'),
        ({'initial_model': bare}, r'initial_model is a GPT2LMHeadModel of transformers'),
        ({'actor': critic, 'critic': actor}, 'actor is a GPTCritic, and Actor is needed; look at the order'),
        ({'initial_model': critic}, 'initial_model is a GPTCritic'),
        ({'actor': frozen}, 'no parameter of the actor requires a gradient'),
    ],
)
def test_ppo(models, message):
    made = {
        name: models.get(name, kind)()
        for name, kind in (('actor', actor), ('critic', critic), ('initial_model', actor))
    }
    optims = [adam(made['actor']), adam(made['critic'])]
    with pytest.raises(ValueError, match=f'^PPOTrainer: {message}'):
        PPOTrainer('naive', made['actor'], made['critic'], one, made['initial_model'], *optims, max_new_tokens=2)


def test_an_actor_that_was_prepared_without_its_optimizer():
    strategy = NaiveStrategy(seed=0)
    mine, judge = strategy.prepare(actor()), critic()
    judge, judge_optim = strategy.prepare((judge, adam(judge)))
    with pytest.raises(ValueError, match='no parameter of the actor requires a gradient'):
        PPOTrainer(strategy, mine, judge, one, actor(), adam(mine), judge_optim, max_new_tokens=2)


@pytest.mark.parametrize(
    ('trainer', 'model', 'message'),
    [
        (SFTTrainer, bare, 'model is a GPT2LMHeadModel of transformers'),
        (SFTTrainer, critic, 'actor is a GPTCritic, and Actor is needed'),
        (SFTTrainer, frozen, 'no parameter of the model requires a gradient'),
        (RewardModelTrainer, actor, 'reward_model is a GPTActor, and RewardModel is needed'),
        (RewardModelTrainer, lambda: RewardModel(critic().model).requires_grad_(False), 'no parameter of the model'),
    ],
)
def test_trainers_that_only_learn(trainer, model, message):
    made = model()
    ids = torch.tensor([1, 2])
    data = [Sequence(prompt_ids=ids, response_ids=ids, response_mask=torch.tensor([True, True]))]
    with pytest.raises(ValueError, match=f'^{trainer.__name__}: {message}'):
        trainer('naive', made, adam(made), data)
