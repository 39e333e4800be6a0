"""`chatgpt.train`: training in one call. Makes a `Run` of the settings and `Inputs` of the objects, and calls
`execute`, as the command does.

| argument | method |
|---|---|
| `reward_fn` (and `prompts`) | PPO, or another method of `PPOTrainer` by `config` |
| `environment` | the same over several turns; `prompts` and `reward_fn` are optional |
| `samples` and `rewards` | ILQL |
| `samples` | SFT |
| `preferences` | DPO |
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import fields
from pathlib import Path
from typing import Any

from chatgpt.data import load_demonstrations, load_preferences
from chatgpt.data.formats import adopt_turns, copy_tokenizer
from chatgpt.data.prompts import as_prompts, tasks_without_prompts
from chatgpt.data.rewards.calling import check_call, made
from chatgpt.environments import find_environment
from chatgpt.environments.transcript import choose_text_for
from chatgpt.launch.arguments import hints_of
from chatgpt.launch.beside import check_lengths
from chatgpt.launch.config_values import collected, read_file, typed
from chatgpt.launch.destination import try_model_folder
from chatgpt.launch.inputs import Inputs, check_episodes, longest_opening, read_config, read_critic, within_context
from chatgpt.launch.methods import METHODS
from chatgpt.launch.recipes import execute
from chatgpt.launch.runs import PPORun, Run, run_class
from chatgpt.monitor.publish import check_push
from chatgpt.monitor.run_folder import RunRecord
from chatgpt.names import hint
from chatgpt.nn.layouts import longest_side
from chatgpt.nn.loading import load_tokenizer
from chatgpt.rollout.sampling import DEFAULT_NEW_TOKENS, SamplingParams, generation_fields
from chatgpt.strategies.checkpoint import latest
from chatgpt.strategies.registry import STRATEGY_OPTIONS, as_strategy
from chatgpt.trainer.callbacks import Callback, Evaluator
from chatgpt.trainer.experience.environment_scorer import check_reward_beside
from chatgpt.trainer.experience.scorers import as_scorer, check_columns, columns_of
from chatgpt.trainer.fits import check_one_process_per_rank
from chatgpt.trainer.objectives.ilql import BetaEvaluation, rewarded
from chatgpt.trainer.prompt_evaluation import PromptEvaluation
from chatgpt.trainer.settings import Settings

KINDS = ('ppo', 'ilql', 'sft', 'dpo')
DEFAULTS: dict[str, Any] = {
    'num_timesteps': 100,
    'update_timesteps': 1,
    'eval_interval': 10,
}
"""defaults that differ from the command's and the trainer's"""
TRAIN_SETTINGS: dict[str, dict[str, Any]] = {
    'ppo': {'num_timesteps': int},
    **{kind: {'max_length': int | None, 'eval_interval': int} for kind in KINDS[1:]},
}
"""settings that the command does not have; for PPO `max_length` is a generation keyword"""
GIVEN_OTHERWISE: dict[str, str] = {
    **dict.fromkeys(('pretrain', 'model'), 'the model is the first argument'),
    **dict.fromkeys(
        ('seed', 'precision', 'rank_timeout_s', *STRATEGY_OPTIONS),
        'it is of the strategy: give strategy=NaiveStrategy(...), or another, made with it',
    ),
    'plan': 'only the command stops before a run: chatgpt-rlhf ... --plan',
    **dict.fromkeys(
        ('prompt_path', 'prompt_column', 'max_prompt_tokens', 'ppo.skip_bad_records'),
        'give prompts, of chatgpt.data.load_prompts where they are in a file',
    ),
    **dict.fromkeys(('dataset', 'pack_examples'), 'give samples or preferences'),
    'ilql.skip_bad_records': 'each of samples has its number in rewards',
    **dict.fromkeys(('validation_file', 'validation_percentage'), 'give eval_prompts'),
    'early_stopping_patience': 'give callbacks=[StopOnPlateau(...)]',
    'reward_model': 'give reward_fn, which may be a model',
    'stop_string': 'give stop_sequences',
    'max_len': 'give max_length',
    **dict.fromkeys(('num_episodes', 'max_timesteps'), 'give num_timesteps'),
    'model_path': 'give save_path',
    **dict.fromkeys(
        ('need_optim_ckpt', 'save_adapter'), 'strategy.save_optimizer and export_peft write it from the trainer'
    ),
    **dict.fromkeys(
        ('rollout_workers', 'rollout_chunk_size', 'rollout_slice_tokens', 'rollout_resources', 'vllm_tensor_parallel'),
        'workers end with the run and the trainer stays: give PPOTrainer an engine of theirs',
    ),
}
"""settings of the command that `train` does not take (`kind.name`: for that kind only), and what to do instead"""


NEED_RUN_DIR = ('checkpoint_interval', 'checkpoint_minutes', 'keep_last', 'background_checkpoints', 'ema_decay')


def known_settings(kind: str) -> list[str]:
    """Returns the settings of `train`: the trainer's, generation keywords, the command's without `GIVEN_OTHERWISE`."""
    elsewhere = {name.rpartition('.')[2] for name in GIVEN_OTHERWISE if '.' not in name or name.startswith(f'{kind}.')}
    elsewhere |= set(inspect.signature(train).parameters)
    own = [*_config_class(kind).field_names(), *generation_fields(), *TRAIN_SETTINGS[kind]]
    return list(dict.fromkeys([*own, *(n for n in run_class(kind).field_names() if n not in elsewhere)]))


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
    """Trains a model and returns the trainer, with the trained models in `models()`.

    >>> trainer = chatgpt.train('gpt2', reward_fn=score, prompts=prompts, num_timesteps=50)   # doctest: +SKIP
    >>> trainer.save_pretrained('outputs/actor')   # doctest: +SKIP

    Args:
        model: hub name or folder, or a transformers causal LM or encoder-decoder, which is trained in place.
        reward_fn: `fn(prompts, responses, **columns)`, TRL's `fn(prompts, completions, **kwargs)` or trlX's
            `fn(samples, prompts, outputs, **metadata)`, distinguished by the names of the arguments
            (docs/extend/reward.md); a `RewardModel`; or a list of (weight, one of these). Returns one number per
            sample, or a list of numbers per token.
        prompts: texts, dicts with a 'prompt' (other keys are passed to the functions), or what `PPOTrainer.fit` takes.
        environment: environment of several turns: 'games:countdown', module:Class, file.py:Class, an `Environment`
            class, or a function that makes one. Its rewards are the scores; with a `reward_fn` too, `reward_weights`
            are the weights of both, `{'reward': 1.0, 'reward_fn': 0.5}`. The columns of `prompts`, if given, are
            passed to its `reset`.
        samples: texts, (prompt, output) pairs, or what `chatgpt.data.load_demonstrations` takes.
        rewards: one number per sample.
        preferences: what `chatgpt.data.load_preferences` takes.
        eval_prompts: prompts of evaluations before, during and after training; these log the scores of `reward_fn` and
            the metrics of `metric_fn`.
        metric_fn: a function called like `reward_fn`; returns {name: one number per sample}, logged as
            `eval/metrics/<name>`.
        stop_sequences: texts that end a response.
        config: settings by name, optionally in sections or with dotted names (`method.gamma`); a YAML or JSON file of
            them; or the trainer's config dataclass. `settings` take precedence.
        tokenizer: a tokenizer, or its hub name or folder; None: the model's own.
        strategy: a strategy, or its name: naive, ddp, fsdp, ... None: naive.
        run_dir: folder of the run: metrics, and checkpoints every quarter of an hour, at the end and when it fails.
        resume: 'auto' to resume from the newest checkpoint of `run_dir`, if there is one, or a checkpoint's folder.
        save_path: a new folder, to which the trained model and its tokenizer are written, as by
            `trainer.save_pretrained(save_path)`. A separate critic of PPO is written to `<run_dir>/critic`, or without
            a `run_dir` to `<save_path>-critic`, which `critic_from` takes. Without a `run_dir`, the weights of a run
            that fails are written to `<save_path>-cut-short`.
        push_to_hub: 'NAME' or 'ACCOUNT/NAME' on the Hugging Face Hub, to which the trained model is uploaded at the
            end. The permission is checked before the run. If the upload fails, the model is in `save_path` or in a
            folder that the error names.
        hub_private: make that repository private if it is created.
        **settings: fields of the trainer's config, generation keywords, and settings of the method's command
            (`chatgpt-rlhf ppo --help-all`, or sft, dpo, ilql), such as `lr`, `critic_lr`, `lora_rank` and
            `eval_interval`; one that `train` takes in another way is an error that says how. Only here: `num_timesteps`
            (PPO) and `max_length` (tokens of a sample, at most the model's context; for PPO of prompt and response).

    Raises:
        ValueError: before any weight is loaded, unless exactly one kind of data is given; for lists of different
            lengths, an unknown setting, a value out of range, an option of evaluation without `eval_prompts`, or no
            permission to upload.
        PushError: if the trained model could not be uploaded; names its folder and the command that uploads it.
    """
    if model is None:
        raise ValueError(
            'train: give the model first, as a hub name, a folder or a transformers model'
            f'{next((hint(name, ["model"]) for name in settings if "model" in name), "")}'
        )
    try:
        kind = _kind(reward_fn, prompts, environment, samples, rewards, preferences)
    except ValueError:  # a missing argument may be given under a misspelt name
        for name in settings:
            _refuse(KINDS, name)
        raise
    chosen = _read_config(config, kind) | _settings(kind, ((name, name, value) for name, value in settings.items()))
    evaluates = eval_prompts is not None or bool(chosen.get('eval_episodes'))
    _check_given(kind, chosen, metric_fn, stop_sequences, eval_prompts, evaluates)
    _check_places(run_dir, resume, save_path, push_to_hub, hub_private)
    written = [name for name in NEED_RUN_DIR if chosen.get(name) is not None]
    if run_dir is None and written:
        raise ValueError(f'train: {", ".join(written)} would write to run_dir; give run_dir too')
    run = _run(kind, chosen, model, reward_fn, environment)
    run.save_path, run.resume = str(run_dir or ''), resume if resume is None else str(resume)
    run.model_path, run.push_to_hub = None if save_path is None else str(save_path), push_to_hub
    run.hub_private = bool(hub_private)
    run.strategy = strategy if isinstance(strategy, str) else 'naive'
    strategy = as_strategy('naive' if strategy is None else strategy)
    if push_to_hub is not None and getattr(strategy, 'is_rank_0', True):
        check_push(push_to_hub)
    run.fill_defaults()
    run.validate(getattr(strategy, 'world_size', 1))
    if environment is not None:
        assert isinstance(run, PPORun)
        check_one_process_per_rank(strategy)
        environment = find_environment(environment, run.environment_options)
        check_reward_beside(environment, run.reward_weights, reward_fn)
    if isinstance(tokenizer, str | Path):
        tokenizer = load_tokenizer(tokenizer, trust_remote_code=run.trust_remote_code)
    else:
        tokenizer = copy_tokenizer(tokenizer) if tokenizer is not None else _tokenizer_of(model, run)
    if run.apply_chat_template is None:
        # that of the run that is resumed
        record = RunRecord.read(run_dir) if resume is not None and run_dir is not None else None
        run.apply_chat_template = record.data.get('apply_chat_template') if record is not None else None
    model_config, tokenizer = read_config(run, model, tokenizer)
    if save_path is not None:
        try_model_folder(Path(save_path), model_config, run)
    generation = {name: value for name, value in chosen.items() if name in generation_fields()}
    inputs = Inputs(
        run=run,
        settings=run.config(),
        model=model,
        config=model_config,
        tokenizer=tokenizer,
        run_dir=run_dir,
        callbacks=list(callbacks),
        generation=generation,
        by_name=False,
    )
    if stop_sequences:
        generation['stop_strings'] = list(stop_sequences)
    if isinstance(run, PPORun):
        _read_ppo(run, inputs, prompts, reward_fn, environment)
        eval_prompts = tasks_without_prompts(run.eval_episodes) if run.eval_episodes else eval_prompts
    else:
        longest = within_context('max_length', chosen.get('max_length'), model_config, 'the model')
        inputs.train = _records(kind, run, samples, rewards, preferences, tokenizer, longest)
    if eval_prompts is not None:
        interval = chosen.get('eval_interval', DEFAULTS['eval_interval'])
        inputs.callbacks.append(_evaluator(kind, as_prompts(eval_prompts, tokenizer), inputs, metric_fn, interval))
    if save_path is not None and run_dir is None:
        inputs.callbacks.append(_SaveWeightsOnError(Path(save_path)))
    if save_path is None and run_dir is None and push_to_hub is None and getattr(strategy, 'is_rank_0', True):
        note = (
            'nothing of this run is written; give run_dir=... for checkpoints and metrics, save_path=... for the model'
        )
        print(f'train: {note}', file=sys.stderr, flush=True)
    return execute(run, inputs, strategy)


def _check_places(run_dir: Any, resume: Any, save_path: Any, push_to_hub: Any, hub_private: Any) -> None:
    """Raises ValueError for a folder of another run or model, and for an argument that needs another one."""
    written = [] if save_path is None else [str(save_path)] if run_dir else [str(save_path), f'{save_path}-critic']
    for place in map(Path, written):
        if place.exists() and (not place.is_dir() or any(place.iterdir())):
            beside = f': {place}' if str(place) != written[0] else ''
            raise ValueError(
                f'train: save_path={written[0]!r}{beside} is there already and would be overwritten; give a new folder'
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


class _SaveWeightsOnError(Callback):
    """A callback that saves the weights beside `save_path` if a run without checkpoints ends with an exception."""

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


def _kind(reward_fn: Any, prompts: Any, environment: Any, samples: Any, rewards: Any, preferences: Any) -> str:
    given = {'reward_fn': reward_fn, 'samples': samples, 'preferences': preferences, 'rewards': rewards}
    given = {name: value for name, value in given.items() if value is not None}
    if environment is not None:
        if wrong := [name for name in given if name != 'reward_fn']:
            raise ValueError(
                f'train: a model that acts in an environment learns from what it does; leave {wrong[0]} out'
            )
        return 'ppo'
    sources = [name for name in given if name != 'rewards']
    if len(sources) != 1:
        raise ValueError(
            'train: give one of reward_fn (with prompts), environment, samples (with or without rewards), preferences; '
            f'got {" and ".join(sources) or "none of them"}'
        )
    if rewards is not None and samples is None:
        raise ValueError('train: rewards belong to samples; give samples=..., rewards=...')
    if reward_fn is not None and prompts is None:
        raise ValueError('train: a reward_fn needs prompts to answer; give prompts=...')
    if reward_fn is None and prompts is not None:
        raise ValueError(f'train: prompts go with reward_fn, not with {sources[0]}; use eval_prompts to evaluate')
    if rewards is not None and not isinstance(samples, (str, Path)) and len(samples) != len(rewards):
        raise ValueError(f'train: {len(samples)} samples but {len(rewards)} rewards')
    if reward_fn is not None:
        return 'ppo'
    return 'dpo' if preferences is not None else 'sft' if rewards is None else 'ilql'


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
    return _settings(kind, _flattened(content, known_settings(kind)))


def _flattened(content: Mapping[str, Any], known: SequenceOf[str], above: str = '') -> Iterator[tuple[str, str, Any]]:
    """Yields (dotted place, name, value) of every setting; a mapping under a name that is no setting is a section."""
    for key, value in content.items():
        name = str(key).rpartition('.')[2]
        if isinstance(value, Mapping) and name not in known:
            yield from _flattened(value, known, f'{above}{key}.')
        else:
            yield f'{above}{key}', name, value


def _settings(kind: str, entries: Iterable[tuple[str, str, Any]]) -> dict[str, Any]:
    """Converts entries (place, name, value) to settings; a text is read as on a command line.

    Raises:
        ValueError: for a name that is no setting of `kind` or is given twice, or a value of another type.
    """
    hints = hints_of(run_class(kind)) | hints_of(SamplingParams) | hints_of(_config_class(kind)) | TRAIN_SETTINGS[kind]
    hints = {name: hints.get(name, Any) for name in known_settings(kind)}

    def read(value: Any, hint: Any) -> Any:
        return typed(value, hint) if isinstance(value, str) and hint is not Any else value

    return collected(entries, hints, 'train: ', lambda _, name: _refuse((kind,), name), read)


def _config_class(kind: str) -> Any:
    return METHODS[kind].part('config')


def _refuse(kinds: SequenceOf[str], name: str) -> None:
    """Raises ValueError for a name that is a setting of none of `kinds`."""
    known = dict.fromkeys(name for kind in kinds for name in known_settings(kind))
    if name in known:
        return
    elsewhere = GIVEN_OTHERWISE.get(f'{kinds[0]}.{name}', GIVEN_OTHERWISE.get(name))
    if elsewhere and name in run_class(kinds[0]).field_names():
        raise ValueError(f'train: {name!r} is a setting of the command; here {elsewhere}')
    arguments = [p for p in inspect.signature(train).parameters if p != 'settings']
    others = [kind for kind in KINDS if name in known_settings(kind)]
    instead = f'; it is one of {", ".join(others)}' if others else hint(name, [*known, *arguments])
    what = f'a setting of {kinds[0]}' if len(kinds) == 1 else 'an argument or a setting'
    raise ValueError(f'train: {name!r} is not {what}{instead}')


def _check_given(
    kind: str, chosen: Mapping[str, Any], metric_fn: Any, stop_sequences: Any, eval_prompts: Any, evaluates: bool
) -> None:
    """Raises ValueError for two kinds of evaluation, and for settings that have no effect without one."""
    if eval_prompts is not None and chosen.get('eval_episodes'):
        raise ValueError('train: eval_episodes are of tasks without prompts; with eval_prompts leave it out')
    if metric_fn is not None and not evaluates:
        raise ValueError('train: metric_fn measures the responses to eval_prompts; give eval_prompts too')
    if kind == 'ppo' or evaluates:
        return
    of_learning = {*_config_class(kind).field_names(), *run_class(kind).field_names(), *TRAIN_SETTINGS[kind]}
    idle = [*(['stop_sequences'] if stop_sequences else []), *(name for name in chosen if name not in of_learning)]
    if idle:
        raise ValueError(
            f'train: {", ".join(idle)} would change nothing, for {kind} generates only to evaluate; give eval_prompts '
            'too'
        )


def _tokenizer_of(model: Any, run: Run) -> Any:
    name = model if isinstance(model, (str, Path)) else getattr(model, 'name_or_path', None)
    if not name:
        raise ValueError('train: this model does not say which tokenizer is its own; give tokenizer=...')
    return load_tokenizer(name, trust_remote_code=run.trust_remote_code)


def _run(kind: str, chosen: Mapping[str, Any], model: Any, reward_fn: Any, environment: Any) -> Run:
    """Returns the `Run` of a command line with these settings, with names in place of objects."""
    cls, config = run_class(kind), _config_class(kind)
    values: dict[str, Any] = {**{f.name: f.default for f in fields(config)}, **DEFAULTS, **chosen}
    named = isinstance(model, (str, Path))
    if values.get('gradient_checkpointing') and not named:
        raise ValueError(
            'train: gradient_checkpointing is for a model that is loaded here; of one in memory call '
            'model.activation_checkpointing_enable()'
        )
    values |= {'pretrain': str(model) if named else 'the model', 'max_timesteps': values.get('num_timesteps')}
    values |= {'num_episodes': 1, 'reward_fn': None if reward_fn is None else 'reward_fn'}
    if environment is not None:
        module, name = getattr(environment, '__module__', ''), getattr(environment, '__qualname__', 'environment')
        values['environment'] = environment if isinstance(environment, str) else f'{module}:{name}'
    run = cls(**{name: value for name, value in values.items() if name in cls.field_names()})
    run.method, run.given = kind, chosen
    return run


def _read_ppo(run: PPORun, inputs: Inputs, prompts: Any, reward_fn: Any, environment: Any) -> None:
    """Sets prompts, reward, environment and the texts of PPO-ptx in `inputs`."""
    tokenizer = inputs.tokenizer
    if environment is not None:
        choose_text_for(environment, tokenizer)
    inputs.train = None if prompts is None else as_prompts(prompts, tokenizer)
    adopt_turns(tokenizer, inputs.train)  # before the eval prompts can decide it
    bounded = bool(inputs.generation.get('max_length'))  # which bounds responses too
    run.max_new_tokens = inputs.generation.get('max_new_tokens') or (None if bounded else DEFAULT_NEW_TOKENS)
    if inputs.train is not None and environment is None and not bounded:
        check_lengths(inputs.train, longest_side(inputs.config), run.max_new_tokens or 0, 'the context', tokenizer)
    inputs.reward = made(reward_fn)
    check_columns(as_scorer(inputs.reward), inputs.train or ())
    if environment is not None:
        inputs.environment, inputs.environment_settings = environment, run.environment_settings()
        tasks = tasks_without_prompts() if inputs.train is None else inputs.train
        inputs.longest_opening = longest_opening(environment, inputs.environment_settings, tokenizer, tasks, run.seed)
        check_episodes(run, inputs, longest_side(inputs.config), 'the context', 'a model with a longer one')
    read_critic(run, inputs)
    if run.ptx_data is not None:
        longest = longest_side(inputs.config)
        inputs.pretrain_data = load_demonstrations(_texts(run.ptx_data), tokenizer, max_length=longest)[0]


def _records(
    kind: str, run: Run, samples: Any, rewards: Any, preferences: Any, tokenizer: Any, longest: int | None
) -> Any:
    options: dict[str, Any] = {'max_length': longest}
    if kind != 'ilql':
        options['skip_bad_records'] = run.skip_bad_records
    if kind == 'dpo':
        records: Any = load_preferences(preferences, tokenizer, **options)[0]
    else:
        records = load_demonstrations(_texts(samples), tokenizer, **options)[0]
    adopt_turns(tokenizer, records)
    return rewarded(records, list(rewards)) if kind == 'ilql' else records


def _texts(samples: Any) -> Any:
    """Converts pairs and texts to rows for the loaders."""
    first = samples[0] if isinstance(samples, (list, tuple)) and samples else None
    if isinstance(first, str):
        return [{'text': text} for text in samples]
    if isinstance(first, (list, tuple)) and len(first) == 2:
        return [{'prompt': prompt, 'completion': output} for prompt, output in samples]
    return samples


def _evaluator(kind: str, prompts: Any, inputs: Inputs, metric_fn: Any, interval: int) -> Evaluator:
    check_columns(as_scorer(inputs.reward), prompts)
    if inputs.environment is None and not inputs.generation.get('max_length'):
        new = inputs.generation.get('max_new_tokens') or DEFAULT_NEW_TOKENS
        check_lengths(prompts, longest_side(inputs.config), new, 'the context', inputs.tokenizer, 'eval prompt')
    if metric_fn is not None:
        check_call(metric_fn, columns_of(prompts), 'metric_fn')
    # without a reward it uses the trainer's scorer, which has the prepared reward model
    settings = {'environment': inputs.environment, 'environment_settings': inputs.environment_settings}
    evaluation: Any = PromptEvaluation(prompts, inputs.tokenizer, metric_fn=metric_fn, **settings, **inputs.generation)
    if kind == 'ilql':
        evaluation = BetaEvaluation(evaluation)
    return Evaluator(evaluation, interval, metric='score_mean' if kind == 'ppo' else None)
