"""Builds the models of a run: loaded by name, made from a config, or from the caller's model."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from chatgpt import nn
from chatgpt.launch.beside import critic_source, takes_reward_model
from chatgpt.launch.inputs import Inputs
from chatgpt.launch.runs import CriticRun, PPORun, Run
from chatgpt.nn.compiled import compile_blocks
from chatgpt.nn.heads import CategoricalHead, load_head, stored_support
from chatgpt.nn.kinds import MODELS
from chatgpt.nn.loading import load_causal_lm
from chatgpt.nn.lora import has_lora
from chatgpt.nn.reward_model import is_scorer
from chatgpt.nn.shared import SharedTrunk
from chatgpt.nn.trunk import recompute_activations, width_of
from chatgpt.trainer.config import PPOConfig
from chatgpt.trainer.policy import policy_class


class PPOModels(NamedTuple):
    actor: Any
    critic: Any
    reward: Any
    """a model, a function, or a list of (weight, model or function)"""
    initial_model: Any
    mask_model: Any = None
    """a copy of the actor, for policies that use one"""


def make_trunk(inputs: Inputs, dtype: torch.dtype, device: Any) -> SharedTrunk:
    """Returns the frozen base of the run's adapters."""
    run, source = inputs.run, inputs.model
    quantize: Any = None if run.quantize == 'none' else run.quantize
    options: dict[str, Any] = {'checkpoint': run.gradient_checkpointing}
    if isinstance(source, (str, Path)):
        options |= {'trust_remote_code': run.trust_remote_code}
        return SharedTrunk.from_pretrained(source, quantize=quantize, dtype=dtype, device=device, **options)
    model = load_causal_lm(config=inputs.config, **options) if source is None else source
    return SharedTrunk(model.to(device), quantize=quantize, dtype=dtype)


def set_kernels(run: Run, *models: Any) -> None:
    """Sets the run's kernels in models that are not prepared yet; ignores objects that are no modules."""
    for model in models:
        if isinstance(model, nn.Actor) and run.logprob_kernel != 'auto':
            model.logprob_kernel = run.logprob_kernel
        if isinstance(model, torch.nn.Module) and run.compile_blocks:
            compile_blocks(model)


def trunk_role(inputs: Inputs, kind: str, trunk: SharedTrunk, **options: Any) -> Any:
    """Returns an 'Actor', 'Critic' or 'RM' as adapters on a trunk; the trunk's biases stay frozen."""
    make: Any = {'Actor': trunk.actor, 'Critic': trunk.critic, 'RM': trunk.reward_model}[kind]
    keywords = inputs.run.lora_keywords()
    del keywords['lora_train_bias']
    return make(**options, **keywords)


def build_ppo_on_trunk(inputs: Inputs, trunk: SharedTrunk) -> PPOModels:
    """Returns actor, critic and reward model on one base. The critic starts from the adapter that `critic_from` names,
    by default the reward model's, if there is one. The reference is the actor with its adapter off."""
    run, settings, reward = inputs.run, inputs.settings, inputs.reward
    assert isinstance(run, PPORun) and isinstance(settings, PPOConfig)
    adapter = reward if isinstance(reward, (str, Path)) else None
    actor, critic = trunk_role(inputs, 'Actor', trunk), None
    if settings.estimator.needs_values:
        source = adapter if run.critic_from == 'reward_model' else critic_source(run)
        head = None if critic_source(run) else bins_head(inputs)
        critic = trunk_role(inputs, 'Critic', trunk, adapter=source, value_head=head)
    return PPOModels(actor, critic, reward if adapter is None else trunk.reward_model(adapter=adapter), None)


def build_model(inputs: Inputs, kind: str, **options: Any) -> Any:
    """Returns an 'Actor', 'Critic', 'RM' or 'ILQLModel'; call it inside the strategy's `model_init_context`.

    The model is loaded if `inputs.model` is a name or folder, built on it if it is a model, and made from
    `inputs.config` with new weights if it is None.
    """
    run, source = inputs.run, inputs.model
    named = isinstance(source, (str, Path))
    if kind == 'Critic' and isinstance(run, CriticRun):
        return build_critic(inputs, str(source), inputs.config)
    if kind == 'ILQLModel':
        given = {'checkpoint': run.gradient_checkpointing, 'trust_remote_code': run.trust_remote_code}
        return nn.ILQLModel.from_pretrained(source, **given) if named else nn.ILQLModel(source)
    options |= run.lora_keywords()
    if named:
        options |= {'pretrained': source, 'trust_remote_code': run.trust_remote_code}
    elif source is None:
        options['config'] = inputs.config
    else:
        return {'Actor': nn.Actor, 'Critic': nn.Critic, 'RM': nn.RewardModel}[kind](source, **options)
    model = MODELS.find(run.model)
    family: Any = {'Actor': model.actor, 'Critic': model.critic, 'RM': model.reward_model}[kind]
    return family(checkpoint=run.gradient_checkpointing, **options)


def build_ppo_models(inputs: Inputs) -> PPOModels:
    """Returns the models of a PPO run.

    The critic starts from the reward model if that uses the policy's tokenizer (arXiv 2403.17031) and unless
    critic_from='actor'; else from the actor's weights with a new head; or from the model that `critic_from` names. With
    critic='shared' it is a value head on the actor, new or that of `critic_from`: one forward of the trunk gives policy
    and values. With LoRA and frozen biases the reference is the actor with its adapter off, and there is no initial
    model; nor is there one without a KL penalty.
    """
    run, settings = inputs.run, inputs.settings
    assert isinstance(run, PPORun) and isinstance(settings, PPOConfig)
    unfrozen = run.num_layers_unfrozen if run.num_layers_unfrozen > 0 else None
    own_critic = settings.estimator.needs_values and run.critic == 'own'
    for_critic = inputs
    if own_critic and inputs.model is not None and not isinstance(inputs.model, (str, Path)):
        for_critic = replace(inputs, model=deepcopy(inputs.model))  # the actor adds its adapters to the model in place
    in_actor: Any = None
    if settings.estimator.needs_values and run.critic == 'shared':
        in_actor = load_head(source) if (source := critic_source(run)) else bins_head(inputs) or True
    actor = build_model(inputs, 'Actor', num_layers_unfrozen=unfrozen, value_head=in_actor)
    reward = inputs.reward
    if isinstance(reward, (str, Path)):
        reward = nn.RewardModel.from_pretrained(reward, trust_remote_code=run.trust_remote_code)
    critic = None
    if own_critic and (source := critic_source(run)):
        critic = build_critic(inputs, source, inputs.critic_config)
    elif takes_reward_model(run, inputs.reward_tokenizer) and _has_head(reward):
        head = bins_head(inputs, reward.model.config)
        critic = nn.Critic.from_reward_model(reward, value_head=head, **run.lora_keywords())
        if run.gradient_checkpointing:
            recompute_activations(critic.model)
    elif own_critic:
        critic = build_model(for_critic, 'Critic', value_head=bins_head(inputs))
    mask = deepcopy(actor) if policy_class(settings).takes_copy else None
    initial = deepcopy(actor) if run.kl_coef and not run.reference_in_actor else None
    return PPOModels(actor, critic, reward, initial, mask)


def build_critic(inputs: Inputs, source: str, config: Any) -> Any:
    """Returns the critic from a folder or hub name with this config: with the head that is stored there, but with a new
    one for a categorical loss from a reward model, and from a model without a head."""
    run = inputs.run
    options: dict[str, Any] = {'checkpoint': run.gradient_checkpointing, 'trust_remote_code': run.trust_remote_code}
    if is_scorer(source, config):
        reward, head = nn.RewardModel.from_pretrained(source, **options), bins_head(inputs, config)
        return nn.Critic.from_reward_model(reward, value_head=head, **run.lora_keywords())
    head = None if stored_support(source) is not None else bins_head(inputs, config)
    return nn.Critic.from_pretrained(source, value_head=head, **options, **run.lora_keywords())


def bins_head(inputs: Inputs, config: Any = None) -> CategoricalHead | None:
    """Returns a new head of bins for critic_loss='categorical', else None. config: of the critic, if not the
    policy's."""
    settings: Any = inputs.settings
    if not settings.critic_support:
        return None
    return CategoricalHead(width_of(inputs.config if config is None else config), **settings.critic_support)


def _has_head(reward: Any) -> bool:
    """Returns True if a critic can start from this reward."""
    return isinstance(reward, nn.RewardModel) and reward.value_head is not None and not has_lora(reward.model)
