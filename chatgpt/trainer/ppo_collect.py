"""PPO's first verb: generate under full weights, then score, with DAPO's dynamic sampling. A part of `PPOTrainer`.

Left out: what is measured on a sample (`chatgpt.experience`), and who generates (`chatgpt.rollout`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch

from chatgpt.nn.nlpo import MaskedPolicy
from chatgpt.types import Experience, Prompt, Sample

if TYPE_CHECKING:
    from chatgpt.nn import Actor


class NothingToLearn(RuntimeError):
    """Dynamic sampling found no group whose scores differ."""


def informative_groups(experiences: list[Experience]) -> list[list[Experience]]:
    """The groups whose scores are not all equal, in order."""
    groups: dict[int, list[Experience]] = {}
    for e in experiences:
        groups.setdefault(e.group, []).append(e)
    return [members for members in groups.values() if any(e.score != members[0].score for e in members)]


class Collector:
    """Mixed into `PPOTrainer`, whose attributes it uses."""

    sampling_metrics: dict[str, float] = {}
    """of the latest `collect`: what dynamic sampling and filtering did"""

    def collect(self: Any, num_timesteps: int, *, episode_length: int | None = None) -> bool:
        """Generate and score `num_timesteps` timesteps into the buffer; False when a stop was asked for on the way."""
        assert self.prompts is not None, 'set_prompts first'
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
        self.sampling_metrics |= self._filter_overlong(collected)
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
        with self.clock.measure('collect'), self._policy() as policy:
            self.engine.begin(cast('Actor', policy))
            try:
                for _ in range(count):
                    if self.stop_agreed():
                        return None
                    episode, at = divmod(self.timestep - self.fit_start, episode_length or 1)
                    if episode_length and at == 0:
                        self.callbacks.on_episode_start(self, episode)
                    rollouts.append(self._rollout())
                    self.timestep += 1
                    if episode_length and at == episode_length - 1:
                        self.callbacks.on_episode_end(self, episode)
            finally:
                self.engine.end()
        return rollouts

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
        rounds, drawn, timestep = 0, wanted, self.timestep
        kept = informative_groups(collected)
        while len(kept) < wanted and rounds < self.config.dynamic_sampling_rounds:
            rounds += 1
            missing = -(-(wanted - len(kept)) // self.config.experience_batch_size)
            rollouts = self._timesteps(missing, None)
            if rollouts is None:
                return None
            drawn += missing * self.config.experience_batch_size
            kept += informative_groups(self._scored(rollouts))
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

    def _rollout(self: Any) -> list[Sample]:
        """One timestep: this rank's samples of the next `experience_batch_size` prompts."""
        assert self.prompts is not None and self._order is not None
        n, k = self.config.experience_batch_size, self.config.num_samples_per_prompt
        draws = range(self.prompts_drawn, self.prompts_drawn + n)
        first_index, share = self.samples_drawn, n // self.strategy.world_size
        mine = range(self.strategy.rank * share, (self.strategy.rank + 1) * share)
        prompts, indices, groups = [], [], []
        for i in mine:
            prompt = self.prompts[self._order[draws[i]]]
            for j in range(k):
                prompts.append(prompt)
                indices.append(first_index + i * k + j)
                groups.append(draws[i])
        self.prompts_drawn += n
        self.samples_drawn += n * k
        return self._generate(prompts, indices, groups)

    def _generate(self: Any, prompts: list[Prompt], indices: list[int], groups: list[int]) -> list[Sample]:
        samples = self.engine.generate(prompts, self.sampling, seed=self.strategy.seed, indices=indices, groups=groups)
        for sample in samples:
            sample.version = self.phase
            if self.tokenizer is not None:
                self._decode(sample)
        return samples

    def _decode(self: Any, sample: Sample) -> None:
        """Texts for reward functions and tables. The ids stay the sampled ones; text is never tokenized again."""
        text = self.tokenizer.decode(sample.response_ids, skip_special_tokens=True)
        sample.response_text = self.stop_strings.cut(text) if self.stop_strings is not None else text
        if not sample.prompt_text:
            sample.prompt_text = self.tokenizer.decode(sample.prompt_ids, skip_special_tokens=True)
