"""Arguments of TRL's config classes: a table of the unsupported ones, the check that none is ignored silently, and the
conversion of the common ones for `train()`. docs/coming_from/trl/ lists them.

`TrainingArguments` has the fields of transformers' class that scripts set in TRL's configs; importing transformers'
class takes seconds and needs accelerate.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import os
import sys
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

from chatgpt.names import hint
from chatgpt.trainer.callbacks import TRACKERS, SaveCheckpoint, TensorBoard, WandB


class Entry(NamedTuple):
    """The reason why an argument is not supported. A supported or informative one has no entry."""

    kind: Literal['warned', 'refused']
    note: str


def each(entry: Entry, names: str) -> dict[str, Entry]:
    """Returns a table with one entry for several arguments, given as a text of names."""
    return dict.fromkeys(names.split(), entry)


def warned(why: str) -> Entry:
    """Returns the entry of an argument that gives a warning: the run is valid without it, or the trainer lacks it."""
    return Entry('warned', why)


def refused(why: str) -> Entry:
    """Returns the entry of an argument that is an error: without it the run would be a different one."""
    return Entry('refused', why)


def given(config: Any, name: str) -> bool:
    """Returns True if a field was passed to the constructor or set to another value than its default later."""
    if name in config._given:
        return True
    value, default = getattr(config, name), _default(config.__dataclass_fields__[name])
    return value != default and value != getattr(config, '_filled', {}).get(name, default)


def script_level() -> int:
    """Returns the `stacklevel` with which a warning of the caller points at the script."""
    ours, frame, level = ('chatgpt', 'chatgpt_compat'), sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get('__name__', '').partition('.')[0] in ours:
        frame, level = frame.f_back, level + 1
    return level


def check_given(config: Any, table: Mapping[str, Entry]) -> None:
    """Warns of given arguments without effect.

    Raises:
        ValueError: a refused argument is not at its default; the message has the reason and what to write instead.
    """
    for name, entry in table.items():
        if not given(config, name):
            continue
        value = getattr(config, name)
        if value == _default(config.__dataclass_fields__[name]) and (entry.kind == 'refused' or not value):
            continue  # the behaviour here anyway, or an option turned off
        text = f'{type(config).__name__}: {name}={value!r} '
        if entry.kind == 'refused':
            raise ValueError(f'{text}cannot be honoured: {entry.note}')
        warnings.warn(f'{text}has no effect here: {entry.note}', stacklevel=script_level())


def _default(field: dataclasses.Field) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


@dataclass(kw_only=True)
class TrainingArguments:
    """Base of the config classes of TRL's later trainers. Batch sizes are those of one process.

    Raises:
        ValueError: an unknown name; the message has the nearest ones.
    """

    output_dir: str | None = dataclasses.field(default=None, kw_only=False)
    overwrite_output_dir: bool = False
    run_name: str | None = None
    seed: int | None = None
    data_seed: int | None = None
    do_train: bool = False
    do_eval: bool = False
    do_predict: bool = False

    # batches and steps
    per_device_train_batch_size: int = 8
    per_device_eval_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    eval_accumulation_steps: int | None = None
    num_train_epochs: float = 3.0
    max_steps: int = -1
    dataloader_drop_last: bool = False
    dataloader_num_workers: int = 0
    dataloader_pin_memory: bool = True
    dataloader_persistent_workers: bool = False
    dataloader_prefetch_factor: int | None = None
    group_by_length: bool = False
    remove_unused_columns: bool = True
    label_names: list[str] | None = None
    auto_find_batch_size: bool = False

    # optimizer
    learning_rate: float | None = None
    optim: str = 'adamw_torch'
    optim_args: str | None = None
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float | None = None
    lr_scheduler_type: str = 'linear'
    lr_scheduler_kwargs: dict | str | None = None
    warmup_steps: float = 0
    warmup_ratio: float = 0.0
    label_smoothing_factor: float = 0.0
    neftune_noise_alpha: float | None = None

    # precision, memory and processes
    bf16: bool = False
    fp16: bool = False
    bf16_full_eval: bool = False
    fp16_full_eval: bool = False
    tf32: bool | None = None
    gradient_checkpointing: bool = False
    gradient_checkpointing_kwargs: dict | str | None = None
    torch_compile: bool = False
    torch_compile_backend: str | None = None
    torch_compile_mode: str | None = None
    torch_empty_cache_steps: int | None = None
    use_liger_kernel: bool = False
    deepspeed: str | None = None
    fsdp: str | None = None
    fsdp_config: dict | str | None = None
    ddp_backend: str | None = None
    ddp_timeout: int = 1800
    ddp_find_unused_parameters: bool | None = None
    ddp_bucket_cap_mb: int | None = None
    ddp_broadcast_buffers: bool | None = None
    local_rank: int = -1
    use_cpu: bool = False
    no_cuda: bool = False
    accelerator_config: dict | str | None = None
    full_determinism: bool = False

    # logging, evaluation, files
    logging_dir: str | None = None
    logging_strategy: str = 'steps'
    logging_steps: float | None = None
    logging_first_step: bool = False
    log_level: str = 'passive'
    disable_tqdm: bool | None = None
    report_to: None | str | list[str] = None
    eval_strategy: str = 'no'
    evaluation_strategy: str | None = None
    eval_steps: float | None = None
    eval_delay: float = 0
    eval_on_start: bool = False
    save_strategy: str = 'steps'
    save_steps: float = 500
    save_total_limit: int | None = None
    save_only_model: bool = False
    save_safetensors: bool = True
    load_best_model_at_end: bool = False
    metric_for_best_model: str | None = None
    greater_is_better: bool | None = None
    resume_from_checkpoint: str | None = None
    ignore_data_skip: bool = False
    push_to_hub: bool = False
    hub_model_id: str | None = None
    hub_strategy: str = 'every_save'
    hub_token: str | None = None
    hub_private_repo: bool | None = None
    hub_revision: str | None = None
    include_num_input_tokens_seen: bool = False

    _explicit = frozenset[str]()  # without an annotation it is not a field
    """names of the arguments that the constructor was called with"""

    def __new__(cls, *args: Any, **values: Any) -> Self:
        known = [name for name in inspect.signature(cls.__init__).parameters if name != 'self']
        for name in values:
            if name not in known:
                near = hint(name, known)
                raise ValueError(
                    f'{cls.__name__}({name}=...): TRL has no such argument, or it is not served here{near}'
                )
        self = super().__new__(cls)
        # A command-line parser passes every field, so its names do not show which ones the user gave.
        everything = {f.name for f in dataclasses.fields(cls) if f.init} <= values.keys()
        self._explicit = frozenset(() if everything else values)
        return self

    def __post_init__(self) -> None:
        # This precedes the filling-in of defaults. Scripts pass None for the default.
        self._given = {
            f.name
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != _default(f) or (f.name in self._explicit and getattr(self, f.name) is not None)
        }

    def to_dict(self) -> dict[str, Any]:
        """Returns all arguments by name."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict(), indent=2, default=str)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """Returns all arguments as numbers and texts."""
        return {k: v if isinstance(v, (bool, int, float, str)) else str(v) for k, v in self.to_dict().items()}

    # what scripts read of the process

    @property
    def device(self) -> Any:
        import torch

        return torch.device(f'cuda:{_of_launcher("LOCAL_RANK", 0)}' if torch.cuda.is_available() else 'cpu')

    @property
    def n_gpu(self) -> int:
        """The number of GPUs of this process."""
        return int(self.device.type == 'cuda')

    @property
    def world_size(self) -> int:
        return _of_launcher('WORLD_SIZE', 1)

    @property
    def process_index(self) -> int:
        return _of_launcher('RANK', 0)

    @property
    def should_save(self) -> bool:
        return self.process_index == 0

    @property
    def should_log(self) -> bool:
        return _of_launcher('LOCAL_RANK', 0) == 0

    def get_process_log_level(self) -> int:
        from transformers.utils import logging

        level = logging.get_log_levels_dict().get(self.log_level) if self.should_log else None
        return logging.get_verbosity() if level is None else level

    def main_process_first(self, local: bool = True, desc: str = 'work') -> AbstractContextManager[None]:
        """Does nothing: processes are connected by the trainer, and files of `datasets` have locks."""
        return nullcontext()


def _of_launcher(name: str, default: int) -> int:
    return int(os.environ.get(name, default))


@dataclass(kw_only=True)
class SamplingArguments(TrainingArguments):
    """The arguments of trainers that sample: PPO and RLOO."""

    dataset_num_proc: int | None = None
    num_mini_batches: int = 1
    total_episodes: int | None = None
    local_rollout_forward_batch_size: int = 64
    num_sample_generations: int = 10
    response_length: int = 53
    stop_token: str | None = None
    stop_token_id: int | None = None
    temperature: float = 0.7
    missing_eos_penalty: float | None = None
    cliprange: float = 0.2
    whiten_rewards: bool = False
    world_size: int | None = None  # type: ignore[assignment]
    num_total_batches: int | None = None
    micro_batch_size: int | None = None
    local_batch_size: int | None = None
    batch_size: int | None = None
    local_mini_batch_size: int | None = None
    mini_batch_size: int | None = None


# ---------------------------------------------------------------------- conversion

ARGUMENTS: dict[str, Entry] = {
    **each(
        warned('a matter of memory or speed, without influence on numbers'),
        'eval_accumulation_steps tf32 torch_compile torch_compile_backend torch_compile_mode torch_empty_cache_steps '
        'use_liger_kernel',
    ),
    **each(
        warned('records are tokenized once and cut into batches in this process; there is no dataloader'),
        'dataloader_num_workers dataloader_persistent_workers dataloader_prefetch_factor',
    ),
    **each(
        warned('processes and what each holds are decided by the launcher: torchrun runs data-parallel'),
        'deepspeed fsdp fsdp_config ddp_backend ddp_timeout ddp_find_unused_parameters ddp_bucket_cap_mb '
        'ddp_broadcast_buffers accelerator_config',
    ),
    **each(
        warned('the strategy takes the accelerator where there is one; hide it with CUDA_VISIBLE_DEVICES='),
        'use_cpu no_cuda',
    ),
    'dataloader_drop_last': warned('the last batch of an epoch is learned from, whatever its size'),
    'group_by_length': warned('forwards leave padding out, so there is nothing to group for'),
    'auto_find_batch_size': warned('python -m chatgpt.plan says which batch fits before a run'),
    'optim_args': refused('there are no further arguments of AdamW or SGD here'),
    'lr_scheduler_kwargs': refused('the schedules here have no further arguments'),
    'label_smoothing_factor': refused('SFT has no label smoothing here'),
    'neftune_noise_alpha': refused('there is no noise on embeddings here'),
    'logging_first_step': warned('the first line comes after logging_steps'),
    'eval_delay': warned('evaluations begin with the first that is due'),
    'save_only_model': warned('a checkpoint here is what a run goes on from; save_model writes the model alone'),
    'load_best_model_at_end': warned('the model in hand is that of the last step; checkpoints are in output_dir'),
    'ignore_data_skip': warned('a resumed run goes on with the batch it would have had'),
    'include_num_input_tokens_seen': warned('perf/learn_tokens_per_s in metrics.jsonl counts tokens'),
}
"""unsupported argument of transformers' class → reason"""

_ADAMW = ('adamw_torch', 'adamw_torch_fused', 'adamw_hf', 'adamw')
_SMALL_ADAMW = (
    *('paged_adamw_32bit', 'paged_adamw_8bit', 'paged_adamw', 'adamw_bnb_8bit', 'adamw_8bit', 'adamw_torch_8bit'),
    *('adamw_torch_4bit', 'adamw_apex_fused', 'adamw_anyprecision'),
)
"""variants of AdamW that keep their states elsewhere or in fewer bits"""
_SCHEDULES = {'linear': 'linear', 'cosine': 'cosine', 'constant': 'constant', 'constant_with_warmup': 'constant'}
_WHEN = ('steps', 'epoch', 'no')
CHOICES = {'optim': (*_ADAMW, 'sgd', *_SMALL_ADAMW), 'lr_scheduler_type': tuple(_SCHEDULES)}
CHOICES |= dict.fromkeys(('logging_strategy', 'eval_strategy', 'save_strategy'), _WHEN)


def text_of(args: Any, name: str) -> str:
    """Returns an argument as text, also from an enum of transformers."""
    value = getattr(args, name)
    return str(getattr(value, 'value', value))


def check_choices(args: Any) -> None:
    """Raises ValueError for an argument with a value that is not among its choices."""
    for name, known in CHOICES.items():
        if (value := text_of(args, name)) not in known:
            raise ValueError(
                f'{type(args).__name__}: {name}={value!r} is not served here; use one of {", ".join(known)}'
            )
    if (name := text_of(args, 'optim')) in _SMALL_ADAMW:
        warnings.warn(
            f'{type(args).__name__}: optim={name!r} is plain AdamW here, with states in 32 bits',
            stacklevel=script_level(),
        )
    if args.bf16 and args.fp16:
        raise ValueError(f'{type(args).__name__}: bf16=True and fp16=True; give one of them')


def schedule(args: Any, total_steps: int) -> dict[str, Any]:
    """Returns `lr_schedule` and `warmup_steps` for a run of `total_steps` optimizer steps."""
    share = args.warmup_steps if 0 < args.warmup_steps < 1 else args.warmup_ratio
    steps = int(args.warmup_steps) if args.warmup_steps >= 1 else math.ceil(share * total_steps)
    return {'lr_schedule': _SCHEDULES[text_of(args, 'lr_scheduler_type')], 'warmup_steps': steps}


def make_optimizer(args: Any, strategy: Any, model: Any) -> Any:
    """Returns AdamW or SGD over the trainable parameters; biases and norms have no weight decay."""
    import torch

    decayed, apart = list[Any](), list[Any]()
    for name, p in model.named_parameters():
        if p.requires_grad:
            (apart if args.weight_decay and (p.dim() < 2 or name.endswith('bias')) else decayed).append(p)
    groups = [
        {'params': parameters, 'weight_decay': decay}
        for parameters, decay in ((decayed, args.weight_decay), (apart, 0.0))
        if parameters
    ]
    if text_of(args, 'optim') == 'sgd':
        return torch.optim.SGD(groups, lr=args.learning_rate, weight_decay=args.weight_decay)
    betas = (args.adam_beta1, args.adam_beta2)
    return strategy.make_optimizer(groups, lr=args.learning_rate, betas=betas, eps=args.adam_epsilon)


def every(value: float | None, default: float, total_steps: int) -> int:
    """Returns an interval such as `logging_steps` in steps; a value below 1 is a fraction of the run."""
    value = default if value is None else value
    return max(math.ceil(value * total_steps) if value < 1 else int(value), 1)


def trackers(args: Any) -> list[Any]:
    """Returns the callbacks of `report_to`; warns of a tracker without one."""
    given = args.report_to if isinstance(args.report_to, (list, tuple)) else [args.report_to]
    made: list[Any] = []
    for name in given:
        if name in (None, 'none'):
            continue
        if name == 'tensorboard':
            made.append(TensorBoard(args.logging_dir) if args.logging_dir else TensorBoard())
        elif name == 'wandb':
            project = os.environ.get('WANDB_PROJECT', 'huggingface')
            made.append(WandB(project, **({'name': args.run_name} if args.run_name else {})))
        elif name in TRACKERS:
            made.append(TRACKERS.find(name)())
        else:
            warnings.warn(
                f'{type(args).__name__}: report_to={name!r} has no effect here; there are {", ".join(TRACKERS)}, and '
                'metrics.jsonl is always written to output_dir',
                stacklevel=script_level(),
            )
    return made


def saving(args: Any, interval: int | None) -> SaveCheckpoint:
    """Returns the callback that writes checkpoints; `interval`: learning phases between two."""
    if text_of(args, 'save_strategy') == 'no':
        return SaveCheckpoint(interval=None)
    return SaveCheckpoint(interval=interval, keep_last=args.save_total_limit)
