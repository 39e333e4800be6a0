"""PPO: collect experience with the current policy, learn from it, repeat.

    fit ─▶ collect: generate under full weights, then score, reference, values, advantages ─▶ buffer
        ─▶ learn:   epochs of train batches from the buffer ─▶ learn_batch ─▶ strategy.backward, strategy.optimizer_step
        ─▶ metrics, callbacks

The same two verbs can be driven by hand: `generate`, then `step(queries, responses, scores)`.

Left out: how text becomes ids (`chatgpt.dataset`), how a response is scored (`chatgpt.experience`), and the hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from chatgpt.batching import collate_or_filler
from chatgpt.dataset.prompts import PromptOrder, PromptSet, as_prompts
from chatgpt.experience import ExperienceMaker, ExperienceSettings, ReplayBuffer, ScoreShaper, as_scorer
from chatgpt.experience.scorers import described, models_of
from chatgpt.functional.kl import AdaptiveKLController, FixedKLController
from chatgpt.nn.dropout import dropout_off
from chatgpt.plan.setup import Setup
from chatgpt.rollout import LocalEngine, RolloutEngine
from chatgpt.trainer.advantages import estimate_advantages, whitened
from chatgpt.trainer.base import Trainer
from chatgpt.trainer.callbacks import Callback, RatioCheck
from chatgpt.trainer.config import NEEDS_CRITIC, PPOConfig
from chatgpt.trainer.learning import TrainedModel, Work, generator_for, learn_batch, train_batches
from chatgpt.trainer.pipeline import pipeline_for
from chatgpt.trainer.ppo_collect import Collector
from chatgpt.trainer.ppo_loss import PPOLoss
from chatgpt.trainer.ppo_metrics import (
    PhaseMetrics,
    first_batch_metrics,
    performance_metrics,
    rollout_metrics,
    scaling_metrics,
    value_metrics,
)
from chatgpt.trainer.ppo_setup import (
    RatioGuard,
    check_nlpo,
    check_rewards,
    has_reference,
    memory_setup,
    sampling_for,
    split_kwargs,
    take_over,
    trains_value_head,
)
from chatgpt.trainer.ppo_stepwise import StepwisePPO
from chatgpt.trainer.strategies.base import Strategy
from chatgpt.trainer.strategies.named import prepared_by
from chatgpt.types import Experience, Sequence


class PPOTrainer(Collector, StepwisePPO, Trainer):
    """Proximal policy optimisation (Schulman et al. 2017) of a language model on a reward.

    Args:
        strategy: has prepared the models below; or a name, such as 'ddp', whose strategy prepares them here.
        actor: the policy, as prepared.
        critic: the value model, as prepared; None when the actor carries a value head or the estimator needs none. A value head that
            the estimator does not need stays as it is, with a warning.
        reward_model: a prepared `RewardModel`, a function `fn(prompts, responses, **columns)`, a `transformers` pipeline, or
            a list of (weight, one of these).
        initial_model: the frozen reference, as prepared. None means the actor itself with its adapter off (LoRA) or its
            frozen branch (hydra); without either, kl_coef must be 0.
        actor_optim, critic_optim: as prepared.
        config: all settings as a `PPOConfig`; its fields are also accepted as keyword arguments here.
        tokenizer: needed for prompts given as text, for reward functions and for stop strings.
        callbacks, run_dir: see `Trainer`.
        engine: who generates; a `LocalEngine` by default. With `max_staleness` one that answers later, such as `RemoteEngine`.
        reward_tokenizer: the reward model's tokenizer when it is not the policy's.
        pretrain_data: sequences for PPO-ptx (`ptx_coef`).
        mask_model: NLPO's mask policy (`nlpo_top_p`): a copy of the actor, prepared as a frozen model.
        **kwargs: fields of `PPOConfig`, and fields of transformers' GenerationConfig (`max_length` is prompt + response).

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
        reward_tokenizer: Any = None,
        pretrain_data: SequenceOf[Sequence] | None = None,
        mask_model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        config, generate_kwargs = split_kwargs(config, kwargs)
        strategy, (actor, actor_optim), (critic, critic_optim), reward_model, initial_model, mask_model = prepared_by(
            strategy, (actor, actor_optim), (critic, critic_optim), reward_model, initial_model, mask_model
        )
        config.validate(strategy.world_size)
        self.actor, self.critic = actor, critic
        self.actor_optim, self.critic_optim = actor_optim, critic_optim
        bare: Any = strategy.unwrap(actor)
        self.shares_trunk = critic is None and trains_value_head(strategy, bare, config)
        self.mask_model = mask_model
        self._check_models(strategy, config, bare, initial_model)
        if mask_model is not None:
            check_nlpo(strategy, bare, engine)
        super().__init__(strategy, config, callbacks=callbacks, tokenizer=tokenizer, run_dir=run_dir)
        self.engine = engine if engine is not None else LocalEngine()
        self.pipeline = pipeline_for(self.engine, config)
        self.generate_kwargs = generate_kwargs
        self.sampling, self.stop_strings = sampling_for(bare, tokenizer, generate_kwargs)
        self.buffer = ReplayBuffer(config.buffer_limit, 'cpu' if config.buffer_cpu_offload else strategy.device)
        self.kl_controller = (
            FixedKLController(config.kl_coef)
            if config.kl_target is None
            else AdaptiveKLController(config.kl_coef, config.kl_target, config.kl_horizon)
        )
        if config.ptx_coef and not pretrain_data:
            raise ValueError(f'ptx_coef={config.ptx_coef} needs pretrain_data, a list of sequences of pretraining text')
        self.pretrain_data = list(pretrain_data or ())
        recompute = config.recompute_logprobs
        if recompute == 'auto':
            inexact = getattr(self.engine, 'recompute_logprobs', False)
            recompute = strategy.dtype != torch.float32 or config.tis_cap is not None or inexact
        self.maker = ExperienceMaker(
            strategy,
            actor,
            critic,
            initial_model,
            as_scorer(
                reward_model,
                max_tokens_per_batch=config.max_tokens_per_batch,
                timeout_s=config.score_timeout_s,
                reward_tokenizer=reward_tokenizer,
                packing=config.packing,
            ),
            ScoreShaper(
                config.score_scaling, config.score_clip, config.missing_eos_score, config.token_penalty, self._overlong(config)
            ),
            ExperienceSettings(
                temperature=self.sampling.temperature,
                kl_kind=config.kl_kind,
                recompute_logprobs=recompute,
                whiten_rewards=config.whiten_rewards,
                max_tokens_per_batch=config.max_tokens_per_batch,
                packing=config.packing,
            ),
            estimate=lambda experiences: estimate_advantages(experiences, config),
            reference_context=bare.reference if initial_model is None and has_reference(bare) else None,
            actor_has_values=self.shares_trunk,
            reference_with_policy=initial_model is None and hasattr(bare, 'ref_branch'),
        )
        check_rewards(self.maker.scorer, config)
        if config.offload == 'idle':
            for frozen in [*models_of(self.maker.scorer), *([initial_model] if initial_model is not None else [])]:
                strategy.keep_idle(frozen)
        for model in self.models().values():
            dropout_off(strategy.unwrap(model))
        self.loss = PPOLoss(actor, critic, config, self.sampling.temperature, self.sampling.max_new_tokens)
        self.loss.mask_model = mask_model
        self._check_lengths(config)
        self.timestep = 0
        self.fit_start = 0
        """timestep at which the current `fit` began"""
        self.prompts_drawn = 0
        self.samples_drawn = 0
        self.prompts: PromptSet | None = None
        self.update_timesteps = 1
        self._order: PromptOrder | None = None

    def _overlong(self, config: PPOConfig) -> tuple[Callable[[int], int], int] | None:
        if config.overlong_buffer is None:
            return None
        name, limit = min(((n, v) for n in ('max_new_tokens', 'max_length') if (v := getattr(self.sampling, n))), key=lambda p: p[1])
        if config.overlong_buffer > limit:
            raise ValueError(f'overlong_buffer={config.overlong_buffer} is a part of {name}={limit}; it must not be larger')
        return self.sampling.room, config.overlong_buffer

    def _check_lengths(self, config: PPOConfig) -> None:
        if config.aggregation == 'sequence_sum' and self.sampling.max_new_tokens is None:
            raise ValueError("loss_aggregation='sequence_sum' divides by max_new_tokens: give it")

    def _check_models(self, strategy: Strategy, config: PPOConfig, actor: nn.Module, initial_model: nn.Module | None) -> None:
        if config.advantage_estimator in NEEDS_CRITIC and self.critic is None and not self.shares_trunk:
            raise ValueError(
                f'advantage_estimator={config.advantage_estimator!r} needs values: pass a critic, or an actor with value_head=True'
            )
        if (config.nlpo_top_p is None) != (self.mask_model is None):
            raise ValueError('NLPO needs both: nlpo_top_p, and mask_model, a prepared copy of the actor')
        if self.critic is not None and self.critic_optim is None:
            raise ValueError('a critic needs critic_optim')
        if initial_model is None and config.kl_coef and not has_reference(actor):
            raise ValueError(
                f'kl_coef={config.kl_coef} needs a reference: pass initial_model, use an actor with lora_rank > 0, or set kl_coef=0'
            )

    # ------------------------------------------------------------------ what the base asks

    def models(self) -> Mapping[str, nn.Module]:
        mask = {'mask': self.mask_model} if self.mask_model is not None else {}
        return {'actor': self.actor} | ({'critic': self.critic} if self.critic is not None else {}) | mask

    def optimizers(self) -> Mapping[str, Optimizer]:
        return {'actor': self.actor_optim} | ({'critic': self.critic_optim} if self.critic_optim is not None else {})

    def own_callbacks(self) -> list[Callback]:
        return [RatioCheck()] if self.config.ratio_check else []

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            'timestep': self.timestep,
            'fit_start': self.fit_start,
            **self._drawn(),
            'kl_controller': self.kl_controller.state_dict(),
            'score_moments': self.maker.shaper.moments.state_dict(),
        }

    def checkpoint_state(self) -> dict[str, Any]:
        return self.state_dict() | self._in_flight()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.timestep = int(state['timestep'])
        self.fit_start = int(state['fit_start'])
        self.prompts_drawn = int(state['prompts_drawn'])
        self.samples_drawn = int(state['samples_drawn'])
        if self.pipeline is not None:
            self.pipeline.clear()
            self._recorded = list(state.get('in_flight', ()))
        self.kl_controller.load_state_dict(state['kl_controller'])
        self.maker.shaper.moments.load_state_dict(state['score_moments'])

    def fingerprint(self) -> dict[str, Any]:
        sampling = {k: v for k, v in vars(self.sampling).items() if k != 'stop'}
        data = self.prompts.fingerprint() if self.prompts is not None else None
        return super().fingerprint() | {'sampling': sampling, 'prompts': data, 'reward': described(self.maker.scorer)}

    # ------------------------------------------------------------------ the loop

    def fit(
        self,
        prompts: Any,
        num_episodes: int = 1,
        max_timesteps: int = 10,
        update_timesteps: int = 10,
    ) -> None:
        """Alternate collect and learn.

        Args:
            prompts: a `PromptSet`, or anything `as_prompts` takes: texts, dicts with a 'prompt', `Prompt` records, id tensors.
            num_episodes: the run has num_episodes x max_timesteps timesteps. After `load_checkpoint` it goes on where it was; a
                second call adds as many again.
            max_timesteps: timesteps of an episode.
            update_timesteps: timesteps collected before one learning phase; a remainder at the end is learned from as well.
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
            self._forget_in_flight()
            self.fit_start = self.timestep
            self.fit_updates = self.num_updates
        self.is_resuming = False
        self.total_updates = self.fit_updates + self._count_updates(total, update_timesteps)
        end = self.fit_start + total
        with self.running(num_phases=self.phase + -(-(end - self.timestep) // update_timesteps)):
            while self.timestep < end and not self.stop_agreed():
                start = self.state_dict()
                done = self.timestep - self.fit_start
                ends = [done, *range(done - done % update_timesteps + update_timesteps, total, update_timesteps), total]
                sizes = [b - a for a, b in zip(ends, ends[1:], strict=False)][: self.config.max_staleness + 1]
                if not self.collect(sizes[0], episode_length=max_timesteps, later=sizes[1:]):
                    self._drop_phase(start)
                    break
                self.learn_phase()

    def memory_setup(self) -> Setup:
        return memory_setup(self)

    def set_prompts(self, prompts: Any) -> None:
        """The prompts that `collect` draws from, in an order that is a function of the seed."""
        self.prompts = as_prompts(prompts, self.tokenizer)
        self._order = PromptOrder(len(self.prompts), self.strategy.seed)

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
        kept = self.pipeline.give_up(self.phase) if self.pipeline is not None else []
        self.load_state_dict(state)
        self._put_back(kept)
        self.is_resuming = False

    def put_back(self) -> bool:
        self.buffer.clear()
        return super().put_back()

    # ------------------------------------------------------------------ learn

    def learn_phase(self) -> dict[str, float]:
        """Learn from the buffer, empty it, adapt the KL coefficient, log. Returns the phase's metrics."""
        self.check_ranks('before learning')
        experiences = list(self.buffer)
        kl_coef = self.loss.kl_coef = self.kl_controller.value
        with self.clock.measure('learn'):
            metrics = self.learn(experiences)
        rollouts = rollout_metrics(experiences, kl_coef, in_reward=self.config.kl_in == 'reward')
        self.kl_controller.update(rollouts['rollout/kl_mean'], len(experiences))
        if self.mask_model is not None and (self.phase + 1) % self.config.nlpo_update_interval == 0:
            take_over(self.strategy.unwrap(self.mask_model), self.strategy.unwrap(self.actor))
        self.buffer.clear()
        metrics = rollouts | scaling_metrics(self.maker.shaper) | value_metrics(experiences) | self.sampling_metrics | metrics
        metrics |= performance_metrics(experiences, self.clock.metrics(), self.config.max_epochs)
        self.end_phase(metrics)
        return metrics

    def learn(self, experiences: list[Experience]) -> dict[str, float]:
        """`max_epochs` passes over the experience in train batches. Returns `ppo/...` metrics."""
        c, phase = self.config, PhaseMetrics()
        items = whitened(experiences, c) if c.whitens_advantages else experiences
        skipped, stopped, first = 0, False, True
        for epoch in range(c.max_epochs):
            self.callbacks.on_learn_epoch_start(self, epoch)
            for number, records in enumerate(self._train_batches(items, epoch)):
                if not any(bool(r.response_mask.any()) for r in records):
                    skipped += 1  # everything was filtered; a step would only decay the weights
                    continue
                self.callbacks.on_learn_batch_start(self)
                self.loss.begin(records)
                rates = self.set_learning_rates()
                where = f'in phase {self.phase + 1}, epoch {epoch + 1}, train batch {number + 1}'
                guard = RatioGuard(c)
                result = learn_batch(
                    self.strategy,
                    self._work(records),
                    max_tokens=c.max_tokens_per_batch,
                    max_grad_norm=c.max_grad_norm,
                    veto=guard,
                    where=where,
                    pin_memory=c.dataloader_pin_memory,
                    packing=c.packing,
                    steps=self.steps,
                )
                if first:
                    phase.add(first_batch_metrics(result.metrics))
                    first = False
                self.num_updates += result.stepped
                skipped += not result.stepped
                phase.add(result.metrics | {'lr': rates['actor']} | ({'critic_lr': rates['critic']} if 'critic' in rates else {}))
                self.callbacks.on_learn_batch_end(self, result.metrics)
                if guard.early_stop:
                    stopped = True
                    break
            self.callbacks.on_learn_epoch_end(self, epoch)
            if stopped:
                break
        result_metrics = phase.result('ppo')
        return result_metrics | {
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

    def _work(self, records: list[Experience]) -> list[Work]:
        """What one train batch trains: actor and critic on experience and, with PPO-ptx, the actor on pretraining text."""
        if self.shares_trunk:
            parts = [TrainedModel('actor', self.actor, self.actor_optim, self.loss.shared)]
        else:
            parts = [TrainedModel('actor', self.actor, self.actor_optim, self.loss.actor)]
            if self.critic is not None and self.critic_optim is not None:
                parts.append(TrainedModel('critic', self.critic, self.critic_optim, self.loss.critic))
        work = [Work(records, parts, collate_or_filler, lambda r: r.num_tokens)]
        if self.config.ptx_coef:
            text = self._pretrain_batch(len(records))
            self.loss.num_ptx_tokens = max(sum(int(s.response_mask.sum()) for s in text), 1)
            part = TrainedModel('actor', self.actor, self.actor_optim, self.loss.ptx)
            work.append(Work(text, [part], collate_or_filler, lambda s: s.num_tokens))
        return work

    def _pretrain_batch(self, size: int) -> list[Sequence]:
        """As many pretraining sequences as the train batch has; drawn from (seed, optimizer step), so a resume draws the same."""
        draw = torch.randint(len(self.pretrain_data), (size,), generator=generator_for(self.strategy.seed, -1, self.num_updates))
        return [self.pretrain_data[i] for i in draw.tolist()]
