"""Timesteps: prompts and sample numbers of each, functions of counters."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from chatgpt.data.prompts import PromptOrder, PromptSet
from chatgpt.rollout import Call, SamplingParams
from chatgpt.strategies.base import Strategy
from chatgpt.types import Sample


class Draws:
    """A source of timesteps, each generated when it is needed. Its counters are part of a checkpoint.

    Args:
        sampling: parameters of every call.
        batch_size: prompts of one timestep, all ranks together.
        num_samples_per_prompt: responses to each prompt.
        begun: a context in which the engine has the policy's weights.
        generate: calls the engine.
        made_from: returns everything that determines samples except the weights, as JSON.
    """

    def __init__(
        self,
        strategy: Strategy,
        sampling: SamplingParams,
        batch_size: int,
        num_samples_per_prompt: int,
        *,
        begun: Callable[[], AbstractContextManager[Any]],
        generate: Callable[[Call], list[Sample]],
        made_from: Callable[[], Any],
    ) -> None:
        self.strategy, self.sampling = strategy, sampling
        self.begun, self.generate, self.made_from = begun, generate, made_from
        self.batch_size, self.num_samples_per_prompt = batch_size, num_samples_per_prompt
        self.prompts: PromptSet | None = None
        self._order: PromptOrder | None = None
        self.prompts_drawn = 0
        """number of prompts used, all ranks together"""
        self.samples_drawn = 0

    def set_prompts(self, prompts: PromptSet) -> None:
        """Sets the prompts, which are sampled without replacement within an epoch."""
        self.prompts, self._order = prompts, PromptOrder(len(prompts), self.strategy.seed)

    def number(self, count: int) -> int:
        """Reserves run-wide numbers for `count` samples of this rank and returns the first. A collective."""
        counts = self.strategy.all_gather_object(count)
        first = self.samples_drawn + sum(counts[: self.strategy.rank])
        self.samples_drawn += sum(counts)
        return first

    def draw(self) -> tuple[Call, int, int]:
        """Returns the engine's call for this rank's share of the next timestep, and the numbers of its first prompt and
        its first sample, all ranks together."""
        if self.prompts is None or self._order is None:
            raise ValueError('collect: there are no prompts: call set_prompts first')
        n, k = self.batch_size, self.num_samples_per_prompt
        first_prompt, first_sample, share = self.prompts_drawn, self.samples_drawn, n // self.strategy.world_size
        own = range(self.strategy.rank * share, (self.strategy.rank + 1) * share)
        call = Call.of(
            [self.prompts[self._order[first_prompt + i]] for i in own for _ in range(k)],
            self.sampling,
            seed=self.strategy.seed,
            indices=[first_sample + i * k + j for i in own for j in range(k)],
            groups=[first_prompt + i for i in own for _ in range(k)],
        )
        self.prompts_drawn += n
        self.samples_drawn += n * k
        return call, first_prompt, first_sample

    @contextmanager
    def source(self, sizes: SequenceOf[int], version: int) -> Iterator[Callable[[], list[Sample]]]:
        """Yields a function that returns the samples of the next timestep; it may be called `sizes[0]` times.

        Args:
            sizes: numbers of timesteps of this phase and the following ones.
            version: learning phases of the policy.
        """

        def next_samples() -> list[Sample]:
            samples = self.generate(self.draw()[0])
            for sample in samples:
                sample.version = version
            return samples

        with self.begun():
            yield next_samples

    def learned(self) -> None:
        """Forgets the timesteps that were taken, once they are in the replay buffer."""

    def forget(self) -> None:
        """Drops the samples in flight; their prompts are used again."""

    def alone(self) -> AbstractContextManager[Any]:
        """Context in which nothing else uses the engine."""
        return nullcontext()

    @contextmanager
    def dropped(self, version: int) -> Iterator[None]:
        """Context of a `load_state_dict` that drops a phase: tokens of older weights stay in flight."""
        yield

    def state_dict(self) -> dict[str, int]:
        return {'prompts_drawn': self.prompts_drawn, 'samples_drawn': self.samples_drawn}

    def before_in_flight(self) -> dict[str, int]:
        """Returns the counters before what is in flight, if that is dropped and has to be drawn again; else {}."""
        return {}

    def state(self) -> dict[str, Any]:
        """Returns everything in flight as JSON and tensors, all ranks together. A collective."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        self.prompts_drawn, self.samples_drawn = int(state['prompts_drawn']), int(state['samples_drawn'])
        records = state.get('in_flight')
        if type(self) is not Draws or not records:
            return
        if not state.get('schedule'):
            self.go_back(records)
        elif self.strategy.is_rank_0:
            text = 'prompts in flight in the checkpoint of a stream are left out: only rollout workers go on with them'
            warnings.warn(text, stacklevel=2)

    def go_back(self, records: SequenceOf[Mapping[str, Any]]) -> None:
        """Sets the counters to those before whole timesteps in flight, which are then drawn again."""
        self.prompts_drawn = min(record['first_prompt'] for record in records)
        self.samples_drawn = min(record['first_sample'] for record in records)
