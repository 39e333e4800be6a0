"""One verb for the impatient: `chatgpt.train`. It makes the `Inputs` of a run, which is built as one of a command line
is.

| what is given | what runs |
|---|---|
| `reward_fn` (and `prompts`) | PPO, or another method of `PPOTrainer` by `config` |
| `environment` | the same, over several turns; `prompts` and `reward_fn` where one likes |
| `samples` and `rewards` | ILQL |
| `samples` | SFT |
| `preferences` | DPO |
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

import torch

from chatgpt.checkpoint import latest
from chatgpt.dataset import load_demonstrations, load_preferences
from chatgpt.dataset.formats import note_model
from chatgpt.dataset.prompts import as_prompts, tasks_without_prompts
from chatgpt.environments import EnvironmentSettings, find_environment
from chatgpt.launch.config_values import read_file
from chatgpt.launch.destination import try_model_folder
from chatgpt.launch.encoder_decoder import check_run_apart
from chatgpt.launch.inputs import Inputs, longest_opening, within_context
from chatgpt.launch.methods import METHODS
from chatgpt.launch.recipes import fit, make_trainer, say_use
from chatgpt.launch.runs import CRITIC_STARTS, ENVIRONMENT, DataRun, PPORun, Run
from chatgpt.names import hint
from chatgpt.nn.loading import load_config, load_tokenizer
from chatgpt.publish import check_push, push_folder
from chatgpt.rewards.calling import made
from chatgpt.rollout.episodes import check_writes_turns
from chatgpt.rollout.sampling import generation_fields
from chatgpt.trainer.callbacks import Callback, Evaluator
from chatgpt.trainer.collect import check_hears_alike
from chatgpt.trainer.config import Settings
from chatgpt.trainer.objectives.ilql import BetaEvaluation, rewarded
from chatgpt.trainer.prompt_evaluation import PromptEvaluation
from chatgpt.trainer.strategies.named import as_strategy

OWN: dict[str, dict[str, Any]] = {
    'ppo': {
        'lr': 1e-5,
        'critic_lr': 1e-5,
        'critic_from': 'reward_model',
        'num_timesteps': 100,
        'lora_rank': 0,
        'eval_interval': 10,
        'environment_options': None,
        'max_turns': 16,
        'max_turn_tokens': None,
        'step_timeout_s': 30.0,
        'environment_workers': 'threads',
        'apply_chat_template': False,
        'reward_weights': None,
        'eval_episodes': 0,
    },
    'ilql': {'lr': 1e-5, 'eval_interval': 10, 'max_length': None},
    'sft': {'lr': 1e-5, 'lora_rank': 0, 'eval_interval': 10, 'max_length': None, 'skip_bad_records': False},
    'dpo': {'lr': 1e-5, 'lora_rank': 0, 'eval_interval': 10, 'max_length': None, 'skip_bad_records': False},
}
"""settings of this verb with their defaults, beside the trainer's own; `max_length` of PPO is the generation keyword"""


def train(
    model: Any = None,
    *,
    reward_fn: Callable[..., Any] | None = None,
    prompts: Any = None,
    environment: Any = None,
    samples: Any = None,
    rewards: Any = None,
    preferences: Any = None,
    eval_prompts: Any = None,
    metric_fn: Callable[..., Any] | None = None,
    stop_sequences: SequenceOf[str] = (),
    config: Mapping[str, Any] | Settings | str | Path | None = None,
    tokenizer: Any = None,
    strategy: Any = None,
    run_dir: str | Path | None = None,
    resume: str | Path | None = None,
    save_path: str | Path | None = None,
    push_to_hub: str | None = None,
    hub_private: bool | None = None,
    callbacks: SequenceOf[Any] = (),
    **settings: Any,
) -> Any:
    """Train a model and return its trainer, whose `models()` are the trained ones.

    >>> trainer = chatgpt.train('gpt2', reward_fn=score, prompts=prompts, num_timesteps=50)   # doctest: +SKIP
    >>> trainer.save_pretrained('outputs/actor')   # doctest: +SKIP

    Args:
        model: hub name or folder, or a transformers causal LM or encoder-decoder, which is trained in place.
        reward_fn: `fn(prompts, responses, **columns)`, or trlX's `fn(samples, prompts, outputs, **metadata)`, told
            apart by the names of its arguments; a `RewardModel`; or a list of (weight, one of these). One number per
            sample, or a list of numbers per token.
        prompts: texts, dicts with a 'prompt' (other keys reach the functions by name), or anything `PPOTrainer.fit`
            takes.
        environment: what the model acts in over several turns: 'games:countdown', module:Class, file.py:Class, an
            `Environment` class, or a function that makes one. Its rewards are the scores where there is no `reward_fn`;
            the columns of `prompts`, where there are any, go to its `reset`.
        samples: texts, (prompt, output) pairs, or what `chatgpt.dataset.load_demonstrations` takes.
        rewards: one number per sample.
        preferences: what `chatgpt.dataset.load_preferences` takes.
        eval_prompts: evaluated on before, during and after; with `reward_fn` their scores, with `metric_fn` its
            metrics.
        metric_fn: a function in either convention → {name: one number per sample}, logged as `eval/metrics/<name>`.
        stop_sequences: a response ends where one of these appears.
        config: settings by name, in sections or with dotted names (`method.gamma`) where one likes; a YAML or JSON file
            of them; or the trainer's config dataclass. `settings` win over it.
        tokenizer: None takes the model's own.
        strategy: a strategy, or one by name: naive, ddp, fsdp, ... (None is naive).
        run_dir: folder of the run: metrics, and checkpoints every quarter of an hour, at the end and when it fails.
        resume: 'auto' to go on from the newest checkpoint of `run_dir` where there is one, or a checkpoint's folder.
        save_path: a new folder, where the trained model is written with its tokenizer, as
            `trainer.save_pretrained(save_path)` does. Without a `run_dir`, the weights of a run that fails are written
            to `<save_path>-cut-short`.
        push_to_hub: 'NAME' or 'ACCOUNT/NAME' on the Hugging Face Hub, where the trained model is uploaded at the end;
            whether it may be is asked before the run. Where that fails after all, the model is in `save_path`, or in a
            folder that the error names.
        hub_private: make that repository private, where it is made.
        **settings: fields of the trainer's config, generation keywords, and `lr`, `eval_interval`, `lora_rank` (not
            ILQL), `critic_lr`, `critic_from` ('actor', or 'reward_model', which holds where the reward is one) and
            `num_timesteps` (PPO), `max_length` (tokens of a sample, at most the model's context; with PPO of prompt and
            response), `skip_bad_records` (SFT and DPO); of an environment `environment_options`, `max_turns`,
            `max_turn_tokens`, `step_timeout_s`, `environment_workers`, `apply_chat_template`, `reward_weights` and
            `eval_episodes` (tasks without prompts).

    Raises:
        ValueError: not exactly one kind of data, lists of different lengths, an unknown setting or a value out of
            range, something that belongs to `eval_prompts` without them, no right to upload; before any weight is
            loaded.
        PushError: the trained model could not be uploaded; says where it is, and the command that uploads it.
    """
    if model is None:
        raise ValueError(
            'train: give the model first, as a hub name, a folder or a transformers model'
            f'{next((hint(name, ["model"]) for name in settings if "model" in name), "")}'
        )
    kind = _kind(reward_fn, prompts, environment, samples, rewards, preferences)
    chosen = _read_config(config, kind) | settings
    _check_settings(kind, chosen)
    _check_environment(environment, chosen, eval_prompts)
    if eval_prompts is None and not chosen.get('eval_episodes'):
        _check_nothing_to_evaluate(kind, chosen, metric_fn, stop_sequences)
    if (
        save_path is not None
        and Path(save_path).exists()
        and (not Path(save_path).is_dir() or any(Path(save_path).iterdir()))
    ):
        raise ValueError(
            f'train: save_path={str(save_path)!r} is there already and would be overwritten; give a new folder'
        )
    if run_dir is not None and resume is None and (found := latest(Path(run_dir, 'checkpoints'))) is not None:
        raise ValueError(
            f'train: run_dir={str(run_dir)!r} holds checkpoints of an earlier run, up to {found.name}: go on with '
            "resume='auto', or give another run_dir"
        )
    if hub_private is not None and push_to_hub is None:
        raise ValueError('train: hub_private is about a repository of the hub; give push_to_hub too')
    if resume == 'auto' and run_dir is None:
        raise ValueError("train: resume='auto' looks into run_dir; give run_dir=...")
    strategy = as_strategy('naive' if strategy is None else strategy)
    if push_to_hub is not None and getattr(strategy, 'is_rank_0', True):
        check_push(push_to_hub)
    own = {name: chosen.pop(name, default) for name, default in OWN[kind].items()}
    if kind == 'ppo' and own['critic_from'] not in CRITIC_STARTS:
        raise ValueError(f'train: critic_from={own["critic_from"]!r} is not one of {", ".join(CRITIC_STARTS)}')
    run = _run(kind, own)
    if environment is not None:
        check_hears_alike(strategy)
        environment = find_environment(environment, own['environment_options'])
    trainer_settings, generation = _config_class(kind).split('train', None, chosen)
    trainer_settings.validate(getattr(strategy, 'world_size', 1))
    model_config = load_config(model) if isinstance(model, (str, Path)) else model.config
    if save_path is not None:
        try_model_folder(Path(save_path), model_config)
    tokenizer = tokenizer or _tokenizer_of(model)
    note_model(tokenizer, model_config)
    check_run_apart(run, model_config)
    if environment is not None:
        check_writes_turns(model_config)
    inputs = Inputs(
        run=run,
        settings=trainer_settings,
        model=model,
        tokenizer=tokenizer,
        run_dir=run_dir,
        callbacks=list(callbacks),
        generation=generation,
    )
    if stop_sequences:
        generation['stop_strings'] = list(stop_sequences)
    if kind == 'ppo':
        inputs.train = prompts
        inputs.reward = None if reward_fn is None else as_reward(reward_fn)
        if environment is not None:
            inputs.environment, inputs.environment_settings = environment, _checked_in_time(inputs, environment, own)
            eval_prompts = tasks_without_prompts(own['eval_episodes']) if own['eval_episodes'] else eval_prompts
    else:
        options = {'max_length': within_context('max_length', own['max_length'], model_config, 'the model')}
        if 'skip_bad_records' in own:
            options['skip_bad_records'] = own['skip_bad_records']
        inputs.train = _records(kind, samples, rewards, preferences, inputs.tokenizer, options)
    if eval_prompts is not None:
        inputs.callbacks.append(_evaluator(kind, eval_prompts, inputs, metric_fn, own['eval_interval']))
    if save_path is not None and run_dir is None:
        inputs.callbacks.append(_KeepWeights(Path(save_path)))
    if save_path is None and run_dir is None and push_to_hub is None and getattr(strategy, 'is_rank_0', True):
        told = (
            'nothing of this run is written; give run_dir=... for checkpoints and metrics, save_path=... for the model'
        )
        print(f'train: {told}', file=sys.stderr, flush=True)
    trainer = make_trainer(inputs, strategy)
    if resume is not None:
        if kind == 'ppo':  # whose order a checkpoint goes on with
            inputs.train = None if prompts is None else as_prompts(prompts, inputs.tokenizer)
            trainer.set_prompts(inputs.train)
        trainer.load_checkpoint(resume)
    fit(inputs, trainer)
    if save_path is not None:
        trainer.save_pretrained(save_path)
        say_use(run, trainer, Path(save_path))
    if push_to_hub is not None and save_path is not None:
        place = Path(save_path)
        trainer.strategy.run_on_rank0(lambda: push_folder(place, push_to_hub, private=hub_private))
    elif push_to_hub is not None:
        trainer.push_to_hub(push_to_hub, private=hub_private)
    return trainer


class _KeepWeights(Callback):
    """Of a run that leaves no checkpoints: the weights that an exception leaves whole, beside the place of the trained
    ones."""

    def __init__(self, save_path: Path) -> None:
        self.place = save_path.with_name(f'{save_path.name}-cut-short')

    def on_exception(self, trainer: Any, error: BaseException) -> None:
        failed_together = isinstance(error, Exception) and trainer.strategy.fails_together('keeping weights')
        if failed_together and trainer.num_updates and not trainer.steps.within and not self.place.exists():
            trainer.save_pretrained(self.place)
            if trainer.strategy.is_rank_0:
                print(
                    f'the weights after the last optimizer step are kept in {self.place}', file=sys.stderr, flush=True
                )


def _check_environment(environment: Any, chosen: Mapping[str, Any], eval_prompts: Any) -> None:
    """What belongs to an environment, and what does not go with one."""
    if environment is None:
        for name in ENVIRONMENT:
            if chosen.get(name):
                raise ValueError(f'train: {name} is about an environment, and there is none; give environment=...')
    elif chosen.get('eval_episodes') and eval_prompts is not None:
        raise ValueError('train: eval_episodes are of tasks without prompts; with eval_prompts leave it out')


def _checked_in_time(inputs: Inputs, environment: Any, own: Mapping[str, Any]) -> EnvironmentSettings:
    """The settings of an environment that was tried."""
    settings = EnvironmentSettings(
        max_turns=own['max_turns'],
        max_turn_tokens=own['max_turn_tokens'],
        step_timeout_s=own['step_timeout_s'],
        workers=own['environment_workers'],
        apply_chat_template=own['apply_chat_template'] or None,
    )
    prompts = tasks_without_prompts() if inputs.train is None else as_prompts(inputs.train, inputs.tokenizer)
    longest_opening(environment, settings, inputs.tokenizer, prompts, getattr(inputs.run, 'seed', 0))
    return settings


def _kind(reward_fn: Any, prompts: Any, environment: Any, samples: Any, rewards: Any, preferences: Any) -> str:
    if environment is not None:
        wrong = [
            n for n, v in (('samples', samples), ('preferences', preferences), ('rewards', rewards)) if v is not None
        ]
        if wrong:
            raise ValueError(
                f'train: a model that acts in an environment learns from what it does; leave {wrong[0]} out'
            )
        return 'ppo'
    given = [
        n for n, v in (('reward_fn', reward_fn), ('samples', samples), ('preferences', preferences)) if v is not None
    ]
    if len(given) != 1:
        what = ' and '.join(given) if given else 'none of them'
        raise ValueError(
            'train: give one of reward_fn (with prompts), environment, samples (with or without rewards), preferences; '
            f'got {what}'
        )
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
    if not isinstance(samples, (str, Path)) and len(samples) != len(rewards):
        raise ValueError(f'train: {len(samples)} samples but {len(rewards)} rewards')
    return 'ilql'


def _read_config(config: Any, kind: str) -> dict[str, Any]:
    if config is None:
        return {}
    if isinstance(config, Settings):
        wanted = _config_class(kind)
        if not isinstance(config, wanted):
            raise ValueError(
                f'train: config is a {type(config).__name__}, but what is given trains with a {wanted.__name__}'
            )
        return config.to_dict()
    content = read_file(config) if isinstance(config, (str, Path)) else config
    if not isinstance(content, Mapping):
        raise ValueError(
            'train: config must be names with values, a file of them, or a config dataclass; got '
            f'{type(content).__name__}'
        )
    found: dict[str, Any] = {}
    places: dict[str, str] = {}
    for place, value in _leaves(content, _known(kind)):
        name = place.rpartition('.')[2]
        if name in found:
            raise ValueError(f'train: config gives {name} twice, as {places[name]} and as {place}')
        found[name], places[name] = value, place
    return found


def _leaves(content: Mapping[str, Any], known: SequenceOf[str], above: str = '') -> Iterator[tuple[str, Any]]:
    """(dotted place, value) of every setting; a mapping under a name that is no setting is a section."""
    for key, value in content.items():
        if isinstance(value, Mapping) and str(key).rpartition('.')[2] not in known:
            yield from _leaves(value, known, f'{above}{key}.')
        else:
            yield f'{above}{key}', value


def _config_class(kind: str) -> Any:
    return METHODS[kind].part('config')


def _known(kind: str) -> list[str]:
    return [*_config_class(kind).field_names(), *generation_fields(), *OWN[kind]]


def _check_settings(kind: str, chosen: Mapping[str, Any]) -> None:
    known = _known(kind)
    for name in chosen:
        if name not in known:
            names = [*known, *inspect.signature(train).parameters]
            raise ValueError(f'train: {name!r} is not a setting of {kind}{hint(name, names)}')


def _check_nothing_to_evaluate(
    kind: str, chosen: Mapping[str, Any], metric_fn: Any, stop_sequences: SequenceOf[str]
) -> None:
    """What would have no effect without `eval_prompts` is a mistake."""
    if metric_fn is not None:
        raise ValueError('train: metric_fn measures what is said to eval_prompts; give eval_prompts too')
    if kind == 'ppo':
        return
    config_and_own = {*_config_class(kind).field_names(), *OWN[kind]}
    idle = [*(['stop_sequences'] if stop_sequences else []), *(name for name in chosen if name not in config_and_own)]
    if idle:
        raise ValueError(
            f'train: {", ".join(idle)} would change nothing, for {kind} generates only to evaluate; give eval_prompts '
            'too'
        )


def _tokenizer_of(model: Any) -> Any:
    name = model if isinstance(model, (str, Path)) else getattr(model, 'name_or_path', None)
    if not name:
        raise ValueError('train: this model does not say which tokenizer is its own; give tokenizer=...')
    return load_tokenizer(name)


def as_reward(reward_fn: Any) -> Any:
    """A function in our convention, `fn(prompts, responses, **columns)`, of one in either; anything else as it is.

    A function with an argument `samples` or `outputs`, and none called `responses`, is in trlX's: it gets those of
    `samples`, `prompts`, `outputs` and the columns that it names, or all of them if it takes any keyword. Weighted
    lists are gone through.
    """
    if isinstance(reward_fn, (list, tuple)):
        return type(reward_fn)(
            (item[0], as_reward(item[1])) if isinstance(item, (list, tuple)) and len(item) == 2 else item
            for item in reward_fn
        )
    reward_fn = made(reward_fn)
    names = _names_of_trlx(reward_fn)
    if names is None:
        return reward_fn

    def reward(prompts: list[str], responses: list[str], **columns: Any) -> Any:
        joined = [p + r for p, r in zip(prompts, responses, strict=True)]
        given = columns | {'samples': joined, 'prompts': prompts, 'outputs': responses}
        return reward_fn(**{name: value for name, value in given.items() if '**' in names or name in names})

    reward.__name__ = reward.__qualname__ = getattr(reward_fn, '__qualname__', type(reward_fn).__name__)
    return reward


def _names_of_trlx(fn: Any) -> set[str] | None:
    """Argument names of a function in trlX's convention, '**' for any keyword; None for anything else."""
    if isinstance(fn, torch.nn.Module) or not callable(fn):
        return None
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return None
    names = {'**' if p.kind is p.VAR_KEYWORD else p.name for p in parameters}
    return names if names & {'samples', 'outputs'} and 'responses' not in names else None


def as_metric(metric_fn: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """A metric function in trlX's convention, `fn(samples=, prompts=, outputs=, **columns)`, of one in either."""
    if metric_fn is None:
        return None
    names = _names_of_trlx(metric_fn)
    if names is not None:
        return lambda **given: metric_fn(
            **{name: value for name, value in given.items() if '**' in names or name in names}
        )

    def metric(*, samples: list[str], prompts: list[str], outputs: list[str], **columns: Any) -> Any:
        parameters = inspect.signature(metric_fn).parameters
        any_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        return metric_fn(prompts, outputs, **{k: v for k, v in columns.items() if any_keyword or k in parameters})

    return metric


def _run(kind: str, own: Mapping[str, Any]) -> Run:
    """What is said of models and optimizers, as a command line's settings."""
    common = {'lr': own['lr'], 'lora_rank': own.get('lora_rank', 0)}
    if kind != 'ppo':
        run = DataRun(**common)
        run.method = kind
        return run
    length = {'num_episodes': 1, 'max_timesteps': own['num_timesteps'], 'update_timesteps': 1}
    of_environment = {'reward_weights': own['reward_weights']}
    return PPORun(critic_lr=own['critic_lr'], critic_from=own['critic_from'], **of_environment, **length, **common)


def _records(
    kind: str, samples: Any, rewards: Any, preferences: Any, tokenizer: Any, options: Mapping[str, Any]
) -> Any:
    if kind == 'dpo':
        return load_preferences(preferences, tokenizer, **options)[0]
    sequences, _ = load_demonstrations(_texts(samples), tokenizer, **options)
    return rewarded(sequences, list(rewards)) if kind == 'ilql' else sequences


def _texts(samples: Any) -> Any:
    """Pairs and texts as rows that the loaders know."""
    if isinstance(samples, (list, tuple)) and samples and isinstance(samples[0], str):
        return [{'text': text} for text in samples]
    if (
        isinstance(samples, (list, tuple))
        and samples
        and isinstance(samples[0], (list, tuple))
        and len(samples[0]) == 2
    ):
        return [{'prompt': prompt, 'completion': output} for prompt, output in samples]
    return samples


def _evaluator(kind: str, prompts: Any, inputs: Inputs, metric_fn: Any, interval: int) -> Evaluator:
    # no reward of its own: the trainer's scorer holds the reward model that the strategy has prepared
    evaluation: Any = PromptEvaluation(
        prompts,
        inputs.tokenizer,
        metric_fn=as_metric(metric_fn),
        environment=inputs.environment,
        environment_settings=inputs.environment_settings,
        **inputs.generation,
    )
    if kind == 'ilql':
        evaluation = BetaEvaluation(evaluation)
    return Evaluator(evaluation, interval, metric='score_mean' if kind == 'ppo' else None)
