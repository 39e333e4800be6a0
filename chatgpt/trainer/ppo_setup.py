"""What `PPOTrainer` does with its arguments before the first token: keywords, sampling, checks of what the caller brings."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from chatgpt.names import hint
from chatgpt.plan.of_run import common_fields
from chatgpt.plan.setup import Setup
from chatgpt.rollout import LocalEngine, SamplingParams, StopStrings
from chatgpt.rollout.sampling import generation_fields
from chatgpt.trainer.config import NEEDS_CRITIC, NEEDS_GROUPS, PPOConfig
from chatgpt.types import FinishReason, Prompt, Sample

DEFAULT_NEW_TOKENS = 64


def split_kwargs(config: PPOConfig | None, kwargs: Mapping[str, Any]) -> tuple[PPOConfig, dict[str, Any]]:
    """The trainer's keywords as a `PPOConfig` and the generation keywords.

    Raises:
        ValueError: a keyword that is neither; lists the nearest known ones.
    """
    settings, generation = PPOConfig.field_names(), generation_fields()
    for name in kwargs:
        if name not in settings and name not in generation:
            known = hint(name, [*settings, *generation])
            raise ValueError(f'PPOTrainer got an unknown keyword {name!r}{known}')
    own = {k: v for k, v in kwargs.items() if k in settings}
    if config is not None:
        config = replace(config, **own)
    else:
        config = PPOConfig(**own)
    return config, {k: v for k, v in kwargs.items() if k not in settings}


def sampling_for(actor: nn.Module, tokenizer: Any, kwargs: Mapping[str, Any]) -> tuple[SamplingParams, StopStrings | None]:
    """Sampling parameters from generation keywords, with the end and padding tokens of the tokenizer or the model filled in."""
    given = dict(kwargs)
    stop_strings = given.pop('stop_strings', None)
    generation_config = getattr(getattr(actor, 'model', None), 'generation_config', None)
    if given.get('eos_token_id') is None:
        given['eos_token_id'] = getattr(tokenizer, 'eos_token_id', None)
        if given['eos_token_id'] is None:
            given['eos_token_id'] = getattr(generation_config, 'eos_token_id', None)
    if given.get('pad_token_id') is None:
        given['pad_token_id'] = getattr(tokenizer, 'pad_token_id', None)
        if given['pad_token_id'] is None:
            given['pad_token_id'] = getattr(generation_config, 'pad_token_id', None)
    if given.get('max_new_tokens') is None and given.get('max_length') is None:
        given['max_new_tokens'] = DEFAULT_NEW_TOKENS
    sampling = SamplingParams.from_generation_kwargs(**given)
    if not stop_strings:
        return sampling, None
    if tokenizer is None:
        raise ValueError('stop_strings needs a tokenizer')
    matcher = StopStrings(tokenizer, [stop_strings] if isinstance(stop_strings, str) else list(stop_strings))
    matcher = matcher.not_before(sampling.min_new_tokens)
    return replace(sampling, stop=matcher), matcher


def has_reference(actor: nn.Module) -> bool:
    """Whether the actor can serve as its own reference: adapter off, or a frozen branch."""
    return bool(getattr(actor, 'has_reference', False))


def trains_value_head(strategy: Any, actor: Any, config: PPOConfig) -> bool:
    """Whether the actor carries a value head that the estimator needs; warns of one that it does not.

    Raises:
        ValueError: one that it does not need, under a strategy that cannot leave a parameter without a gradient.
    """
    if getattr(actor, 'value_head', None) is None:
        return False
    if config.advantage_estimator in NEEDS_CRITIC:
        return True
    if not strategy.supports_unused:
        raise ValueError(
            f'advantage_estimator={config.advantage_estimator!r} takes no values, and {type(strategy).__name__} cannot leave the '
            "actor's value head untrained: build the actor without value_head"
        )
    if strategy.is_rank_0:
        warnings.warn(
            f"the actor's value head is not trained: advantage_estimator={config.advantage_estimator!r} takes no values; build the actor "
            'without value_head to silence this',
            stacklevel=3,
        )
    return False


def check_nlpo(strategy: Any, actor: Any, engine: Any = None) -> None:
    """What NLPO needs of strategy, actor and engine; ValueError says what is missing."""
    if engine is not None and not isinstance(engine, LocalEngine):
        raise ValueError(
            f'NLPO draws from two models at once, which only LocalEngine does: {type(engine).__name__} would ignore the mask'
        )
    if strategy.dtype != torch.float32:
        raise ValueError(
            'NLPO takes the old log-probs from the decode, which agree with the trainer in fp32 only: use precision=fp32'
        )
    if not strategy.weights_in_place:
        raise ValueError(
            f'NLPO does not run under {type(strategy).__name__}, whose weights cannot be copied between models; use ddp or fsdp'
        )
    if has_reference(actor):
        raise ValueError('NLPO copies the actor as a whole: use an actor without LoRA and num_layers_unfrozen')


def check_rewards(scorer: Any, config: PPOConfig) -> None:
    """ValueError when the estimator needs several rewards and there are none to tell apart."""
    if config.advantage_estimator == 'gdpo' and len(getattr(scorer, 'weighted', ())) < 2:
        raise ValueError(
            "advantage_estimator='gdpo' normalises several rewards apart: give reward_model as a list of two or more (weight, reward) pairs"
        )


@torch.no_grad()
def take_over(target: nn.Module, source: nn.Module) -> None:
    """Copy weights between two models of one layout, on whatever part of them this rank holds."""
    for mine, given in zip(target.parameters(), source.parameters(), strict=True):
        pair = [t.to_local() if hasattr(t, 'to_local') else t for t in (mine, given)]
        pair[0].copy_(pair[1])


def check_by_hand(config: PPOConfig) -> None:
    """ValueError for settings that need what only `fit` has: the engine's log-probs, or prompts to draw."""
    if config.nlpo_top_p is not None:
        raise ValueError('nlpo_top_p draws from the masked policy, which generate and step do not know: use fit')
    if config.tis_cap is not None:
        raise ValueError("tis_cap needs the engine's log-probs, which step is not given: use fit, or leave tis_cap out")
    if config.advantage_estimator == 'gdpo':
        raise ValueError("advantage_estimator='gdpo' needs the scores of each reward, which step is not given: use fit")
    if config.dynamic_sampling_rounds:
        raise ValueError('dynamic_sampling_rounds draws further prompts, which step does not have: use fit')


def given_groups(prompts: SequenceOf[Prompt], config: PPOConfig) -> list[int]:
    """Position of the first response of each response's group, counted in one list of `step`.

    Under an estimator that compares responses, every `num_samples_per_prompt` that follow one another are a group; else each is alone.

    Raises:
        ValueError: a list that does not divide into groups, or a group with different prompts.
    """
    if config.advantage_estimator not in NEEDS_GROUPS:
        return list(range(len(prompts)))
    size, name = config.num_samples_per_prompt, config.advantage_estimator
    if len(prompts) % size:
        raise ValueError(
            f'step: {name} compares groups of num_samples_per_prompt={size}; {len(prompts)} responses do not divide into them'
        )
    starts = [i // size * size for i in range(len(prompts))]
    for i, start in enumerate(starts):
        if not torch.equal(prompts[i].ids, prompts[start].ids):
            raise ValueError(
                f'step: queries {start} to {start + size - 1} are one group of {name} and must be equal; query {i} is not'
            )
    return starts


def given_samples(
    prompts: SequenceOf[Prompt],
    responses: SequenceOf[Tensor],
    scores: SequenceOf[float | Tensor],
    masks: SequenceOf[Tensor] | None,
    sampled: SequenceOf[SamplingParams],
) -> tuple[list[Sample], list[float | Tensor]]:
    """Samples and scores out of what the caller of `step` brings.

    A response has ended where its last token is an end token, or a stop string is at its end, under one of the settings `sampled`.

    Raises:
        ValueError: lists of different lengths, an empty response, a mask of the wrong length.
    """
    lengths = {'queries': len(prompts), 'responses': len(responses), 'scores': len(scores)}
    if masks is not None:
        lengths['response_masks'] = len(masks)
    if len(set(lengths.values())) != 1 or not prompts:
        raise ValueError(f'step needs lists of one length, at least 1; got {lengths}')
    samples, checked = [], []
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        ids = torch.as_tensor(response, dtype=torch.int64).flatten().cpu()
        mask = torch.ones_like(ids, dtype=torch.bool) if masks is None else torch.as_tensor(masks[i]).bool().flatten().cpu()
        score = torch.as_tensor(scores[i], dtype=torch.float32).cpu()
        dense = score.dim() > 0 and score.numel() > 1
        if len(ids) == 0:
            raise ValueError(f'step: response {i} is empty; it needs at least its end token')
        if len(mask) != len(ids):
            raise ValueError(f'step: response_masks[{i}] has {len(mask)} entries for {len(ids)} tokens')
        if dense and len(score) != len(ids):
            raise ValueError(f'step: scores[{i}] has {len(score)} entries for {len(ids)} tokens')
        if not torch.isfinite(score).all():
            raise ValueError(f'step: scores[{i}] is not finite')
        zeros = torch.zeros(len(ids))
        sample = Sample(
            index=i,
            group=i,
            prompt_ids=prompt.ids,
            response_ids=ids,
            response_mask=mask,
            logprobs=zeros,
            filtered_logprobs=zeros,
            edge_distances=torch.ones(len(ids)),
            finish_reason=_finish_reason(ids.tolist(), sampled),
            temperature=sampled[0].temperature,
            prompt_text=prompt.text,
            columns=prompt.columns,
        )
        samples.append(sample)
        checked.append(score.flatten() if dense else float(score.flatten()[0]))
    return samples, checked


def _finish_reason(ids: list[int], sampled: SequenceOf[SamplingParams]) -> FinishReason:
    if any(ids[-1] in s.eos_token_ids for s in sampled):
        return 'eos'
    return 'stop' if any(s.stop is not None and s.stop(ids) for s in sampled) else 'length'


def check_ids(what: str, ids: SequenceOf[Tensor], actor: nn.Module) -> None:
    """ValueError for a token id that the actor's vocabulary does not have."""
    config: Any = getattr(getattr(actor, 'model', None), 'config', None)
    config = config.get_text_config() if hasattr(config, 'get_text_config') else config
    size = getattr(config, 'vocab_size', None)
    for i, given in enumerate(ids):
        outside = [] if size is None else [t for t in torch.as_tensor(given).flatten().tolist() if not 0 <= t < size]
        if outside:
            raise ValueError(f'{what} {i} has the token id {outside[0]}, outside of the vocabulary of {size} tokens; use its tokenizer')


class RatioGuard:
    """Decides, before a step, whether a train batch may change the weights.

    A batch whose mean ratio exceeds `ratio_threshold` is skipped; one whose approximate KL exceeds 1.5 · `target_kl` is skipped
    and ends the phase (TRL's semantics for both).
    """

    def __init__(self, config: PPOConfig) -> None:
        self.config = config
        self.early_stop = False

    def __call__(self, metrics: dict[str, float]) -> bool:
        c = self.config
        if c.target_kl is not None and metrics['approx_kl'] > 1.5 * c.target_kl:
            self.early_stop = True
            return True
        return c.ratio_threshold is not None and metrics['ratio_mean'] > c.ratio_threshold


def memory_setup(trainer: Any) -> Setup:
    """A `PPOTrainer` as the planner sees it, with its longest prompt."""
    from chatgpt.experience import RewardModelScorer

    config, strategy = trainer.config, trainer.strategy
    actor = strategy.unwrap(trainer.actor)
    scorer = trainer.maker.scorer
    reward: Any = strategy.unwrap(scorer.model) if isinstance(scorer, RewardModelScorer) else None
    prompts = trainer.prompts or ()
    lengths = [len(prompts[i].ids) for i in range(len(prompts))] or [1]
    return Setup(
        **common_fields(strategy, config, actor, trainer.actor_optim, 'ppo'),
        reward_config=reward.model.config if hasattr(reward, 'model') else None,
        critic='own' if trainer.critic is not None else 'shared' if trainer.shares_trunk else 'none',
        num_layers_unfrozen=actor.ref_branch.num_blocks if hasattr(actor, 'ref_branch') else -1,
        kl=trainer.maker.initial_model is not None or trainer.maker.reference_context is not None,
        experience_batch_size=config.experience_batch_size,
        num_samples_per_prompt=config.num_samples_per_prompt,
        offload=config.offload,
        update_timesteps=trainer.update_timesteps,
        max_prompt_tokens=max(lengths),
        max_new_tokens=max(trainer.sampling.room(max(lengths)), 1),
    )
