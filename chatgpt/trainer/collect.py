"""Collecting: prompts in an order that is a function of the seed, responses, texts. PPO, RFT and evaluation hold a
collector. It owns the plan of a fit, how many timesteps, prompts and samples were given out, and what was asked of an
engine that answers later.

    samples = collector.generate(prompts, indices=range(first, first + len(prompts)))       # these prompts, now

    collector.set_prompts(prompts)
    collector.set_plan(Plan(total=100, per_phase=8))                                           # 8 timesteps a phase
    while collector.phases():
        timesteps = collector.collect(version=phase, stop=stop_agreed)                      # None: asked to stop
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from chatgpt.data.formats import choice_facts
from chatgpt.data.prompts import PromptOrder, PromptSet
from chatgpt.rollout import Call, RolloutEngine, SamplingParams, StopStrings
from chatgpt.rollout.exact import exact_draws
from chatgpt.rollout.stop import write_texts
from chatgpt.strategies.base import Strategy
from chatgpt.trainer.checkpointing import as_json
from chatgpt.trainer.fits import check_hears_alike
from chatgpt.trainer.journal import Journal
from chatgpt.trainer.pipeline import Pipeline, Timestep
from chatgpt.trainer.schedule import Plan
from chatgpt.types import Prompt, Sample

Full = Callable[..., AbstractContextManager[Any]]
"""a context that gives the model to generate with"""


class Collector:
    """Generates on this rank's share of the prompts.

    Args:
        strategy: splits prompts over ranks.
        engine: who generates; with `strategy.exact`, by `ExactDraws`.
        sampling, stop_strings: how, and where a response ends by its text.
        policy: gives the model to generate with, whole weights; entered once per `generate` and per `collect`.
        tokenizer: writes prompt and response texts into the samples; None where nobody reads text.
        batch_size: prompts of one timestep, all ranks together.
        num_samples_per_prompt: responses to each prompt.
        max_staleness: learning phases that the weights behind a sample may be old; more than 0 needs an engine that
            answers later.

    Raises:
        ValueError: `max_staleness` with an engine that does not answer later; with `strategy.exact`, an engine whose
            draws cannot be exact; episodes under tensor parallelism.
    """

    def __init__(
        self,
        strategy: Strategy,
        engine: RolloutEngine,
        sampling: SamplingParams,
        *,
        policy: Full,
        tokenizer: Any = None,
        stop_strings: StopStrings | None = None,
        batch_size: int = 1,
        num_samples_per_prompt: int = 1,
        max_staleness: int = 0,
    ) -> None:
        if engine.environment is not None:
            check_hears_alike(strategy)
        if strategy.exact is not None:
            engine = exact_draws(engine)
        self.strategy, self.engine, self.sampling, self.policy = strategy, engine, sampling, policy
        self.tokenizer, self.stop_strings = tokenizer, stop_strings
        self.batch_size, self.num_samples_per_prompt = batch_size, num_samples_per_prompt
        self.max_staleness = max_staleness
        self.pipeline: Pipeline | None = None
        """timesteps in flight, of an engine that answers later"""
        if engine.abilities.answers_ahead:
            self.pipeline = Pipeline(engine, strategy, max_staleness, self._draw)
        elif max_staleness:
            raise ValueError(
                f'max_staleness={max_staleness} needs an engine that generates while the trainer learns, such as '
                f'RemoteEngine; {type(engine).__name__} does not'
            )
        self.prompts: PromptSet | None = None
        self._order: PromptOrder | None = None
        self.timestep = 0
        """timesteps given out"""
        self.prompts_drawn = 0
        """prompts given out, all ranks together"""
        self.samples_drawn = 0
        self.plan = Plan()
        self.generating_s = 0.0
        """this rank's own engine, since the last `taken_s`"""
        name = None if engine.environment is None else engine.environment['name']
        self.journal = None if name is None else Journal(name, tokenizer.decode, strategy)

    def set_prompts(self, prompts: PromptSet) -> None:
        """The prompts that `collect` draws from, without replacement within an epoch."""
        self.prompts = prompts
        self._order = PromptOrder(len(prompts), self.strategy.seed)

    def fingerprint(self) -> dict[str, Any]:
        """What decides the draws, beside the seed."""
        prompts = self.prompts.fingerprint() if self.prompts is not None else None
        environment = self.engine.environment
        return {'sampling': self._generation(), 'prompts': prompts} | (
            {'environment': environment} if environment is not None else {}
        )

    def facts(self) -> dict[str, Any]:
        """What run.json says of generating and of the prompts; see `RunRecord`."""
        data = self.prompts.facts() if self.prompts is not None else {}
        return {'generation': self._generation(), 'data': data | choice_facts(self.tokenizer)}

    def _generation(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self.sampling).items() if k != 'stop'}

    # ------------------------------------------------------------------ these prompts, now

    def number(self, count: int) -> int:
        """Give run-wide numbers to `count` samples of this rank; the first. A collective."""
        counts = self.strategy.all_gather_object(count)
        first = self.samples_drawn + sum(counts[: self.strategy.rank])
        self.samples_drawn += sum(counts)
        return first

    def generate(
        self,
        prompts: SequenceOf[Prompt],
        *,
        indices: SequenceOf[int],
        groups: SequenceOf[int] | None = None,
        seed: int | None = None,
        limits: SequenceOf[int] | None = None,
        sampling: SamplingParams | None = None,
        policy: Full | None = None,
    ) -> list[Sample]:
        """Samples of this rank's prompts, in their order, with texts.

        Args:
            indices: run-wide sample numbers, which with the seed decide every draw.
            limits: each response's own limit of new tokens, in place of that of `sampling`.
            seed, sampling, policy: in place of the strategy's and the collector's own.
        """
        sampling = sampling or self.sampling
        if limits is not None:  # all ranks ask alike
            longest = max(max(each, default=1) for each in self.strategy.all_gather_object(list(limits)))
            sampling = replace(sampling, max_new_tokens=longest)
        seed = self.strategy.seed if seed is None else seed
        call = Call.of(prompts, sampling, seed=seed, indices=indices, groups=groups, limits=limits)
        with self._begun(policy):
            return self.decode(self._timed(call))

    def _timed(self, call: Call) -> list[Sample]:
        start = time.perf_counter()
        samples = self.engine.generate(call)
        self.generating_s += time.perf_counter() - start
        return self._of_rank(samples)

    def _of_rank(self, samples: list[Sample]) -> list[Sample]:
        """What the rank's first process has, where each has an engine with a whole model of its own: the processes of a
        rank compute every token of them together, and another GPU may have drawn another."""
        can = self.engine.abilities
        return self.strategy.ranks.from_leader(samples) if can.copies_weights and not can.spans_ranks else samples

    def taken_s(self) -> float:
        """Seconds that this rank's engine has generated since it was last asked; waiting for other ranks is not in
        them."""
        seconds, self.generating_s = self.generating_s, 0.0
        return seconds

    def draw_metrics(self) -> dict[str, float]:
        """`perf/...`: what the engine counted since it was last asked, all ranks together. A collective where it counts
        anything."""
        counts = self.engine.counts()
        if not counts:
            return {}
        own = torch.tensor(list(counts.values()), dtype=torch.float64, device=self.strategy.device)
        return {f'perf/{name}': n for name, n in zip(counts, self.strategy.all_reduce(own).tolist(), strict=True)}

    @contextmanager
    def _begun(self, policy: Full | None = None) -> Iterator[None]:
        """Inside, the engine has the policy's weights."""
        with ExitStack() as held:
            copies = self.engine.abilities.copies_weights
            full = (policy or self.policy)(whole=copies, read_only=copies)
            self.engine.begin(held.enter_context(full))
            self.strategy.keep_copy(self.engine.generator, self.engine.keeping)
            if copies:
                held.close()  # a copy in the compute dtype would lie beside the engine's own
            try:
                yield
            finally:
                self.engine.end()

    def free(self) -> None:
        """Free what was kept for a next phase: the engine's cache and graphs, the policy's copy in 16 bits."""
        self.engine.release()
        self.strategy.keep_copy(self.engine.generator, False)

    def decode(self, samples: list[Sample]) -> list[Sample]:
        """The samples, with their texts where there is a tokenizer."""
        for sample in samples if self.tokenizer is not None else ():
            if sample.episode is None:  # an episode has the texts of its turns
                write_texts(sample, self.tokenizer, self.stop_strings)
        return samples

    # ------------------------------------------------------------------ the next prompts

    def set_plan(self, plan: Plan, *, resume: bool = False) -> None:
        """From here on `collect` gives one phase of the plan after the other; with `resume`, what a checkpoint has
        collected is the plan's beginning."""
        if not resume:
            self.forget_in_flight()
        self.plan = replace(plan, start=self.plan.start if resume else self.timestep)

    def phases(self) -> list[int]:
        """Timesteps of each phase of the plan that is left."""
        return self.plan.phases(self.timestep)

    def collect(
        self,
        num_timesteps: int | None = None,
        *,
        version: int,
        counts: bool = True,
        stop: Callable[[], bool] = lambda: False,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> list[list[Sample]] | None:
        """This rank's samples of each timestep; None when `stop()` was true before one of them.

        An engine that answers later is also asked for the plan's next `max_staleness` phases.

        Args:
            num_timesteps: None takes the next phase of the plan.
            version: learning phases that the policy has behind it.
            counts: the timesteps are those of the plan; False for further prompts of the same phase.
            around: a context around each timestep, at the end of which it has been counted.
        """
        assert self.prompts is not None, 'set_prompts first'
        coming = self.phases()
        if num_timesteps is None:
            num_timesteps, *coming = coming
        timesteps: list[list[Sample]] = []
        with self._source(num_timesteps, version, coming[: self.max_staleness]) as next_samples:
            for _ in range(num_timesteps):
                if stop():
                    return None
                with around():
                    timesteps.append(next_samples())
                    self.timestep += counts
                if self.journal is not None:
                    self.journal.record(timesteps[-1], self._made_from)
        return timesteps

    @contextmanager
    def _source(self, count: int, version: int, later: SequenceOf[int]) -> Iterator[Callable[[], list[Sample]]]:
        """What gives this rank's samples of the next timestep, `count` times."""
        pipeline = self.pipeline
        if pipeline is None:
            with self._begun():
                yield lambda: self.decode(self._draw(version).stamped(self._timed))
            return
        if not pipeline.take_up([count, *later], version, self._made_from):
            self.forget_in_flight()
        missing = count + sum(later) - len(pipeline.waiting)
        with self._begun() if missing > 0 else nullcontext():
            for _ in range(missing):
                pipeline.ask(version)
        yield lambda: self.decode(self._of_rank(pipeline.take(version)))

    def _draw(self, version: int) -> Timestep:
        """The next prompts: this rank's share of them, with their numbers."""
        assert self.prompts is not None and self._order is not None
        n, k = self.batch_size, self.num_samples_per_prompt
        first_prompt, first_index, share = self.prompts_drawn, self.samples_drawn, n // self.strategy.world_size
        prompts, indices, groups = [], [], []
        for i in range(self.strategy.rank * share, (self.strategy.rank + 1) * share):
            prompt = self.prompts[self._order[first_prompt + i]]
            for j in range(k):
                prompts.append(prompt)
                indices.append(first_index + i * k + j)
                groups.append(first_prompt + i)
        self.prompts_drawn += n
        self.samples_drawn += n * k
        call = Call.of(prompts, self.sampling, seed=self.strategy.seed, indices=indices, groups=groups)
        return Timestep(first_prompt=first_prompt, first_sample=first_index, call=call, version=version)

    # ------------------------------------------------------------------ state

    def learned(self) -> None:
        """The timesteps that were taken are in a replay buffer; they will not be put back."""
        if self.pipeline is not None:
            self.pipeline.taken.clear()
        if self.journal is not None:
            self.journal.clear()

    def forget_in_flight(self) -> None:
        """Their prompts are drawn again."""
        if self.pipeline is not None:
            self.prompts_drawn, self.samples_drawn = self._drawn()
            self.pipeline.clear()

    @contextmanager
    def dropped(self, version: int) -> Iterator[None]:
        """Around a `load_state_dict` of a phase's start, which gives that phase up: what older weights have generated
        stays in flight."""
        kept = self.pipeline.give_up(version) if self.pipeline is not None else []
        yield
        if self.pipeline is not None:
            self.pipeline.waiting.extend(kept)
        self.prompts_drawn += len(kept) * self.batch_size
        self.samples_drawn += len(kept) * self.batch_size * self.num_samples_per_prompt

    def _drawn(self) -> tuple[int, int]:
        """Prompts and samples given out, but for those in flight, which a run that goes on from here asks for again."""
        if self.pipeline is not None and self.pipeline.waiting:
            first = self.pipeline.waiting[0]
            return first.first_prompt, first.first_sample
        return self.prompts_drawn, self.samples_drawn

    def state_dict(self) -> dict[str, Any]:
        prompts, samples = self._drawn()
        return {
            'timestep': self.timestep,
            'fit_start': self.plan.start,
            'prompts_drawn': prompts,
            'samples_drawn': samples,
        }

    def in_flight(self) -> dict[str, Any]:
        """For a checkpoint, beside `state_dict`: the samples in flight, and what environments answered in a phase that
        was dropped, all ranks together. A collective."""
        parts = [part for part in (self.pipeline, self.journal) if part is not None]
        return {name: value for part in parts for name, value in part.state(self._made_from).items()}

    def _made_from(self) -> Any:
        """What samples follow from, but for the weights."""
        return as_json(self.fingerprint() | {'seed': self.strategy.seed})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.timestep, self.plan = int(state['timestep']), replace(self.plan, start=int(state['fit_start']))
        self.prompts_drawn, self.samples_drawn = int(state['prompts_drawn']), int(state['samples_drawn'])
        for part in (self.pipeline, self.journal):
            if part is not None:
                part.load(state)
