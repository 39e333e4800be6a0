"""Tools of conformance checks: a bench that builds and trains tiny models, tolerances, and assertions."""

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
    """The allowed differences from `NaiveStrategy` in the same precision."""

    parameter_max: float = 0.05
    """of any weight, in learning rates per step"""
    parameter_mean: float = 0.05
    """of weights on average, in learning rates per step"""
    loss: float = 1e-5
    """of losses, relative"""
    norm: float = 1e-4
    """of gradient norms, relative"""


FP32 = Tolerance()
BF16 = Tolerance(parameter_max=2.0, parameter_mean=0.2, loss=2e-2, norm=5e-2)
"""Adam's first steps are close to lr * sign(gradient). A gradient below bf16's rounding noise (2**-8 relative to its
largest terms) may have either sign, so a single weight may differ by 2 lr per step; the mean shows that most weights
agree. Losses are sums of terms rounded to 2**-8."""


class ConformanceError(AssertionError):
    """Raised if a check fails, with its name and the difference."""


class Refused(Exception):
    """Raised if the strategy does not support what a check tests."""


@dataclass(kw_only=True)
class Bench:
    """The strategies, models and files of a check."""

    make_strategy: Callable[[], Strategy]
    folder: Path
    """an empty folder, shared by all ranks"""
    tolerance: Tolerance = FP32
    make_model: Callable[[], nn.Module] = TinyPolicy
    make_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None
    """None: the strategy's `make_optimizer`"""
    make_reference: Callable[[Strategy], Strategy] = lambda s: NaiveStrategy(
        s.seed, s.numerics.precision, device=s.device
    )
    """one process in the same precision on the same device"""
    _numbers: Iterator[int] = field(default_factory=lambda: iter(range(1_000_000)))

    def path(self, suffix: str = '') -> Path:
        """Returns a new path, the same on every rank."""
        return self.folder / f'{next(self._numbers):04d}{suffix}'

    def optimizer(self, strategy: Strategy, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Returns Adam with learning rate `LR` and eps 1e-5."""
        if self.make_optimizer is not None:
            return self.make_optimizer(parameters)
        return strategy.make_optimizer(parameters, lr=LR, eps=1e-5)

    def pair(self, strategy: Strategy) -> tuple[nn.Module, Optimizer]:
        """Returns a new model and its optimizer, prepared for training."""
        with strategy.model_init_context():
            model = self.make_model()
        return strategy.prepare((model, self.optimizer(strategy, (p for p in model.parameters() if p.requires_grad))))

    def weights(self, strategy: Strategy, model: nn.Module) -> dict[str, Tensor]:
        """Returns full weights, saved to one file and read by plain torch."""
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
        """Trains on batches that depend on the step number alone; returns (loss, gradient norm) of each step."""
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
        """Returns this rank's first micro-batch of `tiny_sequences` and its weights, on the device."""
        batch, weights = tiny_micro_batches(tiny_sequences(seed=seed), strategy.rank, strategy.world_size)[0]
        return batch.to(strategy.device), weights.to(strategy.device)

    def compare(self, got: dict[str, Tensor], want: dict[str, Tensor], steps: int, what: str) -> None:
        """Compares weights, within the tolerance for `steps` steps."""
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
        """Compares losses and norms, within the tolerance."""
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
    """Checks for the same names and bits."""
    expect(got.keys() == want.keys(), f'{what}: names differ: {sorted(got.keys() ^ want.keys())[:5]}')
    different = [n for n in want if got[n].shape != want[n].shape or not torch.equal(got[n], want[n])]
    expect(not different, f'{what}: {", ".join(different[:5])} differ(s)')


@contextmanager
def raises(kinds: type[Exception] | tuple[type[Exception], ...], text: str, what: str) -> Iterator[None]:
    """Checks that the body raises one of `kinds` with `text` in its message."""
    try:
        yield
    except kinds as error:
        expect(text in str(error), f'{what}: the message {str(error)!r} does not mention {text!r}')
    else:
        raise ConformanceError(f'{what}: no error was raised')


Check = Callable[[Bench], None]
