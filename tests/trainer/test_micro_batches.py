"""Micro-batches of a train batch: split over the ranks by cost, and with or without padding the same losses."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch

import chatgpt.nn.packing as packing_module
from chatgpt.batching import collate, micro_batches
from chatgpt.nn import GPTActor, GPTCritic
from chatgpt.strategies import DDPStrategy, NaiveStrategy
from chatgpt.testing.fakes import tiny_config
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer import PPOTrainer
from chatgpt.trainer.callbacks import ProgressBar
from chatgpt.trainer.step import Learner, Work, learn_batch
from chatgpt.types import Sequence

# In this order half and half would give one rank 36 tokens and the other 10.
LENGTHS = [10, 9, 9, 8, 3, 3, 2, 2]

# ---------------------------------------------------------------- balanced by cost


def sequence(length: int) -> Sequence:
    ids = torch.arange(3, 3 + length)
    return Sequence(prompt_ids=ids[:1], response_ids=ids[1:], response_mask=torch.ones(length - 1, dtype=torch.bool))


def test_ranks_get_equal_costs_by_hand():
    cuts = [[[LENGTHS[i] for i in cut] for cut in cuts] for cuts in micro_batches(LENGTHS, 2, 20)]
    # Longest first, each to the rank with fewer sequences, then with fewer tokens, then to rank 0; forwards of up to 20
    # padded tokens.
    assert cuts == [[[10, 8], [3, 2]], [[9, 9], [3, 2]]]


def learn() -> tuple[list[int], int]:
    """Tokens of the records that this rank learned from, and the number of its micro-batches."""
    seen: list[list[int]] = []

    def loss(model: Any, batch: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        seen.append(batch.attention_mask.sum(1).tolist())
        return -(model(batch).logprobs * batch.action_mask).sum() / sum(LENGTHS), {}

    with DDPStrategy(device='cpu') as strategy:
        actor = GPTActor(config=tiny_config('gpt2'))
        actor, optimizer = strategy.prepare((actor, torch.optim.SGD(actor.parameters(), lr=0.1)))
        work = Work(
            [sequence(n) for n in LENGTHS], [Learner('actor', actor, optimizer, loss)], collate, lambda r: r.num_tokens
        )
        learn_batch(strategy, [work], max_tokens=20)
    return sorted(n for records in seen for n in records), len(seen)


def test_what_two_processes_learn_from():
    (first, num_first), (second, num_second) = run_distributed(learn, 2)
    assert sorted(first + second) == sorted(LENGTHS)
    assert (len(first), sum(first)) == (len(second), sum(second)) == (4, 23)
    assert num_first == num_second


# ---------------------------------------------------------------- with and without padding


class Recorder(ProgressBar):
    def __init__(self) -> None:
        super().__init__(enabled=False)
        self.phases: list[dict[str, float]] = []
        self.samples: list[list[int]] = []

    def on_make_experience_end(self, trainer: Any, experiences: list[Any]) -> None:
        self.samples += [e.response_ids.tolist() for e in experiences]

    def on_phase_end(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
        self.phases.append(metrics)


def reward(prompts: list[Any], responses: list[Any]) -> list[float]:
    return [float(sum(int(i) == 7 for i in r)) - 0.1 * len(r) for r in responses]


def fit(packing: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[Recorder, int]:
    """Three phases of PPO, and the number of their packed forwards."""
    strategy = NaiveStrategy(seed=0)
    config = tiny_config('gpt2', vocab_size=16, hidden=16, positions=32)
    actor, critic = GPTActor(config=config), GPTCritic(config=config)
    items = [(m, torch.optim.AdamW(m.parameters(), lr=3e-3, eps=1e-5)) for m in (actor, critic)]
    (actor, actor_optim), (critic, critic_optim), initial = strategy.prepare(*items, deepcopy(actor))
    calls: list[int] = []
    original = packing_module._packed_hidden
    monkeypatch.setattr(packing_module, '_packed_hidden', lambda *args: calls.append(1) or original(*args))
    recorder = Recorder()
    trainer = PPOTrainer(
        strategy,
        actor,
        critic,
        reward,
        initial,
        actor_optim,
        critic_optim,
        packing=packing,
        callbacks=[recorder],
        experience_batch_size=16,
        train_batch_size=8,
        max_epochs=2,
        kl_coef=0.01,
        max_new_tokens=6,
        eos_token_id=2,
    )
    generator = torch.Generator().manual_seed(1)
    trainer.fit([torch.randint(3, 16, (1 + i % 4,), generator=generator) for i in range(16)], 1, 3, 1)
    monkeypatch.undo()
    return recorder, len(calls)


def test_packed_and_plain_ppo_have_the_same_losses(monkeypatch):
    (packed, num_packed), (plain, num_plain) = fit(True, monkeypatch), fit(False, monkeypatch)
    # Learning alone: 3 phases of 2 passes over 2 batches, actor and critic; scoring: initial model and critic.
    assert num_packed >= 3 * (2 * 2 * 2 + 2) and num_plain == 0
    assert packed.samples == plain.samples and len({len(s) for s in packed.samples}) > 2
    for a, b in zip(packed.phases, plain.phases, strict=True):
        for name in (
            'ppo/policy_loss',
            'ppo/value_loss',
            'ppo/actor_grad_norm',
            'ppo/critic_grad_norm',
            'ppo/entropy',
            'rollout/kl_mean',
        ):
            assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-6), name
