"""Reads and checks the inputs of a run: tokenizer, data, reward and model config.

Mistakes in settings and data are found here, before any weight is loaded.
"""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from chatgpt.data import (
    load_demonstrations,
    load_examples,
    load_labelled,
    load_preferences,
    pack,
    split_examples,
)
from chatgpt.data.examples import Labelled, Preference
from chatgpt.data.formats import (
    adopt_turns,
    choose_text,
    is_for_encoder_decoder,
    note_model,
    shown_format,
    template_of,
    text_choice,
)
from chatgpt.data.loading import left_out
from chatgpt.data.prompts import load_prompts, tasks_without_prompts
from chatgpt.data.reading import BadRecords, read_records
from chatgpt.data.tokenize import Overflow, TokenizedPreference, check_tokenizer
from chatgpt.environments import EnvironmentSettings, find_environment, make_environment
from chatgpt.environments.transcript import choose_text_for
from chatgpt.launch import demo_world
from chatgpt.launch.arguments import load_function, world_size_from_env
from chatgpt.launch.beside import check_adapter, check_critic, check_lengths, critic_source, reward_model_inputs
from chatgpt.launch.destination import check_resume
from chatgpt.launch.rollouts import check_rollout_args
from chatgpt.launch.rules import ENCODER_DECODER_RULES
from chatgpt.launch.runs import DataRun, PPORun, Run, SFTRun
from chatgpt.nn.kinds import MODELS
from chatgpt.nn.layouts import longest_side
from chatgpt.nn.loading import load_config, load_tokenizer
from chatgpt.rollout import LocalEngine
from chatgpt.rollout.episodes import EpisodeEngine, check_writes_turns
from chatgpt.rules import check
from chatgpt.strategies.ranks import check_world_size
from chatgpt.strategies.rules import GROUP_RULES
from chatgpt.strategies.sequence_parallel import check_sequences
from chatgpt.strategies.tensor_parallel import check_model
from chatgpt.trainer.experience.environment_scorer import check_reward_beside
from chatgpt.trainer.experience.scorers import as_scorer, check_columns
from chatgpt.trainer.fits import check_router_loss
from chatgpt.trainer.objectives.config import KTOConfig, PreferenceConfig, RewardModelConfig
from chatgpt.trainer.objectives.kto import check_both_kinds
from chatgpt.trainer.objectives.reward_model import is_success
from chatgpt.trainer.offline import check_patience
from chatgpt.trainer.rules import LABELLED_RULES
from chatgpt.trainer.settings import Settings


@dataclass(kw_only=True)
class Inputs:
    """The inputs of a run, made by `read_inputs` from settings or by `chatgpt.train` from objects."""

    run: Run
    settings: Settings
    """settings of the trainer; their class decides the trainer"""
    tokenizer: Any
    train: Any = None
    """prompts or records"""
    validation: Any = None
    """prompts or records to evaluate on; None: no evaluation"""
    model: Any = None
    """initial model: a hub name, a folder, or a transformers model, which is trained in place; None: new weights"""
    config: Any = None
    """config of the model"""
    reward: Any = None
    """a folder, a reward model, a function, or a list of (weight, one of these)"""
    reward_tokenizer: Any = None
    """tokenizer of the reward model if it differs from the policy's"""
    reward_context: int | None = None
    """maximum tokens of a sequence of the reward model"""
    critic_config: Any = None
    """config of the model that a separate critic starts from; None: that of the reward model or of the actor"""
    environment: Any = None
    """function that makes the environment of an episode"""
    environment_settings: EnvironmentSettings | None = None
    longest_opening: int = 0
    """maximum tokens before the first turn, over the first tasks"""
    pretrain_data: Any = None
    generation: dict[str, Any] = field(default_factory=dict)
    """generation keywords"""
    callbacks: list[Any] = field(default_factory=list)
    run_dir: Any = None
    notes: list[str] = field(default_factory=list)
    """lines about the data, which are printed at the start"""
    by_name: bool = True
    """True: read from the names in the run's settings; False: objects given to `chatgpt.train`"""


def read_inputs(run: Run) -> Inputs:
    """Checks the settings of a run, fills those that depend on the model, and reads its data.

    Raises:
        ValueError: for settings out of range or excluding each other, a bad file, a tokenizer of another model, ...
    """
    check_run(run, ranks_of(run))
    config, tokenizer = read_config(run)
    read = run.entry().part('reader')
    inputs = Inputs(
        run=run, settings=run.config(), tokenizer=tokenizer, model=run.base, config=config, run_dir=run.save_path
    )
    read(run, inputs)
    adopt_turns(tokenizer, inputs.train)
    run.apply_chat_template = text_choice(tokenizer)  # for run.json
    return inputs


def ranks_of(run: Run) -> int:
    """Returns the number of ranks of this launch."""
    processes = world_size_from_env()
    if run.plan:  # a plan may be for more processes than were started
        return processes
    check(run, GROUP_RULES)
    ranks = check_world_size(processes, run.tensor_parallel)
    return check_world_size(ranks, run.sequence_parallel, 'sequence_parallel')


def check_run(run: Run, world_size: int) -> None:
    """Fills the defaults that depend on the model, and checks the settings and the run's folder."""
    run.fill_defaults()
    run.validate(world_size)
    if isinstance(run, PPORun):
        check_rollout_args(run)
        if run.estimator.rewards_apart and len(run.reward_weights or ()) < 2:
            raise ValueError(
                f'advantage_estimator={run.advantage_estimator!r} takes a list of rewards, which the command line '
                'cannot give but for an environment, by reward_weights; use PPOTrainer or chatgpt.train'
            )
    if not run.plan:  # a plan writes nothing
        check_resume(run)


def quiet_transformers() -> None:
    """Turns off transformers' progress bars, which would hide the progress of the run."""
    logging.disable_progress_bar()


def check_writes(config: Any, name: str) -> None:
    """Raises ValueError for the config of a reward model."""
    heads = [name for name in getattr(config, 'architectures', None) or [] if 'ForSequenceClassification' in name]
    if heads:
        raise ValueError(
            f'--pretrain {name} is a reward model ({heads[0]}), which cannot write: give the model that it was made '
            'of, and this as --reward_model where there is one'
        )


def read_config(run: Run, model: Any = None, tokenizer: Any = None) -> tuple[Any, Any]:
    """Returns config and tokenizer of a run, or of `model` and `tokenizer` if given, checked against each other."""
    quiet_transformers()
    code = {'trust_remote_code': run.trust_remote_code}
    if model is not None and not isinstance(model, (str, Path)):
        config = model.config
    elif run.base:
        config = load_config(run.base, **code)
    elif isinstance(run, PPORun) and run.environment is not None:
        config, tokenizer = demo_world.game_config(), demo_world.game_tokenizer()
    else:
        config, tokenizer = demo_world.demo_config(), demo_world.demo_tokenizer()
    if tokenizer is None:
        tokenizer = load_tokenizer(run.tokenizer or str(run.base), **code)
    if run.trained == 'actor':
        check_writes(config, str(run.pretrain))
    kind = MODELS.find(run.model)
    family = getattr(kind.actor or kind.reward_model, 'model_type', None)
    if family not in (None, config.model_type):
        raise ValueError(f'--model {run.model}: the model is of the family {config.model_type!r}; use --model auto')
    check_tokenizer(tokenizer, config)
    check_router_loss(config)
    check_run_apart(run, config)
    check_parts(run, config, getattr(kind, run.trained))
    if isinstance(run.base, str) and model is None:
        check_layers(run, config, getattr(kind, run.trained))
    note_model(tokenizer, config)
    choose_text(tokenizer, run.apply_chat_template)
    return config, tokenizer


def check_run_apart(run: Run, config: Any) -> None:
    """Raises ValueError for a setting that an encoder-decoder does not support."""
    if not getattr(config, 'is_encoder_decoder', False):
        return
    for rule in ENCODER_DECODER_RULES:
        if sentence := rule.broken_by(run):
            name = run.pretrain or 'the model'
            raise ValueError(f'{name} is an encoder-decoder ({config.model_type}), which {sentence}')
    if getattr(run, 'environment', None) is not None:
        check_writes_turns(config)


def check_parts(run: Run, config: Any, make: Any) -> None:
    """Raises ValueError if processes cannot compute a model of this config together. `make`: its class."""
    for check_parts_of, parts in ((check_model, run.tensor_parallel), (check_sequences, run.sequence_parallel)):
        if parts > 1 and not run.trust_remote_code:  # remote code is not built on the meta device
            with torch.device('meta'):
                check_parts_of(make(config=copy.deepcopy(config)), parts)


def check_layers(run: Run, config: Any, make: Any) -> None:
    """Raises ValueError for adapters or unfrozen blocks that do not fit a model of this config. `make`: its class."""
    unfrozen = getattr(run, 'num_layers_unfrozen', -1)
    classifier = run.trained == 'reward_model' and any('ForSequenceCl' in name for name in config.architectures or ())
    if classifier or run.trust_remote_code or run.on_trunk or not (run.lora_rank or unfrozen > 0):
        return  # from its config alone a classifier is built without its own head
    own = {'num_layers_unfrozen': unfrozen} if unfrozen > 0 else {}
    with torch.device('meta'):
        make(config=copy.deepcopy(config), **run.lora_keywords(), **own)


def within_context(name: str, given: int | None, config: Any, model: Any, *, default: int | None = None) -> int | None:
    """Returns the maximum tokens of a sequence: `given`, else the smaller of `default` and the model's context (of an
    encoder-decoder: of each side).

    Raises:
        ValueError: if `given` is beyond the context.
    """
    limit = longest_side(config)
    if limit is not None and given is not None and given > limit:
        raise ValueError(
            f'{name}={given} is beyond the context of {model}, {limit} tokens; give at most {limit}, or leave it out'
        )
    known = [n for n in (default if given is None else given, limit) if n is not None]
    return min(known, default=None)


# ---------------------------------------------------------------------- PPO


def read_ppo(run: PPORun, inputs: Inputs) -> None:
    tokenizer, skip, context = inputs.tokenizer, run.skip_bad_records, longest_side(inputs.config)
    if run.reward_fn:
        inputs.reward = load_function(run.reward_fn)
    if run.reward_model:
        if run.shared_trunk:
            check_adapter('reward model', run.reward_model, run.pretrain)
        config = load_config(run.reward_model, trust_remote_code=run.trust_remote_code)
        check_parts(run, config, MODELS.find('auto').reward_model)
        inputs.reward = run.reward_model
        inputs.reward_tokenizer, inputs.reward_context = reward_model_inputs(
            run.reward_model, tokenizer, trust_remote_code=run.trust_remote_code
        )
    if run.environment is not None:
        inputs.environment = find_environment(run.environment, run.environment_options)
        choose_text_for(inputs.environment, tokenizer)
    if run.prompt_path:
        prompts = _own_prompts(run, run.prompt_path, tokenizer, context)
    elif run.environment is not None:
        prompts = tasks_without_prompts()
    else:
        prompts = load_prompts(demo_world.demo_prompts(200, seed=0), tokenizer, max_prompt_tokens=run.max_prompt_tokens)
        inputs.reward = inputs.reward or demo_world.true_reward
    adopt_turns(tokenizer, prompts)  # before the eval prompts can decide it
    own_template = []
    if text_choice(tokenizer) and template_of(inputs.reward_tokenizer) not in (None, template_of(tokenizer)):
        own_template = [
            f'{run.reward_model} has a chat template of its own, and scores texts in the template of the policy, which '
            'it was not trained on: give a --reward_fn that renders conversations for it'
        ]
    read: list[tuple[Any, str, Any]] = [(run.prompt_path, 'prompts', prompts)]
    inputs.train, inputs.validation = _eval_prompts(run, prompts, tokenizer, context)
    named = {'prompt': inputs.train, 'eval prompt': inputs.validation}
    both, new = {name: subset for name, subset in named.items() if subset}, run.max_new_tokens or 0
    if run.reward_fn:
        for subset in both.values():
            check_columns(as_scorer(inputs.reward), subset)
    if run.environment is not None:
        _read_environment(run, inputs, context)
    else:
        for name, subset in both.items():
            check_lengths(subset, context, new, 'the context', tokenizer, name)
    if run.max_timesteps is None:
        if run.environment is not None and not run.prompt_path:
            raise ValueError('max_timesteps: tasks of an environment have no end; give how many timesteps there are')
        run.max_timesteps = -(-len(inputs.train) // run.experience_batch_size)
    if run.reward_model and inputs.reward_tokenizer is None:
        for name, subset in both.items():
            check_lengths(subset, inputs.reward_context, new, "the reward model's context", tokenizer, name)
        check_episodes(run, inputs, inputs.reward_context, "the reward model's context", 'another reward_model')
    read_critic(run, inputs)
    if run.ptx_data:
        texts, _ = load_demonstrations(run.ptx_data, tokenizer, max_length=context, skip_bad_records=skip)
        inputs.pretrain_data = texts
        read.append((run.ptx_data, 'texts', texts))
    if run.validation_file:
        read.append((run.validation_file, 'eval prompts', inputs.validation))
    inputs.notes = [f'{source}: {len(data)} {what}{left_out(data)}' for source, what, data in read if data.num_skipped]
    inputs.notes += own_template
    if any(data.has_turns for _, _, data in read):
        inputs.notes.append(_chat_format(tokenizer))
    inputs.generation = run.generation()


def read_critic(run: PPORun, inputs: Inputs) -> None:
    """Sets the config of the model that the critic starts from; raises ValueError if it does not fit the run."""
    if (source := critic_source(run)) is None:
        return
    inputs.critic_config = check_critic(run, source, inputs.config, inputs.tokenizer)
    if inputs.critic_config is None:
        return
    check_parts(run, inputs.critic_config, MODELS.find('auto').critic)
    context, what = longest_side(inputs.critic_config), f'the context of the critic {source}'
    if inputs.environment is None:
        check_lengths(inputs.train, context, run.max_new_tokens or 0, what, inputs.tokenizer)
    check_episodes(run, inputs, context, what, 'another critic_from')


def check_episodes(run: PPORun, inputs: Inputs, context: int | None, what: str, instead: str) -> None:
    """Raises ValueError if episodes may be longer than `context`, which is that of `what`."""
    if inputs.environment is None or context is None:
        return
    if inputs.longest_opening + (run.max_new_tokens or 0) > context:
        raise ValueError(
            f'an episode takes up to {inputs.longest_opening} + {run.max_new_tokens} tokens, past {what} of {context}: '
            f'give fewer new tokens, or {instead}'
        )


NUM_OPENINGS = 8
"""number of tasks that `longest_opening` starts"""


def _read_environment(run: PPORun, inputs: Inputs, context: int | None) -> None:
    """Tries the environment; raises ValueError if its episodes are longer than the model's context."""
    check_reward_beside(inputs.environment, run.reward_weights, inputs.reward)
    inputs.environment_settings = run.environment_settings()
    inputs.longest_opening = longest_opening(
        inputs.environment, inputs.environment_settings, inputs.tokenizer, inputs.train, run.seed
    )
    check_episodes(run, inputs, context, 'the context', 'a model with a longer one')


def longest_opening(
    environment: Any, settings: EnvironmentSettings | None, tokenizer: Any, prompts: Any, seed: int
) -> int:
    """Returns the maximum tokens before the first turn, over the first `NUM_OPENINGS` tasks.

    Raises:
        ValueError: if the environment cannot be made, or fails at these tasks.
    """
    make_environment(environment)
    engine = EpisodeEngine(LocalEngine(), environment, tokenizer, settings)
    try:
        first = [prompts[i % len(prompts)] for i in range(NUM_OPENINGS)]
        return max(map(len, engine.openings(first, seed=seed, groups=range(NUM_OPENINGS))))
    finally:
        engine.close()


def _chat_format(tokenizer: Any) -> str:
    return f'conversations read {shown_format(tokenizer)}, the chat template that is saved with the tokenizer'


def _own_prompts(run: PPORun, path: str, tokenizer: Any, context: int | None) -> Any:
    """Reads the prompts of a file by the settings of the run. A prompt that leaves no room for its response in the
    context is a bad record, unless max_prompt_tokens is set."""
    limit = run.max_prompt_tokens
    overflow: Overflow = 'truncate'
    # an environment may write the opening itself, which `longest_opening` checks
    if limit is None and context is not None and run.environment is None:
        room = context if is_for_encoder_decoder(tokenizer) else context - (run.max_new_tokens or 0)
        if room > 0:
            limit, overflow = room, 'refuse'
    return load_prompts(
        path,
        tokenizer,
        column=run.prompt_column,
        max_prompt_tokens=limit,
        overflow=overflow,
        skip_bad_records=run.skip_bad_records,
    )


def _eval_prompts(run: PPORun, prompts: Any, tokenizer: Any, context: int | None) -> tuple[Any, Any]:
    """Returns the training prompts and the eval prompts, None without evaluation."""
    if run.validation_file:
        return prompts, _own_prompts(run, run.validation_file, tokenizer, context)
    if run.eval_episodes:
        return prompts, tasks_without_prompts(run.eval_episodes)
    if not run.validation_percentage:
        return prompts, None
    train, validation = split_examples(range(len(prompts)), run.validation_percentage, seed=run.seed)
    return prompts.subset(train), prompts.subset(validation)


# ---------------------------------------------------------------------- runs that only learn


def read_sft(run: DataRun, inputs: Inputs) -> None:
    """Reads demonstrations or plain text."""
    source = run.dataset or demo_world.demo_corpus(demo_world.NUM_EXAMPLES, seed=0)
    options = _reading_options(run, inputs)
    packs = isinstance(run, SFTRun) and run.pack_examples
    whole = {'max_length': None} if packs else {}
    train, validation = load_demonstrations(source, inputs.tokenizer, **options | whole)
    if packs:
        train[:] = pack(train, run.max_tokens)
        if validation:  # which is not packed
            with warnings.catch_warnings(action='ignore'):  # of the same records
                validation = load_demonstrations(source, inputs.tokenizer, **options)[1]
    if isinstance(run, SFTRun) and run.early_stopping_patience is not None and not validation:
        raise ValueError('early_stopping_patience needs eval data: give --validation_file or --validation_percentage')
    if isinstance(run, SFTRun):
        check_patience(run.early_stopping_patience, run.max_epochs)
    _set_data(inputs, train, validation)


def read_preferences(run: DataRun, inputs: Inputs) -> None:
    """Reads preferences; for a reward model and for KTO also labelled text.

    Raises:
        ValueError: for labelled responses if the method learns from pairs, and for unlabelled ones with KTO.
    """
    source = run.dataset or demo_world.demo_preferences(demo_world.NUM_EXAMPLES, seed=0)
    options = _reading_options(run, inputs)
    first = load_examples(source, max_examples=1, skip_bad_records=run.skip_bad_records)[0]
    method = run.method if isinstance(inputs.settings, PreferenceConfig) else None
    if method == 'kto' and not isinstance(first, (Labelled, Preference)):
        raise ValueError(_kto_error(source, 'no label'))
    if isinstance(first, Labelled) and method not in ('kto', None):
        raise ValueError(f'{run.dataset}: {method} learns from pairs, and these are labelled answers; use kto')
    if isinstance(first, Labelled) and isinstance(inputs.settings, RewardModelConfig):
        check(inputs.settings, LABELLED_RULES)
    load: Callable[..., Any] = load_labelled if isinstance(first, Labelled) else load_preferences
    train, validation = load(source, inputs.tokenizer, **options)
    if isinstance(inputs.settings, KTOConfig) and isinstance(first, Labelled):
        name = inputs.settings.positive_label
        _check_labels(source, (record.label for record in validation), name)
        check_both_kinds(source, _check_labels(source, (record.label for record in train), name))
    _set_data(inputs, train, validation)


def read_rewarded(run: DataRun, inputs: Inputs) -> None:
    """Reads texts with rewards, for ILQL.

    Raises:
        ValueError: for preferences, or a reward that is no number.
    """
    source = run.dataset or demo_world.rewarded_stories(demo_world.NUM_EXAMPLES)
    first = load_examples(source, max_examples=1, skip_bad_records=run.skip_bad_records)[0]
    if not isinstance(first, Labelled):
        raise ValueError(f'{run.dataset}: ILQL needs the columns prompt, response and reward (or text and reward)')
    train, validation = load_labelled(source, inputs.tokenizer, **_reading_options(run, inputs))
    for record in (*train, *validation):
        if isinstance(record.label, (bool, str)):
            raise ValueError(f'{run.dataset}: the reward {record.label!r} is no number, which ILQL needs')
    _set_data(inputs, train, validation)


def _reading_options(run: DataRun, inputs: Inputs) -> dict[str, Any]:
    """Returns the keywords of the `load_` functions of `chatgpt.data`.

    Without `max_len` sequences are cut to 512 tokens, or to the model's context if that is less. Raises ValueError if
    `max_len` is beyond the context.
    """
    model = run.base or 'the small model'
    run.max_len = within_context('max_len', run.max_len, inputs.config, model, default=run.max_tokens)
    percentage = run.validation_percentage if run.dataset else run.validation_percentage or 5.0
    return {
        'max_length': run.max_len,
        'skip_bad_records': run.skip_bad_records,
        'validation_source': run.validation_file,
        'validation_percentage': 0 if run.validation_file else percentage,
        'seed': run.seed,
    }


def _set_data(inputs: Inputs, train: Any, validation: Any) -> None:
    inputs.train, inputs.validation = train, validation
    trained = set(map(_digest, train)) if validation else set()
    evaluated = list(map(_digest, validation))
    if inputs.run.validation_file and trained == set(evaluated):
        raise ValueError(
            f'validation_file={inputs.run.validation_file} holds the records of the training data: give others, or '
            '--validation_percentage'
        )
    shared = sum(record in trained for record in evaluated)
    if shared and inputs.run.data_source():
        warnings.warn(
            f'{shared} of {len(validation)} eval records are in the training data too, and say nothing of other data',
            stacklevel=2,
        )
    inputs.notes = [_chat_format(inputs.tokenizer)] if train.has_turns else []
    inputs.notes.append(
        f'{len(train)} examples to learn from{left_out(train)}, {len(validation)} to evaluate on{left_out(validation)}'
    )


def _digest(record: Any) -> bytes:
    """Returns a hash of the ids of prompt and responses, which identify a record."""
    digest = hashlib.blake2b(digest_size=16)
    for s in sequences_of(record):
        for ids in (s.prompt_ids, s.response_ids):
            digest.update(len(ids).to_bytes(8, 'little') + ids.numpy().tobytes())
    return digest.digest()


def sequences_of(record: Any) -> list[Any]:
    """Returns the sequences of a record: two or more of a preference, else one."""
    return record.sequences() if isinstance(record, TokenizedPreference) else [getattr(record, 'sequence', record)]


def _check_labels(source: Any, labels: Iterable[Any], positive_label: str | None) -> list[bool]:
    """Returns True for each label that means good. Raises ValueError for one that means neither good nor bad, such as a
    reward, or the name of a class without `positive_label`."""
    found = []
    for label in labels:
        try:
            found.append(is_success(label, positive_label))
        except ValueError:
            raise ValueError(_kto_error(source, f'{label!r} where a label is needed')) from None
    return found


def _kto_error(source: Any, fault: str) -> str:
    columns = ', '.join(next(read_records(source, BadRecords(skip=True))).data)
    return (
        f'{source}: KTO needs the columns prompt, response and label (or text and label), where label is true or '
        'false, 1 or 0, good or bad, or a name with --positive_label NAME; or prompt, chosen and rejected. Found the '
        f'columns {columns}, and {fault}'
    )
