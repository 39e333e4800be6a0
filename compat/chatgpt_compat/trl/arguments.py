"""Which arguments of TRL's config classes cannot be honoured, and the check that nothing is ignored in silence.
docs/coming_from/trl.md says what becomes of the others.

`TrainingArguments` has the fields of transformers' class of that name which scripts give to TRL's configs; importing
that one would take seconds and accelerate.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

from chatgpt.names import hint

Kind = Literal['warned', 'refused', 'absent']


class Entry(NamedTuple):
    """Why an argument cannot be honoured; one that is, or that is a note of the script's, has no entry."""

    kind: Kind
    note: str


def each(entry: Entry, names: str) -> dict[str, Entry]:
    """The same of several arguments."""
    return dict.fromkeys(names.split(), entry)


def warned(why: str) -> Entry:
    """Cannot be honoured, and the run is sound without it: a warning names it."""
    return Entry('warned', why)


def refused(why: str) -> Entry:
    """Cannot be honoured, and the run would be another one: an error names it."""
    return Entry('refused', why)


def absent(why: str) -> Entry:
    """No argument of that trainer. Given all the same, by a script that mixes versions, it is a warning."""
    return Entry('absent', why)


def given(config: Any, name: str) -> bool:
    """Whether a field was given a value, when the config was made, or another than its default since."""
    if name in config._given:
        return True
    value, default = getattr(config, name), _default(config.__dataclass_fields__[name])
    return value != default and value != getattr(config, '_filled', {}).get(name, default)


def script_level() -> int:
    """The `stacklevel` with which a warning of the caller's points at the script, however deep in this library."""
    ours, frame, level = ('chatgpt', 'chatgpt_compat'), sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get('__name__', '').partition('.')[0] in ours:
        frame, level = frame.f_back, level + 1
    return level


def check_given(config: Any, table: Mapping[str, Entry]) -> None:
    """An error for each argument that is not at its default and refused; a warning for a given one without effect.

    Raises:
        ValueError: names the argument and says why, and what to write instead.
    """
    for name, entry in table.items():
        if not given(config, name):
            continue
        value = getattr(config, name)
        if value == _default(config.__dataclass_fields__[name]) and (entry.kind == 'refused' or not value):
            continue  # what holds here anyway, or something turned off
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
        ValueError: a name that is no argument, with the nearest ones.
    """

    output_dir: str | None = None
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

    _explicit = frozenset[str]()  # no annotation: it is no field
    """of an object: the names that the call gave"""

    def __new__(cls, *args: Any, **values: Any) -> Self:
        known = [name for name in inspect.signature(cls.__init__).parameters if name != 'self']
        for name in values:
            if name not in known:
                near = hint(name, known)
                raise ValueError(
                    f'{cls.__name__}({name}=...): TRL has no such argument, or it is not served here{near}'
                )
        self = super().__new__(cls)
        # A parser of command lines gives every field, so that its names say nothing.
        everything = {f.name for f in dataclasses.fields(cls) if f.init} <= values.keys()
        self._explicit = frozenset(() if everything else values)
        return self

    def __post_init__(self) -> None:
        # Before anything is filled in. None is how scripts leave an argument to its default.
        self._given = {
            f.name
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != _default(f) or (f.name in self._explicit and getattr(self, f.name) is not None)
        }

    def to_dict(self) -> dict[str, Any]:
        """All arguments by name."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
