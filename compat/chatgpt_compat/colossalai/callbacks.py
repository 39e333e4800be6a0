"""Its callbacks: hooks that are not handed the trainer, files of weights every so many episodes, and the benchmark's
evaluator."""

from __future__ import annotations

import inspect
from functools import wraps
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from chatgpt.strategies import Strategy
from chatgpt.trainer.callbacks import Callback as OurCallback
from chatgpt.trainer.callbacks import PerformanceEvaluator as OurEvaluator
from chatgpt.trainer.callbacks import TrainerView

HOOKS = {
    'on_fit_start': 0,
    'on_fit_end': 0,
    'on_episode_start': 1,
    'on_episode_end': 1,
    'on_make_experience_start': 0,
    'on_make_experience_end': 1,
    'on_learn_epoch_start': 1,
    'on_learn_epoch_end': 1,
    'on_learn_batch_start': 0,
    'on_learn_batch_end': 2,
}
"""how many arguments its hooks take"""


class Callback(OurCallback):
    """Derive from it: hooks with its arguments are called with those, hooks with ours, which begin with the trainer, as
    they are.

    `on_make_experience_end(experience)` is given the list of a phase's `chatgpt.types.Experience`, and so is the second
    argument of `on_learn_batch_end(metrics, experience)`.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, count in HOOKS.items():
            hook = vars(cls).get(name)
            if hook is not None and len(inspect.signature(hook).parameters) == 1 + count and not _takes_trainer(hook):
                setattr(cls, name, _without_trainer(hook, name))


def _nothing(self: Callback, *arguments: Any) -> None:
    """What a hook does that is not overridden, with whichever arguments a subclass calls it."""


for _name in HOOKS:
    setattr(Callback, _name, _nothing)


def _takes_trainer(hook: Any) -> bool:
    return 'trainer' in list(inspect.signature(hook).parameters)[1:2]


def _without_trainer(hook: Any, name: str) -> Any:
    @wraps(hook)
    def called(self: Callback, trainer: TrainerView, *arguments: Any) -> None:
        if name == 'on_learn_batch_end':
            arguments = (*arguments, trainer.last_experiences)
        hook(self, *arguments)

    del called.__wrapped__  # type: ignore[attr-defined]  # a subclass that calls its base has the signature it sees
    return called


class SaveCheckpoint(OurCallback):
    """Weights and optimizer states every `interval` episodes, as path/checkpoint/episode_N/actor.pt, actor-optim.pt and
    the same of the critic.

    They are for `strategy.load_model` and `load_optimizer`. A run that goes on where it was needs
    `chatgpt.trainer.callbacks.SaveCheckpoint`, which keeps everything.
    """

    def __init__(
        self,
        path: str | Path,
        interval: int,
        strategy: Strategy,
        actor: nn.Module | None = None,
        critic: nn.Module | None = None,
        actor_optim: Optimizer | None = None,
        critic_optim: Optimizer | None = None,
    ) -> None:
        if interval < 1:
            raise ValueError(f'interval={interval} must be at least 1')
        self.path, self.interval, self.strategy = Path(path, 'checkpoint'), interval, strategy
        self.saved = {'actor': (actor, actor_optim), 'critic': (critic, critic_optim)}
        self._episode: int | None = None

    def on_episode_end(self, trainer: TrainerView, episode: int) -> None:
        if (episode + 1) % self.interval == 0:
            self._episode = episode

    def on_phase_end(self, trainer: TrainerView, step: int, metrics: dict[str, float]) -> None:
        """An episode ends with its last timestep collected; what it taught is learned by the end of the phase."""
        if self._episode is None:
            return
        folder = self.path / f'episode_{self._episode}'
        self._episode = None
        self.strategy.run_on_rank0(lambda: folder.mkdir(parents=True, exist_ok=True))
        for name, (model, optimizer) in self.saved.items():
            if model is None:
                continue
            self.strategy.save_model(model, folder / f'{name}.pt', only_rank0=True)
            if optimizer is not None:
                self.strategy.save_optimizer(optimizer, folder / f'{name}-optim.pt', only_rank0=False)


class PerformanceEvaluator(OurEvaluator):
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
        super().__init__(
            actor_num_params,
            critic_num_params,
            initial_model_num_params,
            reward_model_num_params,
            enable_grad_checkpoint,
            ignore_phases=ignore_episodes,
        )
