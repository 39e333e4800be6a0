"""Trainers and callbacks with the arguments of ColossalAI's `chatgpt`, on the library's own.

A model and an optimizer that no strategy has prepared are prepared by the trainer.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from chatgpt.nn.records import is_here
from chatgpt.strategies import Strategy
from chatgpt.trainer import PPOTrainer as OurPPOTrainer
from chatgpt.trainer import RewardModelTrainer as OurRewardModelTrainer
from chatgpt.trainer import SFTTrainer as OurSFTTrainer
from chatgpt.trainer import callbacks as ours
from chatgpt.trainer.callbacks import TrainerView
from chatgpt_compat.colossalai.data import demonstrations, preferences
from chatgpt_compat.colossalai.losses import LogExpLoss, LogSigLoss

PPO_ORDER = (
    *('kl_coef', 'train_batch_size', 'buffer_limit', 'buffer_cpu_offload', 'eps_clip', 'value_clip'),
    *('experience_batch_size', 'max_epochs', 'tokenizer', 'sample_replay_buffer', 'dataloader_pin_memory', 'callbacks'),
)
"""positional arguments after the optimizers"""
CACHE_FUNCTIONS = ('prepare_inputs_fn', 'update_model_kwargs_fn')


def is_prepared(strategy: Strategy, optimizer: Optimizer) -> bool:
    try:
        strategy.discard_gradients(optimizer)  # there are none yet
    except ValueError:
        return False
    return True


class PPOTrainer(OurPPOTrainer):
    """`chatgpt.trainer.PPOTrainer` with these differences:

    - the arguments after the optimizers may be positional, in ColossalAI's order;
    - `tokenizer` may be a function of a list of prompts that returns input_ids and attention_mask;
    - `prepare_inputs_fn` and `update_model_kwargs_fn` have no effect: the engine manages the cache;
    - an episode that ends with a learning phase ends after learning.
    """

    _ended: int | None = None
    """the episode that ends with the current learning phase"""

    def __init__(
        self,
        strategy: Strategy,
        actor: nn.Module,
        critic: nn.Module,
        reward_model: Any,
        initial_model: nn.Module | None,
        actor_optim: Optimizer,
        critic_optim: Optimizer | None = None,
        *settings: Any,
        tokenizer: Any = None,
        **kwargs: Any,
    ) -> None:
        if len(settings) > len(PPO_ORDER):
            raise ValueError(
                f'PPOTrainer takes {7 + len(PPO_ORDER)} arguments without a name, {7 + len(settings)} given'
            )
        named = dict(zip(PPO_ORDER, settings, strict=False))
        if twice := named.keys() & kwargs.keys():
            raise ValueError(f'PPOTrainer got {sorted(twice)[0]} twice')
        kwargs = named | kwargs
        tokenizer = kwargs.pop('tokenizer', tokenizer)
        for name in CACHE_FUNCTIONS:
            kwargs.pop(name, None)
        kwargs['callbacks'] = list(kwargs.get('callbacks') or ())
        is_function = callable(tokenizer) and not hasattr(tokenizer, 'decode')
        self.tokenize: Callable[[list[Any]], Any] | None = tokenizer if is_function else None
        if isinstance(strategy, Strategy) and not is_prepared(strategy, actor_optim):
            (actor, actor_optim), reward_model, initial_model = strategy.prepare(
                (actor, actor_optim), reward_model, initial_model
            )
            if critic is not None:
                critic, critic_optim = strategy.prepare((critic, critic_optim))
        super().__init__(
            strategy,
            actor,
            critic,
            reward_model,
            initial_model,
            actor_optim,
            critic_optim,
            tokenizer=None if is_function else tokenizer,
            **kwargs,
        )

    def set_prompts(self, prompts: Any) -> None:
        if self.tokenize is not None and not isinstance(prompts, str):
            prompts = [self._ids(prompt) for prompt in prompts]
        super().set_prompts(prompts)

    @contextmanager
    def _timestep(self) -> Iterator[None]:
        plan = self.collector.plan
        at_end = self.timestep - plan.start + 1 in plan.ends
        episode, begins, ends = plan.episode(self.timestep)
        self._ended = episode if ends and at_end else None
        if begins:
            self.callbacks.on_episode_start(self, episode)
        yield
        if ends and not at_end:
            self.callbacks.on_episode_end(self, episode)

    def learn(self) -> dict[str, float]:
        metrics = super().learn()
        episode, self._ended = self._ended, None
        if episode is not None:
            self.callbacks.on_episode_end(self, episode)
        return metrics

    def _ids(self, prompt: Any) -> torch.Tensor:
        assert self.tokenize is not None
        batch = self.tokenize([prompt])
        ids = batch['input_ids'][0]
        mask = batch['attention_mask'][0].bool() if 'attention_mask' in batch else torch.ones_like(ids).bool()
        return ids[mask]


class RewardModelTrainer(OurRewardModelTrainer):
    """The reward-model trainer of both layouts: (model, strategy, optim, [loss_fn,] train_dataset, [valid_dataset,]
    eval_dataset, batch_size, max_epochs), with data sets of (chosen ids, mask, rejected ids, mask).

    `batch_size` is that of a process. Scores are not shifted after training (`calibrate=False`). The learning rate
    follows a cosine over the steps of the run.
    """

    def __init__(
        self,
        model: nn.Module,
        strategy: Strategy,
        optim: Optimizer,
        *positional: Any,
        loss_fn: Any = None,
        train_dataset: Any = None,
        valid_dataset: Any = None,
        eval_dataset: Any = None,
        batch_size: int = 1,
        max_epochs: int | None = None,
        **settings: Any,
    ) -> None:
        given, names = list(positional), ['train_dataset', 'eval_dataset', 'batch_size', 'max_epochs']
        if given and (isinstance(given[0], nn.Module) or given[0] is None):
            loss_fn = given.pop(0)
            names.insert(1, 'valid_dataset')
        found = {'train_dataset': train_dataset, 'valid_dataset': valid_dataset, 'eval_dataset': eval_dataset}
        found |= {'batch_size': batch_size, 'max_epochs': max_epochs} | dict(zip(names, given, strict=False))
        if len(given) > len(names):
            raise ValueError(f'RewardModelTrainer takes at most {3 + len(names)} arguments without a name')
        if found['train_dataset'] is None:
            raise ValueError('RewardModelTrainer needs train_dataset')
        names_of_loss = {LogSigLoss: 'log_sig', LogExpLoss: 'log_exp', type(None): 'log_sig'}
        if type(loss_fn) not in names_of_loss:
            raise ValueError(
                f'loss_fn is a {type(loss_fn).__name__}; give LogSigLoss() or LogExpLoss(), or write an Objective of '
                'your own (docs/extend/objective.md)'
            )
        held_out = found['eval_dataset'] if found['eval_dataset'] is not None else found['valid_dataset']
        if found['valid_dataset'] is not None and found['eval_dataset'] is not None:
            warnings.warn(
                'valid_dataset is not read: eval_dataset is evaluated at the end of every epoch', stacklevel=2
            )
        if not is_prepared(strategy, optim):
            model, optim = strategy.prepare((model, optim))
        epochs = found['max_epochs'] if found['max_epochs'] is not None else 1 if loss_fn is not None else 2
        super().__init__(
            strategy,
            model,
            optim,
            preferences(found['train_dataset']),
            preferences(held_out) if held_out is not None else None,
            train_batch_size=found['batch_size'] * strategy.world_size,
            max_epochs=epochs,
            loss_fn=names_of_loss[type(loss_fn)],
            calibrate=False,
            **settings,
        )
        self.model, self.optimizer = model, optim

    def fit(self, use_lora: int = 0) -> None:  # type: ignore[override]
        super().fit()


class SFTTrainer(OurSFTTrainer):
    """The SFT trainer: (model, strategy, optim, train_dataloader, eval_dataloader, sampler, batch_size, max_epochs).

    A train batch has the loader's batch size on each process. Every process reads the loader's whole data set and takes
    its share of each batch, so `sampler` has no effect.
    """

    def __init__(
        self,
        model: nn.Module,
        strategy: Strategy,
        optim: Optimizer,
        train_dataloader: Any,
        eval_dataloader: Any = None,
        sampler: Any = None,
        batch_size: int = 1,
        max_epochs: int = 2,
        **settings: Any,
    ) -> None:
        train = demonstrations(train_dataloader)
        held_out = None if eval_dataloader is None else demonstrations(eval_dataloader)
        if not is_prepared(strategy, optim):
            model, optim = strategy.prepare((model, optim))
        self._logs = _LossLog()
        callbacks: SequenceOf[ours.Callback] = settings.pop('callbacks', ())
        super().__init__(
            strategy,
            model,
            optim,
            train,
            held_out,
            train_batch_size=(train_dataloader.batch_size or batch_size) * strategy.world_size,
            max_epochs=max_epochs,
            callbacks=[*callbacks, self._logs],
            **settings,
        )
        self.model, self.optimizer = model, optim

    def fit(self, logger: Any = None, use_lora: int = 0, log_interval: int | None = None) -> None:  # type: ignore[override]
        """Trains, and logs the loss to `logger.info` every `log_interval` steps. `use_lora` has no effect."""
        self._logs.logger = logger
        if log_interval is not None:
            if log_interval < 1:
                raise ValueError(f'log_interval={log_interval} must be at least 1')
            self.config.log_interval = log_interval
        super().fit()


class _LossLog(ours.Callback):
    """Logs the losses to a logger."""

    logger: Any = None

    def on_phase_end(self, trainer: TrainerView, step: int, metrics: dict[str, float]) -> None:
        if self.logger is not None and trainer.strategy.is_rank_0:
            losses = {name: value for name, value in metrics.items() if name in ('sft/loss', 'sft/val_loss')}
            self.logger.info(f'step {trainer.num_updates}: ' + ', '.join(f'{k} {v:.4f}' for k, v in losses.items()))


# ---------------------------------------------------------------------- callbacks

HOOKS = {
    **dict.fromkeys(('on_fit_start', 'on_fit_end', 'on_make_experience_start', 'on_learn_batch_start'), 0),
    **dict.fromkeys(('on_episode_start', 'on_episode_end', 'on_make_experience_end'), 1),
    **dict.fromkeys(('on_learn_epoch_start', 'on_learn_epoch_end'), 1),
    'on_learn_batch_end': 2,
}
"""hook of ColossalAI's callbacks → its number of arguments; in coati 0.3 `on_learn_batch_end` has one"""


class Callback(ours.Callback):
    """Base class of callbacks. Hooks may have ColossalAI's arguments, or this library's, which begin with the trainer.

    `experience` of `on_make_experience_end(experience)` and `on_learn_batch_end([metrics,] experience)` is the list of
    a phase's `chatgpt.types.Experience` on this process.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, count in HOOKS.items():
            if (hook := vars(cls).get(name)) is not None:
                names = list(inspect.signature(hook).parameters)[1:]
                fits = len(names) == count or (name == 'on_learn_batch_end' and len(names) == 1)
                if fits and names[:1] != ['trainer']:
                    setattr(cls, name, _without_trainer(hook, name, len(names)))


def _do_nothing(self: Callback, *arguments: Any) -> None:
    """Does nothing; a hook that is not overridden, callable with any arguments."""


for _name in HOOKS:
    setattr(Callback, _name, _do_nothing)


def _without_trainer(hook: Any, name: str, count: int) -> Any:
    @wraps(hook)
    def called(self: Callback, trainer: TrainerView, *arguments: Any) -> None:
        if name == 'on_learn_batch_end':
            arguments = (*arguments, trainer.last_experiences)[-count:]
        if name in ('on_learn_batch_end', 'on_make_experience_end'):
            arguments = (*arguments[:-1], [e for e in arguments[-1] if is_here(e)])
        hook(self, *arguments)

    del called.__wrapped__  # type: ignore[attr-defined]  # `signature` of the hook is then the one with the trainer
    return called


class PerformanceEvaluator(ours.PerformanceEvaluator):
    """`chatgpt.trainer.callbacks.PerformanceEvaluator`; `ignore_episodes` counts learning phases."""

    def __init__(
        self,
        actor_num_params: int,
        critic_num_params: int,
        initial_model_num_params: int,
        reward_model_num_params: int,
        enable_grad_checkpoint: bool = False,
        ignore_episodes: int = 0,
    ) -> None:
        sizes = (actor_num_params, critic_num_params, initial_model_num_params, reward_model_num_params)
        super().__init__(*sizes, enable_grad_checkpoint, ignore_phases=ignore_episodes)


class SaveCheckpoint(Callback):
    """Writes `path/episode_N/actor.pt`, `critic.pt` and the state of each optimizer every `interval` episodes.

    `chatgpt.trainer.callbacks.SaveCheckpoint` writes whole checkpoints, from which a run can resume.
    """

    def __init__(
        self,
        path: str,
        interval: int,
        strategy: Strategy,
        actor: nn.Module | None = None,
        critic: nn.Module | None = None,
        actor_optim: Optimizer | None = None,
        critic_optim: Optimizer | None = None,
    ) -> None:
        self.path, self.interval, self.strategy = Path(path), interval, strategy
        self.pairs = {'actor': (actor, actor_optim), 'critic': (critic, critic_optim)}

    def on_episode_end(self, episode: int) -> None:  # type: ignore[override]
        if (episode + 1) % self.interval:
            return
        folder = self.path / f'episode_{episode}'
        folder.mkdir(parents=True, exist_ok=True)
        for name, (model, optimizer) in self.pairs.items():
            if model is not None:
                self.strategy.save_model(model, folder / f'{name}.pt', only_rank0=True)
                if optimizer is not None:
                    rank = self.strategy.rank
                    self.strategy.save_optimizer(optimizer, folder / f'{name}-optim-rank-{rank}.pt')
