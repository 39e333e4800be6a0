"""A loop of the caller's own: `generate`, then `step(queries, responses, scores)`, with checks of the arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from chatgpt.data.prompts import as_prompts
from chatgpt.nn.trunk import text_config
from chatgpt.rollout import SamplingParams
from chatgpt.rollout.call import Call
from chatgpt.rollout.sampling import sampling_for
from chatgpt.rules import check
from chatgpt.trainer.base import Trainer
from chatgpt.trainer.collect import Collector
from chatgpt.trainer.config import PPOConfig
from chatgpt.trainer.experience import ExperienceMaker
from chatgpt.trainer.rules import STEP_RULES
from chatgpt.trainer.selection import Selection
from chatgpt.types import Experience, FinishReason, Prompt, Sample


class Stepwise(Trainer):
    """A trainer of experience with responses from `fit` or from the caller."""

    config: PPOConfig
    collector: Collector
    maker: ExperienceMaker
    selection: Selection
    generation: dict[str, Any]
    """keywords of generation"""
    _generated_with: tuple[SamplingParams, ...] = ()
    """sampling of the latest `generate`: in `step` its end tokens and stop strings end responses too"""

    def make(self, samples: list[Sample], **given: Any) -> list[Experience]:
        """Returns the experience of all ranks; see `ExperienceMaker.make`."""
        raise NotImplementedError

    def keep(self, experiences: list[Experience], metrics: Mapping[str, float]) -> None:
        """Adds experience to the buffer, with metrics of its collection."""
        raise NotImplementedError

    def learn(self) -> dict[str, float]:
        """Runs one learning phase; returns its metrics."""
        raise NotImplementedError

    def generate(
        self,
        queries: Tensor | SequenceOf[Tensor] | SequenceOf[str],
        *,
        length_sampler: Callable[[], int] | None = None,
        return_prompt: bool = False,
        **generate_kwargs: Any,
    ) -> list[Tensor]:
        """Returns responses of the current policy: a list of (A,) int64 tensors. Each rank passes and gets its own
        share.

        Args:
            queries: (P,) id tensors, or texts if the trainer has a tokenizer; a single one counts as a list of one.
            length_sampler: called once per query; returns the maximum of new tokens of its response.
            return_prompt: prepend the prompt's tokens to the response's.
            **generate_kwargs: generation settings for this call, in place of the trainer's.

        Raises:
            ValueError: an unknown setting, a prompt without room for a response.
        """
        prompts = self._prompts('generate', [queries] if isinstance(queries, (Tensor, str)) else list(queries))
        actor = self.models()['actor']
        sampling, _ = sampling_for(self.strategy.unwrap(actor), self.tokenizer, self.generation | generate_kwargs)
        self._generated_with = (sampling,)
        limits = None if length_sampler is None else [length_sampler() for _ in prompts]
        first = self.collector.draws.number(len(prompts))
        indices = range(first, first + len(prompts))
        with self.clock.measure('collect'), self.strategy.onload(actor):
            samples = self.collector.generate(prompts, indices=indices, limits=limits, sampling=sampling)
        return [torch.cat([s.prompt_ids, s.response_ids]) if return_prompt else s.response_ids for s in samples]

    def step(
        self,
        queries: SequenceOf[Tensor] | SequenceOf[str],
        responses: SequenceOf[Tensor],
        scores: SequenceOf[float | Tensor],
        response_masks: SequenceOf[Tensor] | None = None,
    ) -> dict[str, float]:
        """Runs one learning phase on responses scored by the caller: this rank's share, all lists equally long.

        Args:
            queries: (P,) id tensors or texts. For an estimator that compares responses, each query is repeated
                `num_samples_per_prompt` times in a row.
            responses: (A,) int64 tensors, the sampled tokens themselves.
            scores: a number per response, or (A,) scores per token.
            response_masks: (A,) bool, True for tokens of the model itself; False for tool output and other turns.

        Returns:
            The metrics of the phase, named as in metrics.jsonl.

        Raises:
            ValueError: lists of different lengths, an empty response, a token id outside of the vocabulary, a score
                that is not finite, queries that do not form groups, a setting that only `fit` supports.
        """
        prompts = self._prompts('step', list(queries))
        check_ids('step: response', responses, self.strategy.unwrap(self.models()['actor']))
        sampled = [self.collector.sampling, *self._generated_with]
        samples, checked = given_samples(prompts, responses, scores, response_masks, sampled)
        starts = given_groups(prompts, self.config)
        first = self.collector.draws.number(len(samples))
        for i, sample in enumerate(samples):
            sample.index, sample.group, sample.version = first + i, first + starts[i], self.phase
        # These tokens may come from any source, so the denominator of the ratio is recomputed.
        settings = replace(self.maker.settings, recompute_logprobs=True)
        experiences = self.make(self.collector.decode(samples), scores=checked, settings=settings)
        for e in experiences:
            e.logprobs = e.old_logprobs  # nothing is known of those that generated
        self.keep(experiences, self.selection.of_step(experiences))
        return self.learn()

    def log_stats(
        self,
        stats: Mapping[str, float],
        batch: Mapping[str, SequenceOf[Any]] | None = None,
        rewards: SequenceOf[float] | None = None,
        columns_to_log: SequenceOf[str] = ('query', 'response'),
    ) -> None:
        """Passes the numbers of a `step`, and rows of a batch, to the callbacks' sample tables."""
        self.callbacks.on_log(self, dict(stats), batch or {}, list(rewards or ()), list(columns_to_log))

    def _prompts(self, what: str, queries: list[Any]) -> list[Prompt]:
        if self.collector.engine.environment is not None:
            raise ValueError(
                'an environment acts in fit only: for generate and step leave environment out, and give step '
                "response_masks for tokens that are not the policy's"
            )
        check(self.config, STEP_RULES)
        prompts = list(as_prompts(queries, self.tokenizer))
        check_ids(f'{what}: query', [p.ids for p in prompts], self.strategy.unwrap(self.models()['actor']))
        return prompts


def given_groups(prompts: SequenceOf[Prompt], config: PPOConfig) -> list[int]:
    """Returns, for each response in a list of `step`, the position of the first one of its group.

    For an estimator that compares responses, every `num_samples_per_prompt` consecutive ones are a group; for others
    each is its own.

    Raises:
        ValueError: a list that does not divide into groups, or a group with different prompts.
    """
    if not config.estimator.needs_groups:
        return list(range(len(prompts)))
    size, name = config.num_samples_per_prompt, config.advantage_estimator
    if len(prompts) % size:
        raise ValueError(
            f'step: {name} compares groups of num_samples_per_prompt={size}; {len(prompts)} responses do not divide '
            'into them'
        )
    starts = [i // size * size for i in range(len(prompts))]
    for i, start in enumerate(starts):
        if not torch.equal(prompts[i].ids, prompts[start].ids):
            raise ValueError(
                f'step: queries {start} to {start + size - 1} are one group of {name} and must be equal; query {i} is '
                'not'
            )
    return starts


def given_samples(
    prompts: SequenceOf[Prompt],
    responses: SequenceOf[Tensor],
    scores: SequenceOf[float | Tensor],
    masks: SequenceOf[Tensor] | None,
    sampled: SequenceOf[SamplingParams],
) -> tuple[list[Sample], list[float | Tensor]]:
    """Makes samples and scores from the arguments of `step`.

    A response has ended if its last token is an end token, or a stop string is at its end, for any of the settings
    `sampled`.

    Raises:
        ValueError: lists of different lengths, an empty response, a mask of the wrong length.
    """
    lengths = {'queries': len(prompts), 'responses': len(responses), 'scores': len(scores)}
    if masks is not None:
        lengths['response_masks'] = len(masks)
    if len(set(lengths.values())) != 1 or not prompts:
        raise ValueError(f'step needs lists of one length, at least 1; got {lengths}')
    call = Call.of(prompts, sampled[0], seed=0, indices=range(len(prompts)))
    samples, checked = [], []
    for i, response in enumerate(responses):
        ids = torch.as_tensor(response, dtype=torch.int64).flatten().cpu()
        mask = torch.ones(len(ids)) if masks is None else torch.as_tensor(masks[i])
        mask = mask.bool().flatten().cpu()
        score = torch.as_tensor(scores[i], dtype=torch.float32).cpu()
        dense = score.dim() > 0 and score.numel() > 1
        if len(ids) == 0:
            raise ValueError(f'step: response {i} is empty; it needs at least its end token')
        if not score.numel():
            raise ValueError(f'step: scores[{i}] is empty')
        if len(mask) != len(ids):
            raise ValueError(f'step: response_masks[{i}] has {len(mask)} entries for {len(ids)} tokens')
        if dense and len(score) != len(ids):
            raise ValueError(f'step: scores[{i}] has {len(score)} entries for {len(ids)} tokens')
        if not torch.isfinite(score).all():
            raise ValueError(f'step: scores[{i}] is not finite')
        zeros = torch.zeros(len(ids))
        sample = call.sample(i, ids, zeros, zeros, torch.ones(len(ids)), _finish_reason(ids.tolist(), sampled))
        sample.response_mask = mask
        samples.append(sample)
        checked.append(score.flatten() if dense else float(score.flatten()[0]))
    return samples, checked


def _finish_reason(ids: list[int], sampled: SequenceOf[SamplingParams]) -> FinishReason:
    if any(ids[-1] in s.eos_token_ids for s in sampled):
        return 'eos'
    return 'stop' if any(s.stop is not None and s.stop(ids) for s in sampled) else 'length'


def check_ids(what: str, ids: SequenceOf[Tensor], actor: nn.Module) -> None:
    """Raises ValueError for a token id outside of the actor's vocabulary."""
    config = getattr(getattr(actor, 'model', None), 'config', None)
    size = getattr(text_config(config), 'vocab_size', None)
    for i, given in enumerate(ids):
        outside = [] if size is None else [t for t in torch.as_tensor(given).flatten().tolist() if not 0 <= t < size]
        if outside:
            raise ValueError(
                f'{what} {i} has the token id {outside[0]}, outside of the vocabulary of {size} tokens; use its '
                'tokenizer'
            )
