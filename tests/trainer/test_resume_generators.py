"""What a user's reward draws from the global generators goes on after a resume where it stopped, on every rank."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import torch
from ppo_on_ids import make, prompts

from chatgpt.testing.processes import run_distributed
from chatgpt.trainer.callbacks import ProgressBar


def seed_all(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def draws() -> list[float]:
    """`gauss` and `normal` draw pairs and keep the second for the next call, which is part of the state."""
    return [
        random.random(),
        random.gauss(0, 1),
        float(numpy.random.rand()),
        float(numpy.random.normal()),
        float(torch.rand(())),
    ]


class Noisy(torch.nn.Module):
    """A reward of nothing but the global generators; remembers what it gave."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[list[float]] = []

    def forward(self, batch: Any) -> torch.Tensor:
        scores = [sum(draws()) for _ in range(batch.num_sequences)]
        self.given.append(scores)
        return torch.tensor(scores)


def phases(
    count: int, source: Path | None = None, target: Path | None = None
) -> tuple[list[list[float]], torch.Tensor]:
    trainer = make(reward=(reward := Noisy()), callbacks=[ProgressBar(enabled=False)])
    seed_all(99 if source else 7)
    if source is not None:
        trainer.load_checkpoint(source)
    if target is not None:
        trainer.callbacks.on_phase_end = stopping(trainer, 2)  # type: ignore[method-assign]
    trainer.fit(prompts(), num_episodes=1, max_timesteps=count, update_timesteps=1)
    if target is not None:
        trainer.save_checkpoint(target)
    return reward.given, torch.cat([p.detach().flatten() for m in trainer.models().values() for p in m.parameters()])


def stopping(trainer: Any, last: int) -> Any:
    own = trainer.callbacks.on_phase_end

    def on_phase_end(*args: Any, **kwargs: Any) -> None:
        own(*args, **kwargs)
        if trainer.phase == last:
            trainer.request_stop()

    return on_phase_end


def test_a_reward_that_draws_from_python_and_numpy_goes_on_to_the_bit(tmp_path):
    straight, whole = phases(4)
    first, _ = phases(4, target=tmp_path / 'half')
    rest, weights = phases(4, source=tmp_path / 'half')
    assert 0 < len(first) < len(straight)
    assert first + rest == straight
    assert torch.equal(weights, whole)


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
    from chatgpt.nn import GPTActor
    from chatgpt.strategies import DDPStrategy
    from chatgpt.testing.fakes import tiny_config
    from chatgpt.trainer import SFTTrainer
    from chatgpt.types import Sequence

    with DDPStrategy(device='cpu') as strategy:
        actor = GPTActor(config=tiny_config('gpt2', positions=32))
        actor, optim = strategy.prepare((actor, torch.optim.AdamW(actor.parameters())))
        one = torch.tensor([3])
        data = [Sequence(prompt_ids=one, response_ids=one, response_mask=torch.tensor([True]))] * 2
        trainer = SFTTrainer(strategy, actor, optim, data, callbacks=[ProgressBar(enabled=False)])
        seed_all(strategy.rank)
        draws()
        trainer.save_checkpoint(folder)
        want = draws()
        seed_all(50)
        trainer.load_checkpoint(folder)
        return want, draws()


def test_each_rank_keeps_its_own_generators(tmp_path):
    (want0, got0), (want1, got1) = run_distributed(each_rank_its_own, 2, str(tmp_path / 'saved'))
    assert got0 == want0
    assert got1 == want1
    assert all(a != b for a, b in zip(want0, want1, strict=True))
