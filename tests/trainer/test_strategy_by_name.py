"""A strategy by its name, in `chatgpt.train` and in the trainers: it prepares what the trainer is given."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_runs import weights

import chatgpt
from chatgpt.data import load_demonstrations, load_preferences
from chatgpt.launch import demo_world
from chatgpt.nn import GPTRM, GPTActor, GPTCritic
from chatgpt.strategies import NaiveStrategy
from chatgpt.strategies.registry import STRATEGIES, strategy_by_name
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer import DPOTrainer, PPOTrainer, RewardModelTrainer, SFTTrainer

QUICK: dict[str, Any] = {'train_batch_size': 2, 'max_steps': 1}


def pair(model: torch.nn.Module) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def sft(strategy: Any) -> SFTTrainer:
    torch.manual_seed(0)
    records = load_demonstrations(demo_world.demo_corpus(4), demo_world.demo_tokenizer())[0]
    model, optim = pair(GPTActor(config=demo_world.demo_config()))
    if not isinstance(strategy, str):
        model, optim = strategy.prepare((model, optim))
    trainer = SFTTrainer(strategy, model, optim, records, **QUICK)
    trainer.fit()
    return trainer


def test_every_kind_of_trainer():
    by_name, by_hand = sft('naive'), sft(NaiveStrategy())  # the same as a strategy of one's own
    assert isinstance(by_name.strategy, NaiveStrategy) and torch.equal(weights(by_name), weights(by_hand))
    config, tokenizer = demo_world.demo_config(), demo_world.demo_tokenizer()
    actor, critic, rm = GPTActor(config=config), GPTCritic(config=config), GPTRM(config=config)
    optims = pair(actor)[1], pair(critic)[1]
    sizes = {'max_new_tokens': 2, 'experience_batch_size': 2, 'train_batch_size': 2, 'tokenizer': tokenizer}
    ppo = PPOTrainer('naive', actor, critic, rm, deepcopy(actor), *optims, **sizes)
    ppo.fit([row['prompt'] for row in demo_world.demo_prompts(2)], 1, 1, 1)
    assert ppo.num_updates == 1 and not any(p.requires_grad for p in rm.parameters())
    records = load_preferences(demo_world.demo_preferences(4), tokenizer)[0]
    dpo = DPOTrainer('naive', *pair(GPTActor(config=config)), records, initial_model=GPTActor(config=config), **QUICK)
    dpo.fit()
    reward = RewardModelTrainer('naive', *pair(GPTRM(config=config)), records, **QUICK)
    reward.fit()
    assert dpo.num_updates == reward.num_updates == 1


def test_the_verb(model_folder):
    texts = [row['response'] for row in demo_world.demo_corpus(4)]
    trainer = chatgpt.train(str(model_folder), samples=texts, strategy='naive', **QUICK)
    assert trainer.num_updates == 1
    with pytest.raises(ValueError, match="strategy='dpp' is not known; choose one of naive, ddp, .*; did you mean ddp"):
        chatgpt.train(str(model_folder), samples=texts, strategy='dpp', **QUICK)


def two_ranks() -> tuple[int, int]:
    trainer = sft('ddp')
    return trainer.strategy.world_size, trainer.num_updates


def test_ddp_on_two_processes():
    assert run_distributed(two_ranks, 2) == [(2, 1), (2, 1)]


def test_every_name_is_made(monkeypatch):
    """Of the class and with the options of its entry; stand-ins of the classes only note what they are given."""

    def noted(entry):
        class Noted(entry.load()):  # type: ignore[misc]
            def __init__(self, seed, precision, timeout_s=0.0, meta_init=False, **options):
                self.given = {'seed': seed, 'precision': precision, **options}

        return Noted

    for name, entry in dict(STRATEGIES).items():
        monkeypatch.setitem(STRATEGIES, name, replace(entry, target=noted(entry)))
        made = strategy_by_name(name, seed=5)
        kind = {'n': 'NaiveStrategy', 'd': 'DDPStrategy', 'f': 'FSDPStrategy', 'c': 'ColossalAIStrategy'}[name[0]]
        assert type(made).__mro__[1].__name__ == kind
        assert made.given == {'seed': 5, 'precision': 'auto', **entry.options}
