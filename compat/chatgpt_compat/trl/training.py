"""What the trainers of TRL 0.12 to 1.12 have in common, over a trainer of ours: what it is made of, `state` and its log
history, Hugging Face's callbacks, `save_model`. What each learns: `ppo_train`, `pairs`, `sft`."""

from __future__ import annotations

import atexit
import dataclasses
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


# ---------------------------------------------------------------------- what a trainer is made of


def resolved(args: Any, config_class: type, name: str, table: Mapping[str, Entry]) -> Any:
    """The arguments, checked: errors and warnings for what cannot be honoured.

    Args:
        args: None makes the defaults; transformers' TrainingArguments give what they have in common with ours.
        name: of the folder where none is given.
    """
    if args is None:
        args = config_class()
    elif not isinstance(args, TrainingArguments):
        args = _from_transformers(args, config_class)
    check_given(args, table)
    arguments.check_choices(args)
    if args.evaluation_strategy is not None:
        args.eval_strategy = args.evaluation_strategy
    if args.output_dir is None:
        args.output_dir = name
    return args


def _from_transformers(args: Any, config_class: type) -> Any:
    """Ours with the values of transformers' TrainingArguments that are not their defaults."""
    if not dataclasses.is_dataclass(args):
        raise ValueError(f'args: a {type(args).__name__} given; it must be a {config_class.__name__}')
    known = {f.name for f in dataclasses.fields(config_class)}
    theirs: Any = args
    fresh = type(theirs)(output_dir=theirs.output_dir)
    names = [f.name for f in dataclasses.fields(args) if f.init and getattr(args, f.name) != getattr(fresh, f.name)]
    if unknown := sorted(set(names) - known):
        warnings.warn(
            f'args: {", ".join(unknown)} of {type(args).__name__} have no effect here', stacklevel=script_level()
        )
    return config_class(output_dir=theirs.output_dir, **{name: getattr(args, name) for name in names if name in known})


def launched() -> Any:
    """The strategy of one process, or of as many as torchrun or accelerate started."""
    return 'ddp' if int(os.environ.get('WORLD_SIZE', '1')) > 1 else 'naive'


def strategy_of(args: Any) -> Any:
    """The strategy of a run: data-parallel under torchrun or accelerate, else one process."""
    seed = args.data_seed if args.data_seed is not None else 42 if args.seed is None else args.seed
    precision: Any = 'bf16' if args.bf16 else 'fp16' if args.fp16 else 'fp32'
    strategy = strategy_by_name(launched(), seed=seed, precision=precision)
    atexit.register(strategy.close)
    return strategy


def tokenizer_of(processing_class: Any, tokenizer: Any, model: Any) -> Any:
    """The tokenizer under either of its names, else the model's own. Raises ValueError."""
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
    """The transformers model in fp32, loaded where it is a name, with gradient checkpointing where `args` ask for it.
    `options`: the argument with the options of loading."""
    if isinstance(model, (str, Path)):
        model = load_causal_lm(model, **({} if options is None else loading_options(args, options)))
    elif options is not None:
        warn_of_options(args, options)
    return trainable(model, args)


def loading_options(args: Any, name: str) -> dict[str, Any]:
    """What `model_init_kwargs`, or another argument like it, says that our loader takes; a warning of what has no
    effect. Raises ValueError for a quantised model, or a text that is no JSON object."""
    given = getattr(args, name) or {}
    if isinstance(given, str):  # of a command line
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
    """A warning where options of loading are given beside a model that is not loaded here."""
    if getattr(args, name):
        which = 'the reference is a copy or given' if name.startswith('ref_') else 'the model is loaded already'
        warnings.warn(
            f'{type(args).__name__}: {name}={getattr(args, name)!r} has no effect here: {which}; give its name or '
            'folder, or load it with these options',
            stacklevel=script_level(),
        )


def trainable(model: Any, args: Any) -> Any:
    """The model with fp32 weights, recomputing activations where `args` ask for it."""
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
    """Most tokens of a record: as given, but no more than the model's context."""
    limit, given = position_limit(model.config), getattr(args, name)
    if limit is not None and is_encoder_decoder(model):
        limit -= 1  # the start token's
    return given if limit is None else limit if given is None else min(given, limit)


def refuse(owner: str, what: Mapping[str, tuple[Any, str]]) -> None:
    """Raises ValueError for the first argument of a constructor that is given and cannot be honoured: {name: (value,
    why)}."""
    for name, (value, why) in what.items():
        if value is not None:
            raise ValueError(f'{owner}: {name} cannot be honoured here: {why}')


# ---------------------------------------------------------------------- Hugging Face's callbacks


class Bridge(Callback):
    """Calls the script's Hugging Face callbacks from our hooks, and has the trainer translate and log its metrics."""

    order: ClassVar[int] = -5

    def __init__(self, owner: LaterTrainer) -> None:
        self.owner = owner

    def tell(self, event: str, **more: Any) -> None:
        owner = self.owner
        for callback in owner.callbacks:
            changed = getattr(callback, event)(
                owner.args, owner.state, owner.control, processing_class=owner.processing_class, **more
            )
            owner.control = owner.control if changed is None else changed
        if owner.control.should_training_stop:
            owner.inner.request_stop()

    def on_fit_start(self, trainer: TrainerView) -> None:
        self.tell('on_train_begin')
        self.owner.before_training()

    def on_fit_end(self, trainer: TrainerView) -> None:
        self.tell('on_train_end')

    def on_learn_epoch_start(self, trainer: TrainerView, epoch: int) -> None:
        self.of_offline('on_epoch_begin')

    def on_learn_epoch_end(self, trainer: TrainerView, epoch: int) -> None:
        self.of_offline('on_epoch_end')

    def on_learn_batch_start(self, trainer: TrainerView) -> None:
        self.of_offline('on_step_begin')

    def of_offline(self, event: str) -> None:
        """PPO's passes and batches lie within a step of transformers' callbacks."""
        if self.owner.tells_batches:
            self.tell(event)

    def on_learn_batch_end(self, trainer: TrainerView, metrics: dict[str, float]) -> None:
        self.owner.after_batch(metrics)

    def on_phase_end(self, trainer: TrainerView, step: int, metrics: dict[str, float]) -> None:
        self.owner.after_phase(metrics)

    def on_checkpoint(self, trainer: TrainerView, path: Path) -> None:
        self.tell('on_save')


THEIR_STEPS = {
    *('compute_loss', 'training_step', 'prediction_step', 'evaluation_loop', '_prepare_dataset', 'tokenize_row'),
    *('get_batch_loss_metrics', 'concatenated_forward', 'concatenated_inputs', 'dpo_loss', 'get_batch_logps'),
    *('create_optimizer', 'create_scheduler', 'create_optimizer_and_scheduler', 'get_train_dataloader'),
    *('get_eval_dataloader', '_save', '_save_checkpoint', '_inner_training_loop', 'visualize_samples'),
}
"""of TRL's and transformers' trainers, which scripts override"""


class LaterTrainer(ABC):
    """Base of the trainers: everything but the learning, which is `inner`'s.

    `inner` is the trainer of `chatgpt.trainer` that runs; its metrics and files are there as well. A subclass of a
    script may override what is here; an inner step of TRL's trainers that it overrides is named in a warning.
    """

    inner: Any

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if vain := sorted(THEIR_STEPS & vars(cls).keys()):
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
        """the script's, of Hugging Face's kind"""
        for callback in callbacks or ():
            self.add_callback(callback)
        self.bridge = Bridge(self)
        if args.push_to_hub:
            strategy.run_on_rank0(lambda: check_push(self.hub_model_id, token=args.hub_token))

    # ------------------------------------------------------------------ what scripts touch

    @property
    def tokenizer(self) -> Any:
        """The older name of `processing_class`."""
        return self.processing_class

    @property
    def optimizer(self) -> Any:
        return next(iter(self.inner.optimizers().values()))

    def add_callback(self, callback: Any) -> None:
        """One more of Hugging Face's callbacks, or a class of one."""
        self.callbacks.append(callback() if isinstance(callback, type) else callback)

    def is_world_process_zero(self) -> bool:
        return self.strategy.is_rank_0

    def is_local_process_zero(self) -> bool:
        return self.strategy.local_rank == 0

    def log(self, logs: dict[str, float], *_: Any) -> None:
        """Add a line to `state.log_history` and hand it to the callbacks."""
        self.state.log_history.append({**logs, 'step': self.state.global_step})
        self.bridge.tell('on_log', logs=dict(logs))

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        if self.strategy.is_rank_0:
            print(f'***** {split} metrics *****', *(f'  {k} = {v}' for k, v in sorted(metrics.items())), sep='\n')

    def save_metrics(self, split: str, metrics: Mapping[str, Any], combined: bool = True) -> None:
        """`<output_dir>/<split>_results.json`, and with `combined` the same in all_results.json."""
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
        """`<output_dir>/trainer_state.json`, as transformers writes it."""
        if self.strategy.is_rank_0:
            Path(self.args.output_dir).mkdir(parents=True, exist_ok=True)
            self.state.save_to_json(str(Path(self.args.output_dir, 'trainer_state.json')))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The trained model as a Hugging Face folder with its tokenizer; of an adapted one the adapter, as PEFT writes
        it. With `push_to_hub=True` it is uploaded, too. Call it on every rank."""
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
    tells_batches: ClassVar[bool] = True
    """whether a pass over the data and a batch are an epoch and a step of transformers' callbacks"""

    @property
    def hub_model_id(self) -> str:
        """The repository: `hub_model_id`, or the name of `output_dir`."""
        return self.args.hub_model_id or Path(self.args.output_dir).absolute().name

    def push_to_hub(
        self,
        commit_message: str | None = 'End of training',
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **_: Any,
    ) -> str:
        """Write the model to `output_dir` and upload it; the address. Call it on every rank. It waits for the end,
        whatever `blocking` says.

        Raises:
            ValueError: it is clear beforehand that it may not be uploaded.
            PushError: the upload failed; says where the model is, and how to upload it later.
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
        """What `args` ask of our callbacks. `interval`: learning phases between checkpoints."""
        shown = ProgressBar(enabled=not self.args.disable_tqdm)
        return [self.bridge, shown, arguments.saving(self.args, interval), *arguments.trackers(self.args)]

    def before_training(self) -> None:
        """After `on_train_begin`."""

    def after_batch(self, metrics: Mapping[str, float]) -> None:
        """After an optimizer step."""

    @abstractmethod
    def after_phase(self, metrics: dict[str, float]) -> None:
        """After a learning phase; may add metrics."""

    def resume(self, resume_from_checkpoint: bool | str | None) -> None:
        """Take up a checkpoint of this trainer's. True is the newest in `output_dir`, where there is one."""
        if resume_from_checkpoint:
            self.inner.load_checkpoint('auto' if resume_from_checkpoint is True else resume_from_checkpoint)


def clipping(args: Any) -> float | None:
    """`max_grad_norm`: None is transformers' default, 0 no clipping."""
    value = 1.0 if args.max_grad_norm is None else args.max_grad_norm
    return value if value > 0 else None
