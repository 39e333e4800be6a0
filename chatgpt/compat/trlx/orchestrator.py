"""The first API, of 2022: `get_model`, `get_orchestrator`, and orchestrators that bring model, prompts and reward
together. The trainers are those of today."""

from __future__ import annotations

from typing import Any

from chatgpt.compat.trlx.config import unknown
from chatgpt.compat.trlx.pipeline import BasePipeline, register_datapipeline, split
from chatgpt.compat.trlx.trainers import (
    AccelerateILQLTrainer,
    AcceleratePPOTrainer,
    get_trainer,
    register_trainer,
)

_ORCHESTRATORS: dict[str, type[Any]] = {}


def register_orchestrator(name: Any) -> Any:
    """Decorator: an orchestrator under its class's name, or under the name given."""

    def register(cls: type[Any], key: str) -> type[Any]:
        _ORCHESTRATORS[key.lower()] = cls
        return cls

    return (lambda cls: register(cls, name)) if isinstance(name, str) else register(name, name.__name__)


def get_orchestrator(name: str) -> type[Any]:
    """An orchestrator of a registered name, in any case.

    Raises:
        ValueError: none is registered under it.
    """
    if str(name).lower() not in _ORCHESTRATORS:
        raise unknown('the registry of orchestrators', str(name), [c.__name__ for c in _ORCHESTRATORS.values()])
    return _ORCHESTRATORS[str(name).lower()]


get_model = get_trainer
"""of 2022: 'AcceleratePPOModel', 'AccelerateILQLModel', 'ILQLModel' → the trainer"""
register_model = register_trainer


@register_trainer
class AcceleratePPOModel(AcceleratePPOTrainer):
    """The PPO trainer under its name of 2022: `AcceleratePPOModel(config)`."""


@register_trainer
class AccelerateILQLModel(AccelerateILQLTrainer):
    """The ILQL trainer under its name of 2022: `AccelerateILQLModel(config, logit_mask, metric_fn)`."""

    def __init__(
        self, config: Any, logit_mask: Any = None, metric_fn: Any = None, train_mode: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(config, logit_mask=logit_mask, metric_fn=metric_fn, **kwargs)


@register_trainer
class ILQLModel(AccelerateILQLModel):
    """Of October 2022: `ILQLModel(config, gpt_config_or_path, tokenizer, logit_mask)`."""

    def __init__(
        self, config: Any, gpt_config_or_path: Any = None, tokenizer: Any = None, logit_mask: Any = None, **kwargs: Any
    ) -> None:
        if gpt_config_or_path is not None:
            config.model.model_path = gpt_config_or_path
        if tokenizer is not None:
            config.model.tokenizer_path = tokenizer
        super().__init__(config, logit_mask, **kwargs)


@register_orchestrator
class Orchestrator:
    """Base of orchestrators."""

    def __init__(self, model: Any, pipeline: Any = None) -> None:
        self.model, self.pipeline = model, pipeline


@register_orchestrator
class PPOOrchestrator(Orchestrator):
    """Prompts and a reward for a PPO model: `(model, pipeline, reward_fn=, metric_fn=, chunk_size=)`, or `(pipeline,
    model, chunk_size)` with a subclass's own `score(texts)`, as on trlX's first page."""

    def __init__(
        self,
        model: Any,
        pipeline: Any,
        reward_fn: Any = None,
        metric_fn: Any = None,
        chunk_size: int | None = None,
        stats_fn: Any = None,
    ) -> None:
        if isinstance(model, BasePipeline):
            model, pipeline = pipeline, model
        if isinstance(reward_fn, int):
            reward_fn, chunk_size = None, reward_fn
        super().__init__(model, pipeline)
        self.rl_model = model
        if chunk_size is not None:
            model.config.method.chunk_size = chunk_size
        self.chunk_size = model.config.method.chunk_size
        model.orch = self
        model.reward_fn = reward_fn if reward_fn is not None else self._scored
        model.metric_fn = metric_fn or stats_fn
        model.add_prompt_pipeline(pipeline)

    def score(self, samples: Any) -> Any:
        """One number per text, where there is no reward_fn."""
        raise ValueError(f'{type(self).__name__} has no reward: give reward_fn, or write score(self, samples)')

    def _scored(self, samples: Any) -> Any:
        return self.score(samples)

    def make_experience(self, num_rollouts: int = 1024, iter_count: int = 0) -> None:
        """Rollouts are drawn when `model.learn()` needs them; see `AcceleratePPOTrainer.make_experience`."""
        self.rl_model.make_experience(num_rollouts, iter_count)


@register_orchestrator
class OfflineOrchestrator(Orchestrator):
    """Samples and rewards for an ILQL model: `(model, split_token)` and `make_experience(samples, rewards)`; or, as in
    October 2022, `(model, train_samples, eval_prompts, reward_fn, stats_fn)` at once."""

    def __init__(
        self,
        model: Any,
        train_samples: Any = None,
        eval_prompts: Any = None,
        reward_fn: Any = None,
        stats_fn: Any = None,
        split_token: str | None = None,
    ) -> None:
        if isinstance(train_samples, str):
            train_samples, split_token = None, train_samples
        super().__init__(model)
        self.split_token = split_token
        if train_samples is None:
            return
        self.make_experience(train_samples, reward_fn(train_samples))
        model.metric_fn = stats_fn or (lambda samples, **_: {'reward': list(map(float, reward_fn(samples)))})
        model.add_eval_pipeline(OfflinePipeline(eval_prompts))

    def make_experience(self, samples: Any, rewards: Any) -> None:
        self.model.make_experience(split(samples, self.split_token, self.model.tokenizer), rewards)


@register_datapipeline
class OfflinePipeline(BasePipeline):
    """Texts, or ids, as they are."""

    def __init__(self, texts: Any = None) -> None:
        super().__init__()
        self.texts = texts

    def __getitem__(self, index: int) -> Any:
        return self.texts[index]

    def __len__(self) -> int:
        return len(self.texts)
