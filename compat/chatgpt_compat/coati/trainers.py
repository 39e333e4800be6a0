"""Trainers of `coati`. If loaders are passed to `fit`, the trainer of this library is made there.

Learning rates of supervised trainers follow a cosine over the run; a given scheduler is not stepped. `log_dir` and
`use_wandb` have no effect.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from chatgpt.strategies import Strategy
from chatgpt.trainer import SFTTrainer as OurSFTTrainer
from chatgpt_compat.coati.data import prompts
from chatgpt_compat.colossalai import trainers as march
from chatgpt_compat.colossalai.data import demonstrations

_APRIL = (
    *('kl_coef', 'ptx_coef', 'train_batch_size', 'buffer_limit', 'buffer_cpu_offload', 'eps_clip', 'value_clip'),
    *('experience_batch_size', 'max_epochs', 'tokenizer', 'sample_replay_buffer', 'dataloader_pin_memory', 'callbacks'),
)
_JULY = (
    *('tokenizer', 'kl_coef', 'ptx_coef', 'train_batch_size', 'buffer_limit', 'buffer_cpu_offload', 'eps_clip'),
    *('vf_coef', 'value_clip', 'sample_buffer', 'dataloader_pin_memory', 'offload_inference_models', 'callbacks'),
)
"""positional arguments after the optimizers: up to 0.2.8, and from 0.3 on, beginning with the tokenizer"""
_RENAMED = {'sample_buffer': 'sample_replay_buffer', 'vf_coef': 'value_coef'}


class _MadeByFit:
    """A wrapper of a trainer that `fit` makes; afterwards it has the trainer's attributes."""

    _made: Any = None
    strategy: Any
    model: Any

    def save_model(self, path: Any, only_rank0: bool = False, tokenizer: Any = None) -> None:
        self.strategy.save_model(vars(self).get('actor', vars(self).get('model')), path, only_rank0, tokenizer)

    def __getattr__(self, name: str) -> Any:
        if name.startswith('__') or self._made is None:
            raise AttributeError(f'{type(self).__name__}.{name}: the trainer is made by fit(), which gives its loaders')
        return getattr(self._made, name)


class PPOTrainer(_MadeByFit):
    """PPO over the prompts of a loader, with a loss on pretraining text of another, weighted by `ptx_coef`.

    `coati` has the actor loss ptx_coef · ptx + (1 − ptx_coef) · policy. Here it is divided by 1 − ptx_coef, which gives
    the same update with Adam. `offload_inference_models` has no effect.
    """

    def __init__(
        self,
        strategy: Strategy,
        actor: nn.Module,
        critic: nn.Module,
        reward_model: Any,
        initial_model: nn.Module,
        actor_optim: Optimizer,
        critic_optim: Optimizer,
        *settings: Any,
        **kwargs: Any,
    ) -> None:
        order = _JULY if settings and not isinstance(settings[0], (int, float)) else _APRIL
        if len(settings) > len(order):
            raise ValueError(f'PPOTrainer takes {7 + len(order)} arguments without a name, {7 + len(settings)} given')
        kwargs = dict(zip(order, settings, strict=False)) | kwargs
        self.actor, self.critic, self.strategy = actor, critic, strategy
        self._models = (strategy, actor, critic, reward_model, initial_model, actor_optim, critic_optim)
        self._ptx = float(kwargs.pop('ptx_coef', 0.9))
        if not 0 <= self._ptx < 1:
            raise ValueError(f'ptx_coef={self._ptx} must be at least 0 and below 1')
        kwargs.pop('offload_inference_models', None)
        self._settings = {_RENAMED.get(name, name): value for name, value in kwargs.items()}
        tokenizer = self._settings.get('tokenizer')
        if tokenizer is not None and hasattr(tokenizer, 'decode'):
            self._settings.setdefault('eos_token_id', tokenizer.eos_token_id)
            self._settings.setdefault('pad_token_id', tokenizer.pad_token_id)

    def fit(
        self,
        prompt_dataloader: Any = None,
        pretrain_dataloader: Any = None,
        num_episodes: int = 50000,
        max_timesteps: int = 500,
        update_timesteps: int = 5000,
        *,
        num_collect_steps: int | None = None,
        num_update_steps: int | None = None,
        log_dir: str | None = None,
        use_wandb: bool = False,
    ) -> None:
        """Trains. An episode has `max_timesteps` batches of prompts and learns every `update_timesteps`; from 0.3 on it
        has `num_collect_steps` batches, learned `num_update_steps` times."""
        settings = dict(self._settings)
        if num_collect_steps is not None:
            max_timesteps = update_timesteps = num_collect_steps
            settings['max_epochs'] = num_update_steps or 1
        if isinstance(prompt_dataloader, torch.Tensor):  # ids, as up to March 2023
            rows: Any = prompt_dataloader
        else:
            rows = prompts(prompt_dataloader, settings.get('pad_token_id'))
            settings['experience_batch_size'] = (prompt_dataloader.batch_size or 1) * self.strategy.world_size
        if self._ptx and pretrain_dataloader is not None:
            settings |= {'ptx_coef': self._ptx / (1 - self._ptx)}
            settings |= {'pretrain_data': demonstrations(pretrain_dataloader)}
        self._made = march.PPOTrainer(*self._models, **settings)
        self._made.tokenize = None  # the rows are ids
        self._made.fit(rows, num_episodes=num_episodes, max_timesteps=max_timesteps, update_timesteps=update_timesteps)


class SFTTrainer(_MadeByFit):
    """SFT over a loader, an argument of the constructor or of `fit`; a step takes `accumulation_steps` batches."""

    def __init__(
        self,
        model: nn.Module,
        strategy: Strategy,
        optim: Optimizer,
        train_dataloader: Any = None,
        eval_dataloader: Any = None,
        batch_size: int = 1,
        max_epochs: int = 2,
        accimulation_steps: int = 8,
        accumulation_steps: int | None = None,
        lr_scheduler: Any = None,
        **settings: Any,
    ) -> None:
        if train_dataloader is not None and not hasattr(train_dataloader, 'dataset'):  # 0.3: the scheduler is fourth
            train_dataloader = None
        self.model, self.strategy, self.optimizer = model, strategy, optim
        self._loaders = (train_dataloader, eval_dataloader)
        self._settings = settings | {'max_epochs': max_epochs}
        self._settings |= {'lr_schedule': 'cosine'}
        self._steps, self._batch_size = accumulation_steps or accimulation_steps, batch_size

    def fit(
        self,
        train_dataloader: Any = None,
        eval_dataloader: Any = None,
        logger: Any = None,
        log_dir: str | None = None,
        use_wandb: bool = False,
        log_interval: int | None = None,
    ) -> None:
        train, held_out = train_dataloader or self._loaders[0], eval_dataloader or self._loaders[1]
        if train is None:
            raise ValueError('SFTTrainer needs train_dataloader, of the constructor or of fit')
        rows, logs = demonstrations(train), march._LossLog()
        logs.logger = logger
        if not march.is_prepared(self.strategy, self.optimizer):
            self.model, self.optimizer = self.strategy.prepare((self.model, self.optimizer))
        size = (train.batch_size or self._batch_size) * self.strategy.world_size * self._steps
        self._made = OurSFTTrainer(
            self.strategy,
            self.model,
            self.optimizer,
            rows,
            None if held_out is None else demonstrations(held_out),
            train_batch_size=min(size, len(rows)),
            callbacks=[logs],
            **self._settings,
        )
        if log_interval is not None:
            self._made.config.log_interval = max(log_interval, 1)
        self._made.fit()


_LOADERS = ('train_dataloader', 'valid_dataloader', 'eval_dataloader')


class RewardModelTrainer(_MadeByFit):
    """The reward-model trainer, with data sets in the constructor, or loaders there (after `loss_fn`) or in `fit`."""

    def __init__(
        self,
        model: nn.Module,
        strategy: Strategy,
        optim: Optimizer,
        *positional: Any,
        lr_scheduler: Any = None,
        **kw: Any,
    ) -> None:
        given = [item for item in positional if not hasattr(item, 'get_last_lr')]
        if len(given) > 1 and isinstance(given[1], DataLoader):
            kw |= dict(zip((*_LOADERS, 'max_epochs', 'callbacks'), given[1:], strict=False))
            given = given[:1]
        self.model, self.strategy, self.optimizer = model, strategy, optim
        self._loaders = {name: kw.pop(name, None) for name in _LOADERS}
        self._settings, self._given = kw, given
        if 'train_dataset' in kw or len(given) > 1:
            self._made = march.RewardModelTrainer(model, strategy, optim, *given, **kw)

    def fit(
        self,
        train_dataloader: Any = None,
        *others: Any,
        valid_dataloader: Any = None,
        eval_dataloader: Any = None,
        log_dir: Any = None,
        use_wandb: bool = False,
    ) -> None:
        """Trains. `others`: valid_dataloader, eval_dataloader, as in 0.3.1, or eval_dataloader, log_dir, use_wandb."""
        if self._made is None:
            *before, last = [None, None, *(loader for loader in others if isinstance(loader, DataLoader))]
            given = (train_dataloader, valid_dataloader or before[-1], eval_dataloader or last)
            named = zip(_LOADERS, given, strict=True)
            loaders = {n: self._loaders[n] if loader is None else loader for n, loader in named}
            train = loaders['train_dataloader']
            if train is None:
                raise ValueError(
                    'RewardModelTrainer needs train_dataset, or train_dataloader, of the constructor or fit'
                )
            loss = {'loss_fn': self._given[0]} if self._given else {}
            datasets = {n.replace('loader', 'set'): x.dataset for n, x in loaders.items() if x is not None}
            self._made = march.RewardModelTrainer(
                self.model,
                self.strategy,
                self.optimizer,
                **datasets,
                batch_size=train.batch_size or 1,
                **(self._settings | loss),
            )
        self._made.fit()
