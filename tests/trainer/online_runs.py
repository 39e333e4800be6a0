"""Small runs of PPOTrainer on text, for the tests of its methods."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from phase_log import Log

from chatgpt.nn import GPTActor, GPTCritic
from chatgpt.nn.heads import critic_head
from chatgpt.strategies import NaiveStrategy
from chatgpt.testing.fakes import char_tokenizer, tiny_config
from chatgpt.trainer import PPOTrainer
from chatgpt.types import Experience


class ExperienceLog(Log):
    """Keeps the experiences of every phase too."""

    def __init__(self) -> None:
        super().__init__()
        self.experiences: list[list[Experience]] = []

    def on_make_experience_end(self, trainer: Any, experiences: list[Experience]) -> None:
        self.experiences.append(experiences)


def vowels(prompts: list[str], responses: list[str]) -> list[float]:
    return [float(sum(c in 'aeiou' for c in r)) for r in responses]


def make(
    strategy: Any = None,
    reward: Any = vowels,
    more: Any = (),
    engine: Any = None,
    lr: float = 1e-3,
    value_head: bool = False,
    **kw: Any,
) -> Any:
    strategy = strategy or NaiveStrategy(seed=3, device='cpu')
    torch.manual_seed(3)
    config = tiny_config('gpt2', positions=48)
    actor, initial = GPTActor(config=config), None
    initial = deepcopy(actor)
    if value_head:
        actor.value_head = critic_head(config.n_embd)
    critic = (
        GPTCritic(config=config) if not value_head and kw.get('advantage_estimator', 'gae') in ('gae', 'a2c') else None
    )
    actor, optim = strategy.prepare((actor, torch.optim.AdamW(actor.parameters(), lr=lr, eps=1e-5)))
    critic_optim = None
    if critic is not None:
        critic, critic_optim = strategy.prepare((critic, torch.optim.AdamW(critic.parameters(), lr=1e-3, eps=1e-5)))
    log = ExperienceLog()
    settings = {'experience_batch_size': 4, 'train_batch_size': 8, 'max_new_tokens': 8} | kw
    trainer = PPOTrainer(
        strategy,
        actor,
        critic,
        reward,
        strategy.prepare(initial),
        optim,
        critic_optim,
        tokenizer=char_tokenizer(),
        callbacks=[log, *more],
        engine=engine,
        **settings,
    )
    trainer.log = log
    return trainer


PROMPTS = [f'a {word}' for word in 'one two three four five six'.split()]
DYNAMIC = {'advantage_estimator': 'grpo', 'num_samples_per_prompt': 4, 'kl_coef': 0.0}
QUERIES = [torch.tensor([3, 4])] * 2 + [torch.tensor([5])] * 2
RESPONSES = [torch.tensor([5, 6, 7])] * 4
