"""Collection of samples for PPO, RFT and evaluation: prompts in an order that is a function of the seed, responses,
texts.

A `Collector` owns the plan of a fit, the counters of timesteps, prompts and samples, and requests in flight (`draws`).
`generate` answers given prompts; `collect` the next phase of a plan, with prompts of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch

from chatgpt.data.formats import choice_facts
from chatgpt.data.prompts import PromptSet
from chatgpt.rollout import Call, RolloutEngine, SamplingParams, StopStrings, WeightsLost
from chatgpt.rollout.exact import ExactDraws
from chatgpt.rollout.stop import write_texts
from chatgpt.strategies.base import Strategy
from chatgpt.trainer.checkpointing import as_json
from chatgpt.trainer.draws import Draws
from chatgpt.trainer.fits import check_one_process_per_rank
from chatgpt.trainer.journal import Journal
from chatgpt.trainer.schedule import FitPlan
from chatgpt.trainer.stream import Stream
from chatgpt.types import Prompt, Sample

Full = Callable[..., AbstractContextManager[Any]]
"""a context that yields the model to generate with"""


class Collector:
    """Generates on this rank's share of the prompts.

    Args:
        strategy: splits prompts over ranks.
        engine: generates; in an exact run, through `ExactDraws`.
        sampling, stop_strings: settings of generation, and texts that end a response.
        policy: yields the model to generate with, whole weights; entered once per `generate` and per `collect`.
        tokenizer: writes prompt and response texts into the samples; None if no part reads text.
        batch_size: prompts of a timestep, all ranks together.
        num_samples_per_prompt: responses to each prompt.
        max_staleness: maximum age, in learning phases, of the weights that generate a sample; more than 0 needs an
            asynchronous engine.

    Raises:
        ValueError: `max_staleness` with a synchronous engine; in an exact run, an engine that does not support exact
            draws; episodes under tensor parallelism.
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
            check_one_process_per_rank(strategy)
        if strategy.sums.exact:
            engine = engine.with_draws_of(ExactDraws)
        self.strategy, self.engine, self.sampling, self.policy = strategy, engine, sampling, policy
        self.tokenizer, self.stop_strings = tokenizer, stop_strings
        given = strategy, sampling, batch_size, num_samples_per_prompt
        functions: Any = {'begun': self._begun, 'generate': self._timed, 'made_from': self._made_from}
        self.draws = Draws(*given, **functions)
        if engine.abilities.answers_ahead:
            self.draws = Stream(engine, max_staleness, *given, **functions)
        elif max_staleness:
            raise ValueError(
                f'max_staleness={max_staleness} needs an engine that generates while the trainer learns, such as '
                f'RemoteEngine; {type(engine).__name__} does not'
            )
        self.timestep = 0
        """number of collected timesteps"""
        self.plan = FitPlan()
        self.generating_s = 0.0
        """seconds of this rank's engine since the last `taken_s`"""
        name = None if engine.environment is None else engine.environment['name']
        self.journal = None if name is None else Journal(name, tokenizer.decode, strategy)

    def set_prompts(self, prompts: PromptSet) -> None:
        """Sets the prompts of `collect`, which are sampled without replacement within an epoch."""
        self.draws.set_prompts(prompts)

    def fingerprint(self) -> dict[str, Any]:
        """Returns everything that determines samples, beside the seed."""
        prompts = self.draws.prompts.fingerprint() if self.draws.prompts is not None else None
        environment = {} if self.engine.environment is None else {'environment': self.engine.environment}
        strings = list(self.stop_strings.strings) if self.stop_strings is not None else []
        return {'sampling': self._generation(), 'prompts': prompts, 'stop_strings': strings} | environment

    def facts(self) -> dict[str, Any]:
        """Returns the facts of generation and prompts for run.json; see `RunRecord`."""
        data = self.draws.prompts.facts() if self.draws.prompts is not None else {}
        return {'generation': self._generation(), 'data': data | choice_facts(self.tokenizer)}

    def _generation(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self.sampling).items() if k != 'stop'}

    # ------------------------------------------------------------------ given prompts

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
        """Returns the samples of this rank's prompts, in their order, with texts.

        Args:
            indices: run-wide sample numbers, which with the seed determine every draw.
            limits: maximum of new tokens per response, in place of that of `sampling`.
            seed, sampling, policy: in place of the strategy's and the collector's own.
        """
        sampling = sampling or self.sampling
        if limits is not None:  # all ranks use the same maximum
            longest = max(max(each, default=1) for each in self.strategy.all_gather_object(list(limits)))
            sampling = replace(sampling, max_new_tokens=longest)
        seed = self.strategy.seed if seed is None else seed
        call = Call.of(prompts, sampling, seed=seed, indices=indices, groups=groups, limits=limits)
        samples: list[Sample] | None = None
        while samples is None:
            with self._begun(policy):
                samples = self._timed_or_lost(call)
        return self._finished(samples)

    def _timed_or_lost(self, call: Call) -> list[Sample] | None:
        """Returns the samples of a call, or None on every rank if the workers of one have died with their weights."""
        if not self.engine.abilities.answers_ahead:
            return self._timed(call)
        samples: list[Sample] | None = None
        with suppress(WeightsLost):
            samples = self._timed(call)
        return None if any(self.strategy.all_gather_object(samples is None)) else samples

    def _timed(self, call: Call) -> list[Sample]:
        ranks, together = self.strategy.ranks, self.engine.abilities.spans_ranks
        with ranks.untimed():
            start = time.perf_counter()
            samples = self.engine.generate(call if together else call.part(ranks.own_part(len(call.prompts))))
            self.generating_s += time.perf_counter() - start
        return samples if together else ranks.from_parts(samples)

    def _finished(self, samples: list[Sample]) -> list[Sample]:
        """Returns samples with texts; where each process of a rank has an engine with a whole model, those of the
        first: the processes compute every token of a sample together, and their GPUs may sample different ones."""
        can = self.engine.abilities
        if can.copies_weights and not can.spans_ranks:
            samples = self.strategy.ranks.from_leader(samples)
        return self.decode(samples)

    def taken_s(self) -> float:
        """Returns the seconds that this rank's engine has generated since the last call, without waiting for other
        ranks."""
        seconds, self.generating_s = self.generating_s, 0.0
        return seconds

    def draw_metrics(self) -> dict[str, float]:
        """Returns `perf/...`: the engine's counts since the last call, all ranks together. A collective if it counts
        anything."""
        counts = self.engine.counts()
        if not counts:
            return {}
        own = torch.tensor(list(counts.values()), dtype=torch.float64, device=self.strategy.device)
        return {f'perf/{name}': n for name, n in zip(counts, self.strategy.all_reduce(own).tolist(), strict=True)}

    @contextmanager
    def _begun(self, policy: Full | None = None) -> Iterator[None]:
        """Context in which the engine has the policy's weights."""
        with self.draws.alone(), ExitStack() as held:
            copies = self.engine.abilities.copies_weights
            apart = {'folded': False} if self.engine.abilities.takes_adapters else {}
            full = (policy or self.policy)(whole=copies, read_only=copies, **apart)
            self.engine.begin(held.enter_context(full))
            self.strategy.keep_copy(self.engine.generator, self.engine.keeping)
            if copies:
                held.close()  # frees the copy in the compute dtype beside the engine's own
            try:
                yield
            finally:
                self.engine.end()

    def free(self) -> None:
        """Frees everything kept for the next phase: the engine's cache and graphs, the policy's copy in 16 bits."""
        self.engine.release()
        self.strategy.keep_copy(self.engine.generator, False)

    def decode(self, samples: list[Sample]) -> list[Sample]:
        """Writes the texts of the samples, if there is a tokenizer, and returns the samples."""
        for sample in samples if self.tokenizer is not None else ():
            if sample.episode is None:  # episodes hold the texts of their turns
                write_texts(sample, self.tokenizer, self.stop_strings)
        return samples

    # ------------------------------------------------------------------ the next prompts

    def set_plan(self, plan: FitPlan, *, resume: bool = False) -> None:
        """Sets the plan that `collect` follows, one phase per call; with `resume`, timesteps of a checkpoint are its
        beginning."""
        if not resume:
            self.draws.forget()
        self.plan = replace(plan, start=self.plan.start if resume else self.timestep)

    def phases(self) -> list[int]:
        """Returns the timesteps of each remaining phase of the plan."""
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
        """Returns this rank's samples of each timestep; None if `stop()` was True before one of them.

        An asynchronous engine also receives the timesteps of the plan's next `max_staleness` phases.

        Args:
            num_timesteps: None takes the next phase of the plan.
            version: number of learning phases of the policy.
            counts: the timesteps belong to the plan; False for further prompts of the same phase.
            around: a context of each timestep, which ends after the timestep is counted.
        """
        coming = self.phases()
        if num_timesteps is None:
            if not coming:
                raise ValueError('collect() takes the next phase of `fit`, and there is none: give num_timesteps')
            num_timesteps, *coming = coming
        timesteps: list[list[Sample]] = []
        with self.draws.source([num_timesteps, *coming], version) as next_samples:
            for _ in range(num_timesteps):
                if stop():
                    return None
                with around():
                    timesteps.append(self._finished(next_samples()))
                    self.timestep += counts
                if self.journal is not None:
                    self.journal.record(timesteps[-1], self._made_from)
        return timesteps

    # ------------------------------------------------------------------ state

    def learned(self) -> None:
        """Forgets the timesteps that were taken: they are in a replay buffer and will not be dropped."""
        self.draws.learned()
        if self.journal is not None:
            self.journal.clear()

    def state_dict(self) -> dict[str, Any]:
        return {'timestep': self.timestep, 'fit_start': self.plan.start, **self.draws.state_dict()}

    def before_in_flight(self) -> dict[str, Any]:
        """See `Draws.before_in_flight`."""
        return self.draws.before_in_flight()

    def in_flight(self) -> dict[str, Any]:
        """Returns the state of a checkpoint beside `state_dict`: samples in flight, and answers of environments in a
        dropped phase, all ranks together. A collective."""
        journal = {} if self.journal is None else self.journal.state(self._made_from)
        return self.draws.state() | journal

    def _made_from(self) -> Any:
        """Returns everything that determines samples, except the weights."""
        return as_json(self.fingerprint() | {'seed': self.strategy.seed})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.timestep, self.plan = int(state['timestep']), replace(self.plan, start=int(state['fit_start']))
        self.draws.load(state)
        if self.journal is not None:
            self.journal.load(state)
