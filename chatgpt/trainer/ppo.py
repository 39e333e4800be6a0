"""PPO: collect experience with the current policy, learn from it, repeat.

    fit ─▶ collect: Collector selects prompts and generates with full weights; ExperienceMaker scores ─▶ buffer
        ─▶ learn:   epochs of train batches from the buffer ─▶ learn_batch ─▶ strategy.backward, strategy.optimizer_step
        ─▶ metrics, callbacks

Methods are defined in `algorithms`; `builder` makes the parts; `stepwise` serves a loop of the caller's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from chatgpt.batching import collate
from chatgpt.data.prompts import PromptSet, as_prompts, tasks_without_prompts
from chatgpt.data.tokenize import digest_of, warn_of_bare_prompt
from chatgpt.environments import EnvironmentSettings
from chatgpt.nn.actor import PolicyOutput
from chatgpt.nn.records import moved
from chatgpt.rollout import RolloutEngine
from chatgpt.strategies.base import Strategy
from chatgpt.strategies.registry import prepared_by
from chatgpt.trainer.algorithms import estimate_advantages
from chatgpt.trainer.builder import Models, Reward, build
from chatgpt.trainer.callbacks import RolloutRecorder
from chatgpt.trainer.checkpointing import generator_states, set_generator_states
from chatgpt.trainer.config import PPOConfig
from chatgpt.trainer.critic import CriticCourse
from chatgpt.trainer.experience.scorers import (
    RewardModelScorer,
    check_columns,
    described,
    rescored_metrics,
    with_reward_model,
)
from chatgpt.trainer.fits import check_records
from chatgpt.trainer.losses import (
    VALUE_COLUMNS,
    ActorLoss,
    HeadLoss,
    PtxLoss,
    SharedLoss,
    ValueLoss,
    collate_experience,
    experience_totals,
    sequence_totals,
)
from chatgpt.trainer.metrics import (
    PhaseMetrics,
    experience_metrics,
    mismatch_metrics,
    performance_metrics,
    rank_metrics,
)
from chatgpt.trainer.schedule import FitPlan, generator_for, train_batches
from chatgpt.trainer.selection import ReplayBuffer, Selection, compared, mask_failed
from chatgpt.trainer.step import Learner, Passes, Work, learn_batch
from chatgpt.trainer.stepwise import Stepwise
from chatgpt.types import Batch, Experience, Sample, Sequence


class PPOTrainer(Stepwise):
    """Proximal policy optimisation (Schulman et al. 2017) of a language model on a reward.

    Args:
        strategy: has prepared the models below; or a name, such as 'ddp', to prepare them here.
        actor: the policy, as prepared.
        critic: the value model, as prepared; None when the actor carries a value head or the estimator needs none. A
            value head that the estimator does not need stays untrained, with a warning.
        reward_model: a prepared `RewardModel`, a function `fn(prompts, responses, **columns)`, a `transformers`
            pipeline, or a list of (weight, one of these).
        initial_model: the frozen reference, as prepared. None means the actor itself with its adapter off (LoRA) or its
            frozen branch (hydra); without either, kl_coef must be 0.
        actor_optim, critic_optim: as prepared.
        config: all settings as a `PPOConfig`; its fields are also accepted as keyword arguments here.
        tokenizer: needed for prompts given as text, for reward functions and for stop strings.
        callbacks, run_dir: see `Trainer`. Where there is a `run_dir`, a `RolloutRecorder` is added unless given.
        environment: where the policy acts over several turns: an `Environment` class, a function that makes one, or a
            name such as 'games:countdown'. Its rewards are the scores if there is no `reward_model`.
        environment_settings: limits of an episode, and how environments are run.
        reward_weights: weights of an environment's rewards by name, with `reward_model` as 'reward_model' or
            'reward_fn'; None takes the sum of the environment's.
        engine: generates; by default a `LocalEngine`, for an encoder-decoder an `HFEngine`. `max_staleness` needs an
            asynchronous one, such as `RemoteEngine`.
        reward_tokenizer: the reward model's tokenizer when it is not the policy's.
        pretrain_data: sequences for PPO-ptx (`ptx_coef`).
        mask_model: a copy of the actor, prepared as a frozen model, for a policy made of both (`POLICIES`).
        **kwargs: fields of `PPOConfig`, and fields of transformers' GenerationConfig (`max_length` is prompt +
            response).

    Raises:
        ValueError: an unknown keyword (the nearest known ones are listed), or settings that are incompatible.
    """

    lengthened_by = 'num_episodes or max_timesteps (num_timesteps of chatgpt.train)'

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
        config, self.generation = PPOConfig.split('PPOTrainer', config, kwargs)
        strategy, (actor, actor_optim), (critic, critic_optim), reward_model, initial_model, mask_model = prepared_by(
            strategy, (actor, actor_optim), (critic, critic_optim), reward_model, initial_model, mask_model
        )
        assert not isinstance(strategy, str)
        self.actor, self.critic, self.actor_optim, self.critic_optim = actor, critic, actor_optim, critic_optim
        self.pretrain_data = list(pretrain_data or ())
        self._pretrain_digest = digest_of(self.pretrain_data) if pretrain_data else None
        parts = build(
            type(self).__name__,
            strategy,
            config,
            Models(actor, actor_optim, critic, critic_optim, initial_model, mask_model),
            Reward(reward_model, reward_weights, reward_tokenizer),
            generation=self.generation,
            tokenizer=tokenizer,
            engine=engine,
            environment=environment,
            environment_settings=environment_settings,
            pretrain_data=self.pretrain_data,
        )
        if run_dir is not None and not any(isinstance(c, RolloutRecorder) for c in callbacks):
            callbacks = [RolloutRecorder(), *callbacks]
        self.course = CriticCourse(config)
        if config.critic_apart:
            callbacks = [self.course, *callbacks]
        models, optimizers = parts.models, parts.optimizers
        super().__init__(
            strategy, config, models, optimizers, callbacks=callbacks, tokenizer=tokenizer, run_dir=run_dir
        )
        self.collector, self.policy, self.maker = parts.collector, parts.policy, parts.maker
        self.kl_controller, self.shares_trunk = parts.kl_controller, parts.shares_trunk
        self.tis_cap = parts.tis_cap
        self.engine, self.sampling, self.scorer = parts.collector.engine, parts.collector.sampling, parts.maker.scorer
        self.buffer = ReplayBuffer(config.buffer_limit, 'cpu' if config.buffer_cpu_offload else strategy.device)
        self.selection = Selection(config, strategy)
        self._kept_metrics: dict[str, float] = {}

    # ------------------------------------------------------------------ state

    @property
    def timestep(self) -> int:
        """Number of collected timesteps."""
        return self.collector.timestep

    @property
    def prompts(self) -> PromptSet | None:
        return self.collector.draws.prompts

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            **self.collector.state_dict(),
            'kl_controller': self.kl_controller.state_dict(),
            'score_moments': self.maker.shaper.moments.state_dict(),
        }

    def checkpoint_state(self) -> dict[str, Any]:
        return self.state_dict() | self.collector.in_flight()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.collector.load_state_dict(state)
        self.kl_controller.load_state_dict(state['kl_controller'])
        self.maker.shaper.moments.load_state_dict(state['score_moments'])

    def fingerprint(self) -> dict[str, Any]:
        facts = {'reward': described(self.scorer), 'pretrain_data': self._pretrain_digest}
        return super().fingerprint() | self.collector.fingerprint() | facts | self.maker.reference.facts()

    def facts(self) -> dict[str, Any]:
        c = self.config
        estimator = 'ppo' if c.advantage_estimator == 'gae' else c.advantage_estimator
        method = estimator if c.policy_loss in ('ppo', 'reinforce') else c.policy_loss
        return {'method': method, 'reward': described(self.scorer)} | self.collector.facts()

    # ------------------------------------------------------------------ the loop

    def fit(
        self,
        prompts: Any = None,
        num_episodes: int = 1,
        max_timesteps: int = 10,
        update_timesteps: int = 10,
    ) -> None:
        """Alternates collect and learn.

        Args:
            prompts: a `PromptSet`, or anything `as_prompts` takes: texts, dicts with a 'prompt', `Prompt` records, id
                tensors. None with an environment that sets its own tasks.
            num_episodes: the run has num_episodes x max_timesteps timesteps. After `load_checkpoint` it continues; a
                second call adds as many again.
            max_timesteps: timesteps of an episode.
            update_timesteps: timesteps collected before a learning phase; a remainder at the end is learned as well.

        Raises:
            EpisodesFailed: the environment failed in all episodes of a phase.
            EnvironmentsHang, WorkerError: no further environments can be run; see `chatgpt.environments.runner`.
        """
        plan = FitPlan.of(num_episodes=num_episodes, max_timesteps=max_timesteps, update_timesteps=update_timesteps)
        self.set_prompts(prompts)
        self.buffer.clear()  # a phase that an exception ended is collected again
        self.collector.set_plan(plan, resume=self.is_resuming)
        num_phases = self.phase + len(self.collector.phases())
        first_phase = num_phases - len(plan.ends)
        for warning in plan.warnings(self.config, first_phase):
            self.warn(warning)
        self.course.expect(self.collector.plan, first_phase, resumes=self.is_resuming)
        self.expect_updates(self.collector.plan.num_updates(self.config, first_phase))
        with self.engine if self.engine.environment is not None else nullcontext(), self.running(num_phases):
            while self.collector.phases() and not self.stop_agreed() and self.collect():
                self.learn()

    def set_prompts(self, prompts: Any) -> None:
        """Sets the prompts of `collect`, in an order that is a function of the seed."""
        if prompts is None and self.engine.environment is not None:
            prompts = tasks_without_prompts()
        found = as_prompts(prompts, self.tokenizer)
        check_columns(self.scorer, found)
        warn_of_bare_prompt(found[0].ids, self.tokenizer)
        self.collector.set_prompts(found)

    # ------------------------------------------------------------------ collect

    def collect(self, num_timesteps: int | None = None) -> bool:
        """Generates and scores one phase into the buffer. Returns False if a stop is requested: then the state is that
        before the call, and a checkpoint taken now lies between phases.

        Args:
            num_timesteps: None takes the next phase of `fit`.
        """
        if num_timesteps is not None and num_timesteps < 1:
            raise ValueError(f'collect: num_timesteps={num_timesteps} must be at least 1')
        before, generators = self.state_dict(), generator_states()
        self.callbacks.on_make_experience_start(self)
        experiences = self._experience(num_timesteps, around=self._timestep)
        if experiences is not None:
            more = partial(self._experience, counts=False)
            experiences = self.selection(experiences, self.phase, more)
        if experiences is None:
            with self.collector.draws.dropped(self.phase):
                self.load_state_dict(before)
            self.is_resuming = False
            set_generator_states(generators)  # generation and environments repeat the same draws
            return False
        self.collector.learned()
        with self.clock.measure('score'):
            agreement = rescored_metrics(self.scorer, experiences, self.strategy, self.phase)
        self.keep(experiences, self.selection.metrics | agreement)
        self.callbacks.on_make_experience_end(self, experiences)
        return True

    def keep(self, experiences: list[Experience], metrics: Mapping[str, float]) -> None:
        """Adds experience to the buffer, with metrics of its collection."""
        self.buffer.append(experiences)
        self.last_experiences, self._kept_metrics = experiences, dict(metrics)

    @contextmanager
    def _timestep(self) -> Iterator[None]:
        """Context of a timestep: calls the hooks of an episode that begins or ends with it."""
        episode, begins, ends = self.collector.plan.episode(self.timestep)
        if begins:
            self.callbacks.on_episode_start(self, episode)
        yield
        if ends:
            self.callbacks.on_episode_end(self, episode)

    def _experience(self, num_timesteps: int | None, **options: Any) -> list[Experience] | None:
        """Returns the scored timesteps of all ranks (`chatgpt.nn.records`); None if a stop is requested."""
        with self.clock.measure('collect'):
            timesteps = self.collector.collect(num_timesteps, version=self.phase, stop=self.stop_agreed, **options)
        if timesteps is None:
            return None
        if self.config.environment_failures == 'mask':
            mask_failed([sample for samples in timesteps for sample in samples])
        return [e for samples in timesteps for e in self.make(samples)]

    def make(self, samples: list[Sample], **given: Any) -> list[Experience]:
        """Returns the experience of all ranks; see `ExperienceMaker.make`. The rewards include the KL unless the loss
        does. In the critic's warm-up the returns have λ = 1, so that no value of a new critic is in them."""
        c = self.config
        self._check_samples(samples, [] if given.get('scores') is not None else with_reward_model(self.scorer))
        kl_coef = self.kl_controller.value if c.kl_in == 'reward' else 0.0
        with self.clock.measure('score'):
            experiences = self.maker.make(samples, kl_coef=kl_coef, **given)
            if self.actor_waits:
                estimate_advantages(compared(experiences), c.estimator, replace(c, value_lam=1.0), self.strategy)
        return experiences

    def _check_samples(self, samples: list[Sample], scorers: list[RewardModelScorer]) -> None:
        """Raises ValueError for a sample that one of the models cannot read."""
        maker, records = self.maker, [[sample] for sample in samples]
        reads = {'actor': maker.actor, 'critic': maker.critic, 'initial_model': maker.reference.initial_model}
        of_tokens = [('reward_model', each.model) for each in scorers if each.tokenizer is None]
        for name, model in (*reads.items(), *of_tokens):
            if model is not None:
                check_records(f'{name}: sample', records, self.strategy.unwrap(model))

    # ------------------------------------------------------------------ learn

    def learn(self) -> dict[str, float]:
        """Runs `max_epochs` passes over the buffer and empties it; adapts the KL coefficient, logs. Returns the phase's
        metrics."""
        self.check_ranks('before learning')
        experiences, phase, counts = list(self.buffer), PhaseMetrics(), {'skipped_batches': 0, 'early_stopped': 0}
        if not experiences:
            raise ValueError('learn: there is no experience to learn from: collect first')
        try:
            with self.clock.measure('learn'):
                num_learned = sum(self._run(passes, phase, counts) for passes in self.passes(experiences))
        finally:
            self.buffer.clear()  # nothing is learned twice where a caller goes on after an exception
        learned = phase.result('ppo') | {f'ppo/{name}': float(count) for name, count in counts.items()}
        return self._end(experiences, learned, num_learned)

    def _run(self, passes: Passes, phase: PhaseMetrics, counts: dict[str, int]) -> int:
        """Runs some passes of a phase; adds to its metrics, and to its counts of skipped train batches and of passes
        that `target_kl` ended early. Returns the number of tokens that were learned from."""
        c, strategy, num_tokens = self.config, self.strategy, 0
        for epoch in range(passes.epochs):
            self.callbacks.on_learn_epoch_start(self, epoch)
            for number, records in enumerate(self._train_batches(passes, epoch)):
                if not any(bool(r.response_mask.any()) for r in records):
                    counts['skipped_batches'] += 1  # everything was filtered; a step would only decay the weights
                    continue
                records = moved(strategy, records, strategy.sums.ranks_of([r.num_tokens for r in records]))
                self.callbacks.on_learn_batch_start(self)
                rates, guard = passes.set_rates(), RatioGuard(c)
                result = learn_batch(
                    strategy,
                    passes.work(records),
                    max_tokens=c.max_tokens_per_batch,
                    max_grad_norm=c.max_grad_norm,
                    veto=guard if passes.guarded else None,
                    where=f'in phase {self.phase + 1}, epoch {epoch + 1}, train batch {number + 1}',
                    pin_memory=c.dataloader_pin_memory,
                    steps=self.steps,
                )
                num_tokens += sum(r.num_tokens for r in records)
                phase.add_batch(result.metrics, rates)
                passes.count(result.stepped)
                counts['skipped_batches'] += not result.stepped
                self.callbacks.on_learn_batch_end(self, result.metrics)
                if guard.early_stop:
                    counts['early_stopped'] = 1
                    break
            self.callbacks.on_learn_epoch_end(self, epoch)
            if counts['early_stopped'] and passes.guarded:
                break
        return num_tokens

    def _end(self, experiences: list[Experience], learned: dict[str, float], num_learned: int) -> dict[str, float]:
        """Ends a learning phase, with `num_learned` tokens of all passes; returns its metrics."""
        metrics = experience_metrics(
            experiences, self.config, self.kl_controller.value, self.maker.shaper, self.strategy
        )
        if self.maker.settings.recompute_logprobs and not self.strategy.sums.exact:  # an engine promises no bits
            phase = self.phase if self.config.max_staleness else None
            metrics |= mismatch_metrics(experiences, phase, self.strategy)
        if not self.actor_waits:
            self.kl_controller.update(metrics['rollout/kl_mean'], len(experiences))
        if not self.maker.reference.exists:
            del metrics['rollout/kl_mean'], metrics['rollout/kl_k3_mean']
        metrics |= self._kept_metrics | learned | {'ppo/num_updates': float(self.num_updates)}
        metrics |= self.course.metrics(self.phase)
        self.course.keep(experiences, self.phase + 1)
        self.policy.end_phase(self.phase + 1)
        metrics |= performance_metrics(experiences, self.clock.metrics(), num_learned)
        metrics |= rank_metrics(self.strategy, self.collector.taken_s()) | self.collector.draw_metrics()
        self.end_phase(metrics)
        return metrics

    def _train_batches(self, passes: Passes, epoch: int) -> Iterable[list[Any]]:
        items, key = passes.records, (self.strategy.seed, self.phase, epoch)
        batches = train_batches(len(items), passes.batch_size, key=key)
        return ([items[i] for i in at] for at in islice(batches, 1 if self.config.sample_replay_buffer else None))

    @property
    def actor_waits(self) -> bool:
        """True in the critic's warm-up."""
        return self.phase < self.config.critic_warmup_phases

    def passes(self, experiences: list[Experience]) -> list[Passes]:
        """Returns the passes of this phase: of all models together, or of the actor and then of a critic that learns
        apart; in the critic's warm-up of the critic alone, or of the actor's value head."""
        learners = self.learners()
        if self.actor_waits:
            return [self._critic_passes(learners[-1], experiences)]
        if self.config.critic_apart and not self.shares_trunk:
            actor, critic = learners
            return [self._passes([actor], experiences), self._critic_passes(critic, experiences)]
        return [self._passes(learners, experiences)]

    def _passes(self, learners: list[Learner], experiences: list[Experience]) -> Passes:
        """Returns the passes of the actor, and of models that learn from its train batches."""
        c, names = self.config, [learner.name for learner in learners]
        return Passes(
            c.estimator.whiten(experiences, self.strategy) if c.whitens_advantages else experiences,
            c.max_epochs,
            c.train_batch_size,
            partial(self.work, learners=learners),
            partial(self.set_learning_rates, names),
            self.count_update,
        )

    def _critic_passes(self, critic: Learner, experiences: list[Experience]) -> Passes:
        c, course = self.config, self.course

        def work(records: list[Any]) -> list[Work]:
            totals = sequence_totals(records)
            make_batch = partial(collate_experience, totals=totals, packing=c.packing, names=VALUE_COLUMNS)
            return [Work(records, [critic], make_batch)]

        return Passes(
            course.targets(experiences),
            c.critic_epochs or c.max_epochs,
            c.critic_train_batch_size or c.train_batch_size,
            work,
            lambda: {'critic': self._critic_rate()},
            course.count,
            guarded=False,
        )

    def _critic_rate(self) -> float:
        """Sets the learning rate of the critic's next step. A value head on the trunk has its rate unscheduled."""
        if self.shares_trunk:
            return self._schedules['actor'].set_base()
        return self._schedules['critic'].set(self.course.num_updates, self.course.total_updates)

    def learners(self) -> list[Learner]:
        """Returns the models that learn from the experience of this phase, with their losses. In the critic's warm-up
        values are not clipped to those of collecting, which would bound the way of rollouts that are kept."""
        config = replace(self.config, tis_cap=self.tis_cap)
        actor = ActorLoss(config, self.policy_output, self.kl_controller.value)
        value = ValueLoss(self.config, clips=not self.actor_waits)
        if self.shares_trunk and self.actor_waits:
            return [Learner('critic', self.actor, self.actor_optim, HeadLoss(value))]
        if self.shares_trunk:
            return [Learner('actor', self.actor, self.actor_optim, SharedLoss(actor, value))]
        learners = [Learner('actor', self.actor, self.actor_optim, actor)]
        if self.critic is not None and self.critic_optim is not None:
            learners.append(Learner('critic', self.critic, self.critic_optim, value))
        return learners

    def policy_output(self, model: nn.Module, batch: Batch) -> PolicyOutput:
        """Returns the policy's forward over a micro-batch, and passes it to callbacks. `model` is the actor."""
        output = self.policy.forward(model, batch)
        self.callbacks.on_policy_output(self, batch, output)
        return output

    def work(self, records: list[Experience], learners: list[Learner]) -> list[Work]:
        """Returns the work of a train batch. A subclass that measures more wraps the learners' losses."""
        c = self.config
        totals = experience_totals(records, c, self.sampling.max_new_tokens)
        work = [Work(records, learners, partial(collate_experience, totals=totals, packing=c.packing))]
        if c.ptx_coef:  # as many sequences as the train batch has; a function of the optimizer step
            generator = generator_for(self.strategy.seed, -1, self.num_updates)
            drawn = torch.randint(len(self.pretrain_data), (len(records),), generator=generator)
            text = [self.pretrain_data[i] for i in drawn.tolist()]
            learner = Learner('actor', self.actor, self.actor_optim, PtxLoss(c.ptx_coef))
            work.append(Work(text, [learner], partial(collate, totals=sequence_totals(text), pack=c.packing)))
        return work


class RatioGuard:
    """Refuses a train batch, before its step, if its mean ratio exceeds `ratio_threshold`, or its approximate KL
    exceeds 1.5 · `target_kl`, which also ends the phase (TRL's semantics for both)."""

    def __init__(self, config: PPOConfig) -> None:
        self.config = config
        self.early_stop = False

    def __call__(self, metrics: dict[str, float]) -> bool:
        c = self.config
        if c.target_kl is not None and metrics['approx_kl'] > 1.5 * c.target_kl:
            self.early_stop = True
            return True
        return c.ratio_threshold is not None and metrics['ratio_mean'] > c.ratio_threshold
