"""`trlx.train` and the functions of `trlx.utils`."""

from __future__ import annotations

import inspect
import os
from typing import Any

from chatgpt_compat.trl.core import set_seed as set_all_seeds
from chatgpt_compat.trlx import settings
from chatgpt_compat.trlx.config import TRLConfig, default_ilql_config, default_ppo_config, default_sft_config, unknown
from chatgpt_compat.trlx.pipeline import PromptPipeline, begin_id, get_pipeline
from chatgpt_compat.trlx.rft import AccelerateRFTTrainer  # noqa: F401  # registers it
from chatgpt_compat.trlx.trainers import trainer_class_of


def train(
    model_path: Any = None,
    reward_fn: Any = None,
    dataset: Any = None,
    samples: Any = None,
    rewards: Any = None,
    prompts: Any = None,
    eval_prompts: Any = None,
    metric_fn: Any = None,
    config: TRLConfig | None = None,
    stop_sequences: Any = (),
) -> Any:
    """Trains and returns the trainer: the one in `config.train.trainer`, or PPO with a `reward_fn` of (samples,
    prompts, outputs, tokenizer, **metadata), ILQL with samples and rewards, SFT with samples.

    Args:
        model_path: replaces the config's; may be a transformers config (new weights) or model.
        dataset: (samples, rewards), as in 2022. A sample is a text or (prompt, output, prompt, output, ...).
        prompts, eval_prompts: texts, or dicts with a `prompt` and metadata; by default begin tokens.
        metric_fn: `fn(samples, prompts, outputs, **metadata)` → {name: numbers}, logged as `metrics/<name>`.

    Raises:
        ValueError: no data, or a config that does not fit the arguments; raised before weights are loaded.
    """
    if dataset is not None:
        samples, rewards = dataset
    online = reward_fn is not None and bool(reward_fn)
    if not online and samples is None:
        raise ValueError('trlx.train: give a reward_fn (with prompts), or samples (with or without rewards)')
    if online and samples is not None:
        raise ValueError('trlx.train: both reward_fn and samples are given; give one of them')
    if rewards is not None and len(samples) != len(rewards):
        raise ValueError(f'trlx.train: {len(samples)} samples but {len(rewards)} rewards')
    if config is None:
        config = (default_ppo_config if online else default_sft_config if rewards is None else default_ilql_config)()
    if model_path is not None:
        config.model.model_path = model_path
    name, kwargs = config.train.trainer or '', dict(config.train.trainer_kwargs)
    given = {'config': config, 'reward_fn': reward_fn or None, 'metric_fn': metric_fn}
    given['stop_sequences'] = stop_sequences
    trainer_class = trainer_class_of(name)
    known = all_arguments(trainer_class)
    for key in kwargs:
        if key in given or (known is not None and key not in known):
            raise unknown('trlx: train.trainer_kwargs', key, (known or set()) - given.keys())
    trainer = trainer_class(**given, **kwargs)
    if online != hasattr(trainer, 'add_prompt_pipeline'):
        kind = 'a reward_fn' if online else 'samples'
        raise ValueError(f'trlx.train: {name} does not learn from {kind}; choose another config.train.trainer')
    if not online and (rewards is not None) != hasattr(trainer.config.method, 'two_qs'):
        kind = 'samples without rewards' if rewards is None else 'rewards'
        raise ValueError(f'trlx.train: {name} does not learn from {kind}; choose another config.train.trainer')
    _add_data(trainer, online, samples, rewards, prompts, eval_prompts)
    trainer.learn()
    return trainer


def _add_data(trainer: Any, online: bool, samples: Any, rewards: Any, prompts: Any, eval_prompts: Any) -> None:
    config, tokenizer = trainer.config, trainer.tokenizer
    batch_size = config.train.batch_size * settings.processes()
    begin = [tokenizer.decode([begin_id(tokenizer)])] * batch_size
    longest = settings.longest_prompt(config)
    special = {'add_special_tokens': True} if settings.is_seq2seq(config) else {}
    if online:
        prompts = list(prompts) if prompts is not None else begin
        eval_prompts = prompts[:batch_size] if eval_prompts is None else eval_prompts
        trainer.add_prompt_pipeline(_pipeline(config)(prompts, longest, tokenizer, **special))
    elif rewards is None:
        trainer.make_experience(samples, settings.longest(config))
    else:
        trainer.make_experience(samples, rewards, settings.longest(config))
    eval_prompts = begin if eval_prompts is None else list(eval_prompts)
    trainer.add_eval_pipeline(_pipeline(config)(eval_prompts, longest, tokenizer, **special))


def _pipeline(config: TRLConfig) -> Any:
    """Returns the config's pipeline; a pipeline of 2022 that `train` never used becomes one of prompts."""
    known_to_train = config.train.pipeline not in ('PPOPipeline', 'OfflinePipeline')
    return get_pipeline(config.train.pipeline) if known_to_train else PromptPipeline


def all_arguments(made: type) -> set[str] | None:
    """Returns the names of a class's arguments and of its bases' that get `**kwargs`; None if it takes any keyword."""
    found: set[str] = set()
    for base in made.__mro__:
        if (init := vars(base).get('__init__')) is None:
            continue
        parameters = inspect.signature(init).parameters.values()
        found |= {p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and p.name != 'self'}
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            return found
    return None


# ---------------------------------------------------------------------- trlx.utils


def set_seed(seed: int) -> None:
    """Seeds Python's, numpy's and torch's generators, differently on each process. Training uses `train.seed` only."""
    set_all_seeds(seed + int(os.environ.get('RANK', '0')))


def print_rank_0(*message: Any) -> None:
    if os.environ.get('RANK', '0') == '0':
        print(*message)
