"""PPO's first verb: generate under full weights, then score, with DAPO's dynamic sampling. A part of `PPOTrainer`.

An engine that can be asked now and answer later (`submit` and `take`) is asked for a whole phase at once and, with `max_staleness`, for
phases to come. Left out: what is measured on a sample (`chatgpt.experience`), and who generates (`chatgpt.rollout`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch

from chatgpt.nn.nlpo import MaskedPolicy
from chatgpt.trainer.checkpointing import as_json
from chatgpt.trainer.pipeline import Pipeline, Timestep, restored
from chatgpt.types import Experience, Prompt, Sample

if TYPE_CHECKING:
    from chatgpt.nn import Actor


class NothingToLearn(RuntimeError):
    """Dynamic sampling found no group whose scores differ."""


def informative_groups(experiences: list[Experience], *, apart: bool = False) -> list[list[Experience]]:
    """The groups whose scores are not all equal, in order. `apart`: equal in each reward, not in their sum."""

    def of(e: Experience) -> Any:
        return e.weighted_scores if apart else e.score

    groups: dict[int, list[Experience]] = {}
    for e in experiences:
        groups.setdefault(e.group, []).append(e)
    return [members for members in groups.values() if any(of(e) != of(members[0]) for e in members)]


class Collector:
    """Mixed into `PPOTrainer`, whose attributes it uses."""

    sampling_metrics: dict[str, float] = {}
    """of the latest `collect`: what dynamic sampling and filtering did"""
    pipeline: Pipeline | None = None
    """of an engine that answers later"""
    _later: SequenceOf[int] = ()
    _recorded: SequenceOf[Mapping[str, Any]] = ()
    """timesteps in flight of a checkpoint that was loaded, until `collect` needs them"""

    def collect(self: Any, num_timesteps: int, *, episode_length: int | None = None, later: SequenceOf[int] = ()) -> bool:
        """Generate and score `num_timesteps` timesteps into the buffer; False when a stop was asked for on the way.

        `later`: timesteps of each of the following `max_staleness` phases, which are asked for as well.
        """
        assert self.prompts is not None, 'set_prompts first'
        self._later = later
        self.callbacks.on_make_experience_start(self)
        rollouts = self._timesteps(num_timesteps, episode_length)
        if rollouts is None:
            return False
        collected = self._scored(rollouts)
        self.sampling_metrics = {}
        if self.config.dynamic_sampling_rounds:
            informative = self._informative(collected, num_timesteps * self.config.experience_batch_size)
            if informative is None:
                return False
            collected = informative
        self.sampling_metrics |= self._filter_overlong(collected) | self._staleness(collected)
        if self.pipeline is not None:
            self.pipeline.taken.clear()
        self.buffer.append(collected)
        self.last_experiences = collected
        self.callbacks.on_make_experience_end(self, collected)
        return True

    def _filter_overlong(self: Any, collected: list[Experience]) -> dict[str, float]:
        """With `overlong_filter`, no token of a response that ran out of room counts; its score stays in its group's baseline."""
        if not self.config.overlong_filter:
            return {}
        cut = [e for e in collected if not e.ended]
        for e in cut:
            e.response_mask = torch.zeros_like(e.response_mask)
        return {'rollout/filtered_share': len(cut) / len(collected)}

    def _timesteps(self: Any, count: int, episode_length: int | None) -> list[list[Sample]] | None:
        """This rank's samples of `count` timesteps, None when a stop was asked for. Without an episode length they are extra ones."""
        rollouts: list[list[Sample]] = []
        with self.clock.measure('collect'), self._source(count) as next_rollout:
            for _ in range(count):
                if self.stop_agreed():
                    return None
                episode, at = divmod(self.timestep - self.fit_start, episode_length or 1)
                if episode_length and at == 0:
                    self.callbacks.on_episode_start(self, episode)
                rollouts.append(next_rollout())
                self.timestep += 1
                if episode_length and at == episode_length - 1:
                    self.callbacks.on_episode_end(self, episode)
        return rollouts

    @contextmanager
    def _source(self: Any, count: int) -> Iterator[Callable[[], list[Sample]]]:
        """What gives this rank's samples of the next timestep, `count` times."""
        if self.pipeline is not None:
            self._ask(count)
            yield self._take
            return
        with self._begun():
            yield self._rollout

    @contextmanager
    def _begun(self: Any) -> Iterator[None]:
        """Inside, the engine has the policy's weights."""
        with self._policy() as policy:
            self.engine.begin(cast('Actor', policy))
            try:
                yield
            finally:
                self.engine.end()

    @contextmanager
    def _policy(self: Any) -> Iterator[Any]:
        """What generates: the actor with whole weights, under NLPO restricted by the mask policy."""
        with self.strategy.full_model(self.actor) as policy:
            if self.mask_model is None:
                yield policy
                return
            with self.strategy.full_model(self.mask_model) as mask:
                yield MaskedPolicy(policy, mask, self.config.nlpo_top_p, self.sampling.temperature)

    def _scored(self: Any, rollouts: list[list[Sample]]) -> list[Experience]:
        """Experience of all ranks. A KL that is paid in the loss is not paid in the rewards as well."""
        collected: list[Experience] = []
        kl_coef = self.kl_controller.value if self.config.kl_in == 'reward' else 0.0
        with self.clock.measure('score'):
            for samples in rollouts:
                collected += self.maker.make(samples, kl_coef=kl_coef)
        return collected

    def _informative(self: Any, collected: list[Experience], wanted: int) -> list[Experience] | None:
        """`wanted` groups whose scores differ, drawing further prompts for those whose do not (Yu et al. 2025, section 3.2).

        None when a stop was asked for on the way: a phase of fewer groups would not be the one that an undisturbed run has.

        Raises:
            NothingToLearn: not one group has different scores after the last round.
        """
        rounds, drawn, timestep, apart = 0, wanted, self.timestep, self.config.advantage_estimator == 'gdpo'
        kept = informative_groups(collected, apart=apart)
        while len(kept) < wanted and rounds < self.config.dynamic_sampling_rounds:
            rounds += 1
            missing = -(-(wanted - len(kept)) // self.config.experience_batch_size)
            rollouts = self._timesteps(missing, None)
            if rollouts is None:
                return None
            drawn += missing * self.config.experience_batch_size
            kept += informative_groups(self._scored(rollouts), apart=apart)
        self.timestep = timestep  # replacements are not timesteps of their own
        self.sampling_metrics['rollout/dynamic_rounds'] = float(rounds)
        self.sampling_metrics['rollout/informative_share'] = len(kept) / drawn
        if not kept:
            raise NothingToLearn(
                f'dynamic sampling: after {rounds} further round{"s" * (rounds != 1)} all {drawn} groups have equal scores within; the '
                'task is too easy or too hard for this policy, or num_samples_per_prompt too small'
            )
        if len(kept) < wanted and self.strategy.is_rank_0:
            warnings.warn(f'dynamic sampling gave up after {rounds} rounds with {len(kept)} of {wanted} groups', stacklevel=2)
        return [e for group in kept[:wanted] for e in group]

    def _draw(self: Any) -> Timestep:
        """The next `experience_batch_size` prompts: this rank's share of them, with their numbers."""
        assert self.prompts is not None and self._order is not None
        n, k = self.config.experience_batch_size, self.config.num_samples_per_prompt
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
            first_prompt=first_prompt, first_sample=first_index, prompts=prompts, indices=indices, groups=groups, version=self.phase
        )

    def _rollout(self: Any) -> list[Sample]:
        """One timestep, now: this rank's samples of the next `experience_batch_size` prompts."""
        t = self._draw()
        samples = self.engine.generate(t.prompts, self.sampling, seed=self.strategy.seed, indices=t.indices, groups=t.groups)
        for sample in samples:
            sample.version = t.version
        return self._decoded(samples)

    def _decoded(self: Any, samples: list[Sample]) -> list[Sample]:
        if self.tokenizer is not None:
            for sample in samples:
                self._decode(sample)
        return samples

    def _decode(self: Any, sample: Sample) -> None:
        """Texts for reward functions and tables. The ids stay the sampled ones; text is never tokenized again."""
        ids, stops = sample.response_ids, self.stop_strings
        sample.response_text = self.tokenizer.decode(ids, skip_special_tokens=True) if stops is None else stops.text_of(ids)
        if not sample.prompt_text:
            sample.prompt_text = self.tokenizer.decode(sample.prompt_ids, skip_special_tokens=True)

    # ------------------------------------------------------------------ timesteps in flight

    def _ask(self: Any, count: int) -> None:
        """Ask for what is missing to `count` timesteps now and those of the phases to come."""
        self._restore(count)
        missing = count + sum(self._later) - len(self.pipeline.waiting)
        if missing <= 0:
            return
        with self._begun():
            for _ in range(missing):
                self.pipeline.ask(self._draw(), self._submit)

    def _submit(self: Any, prompts: list[Prompt], indices: list[int], groups: list[int]) -> Any:
        return self.engine.submit(prompts, self.sampling, seed=self.strategy.seed, indices=indices, groups=groups)

    def _take(self: Any) -> list[Sample]:
        timestep = self.pipeline.take()
        if self.phase - timestep.version > self.config.max_staleness:
            raise RuntimeError(
                f'samples of phase {timestep.version + 1} came to phase {self.phase + 1}, with max_staleness={self.config.max_staleness}'
            )
        return self._decoded(timestep.samples)

    def _staleness(self: Any, collected: list[Experience]) -> dict[str, float]:
        """How many learning phases old the weights were that drew the samples."""
        if not self.config.max_staleness:
            return {}
        ages = [self.phase - e.version for e in collected]
        return {'rollout/staleness_mean': sum(ages) / len(ages), 'rollout/staleness_max': float(max(ages))}

    def _drawn(self: Any) -> dict[str, int]:
        """Prompts and samples given out, but for those in flight, which a run that goes on from here asks for again."""
        if self.pipeline is not None and self.pipeline.waiting:
            first = self.pipeline.waiting[0]
            return {'prompts_drawn': first.first_prompt, 'samples_drawn': first.first_sample}
        return {'prompts_drawn': self.prompts_drawn, 'samples_drawn': self.samples_drawn}

    def _forget_in_flight(self: Any) -> None:
        """Their prompts are drawn again."""
        if self.pipeline is not None:
            for name, number in self._drawn().items():
                setattr(self, name, number)
            self.pipeline.clear()
        self._recorded = ()

    def _put_back(self: Any, timesteps: list[Timestep]) -> None:
        """Timesteps of a phase that was given up, in their order."""
        for t in timesteps:
            self.pipeline.waiting.append(t)
            self.prompts_drawn += self.config.experience_batch_size
            self.samples_drawn += self.config.experience_batch_size * self.config.num_samples_per_prompt

    def _in_flight(self: Any) -> dict[str, Any]:
        """For a checkpoint: the samples in flight, all ranks together. A collective."""
        if self.pipeline is None or not self.pipeline.waiting:
            return {'in_flight': list(self._recorded)} if self._recorded else {}
        return {'in_flight': self.pipeline.record(self.strategy.all_gather_object)}

    def _restore(self: Any, count: int) -> None:
        """Take up what was in flight in a checkpoint, unless settings or data have changed: then those prompts are asked for again."""
        records, self._recorded = self._recorded, ()
        if not records:
            return
        due = [phase for phase, size in enumerate([count, *self._later], self.phase) for _ in range(size)]
        fits = len(records) <= len(due) and self._drawn_alike()
        fits = fits and all(at - r['version'] <= self.config.max_staleness for at, r in zip(due, records, strict=False))
        before = self._drawn()
        timesteps = [self._draw() for _ in records]
        if fits and restored(records, timesteps, self.strategy.rank, self.strategy.world_size):
            self.pipeline.waiting.extend(timesteps)
            return
        self.prompts_drawn, self.samples_drawn = before['prompts_drawn'], before['samples_drawn']
        if self.strategy.is_rank_0:
            warnings.warn(f'{len(records)} timesteps in flight in the checkpoint do not fit this run; their prompts are asked for again',
                          stacklevel=2)  # fmt: skip

    def _drawn_alike(self: Any) -> bool:
        """Whether prompts and sampling are those of the checkpoint that was loaded."""
        saved, now = self.saved_fingerprint or {}, as_json(self.fingerprint())
        return all(saved.get(name) == now[name] for name in ('prompts', 'sampling', 'seed'))
