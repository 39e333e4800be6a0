"""Hooks of callbacks with ColossalAI's arguments."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim import Adam

from chatgpt.nn import Actor
from chatgpt.strategies import NaiveStrategy
from chatgpt.testing import tiny_causal_lm
from chatgpt.testing.fakes import char_tokenizer
from chatgpt_compat.colossalai.trainers import Callback, PPOTrainer


def test_batches_end_with_one_argument_or_two() -> None:
    got: list[Any] = []

    class One(Callback):
        def on_learn_batch_end(self, experience: Any) -> None:  # type: ignore[override]
            got.append(experience)

    class Two(Callback):
        def on_learn_batch_end(self, metrics: Any, experience: Any) -> None:  # type: ignore[override]
            got.append((metrics, experience))

    trainer: Any = SimpleNamespace(last_experiences=[])
    for callback in (One(), Two()):
        callback.on_learn_batch_end(trainer, {'loss': 1.0})  # type: ignore[call-arg]
    assert got == [[], ({'loss': 1.0}, [])]


@pytest.mark.parametrize(
    ('update', 'order'),
    [(2, ['learned 0', 'ended 0', 'learned 1', 'ended 1']), (4, ['ended 0', 'learned 0', 'ended 1'])],
)
def test_an_episode_ends_after_its_phase(update: int, order: list[str]) -> None:
    """An episode within a phase ends when its last timestep is collected, as in ColossalAI."""
    pages: list[str] = []

    class Diary(Callback):
        def on_episode_end(self, episode: int) -> None:  # type: ignore[override]
            pages.append(f'ended {episode}')

        def on_learn_epoch_end(self, epoch: int) -> None:  # type: ignore[override]
            pages.append(f'learned {len([p for p in pages if p[:1] == "l"])}')

    actor = Actor(tiny_causal_lm('gpt2'), value_head=torch.nn.Linear(32, 1))
    trainer = PPOTrainer(
        NaiveStrategy(),
        actor,
        None,
        lambda prompts, responses: [1.0 for _ in responses],
        None,
        Adam(actor.parameters()),
        kl_coef=0.0,
        experience_batch_size=2,
        train_batch_size=8,
        max_epochs=1,
        callbacks=[Diary()],
        tokenizer=char_tokenizer(),
        max_new_tokens=2,
    )
    prompts = [torch.tensor([3, 4, 5 + i]) for i in range(4)]
    trainer.fit(prompts, num_episodes=2, max_timesteps=2, update_timesteps=update)
    assert pages == order
