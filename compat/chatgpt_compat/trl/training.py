"""The common base of the trainers of TRL 0.12 to 1.12, on a trainer of this library: construction, `state` and its log
history, Hugging Face's callbacks, `save_model`. The methods are in `ppo_train`, `pairs` and `sft`."""

from __future__ import annotations

import atexit
import dataclasses
import inspect
import json
import os
import shutil
import tempfile
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers.trainer_callback import TrainerControl, TrainerState

from chatgpt.monitor.publish import check_push, push_folder
from chatgpt.nn import export_peft, has_lora, is_encoder_decoder, load_causal_lm, load_tokenizer, position_limit
from chatgpt.strategies import strategy_by_name
from chatgpt.trainer.callbacks import Callback, ProgressBar, TrainerView
from chatgpt_compat.accelerator import Accelerator
from chatgpt_compat.trl import arguments
from chatgpt_compat.trl.arguments import Entry, TrainingArguments, check_given, script_level


class State(TrainerState):
    """transformers' state, with the episodes of PPO."""

    episode: int = 0


# ---------------------------------------------------------------------- parts of a trainer


def resolved(args: Any, config_class: type, name: str, table: Mapping[str, Entry]) -> Any:
    """Returns the arguments, with errors and warnings for unsupported ones.

    Args:
        args: None stands for the defaults; the common fields of transformers' TrainingArguments are copied.
        name: the output folder if none is given.
    """
    if args is None:
        args = config_class()
    elif not isinstance(args, TrainingArguments):
        args = from_transformers(args, config_class)
    check_given(args, table)
    arguments.check_choices(args)
    if args.evaluation_strategy is not None:
        args.eval_strategy = args.evaluation_strategy
    if args.output_dir is None:
        args.output_dir = name
    if args.load_best_model_at_end and args.metric_for_best_model is None:
        args.metric_for_best_model = 'loss'
    if args.metric_for_best_model is not None and args.greater_is_better is None:
        args.greater_is_better = not args.metric_for_best_model.endswith('loss')
    return args


_ALWAYS = ('learning_rate', 'logging_steps')
"""arguments with other defaults in transformers than in TRL"""


def from_transformers(args: Any, config_class: type) -> Any:
    """Returns our config with the values of transformers' TrainingArguments that are not defaults, and with those whose
    default differs from ours."""
    if not dataclasses.is_dataclass(args):
        raise ValueError(f'args: a {type(args).__name__} given; it must be a {config_class.__name__}')
    known = {f.name for f in dataclasses.fields(config_class)}
    theirs: Any = args
    fresh = type(theirs)(output_dir=theirs.output_dir)
    names = [
        f.name
        for f in dataclasses.fields(args)
        if f.init and (f.name in _ALWAYS or getattr(args, f.name) != getattr(fresh, f.name))
    ]
    if unknown := sorted(set(names) - known):
        warnings.warn(
            f'args: {", ".join(unknown)} of {type(args).__name__} have no effect here', stacklevel=script_level()
        )
    return config_class(output_dir=theirs.output_dir, **{name: getattr(args, name) for name in names if name in known})


def launched() -> Any:
    """Returns the name of the strategy: 'ddp' for several processes of torchrun or accelerate, else 'naive'."""
    return 'ddp' if int(os.environ.get('WORLD_SIZE', '1')) > 1 else 'naive'


def strategy_of(args: Any) -> Any:
    """Returns the strategy of a run: data-parallel under torchrun or accelerate, else one process."""
    seed = args.data_seed if args.data_seed is not None else 42 if args.seed is None else args.seed
    precision: Any = 'bf16' if args.bf16 else 'fp16' if args.fp16 else 'fp32'
    strategy = strategy_by_name(launched(), seed=seed, precision=precision)
    atexit.register(strategy.close)
    return strategy


def tokenizer_of(processing_class: Any, tokenizer: Any, model: Any) -> Any:
    """Returns the tokenizer under either of its names, else the model's own. Raises ValueError if there is none."""
    if processing_class is not None and tokenizer is not None and processing_class is not tokenizer:
        raise ValueError('processing_class and tokenizer are two names of one argument; give one of them')
    found = processing_class if processing_class is not None else tokenizer
    if found is None:
        name = model if isinstance(model, (str, Path)) else getattr(model, 'name_or_path', '')
        if not name:
            raise ValueError('processing_class: this model does not say which tokenizer is its own; give it')
        found = load_tokenizer(name)
    if not hasattr(found, 'get_vocab'):
        raise ValueError(f'processing_class: a {type(found).__name__} given; it must be a tokenizer of text')
    return found


def causal_lm(model: Any, args: Any, options: str | None = None) -> Any:
    """Returns the transformers model in fp32, loaded if it is a name, with gradient checkpointing if `args` set it.
    `options`: the name of the argument with loading options."""
    if isinstance(model, (str, Path)):
        model = load_causal_lm(model, **({} if options is None else loading_options(args, options)))
    elif options is not None:
        warn_of_options(args, options)
    return trainable(model, args)


def loading_options(args: Any, name: str) -> dict[str, Any]:
    """Returns our loader's options in `model_init_kwargs` or a similar argument; warns of those without effect. Raises
    ValueError for quantization, and for a text that is not a JSON object."""
    given = getattr(args, name) or {}
    if isinstance(given, str):  # from a command line
        try:
            given = json.loads(given)
        except json.JSONDecodeError as error:
            raise ValueError(f'{name}={given!r} is not JSON: {error}') from None
    if not isinstance(given, Mapping):
        raise ValueError(f'{name}={given!r}: it must hold names with values, such as {{"revision": "main"}}')
    given = ({'trust_remote_code': True} if args.trust_remote_code else {}) | dict(given)
    if given.pop('quantization_config', None) is not None:
        raise ValueError(f'{name}: quantization_config cannot be honoured; models are trained in whole weights')
    given.pop('use_cache', None)
    for key in ('torch_dtype', 'dtype', 'device_map'):
        value = given.pop(key, None)
        if value not in (None, 'auto', 'float32', torch.float32):
            warnings.warn(
                f'{name}: {key}={value!r} has no effect here: weights stay fp32 on the device of the strategy; '
                'bf16=True computes in bf16',
                stacklevel=script_level(),
            )
    return {key: value for key, value in given.items() if value is not None}


def warn_of_options(args: Any, name: str) -> None:
    """Warns of loading options for a model that is loaded already."""
    if getattr(args, name):
        which = 'the reference is a copy or given' if name.startswith('ref_') else 'the model is loaded already'
        warnings.warn(
            f'{type(args).__name__}: {name}={getattr(args, name)!r} has no effect here: {which}; give its name or '
            'folder, or load it with these options',
            stacklevel=script_level(),
        )


def trainable(model: Any, args: Any) -> Any:
    """Returns the model with fp32 weights, and with gradient checkpointing if `args` set it."""
    if getattr(model, 'is_quantized', False):
        raise ValueError('model: it is quantised; models are trained in whole weights here: load it without')
    narrow = next((p.dtype for p in model.parameters() if p.is_floating_point() and p.dtype != torch.float32), None)
    if narrow is not None:
        if not (args.bf16 or args.fp16):
            warnings.warn(
                f'model: its weights are {narrow}; they are kept in fp32 here, and computed in fp32 unless bf16=True',
                stacklevel=script_level(),
            )
        model.float()
    if args.gradient_checkpointing:
        enable = getattr(model, 'activation_checkpointing_enable', None) or model.gradient_checkpointing_enable
        enable({'use_reentrant': False})
    return model


def max_length_of(args: Any, name: str, model: Any) -> int | None:
    """Returns the maximum number of tokens of a record: the argument, but at most the model's context."""
    limit, given = position_limit(model.config), getattr(args, name)
    if limit is not None and is_encoder_decoder(model):
        limit -= 1  # the start token's
    return given if limit is None else limit if given is None else min(given, limit)


def refuse(owner: str, what: Mapping[str, tuple[Any, str]]) -> None:
    """Raises ValueError for the first unsupported argument of a constructor that is not None: {name: (value, why)}."""
    for name, (value, why) in what.items():
        if value is not None:
            raise ValueError(f'{owner}: {name} cannot be honoured here: {why}')


# ---------------------------------------------------------------------- Hugging Face's callbacks


_CLEARS = {'on_evaluate': 'should_evaluate', 'on_save': 'should_save'}
"""event → the request of a callback that it fulfils"""


class Bridge(Callback):
    """Calls the script's Hugging Face callbacks and the trainer's hooks from our hooks. Evaluates and saves at the end
    of a learning phase in which a callback has asked for it."""

    order: ClassVar[int] = -5

    def __init__(self, owner: LaterTrainer) -> None:
        self.owner = owner

    def notify(self, event: str, **more: Any) -> None:
        owner = self.owner
        if (done := _CLEARS.get(event)) is not None:
            setattr(owner.control, done, False)
        given = {'model': owner.model, 'optimizer': owner.optimizer, 'lr_scheduler': None}
        given |= dict.fromkeys(('processing_class', 'tokenizer'), owner.processing_class)
        given |= dict.fromkeys(('train_dataloader', 'eval_dataloader'))
        for callback in owner.callbacks:
            changed = getattr(callback, event)(owner.args, owner.state, owner.control, **(given | more))
            owner.control = owner.control if changed is None else changed
        if owner.control.should_training_stop:
            owner.inner.request_stop()

    def on_fit_start(self, trainer: TrainerView) -> None:
        self.notify('on_train_begin')
        self.owner.before_training()

    def on_fit_end(self, trainer: TrainerView) -> None:
        self.notify('on_train_end')

    def on_learn_epoch_start(self, trainer: TrainerView, epoch: int) -> None:
        self.notify_batch('on_epoch_begin')

    def on_learn_epoch_end(self, trainer: TrainerView, epoch: int) -> None:
        self.notify_batch('on_epoch_end')

    def on_learn_batch_start(self, trainer: TrainerView) -> None:
        self.notify_batch('on_step_begin')

    def notify_batch(self, event: str) -> None:
        """Calls an event of epochs and batches, except for PPO, where these are within a step of transformers."""
        if self.owner.has_batch_events:
            self.notify(event)

    def on_learn_batch_end(self, trainer: TrainerView, metrics: dict[str, float]) -> None:
        self.owner.after_batch(metrics)

    def on_phase_end(self, trainer: TrainerView, step: int, metrics: dict[str, float]) -> None:
        owner: Any = self.owner
        owner.after_phase(metrics)
        if owner.control.should_evaluate and owner.eval_dataset is not None and hasattr(owner, 'evaluate'):
            metrics.update(owner.evaluate())
        owner.control.should_evaluate = False
        if owner.control.should_save:  # a checkpoint lies between learning phases
            owner.inner.save_checkpoint()

    def on_checkpoint(self, trainer: TrainerView, path: Path) -> None:
        self.notify('on_save')


INNER_STEPS = {
    *('compute_loss', 'training_step', 'prediction_step', 'evaluation_loop', '_prepare_dataset', 'tokenize_row'),
    *('get_batch_loss_metrics', 'concatenated_forward', 'concatenated_inputs', 'dpo_loss', 'get_batch_logps'),
    *('create_optimizer', 'create_scheduler', 'create_optimizer_and_scheduler', 'get_train_dataloader'),
    *('get_eval_dataloader', '_save', '_save_checkpoint', '_inner_training_loop', 'visualize_samples'),
}
"""methods of TRL's and transformers' trainers that scripts override"""


class LaterTrainer(ABC):
    """Base of the trainers, around `inner`, the trainer of `chatgpt.trainer` that learns.

    `inner` also writes its own metrics and files. A script's subclass may override the methods of this class;
    overriding an inner step of TRL's trainers gives a warning.
    """

    inner: Any
    model: Any

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if vain := sorted(INNER_STEPS & vars(cls).keys()):
            warnings.warn(
                f'{cls.__name__} overrides {", ".join(vain)}, which nothing calls here: the steps within are this '
                "library's (docs/extend/objective.md says how to write one's own)",
                stacklevel=2,
            )

    def __init__(self, args: Any, processing_class: Any, callbacks: SequenceOf[Any] | None, strategy: Any) -> None:
        self.args, self.processing_class = args, processing_class
        self.strategy = strategy
        self.accelerator = Accelerator(strategy)
        self.state, self.control = State(), TrainerControl()
        self.state.is_world_process_zero = strategy.is_rank_0
        self.state.is_local_process_zero = strategy.local_rank == 0
        self.callbacks: list[Any] = []
        """the script's Hugging Face callbacks"""
        for callback in callbacks or ():
            self.add_callback(callback)
        self.bridge = Bridge(self)
        if args.push_to_hub:
            strategy.run_on_rank0(lambda: check_push(self.hub_model_id, token=args.hub_token))

    @classmethod
    def keywords(cls) -> set[str]:
        """Returns the keywords of the constructor, with those that it passes on."""
        makers = [vars(c)['__init__'] for c in cls.__mro__ if issubclass(c, LaterTrainer) and '__init__' in vars(c)]
        taken = [p for maker in makers[:-1] for p in inspect.signature(maker).parameters.values()]
        return {p.name for p in taken if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)} - {'self'}

    # ------------------------------------------------------------------ for scripts

    @property
    def tokenizer(self) -> Any:
        """The older name of `processing_class`."""
        return self.processing_class

    @property
    def optimizer(self) -> Any:
        return next(iter(self.inner.optimizers().values()))

    def add_callback(self, callback: Any) -> None:
        """Adds a Hugging Face callback or its class."""
        self.callbacks.append(callback() if isinstance(callback, type) else callback)

    def pop_callback(self, callback: Any) -> Any:
        """Removes and returns a callback, or the first of a class; None if there is none."""
        found = next((i for i, c in enumerate(self.callbacks) if c is callback or type(c) is callback), None)
        return None if found is None else self.callbacks.pop(found)

    remove_callback = pop_callback

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """Does nothing: `save_model` writes the card of a whole model."""

    def is_world_process_zero(self) -> bool:
        return self.strategy.is_rank_0

    def is_local_process_zero(self) -> bool:
        return self.strategy.local_rank == 0

    def log(self, logs: dict[str, float], *_: Any) -> None:
        """Adds a line to `state.log_history` and passes it to the callbacks."""
        self.state.log_history.append({**logs, 'step': self.state.global_step})
        self.bridge.notify('on_log', logs=dict(logs))

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        if self.strategy.is_rank_0:
            print(f'***** {split} metrics *****', *(f'  {k} = {v}' for k, v in sorted(metrics.items())), sep='\n')

    def save_metrics(self, split: str, metrics: Mapping[str, Any], combined: bool = True) -> None:
        """Writes `<output_dir>/<split>_results.json`, and with `combined` adds to all_results.json."""
        if not self.strategy.is_rank_0:
            return
        folder = Path(self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        Path(folder, f'{split}_results.json').write_text(json.dumps(dict(metrics), indent=4, sort_keys=True) + '\n')
        if combined:
            path = folder / 'all_results.json'
            both = (json.loads(path.read_text()) if path.is_file() else {}) | dict(metrics)
            path.write_text(json.dumps(both, indent=4, sort_keys=True) + '\n')

    def save_state(self) -> None:
        """Writes `<output_dir>/trainer_state.json` as transformers does."""
        if self.strategy.is_rank_0:
            Path(self.args.output_dir).mkdir(parents=True, exist_ok=True)
            self.state.save_to_json(str(Path(self.args.output_dir, 'trainer_state.json')))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the trained model and its tokenizer as a Hugging Face folder; with adapters, the adapter in PEFT's
        format. With `push_to_hub=True` it uploads the folder. Must be called on every rank."""
        self._write_model(Path(output_dir or self.args.output_dir))
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message='Model save')

    def _write_model(self, path: Path) -> None:
        model = next(iter(self.inner.models().values()))
        bare = self.strategy.unwrap(model)
        if not (has_lora(bare) and self.saves_adapters):
            self.inner.save_pretrained(path)
            return
        weights = self.strategy.full_state_dict(model, path)

        def write() -> None:
            export_peft(bare, path, state=weights)
            self.processing_class.save_pretrained(path)

        self.strategy.run_on_rank0(write)

    save_pretrained = save_model
    saves_adapters: ClassVar[bool] = True
    has_batch_events: ClassVar[bool] = True
    """True if a pass over the data and a batch are an epoch and a step of transformers' callbacks"""

    @property
    def hub_model_id(self) -> str:
        """The name of the repository: `hub_model_id`, or the last part of `output_dir`."""
        return self.args.hub_model_id or Path(self.args.output_dir).absolute().name

    def push_to_hub(
        self,
        commit_message: str | None = 'End of training',
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **_: Any,
    ) -> str:
        """Writes the model to `output_dir`, uploads it and returns its address. Must be called on every rank. It waits
        for the end of the upload; `blocking` has no effect.

        Raises:
            ValueError: the upload cannot succeed, for example without a token.
            PushError: the upload failed; the message has the place of the model and how to upload it later.
        """
        args, strategy, token = self.args, self.strategy, token or self.args.hub_token

        def place() -> tuple[str, Path]:
            name = check_push(self.hub_model_id, token=token)
            return name, Path(tempfile.mkdtemp(prefix='upload-')) / name.rpartition('/')[2]

        def send() -> str:
            address = push_folder(
                folder,
                name,
                private=args.hub_private_repo,
                commit_message=commit_message,
                token=token,
                revision=revision or args.hub_revision,
            )
            shutil.rmtree(folder.parent)
            return address

        self.save_model(_internal_call=True)
        name, folder = strategy.run_on_rank0(place)
        self._write_model(folder)
        return strategy.run_on_rank0(send)

    # ------------------------------------------------------------------ hooks

    def our_callbacks(self, interval: int | None) -> list[Any]:
        """Returns our callbacks for `args`. `interval`: learning phases between checkpoints."""
        shown = ProgressBar(enabled=not self.args.disable_tqdm)
        return [self.bridge, shown, arguments.saving(self.args, interval), *arguments.trackers(self.args)]

    def before_training(self) -> None:
        """Called after `on_train_begin`."""

    def after_batch(self, metrics: Mapping[str, float]) -> None:
        """Called after an optimizer step."""

    @abstractmethod
    def after_phase(self, metrics: dict[str, float]) -> None:
        """Called after a learning phase; may add metrics."""

    def resume(self, resume_from_checkpoint: bool | str | None) -> None:
        """Loads a checkpoint of this trainer. True stands for the newest in `output_dir`, if there is one."""
        if resume_from_checkpoint:
            self.inner.load_checkpoint('auto' if resume_from_checkpoint is True else resume_from_checkpoint)


def clipping(args: Any) -> float | None:
    """Returns the clipping norm of `max_grad_norm`: 1.0 for None, transformers' default; None, no clipping, for 0."""
    value = 1.0 if args.max_grad_norm is None else args.max_grad_norm
    return value if value > 0 else None
