"""PPO driven by hand: `generate`, score however you like, then `step`. The loop is the caller's.

Left out: `fit`, which drives the same verbs (`chatgpt.trainer.ppo`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from chatgpt.dataset.prompts import as_prompts
from chatgpt.trainer.ppo_setup import check_by_hand, check_ids, given_groups, given_samples, sampling_for
from chatgpt.types import Prompt, Sample

if TYPE_CHECKING:
    from chatgpt.nn import Actor
    from chatgpt.rollout import SamplingParams
    from chatgpt.trainer.ppo import PPOTrainer


class StepwisePPO:
    """The step-wise half of `PPOTrainer`, which is what `self` is. On several ranks each gives and gets its own share."""

    generated_with: SamplingParams | None = None
    """of the latest `generate`, whose end tokens and stop strings `step` knows the end of a response by, beside the trainer's own"""

    def generate(
        self: Any,
        queries: Tensor | SequenceOf[Tensor] | SequenceOf[str],
        *,
        length_sampler: Callable[[], int] | None = None,
        return_prompt: bool = False,
        generate_ref_response: bool = False,
        **generate_kwargs: Any,
    ) -> list[Tensor] | tuple[list[Tensor], list[Tensor]]:
        """Responses of the current policy: a list of (A,) int64 tensors.

        Args:
            queries: (P,) id tensors, or texts when the trainer has a tokenizer; one tensor counts as a list of one.
            length_sampler: called once per query; its number is that response's limit of new tokens.
            return_prompt: put the prompt's tokens before the response's.
            generate_ref_response: also generate with the initial model; then a pair of lists is returned.
            **generate_kwargs: generation settings that replace the trainer's for this call.

        Raises:
            ValueError: an unknown setting, a prompt without room for a response, no initial model to generate with.
        """
        check_by_hand(self.config)
        prompts = list(as_prompts([queries] if isinstance(queries, Tensor) else list(queries), self.tokenizer))
        kwargs = self.generate_kwargs | generate_kwargs
        actor = cast(Any, self.strategy.unwrap(self.actor))
        check_ids('generate: query', [p.ids for p in prompts], actor)
        sampling, _ = sampling_for(actor, self.tokenizer, kwargs)
        self.generated_with = sampling
        limits = [sampling.max_new_tokens] * len(prompts) if length_sampler is None else [length_sampler() for _ in prompts]
        if generate_ref_response and self.maker.initial_model is None:
            raise ValueError('generate_ref_response needs an initial_model of its own')
        counts = self.strategy.all_gather_object(len(prompts))
        first = self.samples_drawn + sum(counts[: self.strategy.rank])
        self.samples_drawn += sum(counts)
        models = [self.actor] + ([self.maker.initial_model] if generate_ref_response else [])
        answers = []
        for model in models:
            with self.strategy.at_hand(cast(nn.Module, model)):
                answers.append(_responses(self, cast(nn.Module, model), prompts, sampling, limits, first, return_prompt))
        return (answers[0], answers[1]) if generate_ref_response else answers[0]

    def step(
        self: Any,
        queries: SequenceOf[Tensor] | SequenceOf[str],
        responses: SequenceOf[Tensor],
        scores: SequenceOf[float | Tensor],
        response_masks: SequenceOf[Tensor] | None = None,
    ) -> dict[str, float]:
        """One learning phase on responses scored by the caller: this rank's share, all lists equally long.

        Args:
            queries: (P,) id tensors or texts. Under an estimator that compares responses, each query stands `num_samples_per_prompt`
                times in a row.
            responses: (A,) int64 tensors, the sampled tokens themselves.
            scores: a number per response, or (A,) scores per token.
            response_masks: (A,) bool, True = a token of the model's own; tool output and other turns are False.

        Returns:
            The metrics of the phase, named as in metrics.jsonl.

        Raises:
            ValueError: lists of different lengths, an empty response, a token id outside of the vocabulary, a score that is not finite,
                queries that do not make groups, a setting that only `fit` can follow.
        """
        check_by_hand(self.config)
        prompts = list(as_prompts(list(queries), self.tokenizer))
        actor = self.strategy.unwrap(self.actor)
        check_ids('step: query', [p.ids for p in prompts], actor)
        check_ids('step: response', responses, actor)
        sampled = [self.sampling, *([self.generated_with] if self.generated_with is not None else [])]
        samples, checked = given_samples(prompts, responses, scores, response_masks, sampled)
        starts = given_groups(prompts, self.config)
        counts = self.strategy.all_gather_object(len(samples))
        first = self.samples_drawn + sum(counts[: self.strategy.rank])
        for i, sample in enumerate(samples):
            sample.index, sample.group = first + i, first + starts[i]
            sample.version = self.phase
            if self.tokenizer is not None:
                self._decode(sample)
        self.samples_drawn += sum(counts)
        # These tokens may come from anywhere, so the log-probs the ratio is taken against are computed here.
        settings = replace(self.maker.settings, recompute_logprobs=True)
        with self.clock.measure('score'):
            kl_coef = self.kl_controller.value if self.config.kl_in == 'reward' else 0.0
            experiences = self.maker.make(samples, kl_coef=kl_coef, scores=checked, settings=settings)
        self.sampling_metrics = self._filter_overlong(experiences)
        self.buffer.append(experiences)
        self.last_experiences = experiences
        return self.learn_phase()

    def log_stats(
        self: Any,
        stats: Mapping[str, float],
        batch: Mapping[str, SequenceOf[Any]] | None = None,
        rewards: SequenceOf[float] | None = None,
        columns_to_log: SequenceOf[str] = ('query', 'response'),
    ) -> None:
        """Hand the numbers of a `step`, and rows of a batch, to the callbacks' sample tables."""
        self.callbacks.on_log(self, dict(stats), batch or {}, list(rewards or ()), list(columns_to_log))


def _responses(
    trainer: PPOTrainer,
    model: nn.Module,
    prompts: list[Prompt],
    sampling: SamplingParams,
    limits: SequenceOf[int | None],
    first_index: int,
    return_prompt: bool,
) -> list[Tensor]:
    """Responses of one model. Prompts of one limit go to the engine together; a draw depends on its sample index only."""
    found: dict[int, Sample] = {}
    with trainer.clock.measure('collect'), trainer.strategy.full_model(model) as policy:
        trainer.engine.begin(cast('Actor', policy))
        try:
            for limit in sorted(set(limits), key=lambda n: n or 0):
                positions = [i for i, n in enumerate(limits) if n == limit]
                indices = [first_index + i for i in positions]
                samples = trainer.engine.generate(
                    [prompts[i] for i in positions],
                    replace(sampling, max_new_tokens=limit),
                    seed=trainer.strategy.seed,
                    indices=indices,
                    groups=indices,
                )
                found |= dict(zip(positions, samples, strict=True))
        finally:
            trainer.engine.end()
    ordered = [found[i] for i in range(len(prompts))]
    return [torch.cat([s.prompt_ids, s.response_ids]) if return_prompt else s.response_ids for s in ordered]
