"""What a conformance check works with: a bench that makes and trains tiny models, tolerances, words for results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from chatgpt.strategies.base import Strategy
from chatgpt.strategies.naive import NaiveStrategy
from chatgpt.testing.tiny import TinyPolicy, tiny_loss, tiny_micro_batches, tiny_sequences
from chatgpt.types import Batch, Sequence

LR = 1e-2


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How far from `NaiveStrategy` in the same precision a strategy's numbers may be."""

    parameter_max: float = 0.05
    """largest distance of a weight, in learning rates per step"""
    parameter_mean: float = 0.05
    """mean distance of the weights, in learning rates per step"""
    loss: float = 1e-5
    """relative"""
    norm: float = 1e-4
    """relative, of gradient norms"""


FP32 = Tolerance()
BF16 = Tolerance(parameter_max=2.0, parameter_mean=0.2, loss=2e-2, norm=5e-2)
"""Adam's first steps are close to lr * sign(gradient). A gradient below bf16's rounding noise (2**-8 relative to its
largest terms) may have either sign, which puts a single weight up to 2 lr per step apart; the mean shows whether most
agree. Losses are sums of terms rounded to 2**-8."""


class ConformanceError(AssertionError):
    """A check failed; the message says which and how."""


class Refused(Exception):
    """The strategy refused, by name, what the check is about."""


@dataclass(kw_only=True)
class Bench:
    """What a check works with."""

    make_strategy: Callable[[], Strategy]
    folder: Path
    """shared by all ranks, empty at first"""
    tolerance: Tolerance = FP32
    make_model: Callable[[], nn.Module] = TinyPolicy
    make_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None
    """None takes the strategy's own `make_optimizer`"""
    make_reference: Callable[[Strategy], Strategy] = lambda s: NaiveStrategy(
        s.seed, s.numerics.precision, device=s.device
    )
    """one process in the same precision on the same device"""
    _numbers: Iterator[int] = field(default_factory=lambda: iter(range(1_000_000)))

    def path(self, suffix: str = '') -> Path:
        """A path not used before, the same on every rank."""
        return self.folder / f'{next(self._numbers):04d}{suffix}'

    def optimizer(self, strategy: Strategy, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Adam with a learning rate of `LR` and eps 1e-5."""
        if self.make_optimizer is not None:
            return self.make_optimizer(parameters)
        return strategy.make_optimizer(parameters, lr=LR, eps=1e-5)

    def pair(self, strategy: Strategy) -> tuple[nn.Module, Optimizer]:
        """A new model and its optimizer, prepared for training."""
        with strategy.model_init_context():
            model = self.make_model()
        return strategy.prepare((model, self.optimizer(strategy, (p for p in model.parameters() if p.requires_grad))))

    def weights(self, strategy: Strategy, model: nn.Module) -> dict[str, Tensor]:
        """Full weights, by way of the one-file format that plain torch reads."""
        path = self.path('.pt')
        strategy.save_model(model, path)
        strategy.barrier()
        return torch.load(path, weights_only=True)

    def train(
        self,
        strategy: Strategy,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        steps: int = 3,
        first: int = 0,
        max_tokens: int | None = None,
        max_norm: float | None = None,
        sequences: list[Sequence] | None = None,
    ) -> list[tuple[float, float]]:
        """Optimizer steps on batches that depend on the step number alone; (loss, gradient norm) of each."""
        results = []
        for step in range(first, first + steps):
            data = sequences or tiny_sequences(seed=step)
            micro_batches = tiny_micro_batches(data, strategy.rank, strategy.world_size, max_tokens)
            total = torch.zeros((), device=strategy.device)
            for number, (batch, weights) in enumerate(micro_batches):
                with strategy.accumulate(model, last=number == len(micro_batches) - 1):
                    with strategy.autocast():
                        loss = tiny_loss(model(batch.to(strategy.device)), weights.to(strategy.device))
                    strategy.backward(loss, model, optimizer)
                total += loss.detach()
            norm = strategy.optimizer_step(optimizer, max_norm)
            results.append((float(strategy.all_reduce(total)), norm))
        return results

    def batch(self, strategy: Strategy, seed: int = 0) -> tuple[Batch, Tensor]:
        """This rank's first micro-batch of `tiny_sequences`, and its weights, on the device."""
        batch, weights = tiny_micro_batches(tiny_sequences(seed=seed), strategy.rank, strategy.world_size)[0]
        return batch.to(strategy.device), weights.to(strategy.device)

    def compare(self, got: dict[str, Tensor], want: dict[str, Tensor], steps: int, what: str) -> None:
        """Weights against weights, within the tolerance for so many steps."""
        want = {name: tensor.detach().cpu() for name, tensor in want.items()}
        expect(got.keys() == want.keys(), f'{what}: names differ: {sorted(got.keys() ^ want.keys())[:5]}')
        distances = torch.cat([(got[n].double() - want[n].double()).abs().reshape(-1) for n in want])
        largest, mean = float(distances.max()) / (LR * steps), float(distances.mean()) / (LR * steps)
        expect(
            largest <= self.tolerance.parameter_max and mean <= self.tolerance.parameter_mean,
            f'{what}: weights differ by up to {largest:.3g}, on average {mean:.3g} learning rates per step; allowed '
            f'are {self.tolerance.parameter_max} and {self.tolerance.parameter_mean}',
        )

    def compare_results(self, got: list[tuple[float, float]], want: list[tuple[float, float]], what: str) -> None:
        """Losses and norms against losses and norms."""
        for step, ((loss, norm), (want_loss, want_norm)) in enumerate(zip(got, want, strict=True)):
            close(loss, want_loss, self.tolerance.loss, f'{what}: loss of step {step}')
            close(norm, want_norm, self.tolerance.norm, f'{what}: gradient norm of step {step}')


def expect(condition: bool, message: str) -> None:
    if not condition:
        raise ConformanceError(message)


def close(got: float, want: float, relative: float, what: str) -> None:
    near = got == want or abs(got - want) <= relative * abs(want)
    expect(near, f'{what} is {got!r}, expected {want!r} within {relative:g} relative')


def identical(got: dict[str, Tensor], want: dict[str, Tensor], what: str) -> None:
    """Same names, same bits."""
    expect(got.keys() == want.keys(), f'{what}: names differ: {sorted(got.keys() ^ want.keys())[:5]}')
    different = [n for n in want if got[n].shape != want[n].shape or not torch.equal(got[n], want[n])]
    expect(not different, f'{what}: {", ".join(different[:5])} differ(s)')


@contextmanager
def raises(kinds: type[Exception] | tuple[type[Exception], ...], text: str, what: str) -> Iterator[None]:
    """The body must raise one of `kinds` with `text` in its message."""
    try:
        yield
    except kinds as error:
        expect(text in str(error), f'{what}: the message {str(error)!r} does not mention {text!r}')
    else:
        raise ConformanceError(f'{what}: no error was raised')


Check = Callable[[Bench], None]
