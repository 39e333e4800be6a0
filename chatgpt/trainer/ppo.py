"""PPO: collect experience with the current policy, learn from it, repeat.

    fit ─▶ collect: Collector draws prompts and generates under full weights; ExperienceMaker scores ─▶ buffer
        ─▶ learn:   epochs of train batches from the buffer ─▶ learn_batch ─▶ strategy.backward, strategy.optimizer_step
        ─▶ metrics, callbacks

The same two verbs can be driven by hand: `generate`, then `step(queries, responses, scores)`.

Left out: how text becomes ids (`chatgpt.dataset`), how a response is scored (`chatgpt.experience`), what tells one
method from another (`algorithms`), and the hardware.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from chatgpt.batching import collate
from chatgpt.dataset.prompts import PromptSet, as_prompts, tasks_without_prompts
from chatgpt.dataset.tokenize import warn_of_bare_prompt
from chatgpt.environments import EnvironmentSettings
from chatgpt.experience import (
    ExperienceMaker,
    ExperienceSettings,
    ReplayBuffer,
    RewardModelScorer,
    ScoreShaper,
    as_scorer,
)
from chatgpt.experience.environment_scorer import environment_scorer
from chatgpt.experience.rescore import RESCORE_EVERY, rescored
from chatgpt.experience.scorers import described, models_of
from chatgpt.functional.kl import AdaptiveKLController, FixedKLController
from chatgpt.nn.dropout import dropout_off
from chatgpt.nn.output import PolicyOutput
from chatgpt.rollout import RolloutEngine, SamplingParams
from chatgpt.rollout.episodes import EpisodeEngine, check_writes_turns
from chatgpt.rollout.registry import engine_for
from chatgpt.rollout.sampling import sampling_for
from chatgpt.trainer.algorithms import estimate_advantages
from chatgpt.trainer.base import Trainer
from chatgpt.trainer.callbacks import Callback, RatioCheck, RolloutRecorder
from chatgpt.trainer.checkpointing import generator_states, set_generator_states
from chatgpt.trainer.collect import Collector, check_hears_alike, replace_uninformative
from chatgpt.trainer.config import PPOConfig
from chatgpt.trainer.failed_episodes import check_failed, compared, mask_failed
from chatgpt.trainer.fits import check_records
from chatgpt.trainer.losses import (
    ActorLoss,
    PtxLoss,
    SharedLoss,
    ValueLoss,
    collate_experience,
    experience_totals,
    sequence_totals,
)
from chatgpt.trainer.metrics import (
    PhaseMetrics,
    environment_metrics,
    first_batch_metrics,
    group_metrics,
    performance_metrics,
    rank_metrics,
    rollout_metrics,
    scaling_metrics,
    value_metrics,
)
from chatgpt.trainer.nlpo import policy_for
from chatgpt.trainer.order import generator_for, train_batches
from chatgpt.trainer.reference import has_reference
from chatgpt.trainer.step import Learner, Work, learn_batch
from chatgpt.trainer.stepwise import check_by_hand, check_ids, given_groups, given_samples
from chatgpt.trainer.strategies.base import Strategy
from chatgpt.trainer.strategies.named import prepared_by
from chatgpt.types import Batch, Experience, Sequence


class PPOTrainer(Trainer):
    """Proximal policy optimisation (Schulman et al. 2017) of a language model on a reward.

    Args:
        strategy: has prepared the models below; or a name, such as 'ddp', whose strategy prepares them here.
        actor: the policy, as prepared.
        critic: the value model, as prepared; None when the actor carries a value head or the estimator needs none. A
            value head that the estimator does not need stays as it is, with a warning.
        reward_model: a prepared `RewardModel`, a function `fn(prompts, responses, **columns)`, a `transformers`
            pipeline, or a list of (weight, one of these).
        initial_model: the frozen reference, as prepared. None means the actor itself with its adapter off (LoRA) or its
            frozen branch (hydra); without either, kl_coef must be 0.
        actor_optim, critic_optim: as prepared.
        config: all settings as a `PPOConfig`; its fields are also accepted as keyword arguments here.
        tokenizer: needed for prompts given as text, for reward functions and for stop strings.
        callbacks, run_dir: see `Trainer`. Where there is a `run_dir`, a `RolloutRecorder` is added unless given.
        environment: what the policy acts in over several turns: an `Environment` class, a function that makes one, or
            a name such as 'games:countdown'. Its rewards are the scores where there is no `reward_model`.
        environment_settings: how long an episode may be, and how environments are run.
        reward_weights: of an environment's rewards by name, which then are a weighted list; None takes their sum.
            Beside other rewards they stand in the list of `reward_model`, each as an `EnvironmentScorer(name)`.
        engine: who generates; by default a `LocalEngine`, for an encoder-decoder an `HFEngine`. With `max_staleness`
            one that answers later, such as `RemoteEngine`.
        reward_tokenizer: the reward model's tokenizer when it is not the policy's.
        pretrain_data: sequences for PPO-ptx (`ptx_coef`).
        mask_model: NLPO's mask policy (`nlpo_top_p`): a copy of the actor, prepared as a frozen model.
        **kwargs: fields of `PPOConfig`, and fields of transformers' GenerationConfig (`max_length` is prompt +
            response).

    Raises:
        ValueError: an unknown keyword (the nearest known ones are listed), settings that do not fit together.
    """

    config: PPOConfig

    def __init__(
        self,
        strategy: Strategy | str,
        actor: nn.Module,
        critic: nn.Module | None,
        reward_model: Any,
        initial_model: nn.Module | None,
        actor_optim: Optimizer,
        critic_optim: Optimizer | None = None,
        *,
        config: PPOConfig | None = None,
        tokenizer: Any = None,
        callbacks: SequenceOf[Any] = (),
        run_dir: str | Path | None = None,
        engine: RolloutEngine | None = None,
        environment: Any = None,
        environment_settings: EnvironmentSettings | None = None,
        reward_weights: Mapping[str, float] | None = None,
        reward_tokenizer: Any = None,
        pretrain_data: SequenceOf[Sequence] | None = None,
        mask_model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        config, self.generate_kwargs = PPOConfig.split('PPOTrainer', config, kwargs)
        strategy, (actor, actor_optim), (critic, critic_optim), reward_model, initial_model, mask_model = prepared_by(
            strategy, (actor, actor_optim), (critic, critic_optim), reward_model, initial_model, mask_model
        )
        assert not isinstance(strategy, str)
        config.validate(strategy.world_size)
        if strategy.exact is not None:
            config.check_exact()
        bare: Any = strategy.unwrap(actor)
        self.actor, self.critic = actor, critic
        self.actor_optim, self.critic_optim = actor_optim, critic_optim
        self.shares_trunk = critic is None and _trains_value_head(strategy, bare, config)
        self.sampling, stop_strings = sampling_for(bare, tokenizer, self.generate_kwargs)
        if reward_weights is not None and (environment is None or reward_model is not None):
            raise ValueError(
                'reward_weights weigh the rewards of an environment: pass environment=, and with a reward_model put '
                'them into its list, as (weight, EnvironmentScorer(name))'
            )
        self._check(config, bare, initial_model, pretrain_data)
        self.engine: RolloutEngine = engine if engine is not None else engine_for(bare)
        self.policy = policy_for(strategy, actor, config, self.sampling.temperature, mask_model, self.engine)
        models = {'actor': actor} | ({'critic': critic} if critic is not None else {}) | dict(self.policy.models())
        optimizers = {'actor': actor_optim} | ({'critic': critic_optim} if critic_optim is not None else {})
        own_callbacks: list[Callback] = [RatioCheck()] if config.ratio_check else []
        if run_dir is not None and not any(isinstance(c, RolloutRecorder) for c in callbacks):
            own_callbacks.append(RolloutRecorder())
        super().__init__(
            strategy,
            config,
            models,
            optimizers,
            callbacks=[*own_callbacks, *callbacks],
            tokenizer=tokenizer,
            run_dir=run_dir,
        )
        if environment is not None:
            check_hears_alike(strategy)
            check_writes_turns(getattr(bare, 'config', None))
            self.engine = EpisodeEngine(
                self.engine, environment, tokenizer, environment_settings, stop_strings=stop_strings
            )
            if reward_model is None and not getattr(self.engine.factory, 'gives_rewards', True):
                raise ValueError(
                    f'{self.engine.runner.name} has neither get_reward nor turn_reward; give it one, or a reward_model'
                )
            reward_model = environment_scorer(reward_weights) if reward_model is None else reward_model
        self.collector = Collector(
            strategy,
            self.engine,
            self.sampling,
            policy=self.policy.generating,
            tokenizer=tokenizer,
            stop_strings=stop_strings,
            batch_size=config.experience_batch_size,
            num_samples_per_prompt=config.num_samples_per_prompt,
            max_staleness=config.max_staleness,
        )
        self.buffer = ReplayBuffer(config.buffer_limit, 'cpu' if config.buffer_cpu_offload else strategy.device)
        self.kl_controller = (
            FixedKLController(config.kl_coef)
            if config.kl_target is None
            else AdaptiveKLController(config.kl_coef, config.kl_target, config.kl_horizon)
        )
        self.pretrain_data = list(pretrain_data or ())
        self.maker = self._maker(reward_model, reward_tokenizer, initial_model)
        self.scorer = self.maker.scorer
        if config.estimator.rewards_apart and len(getattr(self.scorer, 'weighted', ())) < 2:
            raise ValueError(
                f'advantage_estimator={config.advantage_estimator!r} normalises several rewards apart: '
                'give reward_model as a list of two or more (weight, reward) pairs, or reward_weights of an environment'
            )
        if config.offload == 'idle':
            for frozen in [*models_of(self.scorer), *([initial_model] if initial_model is not None else [])]:
                strategy.offload(frozen)
        for model in models.values():
            dropout_off(strategy.unwrap(model))
        self.timestep = 0
        self.fit_start = 0
        """timestep at which the current `fit` began"""
        self.update_timesteps = 1
        self._generated_with: SamplingParams | None = None
        """Sampling of the latest `generate`: `step` treats its end tokens and stop strings as ends of responses too."""
        self._has_told_of_failures = False
        self.sampling_metrics: dict[str, float] = {}
        """of the latest `collect`: what dynamic sampling and filtering did"""

    def _check(
        self,
        config: PPOConfig,
        actor: nn.Module,
        initial_model: nn.Module | None,
        pretrain_data: Any,
    ) -> None:
        """What does not fit together among models, data and settings."""
        if config.estimator.needs_values and self.critic is None and not self.shares_trunk:
            raise ValueError(
                f'advantage_estimator={config.advantage_estimator!r} needs values: pass a critic, or an actor with '
                'value_head=True'
            )
        if self.critic is not None and self.critic_optim is None:
            raise ValueError('a critic needs critic_optim')
        if initial_model is None and config.kl_coef and not has_reference(actor):
            raise ValueError(
                f'kl_coef={config.kl_coef} needs a reference: pass initial_model, use an actor with lora_rank > 0, or '
                'set kl_coef=0'
            )
        if config.overlong_buffer is not None:
            limits = [(name, v) for name in ('max_new_tokens', 'max_length') if (v := getattr(self.sampling, name))]
            name, limit = min(limits, key=lambda pair: pair[1])
            if config.overlong_buffer > limit:
                raise ValueError(
                    f'overlong_buffer={config.overlong_buffer} is a part of {name}={limit}; it must not be larger'
                )
        if config.aggregation == 'sequence_sum' and self.sampling.max_new_tokens is None:
            raise ValueError("loss_aggregation='sequence_sum' divides by max_new_tokens: give it")
        if config.ptx_coef and not pretrain_data:
            raise ValueError(f'ptx_coef={config.ptx_coef} needs pretrain_data, a list of sequences of pretraining text')
        check_records(f'{type(self).__name__}: pretrain_data', ([s] for s in pretrain_data or ()), actor)

    def _maker(self, reward_model: Any, reward_tokenizer: Any, initial_model: nn.Module | None) -> ExperienceMaker:
        c, strategy, bare = self.config, self.strategy, cast(Any, self.strategy.unwrap(self.actor))
        recompute = c.recompute_logprobs
        if recompute == 'auto':
            inexact = getattr(self.engine, 'recompute_logprobs', False)
            recompute = strategy.dtype != torch.float32 or c.tis_cap is not None or inexact
            # the decode's are those of its batch
            recompute = recompute or strategy.exact is not None
        scorer = as_scorer(
            reward_model,
            max_tokens_per_batch=c.max_tokens_per_batch,
            timeout_s=c.score_timeout_s,
            reward_tokenizer=reward_tokenizer,
            packing=c.packing,
        )
        overlong = None if c.overlong_buffer is None else (self.sampling.room, c.overlong_buffer)
        estimator = c.estimator
        return ExperienceMaker(
            strategy,
            self.actor,
            self.critic,
            initial_model,
            scorer,
            ScoreShaper(
                c.score_scaling, c.score_clip, c.missing_eos_score, c.token_penalty, overlong, c.reward_of_failure
            ),
            ExperienceSettings(
                temperature=self.sampling.temperature,
                kl_kind=c.kl_kind,
                recompute_logprobs=recompute,
                whiten_rewards=c.whiten_rewards,
                max_tokens_per_batch=c.max_tokens_per_batch,
                packing=c.packing,
            ),
            estimate=lambda experiences: estimate_advantages(compared(experiences), estimator, c),
            reference_context=bare.reference if initial_model is None and has_reference(bare) else None,
            actor_has_values=self.shares_trunk,
            reference_with_policy=initial_model is None and hasattr(bare, 'ref_branch'),
        )

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            'timestep': self.timestep,
            'fit_start': self.fit_start,
            **self.collector.state_dict(),
            'kl_controller': self.kl_controller.state_dict(),
            'score_moments': self.maker.shaper.moments.state_dict(),
        }

    def checkpoint_state(self) -> dict[str, Any]:
        return self.state_dict() | self.collector.in_flight()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.timestep = int(state['timestep'])
        self.fit_start = int(state['fit_start'])
        self.collector.load_state_dict(state)
        self.kl_controller.load_state_dict(state['kl_controller'])
        self.maker.shaper.moments.load_state_dict(state['score_moments'])

    def fingerprint(self) -> dict[str, Any]:
        return super().fingerprint() | self.collector.fingerprint() | {'reward': described(self.scorer)}

    def facts(self) -> dict[str, Any]:
        c = self.config
        estimator = 'ppo' if c.advantage_estimator == 'gae' else c.advantage_estimator
        method = estimator if c.policy_loss in ('ppo', 'reinforce') else c.policy_loss
        return {'method': method, 'reward': described(self.scorer)} | self.collector.facts()

    def planned_sizes(self) -> dict[str, Any]:
        """With the longest prompt; in an environment, with the longest first observation so far."""
        c, actor, scorer = self.config, cast(Any, self.strategy.unwrap(self.actor)), self.scorer
        reward: Any = self.strategy.unwrap(scorer.model) if isinstance(scorer, RewardModelScorer) else None
        longest = max((len(prompt.ids) for prompt in self.collector.prompts or ()), default=1)
        longest = max(longest, getattr(self.engine, 'longest_opening', 0), 1)
        return {
            'task': 'ppo',
            'reward_config': reward.model.config if hasattr(reward, 'model') else None,
            'critic': 'own' if self.critic is not None else 'shared' if self.shares_trunk else 'none',
            'num_layers_unfrozen': actor.ref_branch.num_blocks if hasattr(actor, 'ref_branch') else -1,
            'kl': self.maker.initial_model is not None or self.maker.reference_context is not None,
            'own_reference': self.maker.initial_model is not None,
            'experience_batch_size': c.experience_batch_size,
            'num_samples_per_prompt': c.num_samples_per_prompt,
            'offload': c.offload,
            'update_timesteps': self.update_timesteps,
            'max_prompt_tokens': longest,
            'max_new_tokens': max(self.sampling.room(longest), 1),
        }

    # ------------------------------------------------------------------ the loop

    def fit(
        self,
        prompts: Any = None,
        num_episodes: int = 1,
        max_timesteps: int = 10,
        update_timesteps: int = 10,
    ) -> None:
        """Alternate collect and learn.

        Args:
            prompts: a `PromptSet`, or anything `as_prompts` takes: texts, dicts with a 'prompt', `Prompt` records, id
                tensors. None with an environment that sets tasks of its own.
            num_episodes: the run has num_episodes x max_timesteps timesteps. After `load_checkpoint` it goes on where
                it was; a second call adds as many again.
            max_timesteps: timesteps of an episode.
            update_timesteps: timesteps collected before one learning phase; a remainder at the end is learned from as
                well.

        Raises:
            EpisodesFailed: the environment failed in all episodes of a phase.
            EnvironmentsHang, WorkerError: no further environments can be run; see `chatgpt.environments.runner`.
        """
        for name, value in (
            ('num_episodes', num_episodes),
            ('max_timesteps', max_timesteps),
            ('update_timesteps', update_timesteps),
        ):
            if value < 1:
                raise ValueError(f'{name}={value} must be at least 1')
        self.set_prompts(prompts)
        self.update_timesteps = update_timesteps
        total = num_episodes * max_timesteps
        if not self.is_resuming:
            self.collector.forget_in_flight()
            self.fit_start = self.timestep
            self.fit_updates = self.num_updates
        self.is_resuming = False
        self.total_updates = self.fit_updates + self._count_updates(total, update_timesteps)
        end = self.fit_start + total
        with self._environments(), self.running(num_phases=self.phase + -(-(end - self.timestep) // update_timesteps)):
            while self.timestep < end and not self.stop_agreed():
                start, generators = self.state_dict(), generator_states()
                done = self.timestep - self.fit_start
                ends = [done, *range(done - done % update_timesteps + update_timesteps, total, update_timesteps), total]
                sizes = [b - a for a, b in zip(ends, ends[1:], strict=False)][: self.config.max_staleness + 1]
                if not self.collect(sizes[0], episode_length=max_timesteps, later=sizes[1:]):
                    self._drop_phase(start)
                    set_generator_states(generators)  # what was generated and played draws the same again
                    break
                self.learn_phase()

    @contextmanager
    def _environments(self) -> Iterator[None]:
        """However a run ends, its environments end with it."""
        try:
            yield
        finally:
            if isinstance(self.engine, EpisodeEngine):
                self.engine.close()

    def set_prompts(self, prompts: Any) -> None:
        """The prompts that `collect` draws from, in an order that is a function of the seed."""
        if prompts is None and isinstance(self.engine, EpisodeEngine):
            prompts = tasks_without_prompts()
        found = as_prompts(prompts, self.tokenizer)
        warn_of_bare_prompt(found[0].ids, self.tokenizer)
        self.collector.set_prompts(found)

    @property
    def prompts(self) -> PromptSet | None:
        return self.collector.prompts

    def _count_updates(self, timesteps: int, update_timesteps: int) -> int:
        """Optimizer steps of so many timesteps, for the learning-rate schedules."""
        c, total = self.config, 0
        for start in range(0, timesteps, update_timesteps):
            collected = min(update_timesteps, timesteps - start) * c.experience_batch_size * c.num_samples_per_prompt
            held = min(collected, c.buffer_limit) if c.buffer_limit else collected
            total += c.max_epochs * (1 if c.sample_replay_buffer else -(-held // c.train_batch_size))
        return total

    def _drop_phase(self, state: dict[str, Any]) -> None:
        """Forget a phase that was only partly collected, so that a checkpoint taken now lies between phases."""
        self.buffer.clear()
        kept = self.collector.give_up(self.phase)
        self.load_state_dict(state)
        self.collector.put_back(kept)
        self.is_resuming = False

    # ------------------------------------------------------------------ collect

    def collect(self, num_timesteps: int, *, episode_length: int | None = None, later: SequenceOf[int] = ()) -> bool:
        """Generate and score `num_timesteps` timesteps into the buffer; False when a stop was asked for on the way.

        `later`: timesteps of each of the following `max_staleness` phases, which are asked for as well.
        """
        c = self.config
        self.callbacks.on_make_experience_start(self)
        experiences = self._experience(
            num_timesteps, later, partial(self._episode, episode_length or 1, bool(episode_length))
        )
        if experiences is None:
            return False
        tell = self.strategy.is_rank_0 and not self._has_told_of_failures
        self._has_told_of_failures |= check_failed(experiences, self.phase + 1, tell=tell)
        self.sampling_metrics = {}
        if c.dynamic_sampling_rounds:
            chosen = replace_uninformative(
                experiences,
                num_timesteps * c.experience_batch_size,
                c.dynamic_sampling_rounds,
                c.experience_batch_size,
                lambda count: self._experience(count, later),
                apart=c.estimator.rewards_apart,
                tell=self.strategy.is_rank_0,
            )
            if chosen is None:
                return False
            experiences, self.sampling_metrics = chosen
        self.sampling_metrics |= self._filter_overlong(experiences) | self._staleness(experiences)
        self.sampling_metrics |= self._rescored(experiences)
        self.collector.learned()
        self.buffer.append(experiences)
        self.last_experiences = experiences
        self.callbacks.on_make_experience_end(self, experiences)
        return True

    @contextmanager
    def _episode(self, length: int, told: bool) -> Iterator[None]:
        """Around a timestep: counts it, and calls the hooks of the episode that begins or ends with it."""
        episode, at = divmod(self.timestep - self.fit_start, length)
        if told and at == 0:
            self.callbacks.on_episode_start(self, episode)
        yield
        self.timestep += 1
        if told and at == length - 1:
            self.callbacks.on_episode_end(self, episode)

    def _experience(self, num_timesteps: int, later: SequenceOf[int], around: Any = None) -> list[Experience] | None:
        """Scored timesteps of all ranks. A KL that is paid in the loss is not paid in the rewards as well."""
        with self.clock.measure('collect'):
            timesteps = self.collector.collect(
                num_timesteps,
                version=self.phase,
                later=later,
                stop=self.stop_agreed,
                **({'around': around} if around else {}),
            )
        if timesteps is None:
            return None
        kl_coef = self.kl_controller.value if self.config.kl_in == 'reward' else 0.0
        if self.config.environment_failures == 'mask':
            mask_failed([sample for samples in timesteps for sample in samples])
        with self.clock.measure('score'):
            return [e for samples in timesteps for e in self.maker.make(samples, kl_coef=kl_coef)]

    def _filter_overlong(self, experiences: list[Experience]) -> dict[str, float]:
        """With `overlong_filter`, no token of a response that ran out of room counts; its score stays in its group's
        baseline."""
        if not self.config.overlong_filter:
            return {}
        cut = [e for e in experiences if not e.ended and not e.failed]
        for e in cut:
            e.response_mask = torch.zeros_like(e.response_mask)
        return {'rollout/filtered_share': len(cut) / len(experiences)}

    def _staleness(self, experiences: list[Experience]) -> dict[str, float]:
        """How many learning phases old the weights were that drew the samples."""
        if not self.config.max_staleness:
            return {}
        ages = [self.phase - e.version for e in experiences]
        return {'rollout/staleness_mean': sum(ages) / len(ages), 'rollout/staleness_max': float(max(ages))}

    def _rescored(self, experiences: list[Experience]) -> dict[str, float]:
        """Now and then, whether the reward model agrees with itself."""
        if not isinstance(self.scorer, RewardModelScorer) or self.phase % RESCORE_EVERY:
            return {}
        with self.clock.measure('score'):
            return {'rollout/rescore_error': rescored(self.scorer, experiences, self.strategy)}

    # ------------------------------------------------------------------ learn

    def learn_phase(self) -> dict[str, float]:
        """Learn from the buffer, empty it, adapt the KL coefficient, log. Returns the phase's metrics."""
        self.check_ranks('before learning')
        experiences = list(self.buffer)
        kl_coef = self.kl_controller.value
        with self.clock.measure('learn'):
            metrics = self.learn(experiences)
        rollouts = rollout_metrics(experiences, kl_coef, in_reward=self.config.kl_in == 'reward')
        self.kl_controller.update(rollouts['rollout/kl_mean'], len(experiences))
        self.policy.end_phase(self.phase + 1)
        self.buffer.clear()
        metrics = (
            rollouts
            | group_metrics(experiences, apart=self.config.estimator.rewards_apart)
            | environment_metrics(experiences)
            | scaling_metrics(self.maker.shaper)
            | value_metrics(experiences)
            | self.sampling_metrics
            | metrics
        )
        metrics |= performance_metrics(experiences, self.clock.metrics(), self.config.max_epochs)
        metrics |= rank_metrics(self.strategy, self.collector.taken_s()) | self.collector.draw_metrics()
        self.end_phase(metrics)
        return metrics

    def learn(self, experiences: list[Experience]) -> dict[str, float]:
        """`max_epochs` passes over the experience in train batches. Returns `ppo/...` metrics."""
        c, phase = self.config, PhaseMetrics()
        items = c.estimator.whiten(experiences) if c.whitens_advantages else experiences
        learners = self.learners()
        skipped, stopped, first = 0, False, True
        for epoch in range(c.max_epochs):
            self.callbacks.on_learn_epoch_start(self, epoch)
            for number, records in enumerate(self._train_batches(items, epoch)):
                if not any(bool(r.response_mask.any()) for r in records):
                    skipped += 1  # everything was filtered; a step would only decay the weights
                    continue
                self.callbacks.on_learn_batch_start(self)
                rates = self.set_learning_rates()
                guard = RatioGuard(c)
                result = learn_batch(
                    self.strategy,
                    self.work(records, learners),
                    max_tokens=c.max_tokens_per_batch,
                    max_grad_norm=c.max_grad_norm,
                    veto=guard,
                    where=f'in phase {self.phase + 1}, epoch {epoch + 1}, train batch {number + 1}',
                    pin_memory=c.dataloader_pin_memory,
                    steps=self.steps,
                )
                if first:
                    phase.add(first_batch_metrics(result.metrics))
                    first = False
                self.num_updates += result.stepped
                skipped += not result.stepped
                phase.add(
                    result.metrics
                    | {f'{k}_max': v for k, v in result.metrics.items() if k.endswith('_grad_norm')}
                    | {'lr': rates['actor']}
                    | ({'critic_lr': rates['critic']} if 'critic' in rates else {})
                )
                self.callbacks.on_learn_batch_end(self, result.metrics)
                if guard.early_stop:
                    stopped = True
                    break
            self.callbacks.on_learn_epoch_end(self, epoch)
            if stopped:
                break
        return phase.result('ppo') | {
            'ppo/skipped_batches': float(skipped),
            'ppo/early_stopped': float(stopped),
            'ppo/num_updates': float(self.num_updates),
        }

    def _train_batches(self, items: list[Experience], epoch: int) -> Iterable[list[Experience]]:
        c, key = self.config, (self.strategy.seed, self.phase, epoch)
        if c.sample_replay_buffer:
            order = torch.randperm(len(items), generator=generator_for(*key))[: c.train_batch_size].tolist()
            return [[items[i] for i in order]]
        return ([items[i] for i in positions] for positions in train_batches(len(items), c.train_batch_size, key=key))

    def learners(self) -> list[Learner]:
        """The models that learn from experience in this phase, with their losses."""
        actor = ActorLoss(self.config, self.policy_output, self.kl_controller.value)
        if self.shares_trunk:
            return [Learner('actor', self.actor, self.actor_optim, SharedLoss(actor, ValueLoss(self.config)))]
        learners = [Learner('actor', self.actor, self.actor_optim, actor)]
        if self.critic is not None and self.critic_optim is not None:
            learners.append(Learner('critic', self.critic, self.critic_optim, ValueLoss(self.config)))
        return learners

    def policy_output(self, model: nn.Module, batch: Batch) -> PolicyOutput:
        """The policy's forward over a micro-batch, which callbacks see too. `model` is the actor."""
        output = self.policy.forward(model, batch)
        self.callbacks.on_policy_output(self, batch, output)
        return output

    def work(self, records: list[Experience], learners: list[Learner]) -> list[Work]:
        """What one train batch trains: actor and critic on experience and, with PPO-ptx, the actor on pretraining
        text. A subclass that measures more wraps the learners' losses."""
        c = self.config
        totals = experience_totals(records, c, self.sampling.max_new_tokens)
        work = [
            Work(
                records, learners, partial(collate_experience, totals=totals, packing=c.packing), lambda r: r.num_tokens
            )
        ]
        if c.ptx_coef:
            text = self._pretrain_batch(len(records))
            learner = Learner('actor', self.actor, self.actor_optim, PtxLoss(c.ptx_coef))
            work.append(
                Work(
                    text,
                    [learner],
                    partial(collate, totals=sequence_totals(text), pack=c.packing),
                    lambda s: s.num_tokens,
                )
            )
        return work

    def _pretrain_batch(self, size: int) -> list[Sequence]:
        """As many pretraining sequences as the train batch has; drawn from (seed, optimizer step), so a resume draws
        the same."""
        draw = torch.randint(
            len(self.pretrain_data), (size,), generator=generator_for(self.strategy.seed, -1, self.num_updates)
        )
        return [self.pretrain_data[i] for i in draw.tolist()]

    # ------------------------------------------------------------------ driven by hand

    def generate(
        self,
        queries: Tensor | SequenceOf[Tensor] | SequenceOf[str],
        *,
        length_sampler: Callable[[], int] | None = None,
        return_prompt: bool = False,
        generate_ref_response: bool = False,
        **generate_kwargs: Any,
    ) -> list[Tensor] | tuple[list[Tensor], list[Tensor]]:
        """Responses of the current policy: a list of (A,) int64 tensors. On several ranks each gives and gets its own
        share.

        Args:
            queries: (P,) id tensors, or texts when the trainer has a tokenizer; one tensor counts as a list of one.
            length_sampler: called once per query; its number is that response's limit of new tokens.
            return_prompt: put the prompt's tokens before the response's.
            generate_ref_response: also generate with the initial model; then a pair of lists is returned.
            **generate_kwargs: generation settings that replace the trainer's for this call.

        Raises:
            ValueError: an unknown setting, a prompt without room for a response, no initial model to generate with.
        """
        check_by_hand(self.config, has_environment=isinstance(self.engine, EpisodeEngine))
        prompts = list(as_prompts([queries] if isinstance(queries, Tensor) else list(queries), self.tokenizer))
        bare = self.strategy.unwrap(self.actor)
        check_ids('generate: query', [p.ids for p in prompts], bare)
        sampling, _ = sampling_for(bare, self.tokenizer, self.generate_kwargs | generate_kwargs)
        self._generated_with = sampling
        limits = None if length_sampler is None else [length_sampler() for _ in prompts]
        if generate_ref_response and self.maker.initial_model is None:
            raise ValueError('generate_ref_response needs an initial_model of its own')
        first = self.collector.number(len(prompts))
        indices = list(range(first, first + len(prompts)))
        models = [self.actor] + ([cast(nn.Module, self.maker.initial_model)] if generate_ref_response else [])
        answers = []
        for model in models:
            with self.strategy.onload(model), self.clock.measure('collect'):
                samples = self.collector.generate(
                    prompts,
                    indices=indices,
                    groups=indices,
                    limits=limits,
                    sampling=sampling,
                    policy=partial(self.strategy.full_model, model),
                )
            answers.append(
                [torch.cat([s.prompt_ids, s.response_ids]) if return_prompt else s.response_ids for s in samples]
            )
        return (answers[0], answers[1]) if generate_ref_response else answers[0]

    def step(
        self,
        queries: SequenceOf[Tensor] | SequenceOf[str],
        responses: SequenceOf[Tensor],
        scores: SequenceOf[float | Tensor],
        response_masks: SequenceOf[Tensor] | None = None,
    ) -> dict[str, float]:
        """One learning phase on responses scored by the caller: this rank's share, all lists equally long.

        Args:
            queries: (P,) id tensors or texts. Under an estimator that compares responses, each query stands
                `num_samples_per_prompt` times in a row.
            responses: (A,) int64 tensors, the sampled tokens themselves.
            scores: a number per response, or (A,) scores per token.
            response_masks: (A,) bool, True = a token of the model's own; tool output and other turns are False.

        Returns:
            The metrics of the phase, named as in metrics.jsonl.

        Raises:
            ValueError: lists of different lengths, an empty response, a token id outside of the vocabulary, a score
                that is not finite, queries that do not make groups, a setting that only `fit` can follow.
        """
        check_by_hand(self.config, has_environment=isinstance(self.engine, EpisodeEngine))
        prompts = list(as_prompts(list(queries), self.tokenizer))
        bare = self.strategy.unwrap(self.actor)
        check_ids('step: query', [p.ids for p in prompts], bare)
        check_ids('step: response', responses, bare)
        sampled = [self.sampling, *([self._generated_with] if self._generated_with is not None else [])]
        samples, checked = given_samples(prompts, responses, scores, response_masks, sampled)
        starts = given_groups(prompts, self.config)
        first = self.collector.number(len(samples))
        for i, sample in enumerate(samples):
            sample.index, sample.group = first + i, first + starts[i]
            sample.version = self.phase
        self.collector.decode(samples)
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
        self,
        stats: Mapping[str, float],
        batch: Mapping[str, SequenceOf[Any]] | None = None,
        rewards: SequenceOf[float] | None = None,
        columns_to_log: SequenceOf[str] = ('query', 'response'),
    ) -> None:
        """Hand the numbers of a `step`, and rows of a batch, to the callbacks' sample tables."""
        self.callbacks.on_log(self, dict(stats), batch or {}, list(rewards or ()), list(columns_to_log))


def _trains_value_head(strategy: Strategy, actor: Any, config: PPOConfig) -> bool:
    """Whether the actor carries a value head that the estimator needs; warns of one that it does not.

    Raises:
        ValueError: one that it does not need, under a strategy that cannot leave a parameter without a gradient.
    """
    if getattr(actor, 'value_head', None) is None:
        return False
    if config.estimator.needs_values:
        return True
    if not strategy.supports_unused:
        raise ValueError(
            f'advantage_estimator={config.advantage_estimator!r} takes no values, and {type(strategy).__name__} cannot '
            "leave the actor's value head untrained: build the actor without value_head"
        )
    if strategy.is_rank_0:
        warnings.warn(
            f"the actor's value head is not trained: advantage_estimator={config.advantage_estimator!r} takes no "
            'values; build the actor without value_head to silence this',
            stacklevel=3,
        )
    return False


class RatioGuard:
    """Decides, before a step, whether a train batch may change the weights.

    A batch whose mean ratio exceeds `ratio_threshold` is skipped; one whose approximate KL exceeds 1.5 · `target_kl` is
    skipped and ends the phase (TRL's semantics for both).
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
