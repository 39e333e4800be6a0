"""What a user's reward draws from the global generators goes on after a resume where it stopped, on every rank."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import torch
from ppo_on_ids import fit, make
from tiny_runs import StopAfter, sft, weights

from chatgpt.strategies import DDPStrategy
from chatgpt.testing.processes import run_distributed


def seed_all(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def draws() -> list[float]:
    """`gauss` and `normal` draw pairs and keep the second for the next call, which is part of the state."""
    ours = [random.random(), random.gauss(0, 1)]
    return [*ours, float(numpy.random.rand()), float(numpy.random.normal()), float(torch.rand(()))]


class Noisy(torch.nn.Module):
    """A reward of nothing but the global generators; remembers what it gave."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[list[float]] = []

    def forward(self, batch: Any) -> torch.Tensor:
        self.given.append([sum(draws()) for _ in range(batch.num_sequences)])
        return torch.tensor(self.given[-1])


def phases(source: Path | None = None, target: Path | None = None) -> tuple[list[list[float]], torch.Tensor]:
    reward = Noisy()
    trainer = make(reward=reward, callbacks=[StopAfter(2)] if target else [])
    seed_all(99 if source else 7)
    if source is not None:
        trainer.load_checkpoint(source)
    fit(trainer, 4)
    if target is not None:
        trainer.save_checkpoint(target)
    return reward.given, weights(trainer)


def test_a_reward_that_draws_from_python_and_numpy_goes_on_to_the_bit(tmp_path):
    straight, whole = phases()
    first, _ = phases(target=tmp_path / 'half')
    rest, end = phases(source=tmp_path / 'half')
    assert 0 < len(first) < len(straight) and first + rest == straight
    assert torch.equal(end, whole)


def test_numpy_generators_of_other_kinds(tmp_path):
    trainer = make()
    before = numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(numpy.random.PCG64(3))
    try:
        trainer.save_checkpoint(tmp_path / 'saved')
        want = draws()
        trainer.load_checkpoint(tmp_path / 'saved')
        assert draws() == want
    finally:
        numpy.random.set_bit_generator(before)


def each_rank_its_own(folder: str) -> tuple[list[float], list[float]]:
    with DDPStrategy(device='cpu') as strategy:
        trainer = sft(strategy=strategy)
        seed_all(strategy.rank)
        draws()
        trainer.save_checkpoint(folder)
        want = draws()
        seed_all(50)
        trainer.load_checkpoint(folder)
        return want, draws()


def test_each_rank_keeps_its_own_generators(tmp_path):
    (want0, got0), (want1, got1) = run_distributed(each_rank_its_own, 2, str(tmp_path / 'saved'))
    assert (got0, got1) == (want0, want1)
    assert all(a != b for a, b in zip(want0, want1, strict=True))
