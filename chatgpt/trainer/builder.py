"""Makes the parts of a `PPOTrainer` from its arguments, in the order of their dependencies: checks of models and
settings, policy and engine, collector, reward, maker."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from chatgpt.data.formats import note_model
from chatgpt.environments import EnvironmentSettings
from chatgpt.functional.ppo import AdaptiveKLController, FixedKLController
from chatgpt.nn.heads import support_of
from chatgpt.nn.trunk import dropout_off
from chatgpt.rollout import RolloutEngine, SamplingParams
from chatgpt.rollout.episodes import EpisodeEngine, check_writes_turns
from chatgpt.rollout.registry import engine_for
from chatgpt.rollout.sampling import sampling_for
from chatgpt.strategies.base import Strategy
from chatgpt.trainer.algorithms import estimate_advantages
from chatgpt.trainer.base import config_of
from chatgpt.trainer.collect import Collector
from chatgpt.trainer.config import PPOConfig
from chatgpt.trainer.experience import ExperienceMaker, ExperienceSettings, ScoreShaper, as_scorer
from chatgpt.trainer.experience.environment_scorer import environment_rewards
from chatgpt.trainer.experience.reference import Reference
from chatgpt.trainer.experience.scorers import Scorer, with_reward_model
from chatgpt.trainer.fits import check_apart, check_models, check_records
from chatgpt.trainer.objectives.config import CriticLossSettings
from chatgpt.trainer.policy import Policy, policy_for
from chatgpt.trainer.rules import DECODE_RULES
from chatgpt.trainer.selection import compared
from chatgpt.types import Sequence


@dataclass(frozen=True)
class Models:
    """The trained and the frozen models, as prepared."""

    actor: nn.Module
    actor_optim: Optimizer
    critic: nn.Module | None
    critic_optim: Optimizer | None
    initial_model: nn.Module | None
    mask_model: nn.Module | None

    def trained(self) -> dict[str, nn.Module]:
        return {'actor': self.actor} | ({'critic': self.critic} if self.critic is not None else {})

    def optimizers(self) -> dict[str, Optimizer]:
        return {'actor': self.actor_optim} | ({'critic': self.critic_optim} if self.critic_optim is not None else {})


@dataclass(frozen=True)
class Reward:
    """The reward of responses; see `PPOTrainer`."""

    model: Any
    weights: Mapping[str, float] | None
    tokenizer: Any


@dataclass(frozen=True)
class Parts:
    """The parts of a `PPOTrainer`."""

    models: dict[str, nn.Module]
    """models of a checkpoint, by name"""
    optimizers: dict[str, Optimizer]
    shares_trunk: bool
    """True if the actor carries the trained value head"""
    policy: Policy
    collector: Collector
    maker: ExperienceMaker
    kl_controller: FixedKLController
    tis_cap: float
    """0 without a weight"""


def tis_cap_of(config: PPOConfig, engine: RolloutEngine, exact: bool) -> float:
    """Returns `tis_cap`, by default 2 where the engine's log-probs are not the trainer's, and with `max_staleness`; in
    an exact run 0, since an engine's log-probs depend on its batches.

    2 is the bound that TRL (`vllm_importance_sampling_cap` of its truncated form) and verl (`rollout_is_threshold`)
    have for the correction of Yao et al. 2025.
    """
    if config.tis_cap is not None:
        return config.tis_cap
    own = not engine.abilities.exact_logprobs and config.recompute_logprobs is not False
    return 2.0 if (own or config.max_staleness) and not exact else 0.0


def build(
    owner: str,
    strategy: Strategy,
    config: PPOConfig,
    models: Models,
    reward: Reward,
    *,
    generation: Mapping[str, Any],
    tokenizer: Any,
    engine: RolloutEngine | None,
    environment: Any,
    environment_settings: EnvironmentSettings | None,
    pretrain_data: SequenceOf[Sequence],
) -> Parts:
    """Returns the parts of a trainer; arguments as for `PPOTrainer`, `owner` is its class name.

    Raises:
        ValueError: incompatible models, data or settings.
    """
    config.validate(strategy.world_size)
    strategy.sums.refuse(config, DECODE_RULES)
    bare: Any = strategy.unwrap(models.actor)
    note_model(tokenizer, config_of(strategy, models.actor))
    sampling, stop_strings = sampling_for(bare, tokenizer, generation)
    reference = Reference(strategy, models.actor, bare, models.initial_model)
    _check_models(owner, strategy, models, reward.model if isinstance(reward.model, nn.Module) else None)
    _check_settings(config, sampling, reference, pretrain_data)
    check_records(f'{owner}: pretrain_data', ([s] for s in pretrain_data), bare)
    shares_trunk = _shares_trunk(strategy, config, models, bare)
    if models.critic is not None and not config.estimator.needs_values:
        raise ValueError(f'advantage_estimator={config.advantage_estimator!r} takes no critic: pass critic=None')
    _check_critic(strategy, config, bare if shares_trunk else strategy.unwrap(models.critic or bare), shares_trunk)
    for name, value in {'reward_weights': reward.weights, 'environment_settings': environment_settings}.items():
        if value is not None and environment is None:
            raise ValueError(f'{name}: there is no environment; pass environment=, or leave it out')
    engine = engine or engine_for(bare)
    policy = policy_for(strategy, models.actor, config, sampling.temperature, models.mask_model, engine)
    if environment is not None:
        check_writes_turns(getattr(bare, 'config', None))
        engine = EpisodeEngine(engine, environment, tokenizer, environment_settings, stop_strings=stop_strings)
        reward = _episode_reward(engine, reward)
    collector = Collector(
        strategy,
        engine,
        sampling,
        policy=policy.generating,
        tokenizer=tokenizer,
        stop_strings=stop_strings,
        batch_size=config.experience_batch_size,
        num_samples_per_prompt=config.num_samples_per_prompt,
        max_staleness=config.max_staleness,
    )
    tis_cap = tis_cap_of(config, engine, strategy.sums.exact)
    maker = _maker(strategy, config, models, reference, _scorer(config, reward), collector, shares_trunk, tis_cap)
    trained = {**models.trained(), **policy.models()}
    for model in trained.values():
        dropout_off(strategy.unwrap(model))
    controller = _kl_controller(config)
    return Parts(trained, models.optimizers(), shares_trunk, policy, collector, maker, controller, tis_cap)


def _check_models(owner: str, strategy: Strategy, models: Models, reward_model: nn.Module | None) -> None:
    trained, initial = models.trained(), models.initial_model
    if models.critic is not None and models.critic_optim is None:
        raise ValueError('a critic needs critic_optim')
    frozen = {'initial_model': initial, 'mask_model': models.mask_model, 'reward_model': reward_model}
    check_apart(strategy, trained, models.optimizers(), **frozen)
    check_models(owner, strategy, trained, {'initial_model': initial, 'reward_model': reward_model})


def _check_settings(
    config: PPOConfig, sampling: SamplingParams, reference: Reference, pretrain_data: SequenceOf[Sequence]
) -> None:
    if config.kl_coef and not reference.exists:
        raise ValueError(
            f'kl_coef={config.kl_coef} needs a reference: pass initial_model, use an actor with lora_rank > 0 and '
            'without trained biases, or set kl_coef=0'
        )
    if config.overlong_buffer is not None:
        limits = [(name, v) for name in ('max_new_tokens', 'max_length') if (v := getattr(sampling, name))]
        name, limit = min(limits, key=lambda pair: pair[1])
        if config.overlong_buffer > limit:
            raise ValueError(
                f'overlong_buffer={config.overlong_buffer} is a part of {name}={limit}; it must not be larger'
            )
    if config.aggregation == 'sequence_sum' and sampling.max_new_tokens is None:
        raise ValueError("loss_aggregation='sequence_sum' divides by max_new_tokens: give it")
    if config.ptx_coef and not pretrain_data:
        raise ValueError(f'ptx_coef={config.ptx_coef} needs pretrain_data, a list of sequences of pretraining text')


def _shares_trunk(strategy: Strategy, config: PPOConfig, models: Models, actor: Any) -> bool:
    """Returns True if the actor carries the trained value head; warns of a head that the estimator does not need.

    Raises:
        ValueError: no values for an estimator that needs them; an unused value head under a strategy that cannot leave
            a parameter without a gradient.
    """
    name = f'advantage_estimator={config.advantage_estimator!r}'
    has_head = getattr(actor, 'value_head', None) is not None
    if models.critic is None and config.estimator.needs_values and not has_head:
        raise ValueError(f'{name} needs values: pass a critic, or an actor with value_head=True')
    if models.critic is not None or not has_head or config.estimator.needs_values:
        return models.critic is None and has_head
    if not strategy.abilities.unused:
        raise ValueError(
            f'{name} takes no values, and {type(strategy).__name__} cannot '
            "leave the actor's value head untrained: build the actor without value_head"
        )
    if strategy.is_rank_0:
        warnings.warn(
            f"the actor's value head is not trained: {name} takes no "
            'values; build the actor without value_head to silence this',
            stacklevel=4,
        )
    return False


def check_head(config: CriticLossSettings, owner: Any) -> None:
    """Raises ValueError if the value head of `owner` does not fit `critic_loss`."""
    head, wanted = support_of(getattr(owner, 'value_head', None)), config.critic_support
    if head != wanted:
        has = f'a head of {head}' if head else 'a head with one output'
        give = f'value_head=CategoricalHead(WIDTH, **{wanted}), of chatgpt.nn' if wanted else 'a head with one output'
        raise ValueError(f'critic_loss={config.critic_loss!r} does not fit the critic, which has {has}: give it {give}')


def _check_critic(strategy: Strategy, config: PPOConfig, owner: Any, shares_trunk: bool) -> None:
    """Raises ValueError if the value head of `owner` does not fit `critic_loss`, or a setting of a separate critic is
    given for a value head on the actor."""
    if not config.estimator.needs_values:
        return
    check_head(config, owner)
    if not shares_trunk:
        return
    for name in ('critic_epochs', 'critic_train_batch_size'):
        if getattr(config, name) is not None:
            raise ValueError(
                f"{name}={getattr(config, name)} is of a critic with an optimizer of its own, and here the actor's "
                'value head gives the values: leave it out, or pass a critic'
            )
    if config.critic_warmup_phases and not strategy.abilities.unused:
        raise ValueError(
            f'critic_warmup_phases={config.critic_warmup_phases} trains the value head alone, and '
            f'{type(strategy).__name__} cannot leave the rest of the actor untrained: leave it out, or pass a critic'
        )


def _episode_reward(engine: EpisodeEngine, reward: Reward) -> Reward:
    """Returns the rewards of an environment, combined with the given reward."""
    if reward.model is None and not getattr(engine.factory, 'gives_rewards', True):
        raise ValueError(f'{engine.runner.name} has neither get_reward nor turn_reward; give it one, or a reward_model')
    return Reward(environment_rewards(reward.weights, reward.model), None, reward.tokenizer)


def _scorer(config: PPOConfig, reward: Reward) -> Scorer | None:
    scorer = as_scorer(
        reward.model,
        max_tokens_per_batch=config.max_tokens_per_batch,
        timeout_s=config.score_timeout_s,
        reward_tokenizer=reward.tokenizer,
        packing=config.packing,
    )
    if config.estimator.rewards_apart and len(getattr(scorer, 'weighted', ())) < 2:
        raise ValueError(
            f'advantage_estimator={config.advantage_estimator!r} normalises several rewards apart: give reward_model '
            'as a list of two or more (weight, reward) pairs, or reward_weights of an environment'
        )
    return scorer


def _maker(
    strategy: Strategy,
    c: PPOConfig,
    models: Models,
    reference: Reference,
    scorer: Scorer | None,
    collector: Collector,
    shares_trunk: bool,
    tis_cap: float,
) -> ExperienceMaker:
    recompute = c.recompute_logprobs
    if recompute == 'auto':  # the engine may round differently
        differs = not collector.engine.abilities.exact_logprobs
        recompute = strategy.numerics.dtype != torch.float32 or bool(tis_cap) or differs
    overlong = None if c.overlong_buffer is None else (collector.sampling.room, c.overlong_buffer)
    if c.offload == 'idle':
        frozen = [models.initial_model, *(each.model for each in with_reward_model(scorer))]
        for model in frozen:
            if model is not None:
                strategy.offload(model)
    estimator = c.estimator
    return ExperienceMaker(
        strategy,
        models.actor,
        models.critic,
        reference,
        scorer,
        ScoreShaper(c.score_scaling, c.score_clip, c.missing_eos_score, c.token_penalty, overlong, c.reward_of_failure),
        ExperienceSettings(
            temperature=collector.sampling.temperature,
            kl_kind=c.kl_kind,
            recompute_logprobs=recompute,
            whiten_rewards=c.whiten_rewards,
            max_tokens_per_batch=c.max_tokens_per_batch,
            packing=c.packing,
        ),
        estimate=lambda experiences: estimate_advantages(compared(experiences), estimator, c, strategy),
        actor_has_values=shares_trunk,
    )


def _kl_controller(c: PPOConfig) -> FixedKLController:
    if c.kl_target is None:
        return FixedKLController(c.kl_coef)
    return AdaptiveKLController(c.kl_coef, c.kl_target, c.kl_horizon)
