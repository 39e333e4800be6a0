"""One verb for the impatient: `chatgpt.train`. It builds the objects of the other rooms and calls `fit`; they can do all it does.

| what is given | what runs |
|---|---|
| `reward_fn` (and `prompts`) | PPO, or another method of `PPOTrainer` by `config` |
| `samples` and `rewards` | ILQL |
| `samples` | SFT |
| `preferences` | DPO |
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from copy import deepcopy
from pathlib import Path
from typing import Any

from chatgpt.trainer.config import NEEDS_CRITIC, PPOConfig, Settings, nearest

OWN = {'lr': 1e-5, 'critic_lr': 1e-5, 'num_timesteps': 100, 'lora_rank': 0, 'eval_interval': 10, 'max_length': None}
"""settings of this verb, beside the trainer's own"""


def train(
    model: Any,
    *,
    reward_fn: Callable[..., Any] | None = None,
    prompts: Any = None,
    samples: Any = None,
    rewards: Any = None,
    preferences: Any = None,
    eval_prompts: Any = None,
    metric_fn: Callable[..., Any] | None = None,
    stop_sequences: SequenceOf[str] = (),
    config: Mapping[str, Any] | str | Path | None = None,
    tokenizer: Any = None,
    strategy: Any = None,
    run_dir: str | Path | None = None,
    callbacks: SequenceOf[Any] = (),
    **settings: Any,
) -> Any:
    """Train a model and return its trainer, whose `models()` are the trained ones.

    >>> trainer = chatgpt.train('gpt2', reward_fn=score, prompts=prompts, num_timesteps=50, max_new_tokens=32)   # doctest: +SKIP
    >>> trainer.save_pretrained('outputs/actor')                                                               # doctest: +SKIP

    Args:
        model: hub name or folder, or a transformers causal LM.
        reward_fn: `fn(prompts, responses, **columns)`, or trlX's `fn(samples, prompts, outputs, **metadata)`, told apart by the names of
            its arguments; or a `RewardModel`. One number per sample, or a list of numbers per token.
        prompts: texts, dicts with a 'prompt' (other keys reach the functions by name), or anything `PPOTrainer.fit` takes.
        samples: texts, (prompt, output) pairs, or what `chatgpt.dataset.load_demonstrations` takes.
        rewards: one number per sample.
        preferences: what `chatgpt.dataset.load_preferences` takes.
        eval_prompts: evaluated on before, during and after; with `reward_fn` their scores, with `metric_fn` its metrics.
        metric_fn: `fn(samples=, prompts=, outputs=, **columns)` → {name: one number per sample}, logged as `eval/metrics/<name>`.
        stop_sequences: a response ends where one of these appears.
        config: settings by name, or a YAML or JSON file of them. `settings` win over it.
        tokenizer: None takes the model's own.
        strategy: None is a `NaiveStrategy`.
        **settings: fields of the trainer's config, generation keywords, and `lr`, `critic_lr`, `lora_rank`, `num_timesteps` (PPO),
            `eval_interval`, `max_length` (tokens of a sample).

    Raises:
        ValueError: not exactly one kind of data, lists of different lengths, or an unknown setting; before any weight is loaded.
    """
    kind = _kind(reward_fn, prompts, samples, rewards, preferences)
    chosen = OWN | _read_config(config) | settings
    own = {name: chosen.pop(name) for name in OWN}
    _check_settings(kind, chosen)
    tokenizer = tokenizer or _tokenizer_of(model)
    if strategy is None:
        from chatgpt.trainer.strategies import NaiveStrategy

        strategy = NaiveStrategy()
    build = {'ppo': _ppo, 'ilql': _ilql, 'sft': _sft, 'dpo': _dpo}[kind]
    data = {'reward_fn': as_reward(reward_fn), 'samples': samples, 'rewards': rewards, 'preferences': preferences}
    generation = {'stop_strings': list(stop_sequences)} if stop_sequences else {}
    common: dict[str, Any] = {'tokenizer': tokenizer, 'run_dir': run_dir, 'callbacks': list(callbacks)}
    if eval_prompts is not None:
        common['callbacks'].append(_evaluator(kind, eval_prompts, tokenizer, data['reward_fn'], metric_fn, own, chosen, generation))
    elif metric_fn is not None:
        raise ValueError('metric_fn measures what is said to eval_prompts: give eval_prompts too')
    trainer = build(model, strategy, data, own, chosen, generation, common)
    if kind == 'ppo':
        trainer.fit(prompts, num_episodes=1, max_timesteps=own['num_timesteps'], update_timesteps=1)
    else:
        trainer.fit()
    return trainer


def _kind(reward_fn: Any, prompts: Any, samples: Any, rewards: Any, preferences: Any) -> str:
    given = [n for n, v in (('reward_fn', reward_fn), ('samples', samples), ('preferences', preferences)) if v is not None]
    if len(given) != 1:
        what = ' and '.join(given) if given else 'none of them'
        raise ValueError(f'train: give one of reward_fn (with prompts), samples (with or without rewards), preferences; got {what}')
    if rewards is not None and samples is None:
        raise ValueError('train: rewards belong to samples; give samples=..., rewards=...')
    if reward_fn is not None:
        if prompts is None:
            raise ValueError('train: a reward_fn needs prompts to answer; give prompts=...')
        return 'ppo'
    if prompts is not None:
        raise ValueError(f'train: prompts go with reward_fn, not with {given[0]}; use eval_prompts to evaluate')
    if preferences is not None:
        return 'dpo'
    if rewards is None:
        return 'sft'
    if len(samples) != len(rewards):
        raise ValueError(f'train: {len(samples)} samples but {len(rewards)} rewards')
    return 'ilql'


def _read_config(config: Mapping[str, Any] | str | Path | None) -> dict[str, Any]:
    from chatgpt.launch.config_file import flat, read_file

    if config is None:
        return {}
    if isinstance(config, Settings):
        return config.to_dict()
    content = read_file(config) if isinstance(config, (str, Path)) else config
    return {key.rpartition('.')[2]: value for _, key, value in flat(content)}


def _config_class(kind: str) -> Any:
    from chatgpt import trainer

    return {'ppo': PPOConfig, 'ilql': trainer.ILQLConfig, 'sft': trainer.SFTConfig, 'dpo': trainer.DPOConfig}[kind]


def _check_settings(kind: str, chosen: Mapping[str, Any]) -> None:
    from chatgpt.rollout.sampling import generation_fields

    known = [*_config_class(kind).field_names(), *generation_fields(), *OWN]
    for name in chosen:
        if name not in known:
            raise ValueError(f'train: {name!r} is not a setting of {kind}{nearest(name, known)}')


def _tokenizer_of(model: Any) -> Any:
    from chatgpt.nn.loading import load_tokenizer

    name = model if isinstance(model, (str, Path)) else getattr(model, 'name_or_path', None)
    if not name:
        raise ValueError('train: this model does not say which tokenizer is its own; give tokenizer=...')
    return load_tokenizer(name)


def as_reward(reward_fn: Any) -> Any:
    """A function in our convention, `fn(prompts, responses, **columns)`, of one in either; anything else as it is."""
    import torch

    if reward_fn is None or isinstance(reward_fn, torch.nn.Module) or not callable(reward_fn):
        return reward_fn
    try:
        names = list(inspect.signature(reward_fn).parameters)
    except ValueError:
        return reward_fn
    if 'samples' not in names and 'outputs' not in names:
        return reward_fn

    def reward(prompts: list[str], responses: list[str], **columns: Any) -> Any:
        joined = [p + r for p, r in zip(prompts, responses, strict=True)]
        return reward_fn(samples=joined, prompts=prompts, outputs=responses, **columns)

    return reward


def _causal_lm(model: Any) -> Any:
    from chatgpt.nn.loading import load_causal_lm

    return load_causal_lm(model) if isinstance(model, (str, Path)) else model


def _generation(chosen: Mapping[str, Any], generation: Mapping[str, Any]) -> dict[str, Any]:
    from chatgpt.rollout.sampling import generation_fields

    return {k: v for k, v in chosen.items() if k in generation_fields()} | dict(generation)


def _of_config(kind: str, chosen: Mapping[str, Any]) -> dict[str, Any]:
    names = _config_class(kind).field_names()
    return {k: v for k, v in chosen.items() if k in names}


def _evaluator(
    kind: str, prompts: Any, tokenizer: Any, reward: Any, metric_fn: Any, own: Any, chosen: Mapping[str, Any], generation: Mapping[str, Any]
) -> Any:
    from chatgpt.trainer import BetaEvaluation, PromptEvaluation
    from chatgpt.trainer.callbacks import Evaluator

    scored = None if kind == 'ppo' and not callable(reward) else reward
    evaluation: Any = PromptEvaluation(prompts, tokenizer, scored, metric_fn=metric_fn, **_generation(chosen, generation))
    if kind == 'ilql':
        evaluation = BetaEvaluation(evaluation)
    return Evaluator(evaluation, own['eval_interval'], metric='score_mean' if kind == 'ppo' else None)


def _optimizer(strategy: Any, model: Any, lr: float) -> Any:
    return strategy.make_optimizer([p for p in model.parameters() if p.requires_grad], lr=lr, eps=1e-5)


def _ppo(model: Any, strategy: Any, data: Any, own: Any, chosen: Any, generation: Any, common: Any) -> Any:
    from chatgpt.nn import Actor, Critic
    from chatgpt.trainer import PPOTrainer

    config = PPOConfig(**_of_config('ppo', chosen))
    config.validate(strategy.world_size)
    with strategy.model_init_context():
        actor = Actor(_causal_lm(model), own['lora_rank'])
        critic = None
        if config.advantage_estimator in NEEDS_CRITIC:
            critic = Critic(deepcopy(actor.model) if not own['lora_rank'] else _causal_lm(model), lora_rank=own['lora_rank'])
        initial = None if own['lora_rank'] else deepcopy(actor)
    actor, optim = strategy.prepare((actor, _optimizer(strategy, actor, own['lr'])))
    critic_optim = None
    if critic is not None:
        critic, critic_optim = strategy.prepare((critic, _optimizer(strategy, critic, own['critic_lr'])))
    reward, initial = strategy.prepare(data['reward_fn'], initial)
    return PPOTrainer(
        strategy, actor, critic, reward, initial, optim, critic_optim, config=config, **common, **_generation(chosen, generation)
    )


def _texts(samples: Any) -> Any:
    """Pairs and texts as rows that the loaders know."""
    if isinstance(samples, (list, tuple)) and samples and isinstance(samples[0], str):
        return [{'text': text} for text in samples]
    if isinstance(samples, (list, tuple)) and samples and isinstance(samples[0], (list, tuple)) and len(samples[0]) == 2:
        return [{'prompt': prompt, 'completion': output} for prompt, output in samples]
    return samples


def _sft(model: Any, strategy: Any, data: Any, own: Any, chosen: Any, generation: Any, common: Any) -> Any:
    from chatgpt.dataset import load_demonstrations
    from chatgpt.nn import Actor
    from chatgpt.trainer import SFTTrainer

    records, _ = load_demonstrations(_texts(data['samples']), common['tokenizer'], max_length=own['max_length'])
    with strategy.model_init_context():
        actor = Actor(_causal_lm(model), own['lora_rank'])
    actor, optim = strategy.prepare((actor, _optimizer(strategy, actor, own['lr'])))
    return SFTTrainer(strategy, actor, optim, records, **common, **_of_config('sft', chosen))


def _ilql(model: Any, strategy: Any, data: Any, own: Any, chosen: Any, generation: Any, common: Any) -> Any:
    from chatgpt.dataset import load_demonstrations
    from chatgpt.nn import ILQLModel
    from chatgpt.trainer import ILQLTrainer, rewarded

    if own['lora_rank']:
        raise ValueError('train: ILQL trains all weights; leave lora_rank out')
    sequences, _ = load_demonstrations(_texts(data['samples']), common['tokenizer'], max_length=own['max_length'])
    records = rewarded(sequences, list(data['rewards']))
    with strategy.model_init_context():
        net = ILQLModel(_causal_lm(model))
    net, optim = strategy.prepare((net, _optimizer(strategy, net, own['lr'])))
    return ILQLTrainer(strategy, net, optim, records, **common, **_of_config('ilql', chosen))


def _dpo(model: Any, strategy: Any, data: Any, own: Any, chosen: Any, generation: Any, common: Any) -> Any:
    from chatgpt.dataset import load_preferences
    from chatgpt.nn import Actor
    from chatgpt.trainer import DPOTrainer

    records, _ = load_preferences(data['preferences'], common['tokenizer'], max_length=own['max_length'])
    with strategy.model_init_context():
        actor = Actor(_causal_lm(model), own['lora_rank'])
        initial = None if own['lora_rank'] else deepcopy(actor)
    actor, optim = strategy.prepare((actor, _optimizer(strategy, actor, own['lr'])))
    initial = strategy.prepare(initial)
    return DPOTrainer(strategy, actor, optim, records, initial_model=initial, **common, **_of_config('dpo', chosen))
