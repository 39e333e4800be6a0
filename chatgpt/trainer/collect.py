"""Collecting: prompts in an order that is a function of the seed, responses, texts. One object that PPO, RFT and
evaluation hold.

    collector = Collector(strategy, engine, sampling, policy=..., tokenizer=...)
    samples = collector.generate(prompts, indices=range(first, first + len(prompts)))    # these prompts, now

    collector.set_prompts(prompts)
    timesteps = collector.collect(4, version=phase, stop=stop_agreed)      # the next prompts; None: asked to stop

The collector owns what it changes: how many prompts and samples were given out, and what was asked of an engine that
answers later. Left out: what is measured on a sample (`chatgpt.experience`), and who generates (`chatgpt.rollout`).
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch

from chatgpt.dataset.prompts import PromptOrder, PromptSet
from chatgpt.rollout import AheadEngine, ExactDraws, LocalEngine, RolloutEngine, SamplingParams, StopStrings
from chatgpt.rollout.engine import InProcessEngine
from chatgpt.rollout.episodes import EpisodeEngine
from chatgpt.rollout.stop import write_texts
from chatgpt.trainer.checkpointing import as_json
from chatgpt.trainer.failed_episodes import compared
from chatgpt.trainer.journal import Journal
from chatgpt.trainer.pipeline import Pipeline, Timestep, restored
from chatgpt.trainer.strategies.base import Strategy
from chatgpt.types import Experience, Prompt, Sample

Full = Callable[[], AbstractContextManager[Any]]
"""a context that gives the model to generate with"""


def exact_draws(engine: RolloutEngine) -> ExactDraws:
    return engine if isinstance(engine, ExactDraws) else ExactDraws(engine)


def _innermost(engine: Any) -> Any:
    """Who computes, inside of what makes episodes or exact draws of it."""
    while isinstance(engine, (EpisodeEngine, ExactDraws)):
        engine = engine.engine
    return engine


class NothingToLearn(RuntimeError):
    """Dynamic sampling found no group whose scores differ."""


def check_hears_alike(strategy: Strategy) -> None:
    """Raises ValueError, before an environment is asked, where several processes compute a rank together."""
    if strategy.processes.world_size != strategy.world_size:
        raise ValueError(
            'environment does not go with tensor_parallel: each of the processes that compute a rank together would '
            'ask an environment of its own, and need not hear the same; leave one of them out'
        )


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
        if isinstance(engine, EpisodeEngine):
            check_hears_alike(strategy)
        if strategy.exact is not None:
            if isinstance(engine, EpisodeEngine):
                engine.engine = exact_draws(engine.engine)
            else:
                engine = exact_draws(engine)
        self.strategy, self.engine, self.sampling, self.policy = strategy, engine, sampling, policy
        self.tokenizer, self.stop_strings = tokenizer, stop_strings
        self.batch_size, self.num_samples_per_prompt, self.max_staleness = (
            batch_size,
            num_samples_per_prompt,
            max_staleness,
        )
        self.pipeline = Pipeline(cast(AheadEngine, engine)) if callable(getattr(engine, 'submit', None)) else None
        if max_staleness and self.pipeline is None:
            raise ValueError(
                f'max_staleness={max_staleness} needs an engine that generates while the trainer learns, such as '
                f'RemoteEngine; {type(engine).__name__} does not'
            )
        self.prompts: PromptSet | None = None
        self.prompts_drawn = 0
        """prompts given out, all ranks together"""
        self.samples_drawn = 0
        self.generating_s = 0.0
        """this rank's own engine, since the last `taken_s`"""
        self._order: PromptOrder | None = None
        self._recorded: SequenceOf[Mapping[str, Any]] = ()
        """timesteps in flight of a checkpoint that was loaded, until `collect` needs them"""
        self._recorded_from: Mapping[str, Any] | None = None
        environment = getattr(engine, 'environment', None)
        self._journalled: Mapping[str, Any] | None = None
        """of a checkpoint that was loaded, until `collect` begins"""
        self.journal = Journal(environment['name'], tokenizer.decode) if environment is not None else None

    def set_prompts(self, prompts: PromptSet) -> None:
        """The prompts that `collect` draws from, without replacement within an epoch."""
        self.prompts = prompts
        self._order = PromptOrder(len(prompts), self.strategy.seed)

    def fingerprint(self) -> dict[str, Any]:
        """What decides the draws, beside the seed."""
        prompts = self.prompts.fingerprint() if self.prompts is not None else None
        environment = getattr(self.engine, 'environment', None)
        return {'sampling': self._generation(), 'prompts': prompts} | (
            {'environment': environment} if environment is not None else {}
        )

    def facts(self) -> dict[str, Any]:
        """What run.json says of generating and of the prompts; see `RunRecord`."""
        return {'generation': self._generation(), 'data': self.prompts.facts() if self.prompts is not None else {}}

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
        limits: SequenceOf[int | None] | None = None,
        sampling: SamplingParams | None = None,
        policy: Full | None = None,
    ) -> list[Sample]:
        """Samples of this rank's prompts, in their order, with texts.

        Args:
            indices: run-wide sample numbers, which with the seed decide every draw.
            limits: each response's own limit of new tokens. Prompts of one limit go to the engine together.
            seed, sampling, policy: in place of the strategy's and the collector's own.
        """
        sampling = sampling or self.sampling
        limits = limits if limits is not None else [sampling.max_new_tokens] * len(prompts)
        found: dict[int, Sample] = {}
        different = set(limits)
        if getattr(self.engine, 'is_shared', False):  # all ranks ask alike
            different = set().union(*self.strategy.all_gather_object(different))
        with self._begun(policy):
            for limit in sorted(different, key=lambda n: n or 0):
                at = [i for i, n in enumerate(limits) if n == limit]
                samples = self._timed(
                    [prompts[i] for i in at],
                    replace(sampling, max_new_tokens=limit),
                    seed=self.strategy.seed if seed is None else seed,
                    indices=[indices[i] for i in at],
                    groups=None if groups is None else [groups[i] for i in at],
                )
                found |= dict(zip(at, samples, strict=True))
        return self.decode([found[i] for i in range(len(prompts))])

    def _timed(self, *args: Any, **kwargs: Any) -> list[Sample]:
        start = time.perf_counter()
        samples = self.engine.generate(*args, **kwargs)
        self.generating_s += time.perf_counter() - start
        return self._of_rank(samples)

    def _of_rank(self, samples: list[Sample]) -> list[Sample]:
        """What the rank's first process has, where each has an engine with a whole model of its own: the processes of a
        rank compute every token of them together, and another GPU may have drawn another."""
        if not self._has_own_model() or getattr(self.engine, 'is_shared', False):
            return samples
        return self.strategy.ranks.from_leader(samples)

    def _has_own_model(self) -> bool:
        """Whether the engine copies whole weights, and does not compute with what the strategy gives it."""
        copies = getattr(self.engine, 'copies_weights', False)
        return copies or not isinstance(_innermost(self.engine), InProcessEngine)

    def taken_s(self) -> float:
        """Seconds that this rank's engine has generated since it was last asked; waiting for other ranks is not in
        them."""
        seconds, self.generating_s = self.generating_s, 0.0
        return seconds

    def draw_metrics(self) -> dict[str, float]:
        """`perf/...`: what `ExactDraws` drew again since it was last asked, all ranks together. A collective; nothing
        without it."""
        engine = self.engine
        engine = engine.engine if isinstance(engine, EpisodeEngine) else engine
        if not isinstance(engine, ExactDraws):
            return {}
        own = torch.tensor([engine.redrawn, engine.changed], dtype=torch.float64, device=self.strategy.device)
        engine.redrawn = engine.changed = 0
        redrawn, changed = self.strategy.all_reduce(own).tolist()
        return {'perf/redrawn_draws': redrawn, 'perf/changed_draws': changed}

    @contextmanager
    def _begun(self, policy: Full | None = None) -> Iterator[None]:
        """Inside, the engine has the policy's weights."""
        with ExitStack() as held:
            copies = getattr(self.engine, 'copies_weights', False)
            self.strategy.whole_copies = self._has_own_model()
            self.strategy.only_reads = copies
            self.engine.begin(held.enter_context((policy or self.policy)()))
            generator = _innermost(self.engine)
            if isinstance(generator, LocalEngine):
                self.strategy.keep_copy(generator, generator.keeping)
            if copies:
                held.close()  # a copy in the compute dtype would lie beside the engine's own
            try:
                yield
            finally:
                self.engine.end()

    def free(self) -> None:
        """Free what was kept for a next phase: the engine's cache and graphs, the policy's copy in 16 bits."""
        generator = _innermost(self.engine)
        if isinstance(generator, LocalEngine):
            generator.release()
            self.strategy.keep_copy(generator, False)

    def decode(self, samples: list[Sample]) -> list[Sample]:
        """The samples, with their texts where there is a tokenizer."""
        for sample in samples if self.tokenizer is not None else ():
            if sample.episode is None:  # an episode has the texts of its turns
                write_texts(sample, self.tokenizer, self.stop_strings)
        return samples

    # ------------------------------------------------------------------ the next prompts

    def collect(
        self,
        num_timesteps: int,
        *,
        version: int,
        later: SequenceOf[int] = (),
        stop: Callable[[], bool] = lambda: False,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> list[list[Sample]] | None:
        """This rank's samples of the next `num_timesteps` timesteps; None when `stop()` was true before one of them.

        Args:
            version: learning phases that the policy has behind it.
            later: timesteps of each of the following `max_staleness` phases, which are asked for as well.
            around: a context around each timestep.
        """
        assert self.prompts is not None, 'set_prompts first'
        timesteps: list[list[Sample]] = []
        with self._source(num_timesteps, version, later) as next_samples:
            for _ in range(num_timesteps):
                if stop():
                    return None
                with around():
                    timesteps.append(next_samples())
                self._note(timesteps[-1])
        return timesteps

    def _note(self, samples: list[Sample]) -> None:
        """What environments answered, and whether they did so before, unless settings or data have changed."""
        if self.journal is None:
            return
        state, self._journalled = self._journalled, None
        if state is not None and state['journal_from'] == self._made_from():
            self.journal.expect(state['journal'])
        self.journal.record(samples)

    @contextmanager
    def _source(self, count: int, version: int, later: SequenceOf[int]) -> Iterator[Callable[[], list[Sample]]]:
        """What gives this rank's samples of the next timestep, `count` times."""
        if self.pipeline is not None:
            self._ask(count, version, later)
            yield lambda: self._take(version)
            return
        with self._begun():
            yield lambda: self._rollout(version)

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
        return Timestep(
            first_prompt=first_prompt,
            first_sample=first_index,
            prompts=prompts,
            indices=indices,
            groups=groups,
            version=version,
        )

    def _rollout(self, version: int) -> list[Sample]:
        t = self._draw(version)
        samples = self._timed(t.prompts, self.sampling, seed=self.strategy.seed, indices=t.indices, groups=t.groups)
        for sample in samples:
            sample.version = t.version
        return self.decode(samples)

    # ------------------------------------------------------------------ timesteps in flight

    def _ask(self, count: int, version: int, later: SequenceOf[int]) -> None:
        """Ask for what is missing to `count` timesteps now and those of the phases to come."""
        assert self.pipeline is not None
        self._restore([count, *later], version)
        missing = count + sum(later) - len(self.pipeline.waiting)
        if missing <= 0:
            return
        with self._begun():
            for _ in range(missing):
                self.pipeline.ask(self._draw(version), self._submit)

    def _submit(self, prompts: list[Prompt], indices: list[int], groups: list[int]) -> Any:
        engine: Any = self.engine
        return engine.submit(prompts, self.sampling, seed=self.strategy.seed, indices=indices, groups=groups)

    def _take(self, version: int) -> list[Sample]:
        assert self.pipeline is not None
        timestep = self.pipeline.take()
        if version - timestep.version > self.max_staleness:
            raise RuntimeError(
                f'samples of phase {timestep.version + 1} came to phase {version + 1}, with '
                f'max_staleness={self.max_staleness}'
            )
        assert timestep.samples is not None
        timestep.samples = self._of_rank(timestep.samples)
        return self.decode(timestep.samples)

    def learned(self) -> None:
        """The timesteps that were taken are in a replay buffer; they will not be put back."""
        if self.pipeline is not None:
            self.pipeline.learned()
        if self.journal is not None:
            self.journal.clear()

    def forget_in_flight(self) -> None:
        """Their prompts are drawn again."""
        if self.pipeline is not None:
            self.prompts_drawn, self.samples_drawn = self._drawn()
            self.pipeline.clear()
        self._recorded = ()

    def give_up(self, version: int) -> list[Timestep]:
        """Forget a phase that was only partly collected, but for what older weights have generated: for `put_back`, in
        order."""
        return self.pipeline.give_up(version) if self.pipeline is not None else []

    def put_back(self, timesteps: SequenceOf[Timestep]) -> None:
        """After `load_state_dict` of the given-up phase's start."""
        if self.pipeline is not None:
            self.pipeline.put_back(timesteps)
        self.prompts_drawn += len(timesteps) * self.batch_size
        self.samples_drawn += len(timesteps) * self.batch_size * self.num_samples_per_prompt

    def _restore(self, sizes: SequenceOf[int], version: int) -> None:
        """Take up what was in flight in a checkpoint, unless settings or data have changed: then those prompts are
        asked for again."""
        records, self._recorded = self._recorded, ()
        if not records:
            return
        assert self.pipeline is not None
        due = [phase for phase, size in enumerate(sizes, version) for _ in range(size)]
        fits = len(records) <= len(due) and self._recorded_from == self._made_from()
        fits = fits and all(at - r['version'] <= self.max_staleness for at, r in zip(due, records, strict=False))
        before = self.prompts_drawn, self.samples_drawn
        timesteps = [self._draw(version) for _ in records]
        if fits and restored(records, timesteps, self.strategy.rank, self.strategy.world_size):
            self.pipeline.put_back(timesteps)
            return
        self.prompts_drawn, self.samples_drawn = before
        if self.strategy.is_rank_0:
            told = (
                f'{len(records)} timesteps in flight in the checkpoint do not fit this run; their prompts are asked '
                'for again'
            )
            warnings.warn(told, stacklevel=2)

    # ------------------------------------------------------------------ state

    def _drawn(self) -> tuple[int, int]:
        """Prompts and samples given out, but for those in flight, which a run that goes on from here asks for again."""
        if self.pipeline is not None and self.pipeline.waiting:
            first = self.pipeline.waiting[0]
            return first.first_prompt, first.first_sample
        return self.prompts_drawn, self.samples_drawn

    def state_dict(self) -> dict[str, Any]:
        prompts, samples = self._drawn()
        return {'prompts_drawn': prompts, 'samples_drawn': samples}

    def in_flight(self) -> dict[str, Any]:
        """For a checkpoint, beside `state_dict`: the samples in flight, and what environments answered in a phase that
        was dropped, all ranks together. A collective."""
        state = self._samples_in_flight()
        if self.journal is not None:
            state['journal'] = self.journal.state(self.strategy.all_gather_object)
            state['journal_from'] = self._made_from()
        return state

    def _made_from(self) -> Any:
        """What samples follow from, but for the weights."""
        return as_json(self.fingerprint() | {'seed': self.strategy.seed})

    def _samples_in_flight(self) -> dict[str, Any]:
        if self.pipeline is None or not self.pipeline.waiting:
            return {'in_flight': list(self._recorded), 'in_flight_from': self._recorded_from} if self._recorded else {}
        record = self.pipeline.record(self.strategy.all_gather_object)
        return {'in_flight': record, 'in_flight_from': self._made_from()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.prompts_drawn, self.samples_drawn = int(state['prompts_drawn']), int(state['samples_drawn'])
        if self.pipeline is not None:
            self.pipeline.clear()
            self._recorded, self._recorded_from = list(state.get('in_flight', ())), state.get('in_flight_from')
        if self.journal is not None and 'journal' in state:
            self._journalled = state


# ---------------------------------------------------------------------- dynamic sampling


def informative_groups(experiences: list[Experience], *, apart: bool = False) -> list[list[Experience]]:
    """The groups whose scores are not all equal, in order. `apart`: equal in each reward, not in their sum."""

    def of(e: Experience) -> Any:
        return e.weighted_scores if apart else e.score

    groups: dict[int, list[Experience]] = {}
    for e in experiences:
        groups.setdefault(e.group, []).append(e)
    return [members for members in groups.values() if len({of(e) for e in compared(members)}) > 1]


def replace_uninformative(
    experiences: list[Experience],
    wanted: int,
    rounds: int,
    batch_size: int,
    more: Callable[[int], list[Experience] | None],
    *,
    apart: bool,
    tell: bool,
) -> tuple[list[Experience], dict[str, float]] | None:
    """DAPO's dynamic sampling: `wanted` groups whose scores differ, drawing further prompts for the others (Yu et al.
    2025, section 3.2).

    Args:
        rounds: most further rounds.
        more: draws and scores so many timesteps of `batch_size` prompts; None when a stop was asked for on the way.
            Then None is returned, since a phase of fewer groups would not be the one that an undisturbed run has.
        apart: see `informative_groups`.
        tell: warn when too few are found; one rank does.

    Raises:
        NothingToLearn: not one group has different scores after the last round.
    """
    done, drawn = 0, wanted
    kept = informative_groups(experiences, apart=apart)
    while len(kept) < wanted and done < rounds:
        done += 1
        missing = -(-(wanted - len(kept)) // batch_size)
        further = more(missing)
        if further is None:
            return None
        drawn += missing * batch_size
        kept += informative_groups(further, apart=apart)
    if not kept:
        raise NothingToLearn(
            f'dynamic sampling: after {done} further round{"s" * (done != 1)} all {drawn} groups have equal scores '
            'within; the task is too easy or too hard for this policy, or num_samples_per_prompt too small'
        )
    if len(kept) < wanted and tell:
        warnings.warn(f'dynamic sampling gave up after {done} rounds with {len(kept)} of {wanted} groups', stacklevel=2)
    metrics = {'rollout/dynamic_rounds': float(done), 'rollout/informative_share': len(kept) / drawn}
    return [e for group in kept[:wanted] for e in group], metrics
