"""Base of the settings dataclasses, with the table of ranges. Names, ranges and types are checked when an object is
made."""

from __future__ import annotations

import math
import typing
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from numbers import Integral, Real
from typing import Any, Literal, Self, TypeVar

from chatgpt.names import hint
from chatgpt.rollout.sampling import generation_fields
from chatgpt.rules import check
from chatgpt.trainer.rules import LEARNING_RULES

Schedule = Literal['constant', 'linear', 'cosine']

C = TypeVar('C', bound='Settings')

POSITIVE, NOT_NEGATIVE, COUNT, SHARE = '(0, inf)', '[0, inf)', '[1, inf)', '[0, 1]'

RANGES: dict[str, dict[str, str]] = {
    'LearningSettings': {
        'max_tokens_per_batch': COUNT, 'max_grad_norm': '(0, inf]', 'lr_end_factor': NOT_NEGATIVE, 'lr_decay_steps': COUNT,
        'warmup_steps': NOT_NEGATIVE,
    },
    'PPOConfig': {
        'experience_batch_size': COUNT, 'num_samples_per_prompt': COUNT, 'buffer_limit': NOT_NEGATIVE, 'score_timeout_s': POSITIVE,
        'max_staleness': NOT_NEGATIVE, 'kl_coef': NOT_NEGATIVE, 'kl_target': POSITIVE, 'kl_horizon': POSITIVE, 'score_clip': POSITIVE,
        'missing_eos_score': '(-inf, inf)', 'failure_reward': '(-inf, inf)', 'overlong_buffer': COUNT, 'token_penalty': '(-inf, inf)',
        'dynamic_sampling_rounds': NOT_NEGATIVE, 'gamma': SHARE, 'lam': SHARE, 'lam_length': POSITIVE, 'value_lam': SHARE, 'tis_cap': NOT_NEGATIVE, 'tis_floor': NOT_NEGATIVE, 'dual_clip': '(1, inf)',
        'train_batch_size': COUNT, 'max_epochs': COUNT, 'eps_clip': '(0, 1)',
        'eps_clip_high': POSITIVE, 'value_clip': POSITIVE, 'value_coef': NOT_NEGATIVE, 'entropy_coef': '(-inf, inf)',
        'ptx_coef': NOT_NEGATIVE, 'positive_coef': NOT_NEGATIVE, 'ratio_threshold': POSITIVE, 'target_kl': POSITIVE,
        'critic_warmup_phases': NOT_NEGATIVE, 'critic_epochs': COUNT, 'critic_train_batch_size': COUNT,
    },
    'SupervisedConfig': {'train_batch_size': COUNT, 'max_epochs': COUNT, 'max_steps': COUNT, 'log_interval': COUNT},
    'RewardModelConfig': {'calibration_samples': COUNT, 'center_rewards_coefficient': NOT_NEGATIVE, 'early_stopping_patience': COUNT},
    'ReferenceConfig': {'beta': POSITIVE},
    'DPOConfig': {'label_smoothing': '[0, 0.5)'},
    'KTOConfig': {
        'train_batch_size': '[2, inf): KTO compares each answer with another prompt of its batch; use 2 or more',
        'desirable_weight': NOT_NEGATIVE, 'undesirable_weight': NOT_NEGATIVE,
    },
    'ORPOConfig': {'weight': POSITIVE},
    'SimPOConfig': {'beta': POSITIVE, 'gamma': NOT_NEGATIVE},
    'ILQLConfig': {
        'tau': '(0, 1)', 'gamma': SHARE, 'cql_scale': NOT_NEGATIVE, 'awac_scale': NOT_NEGATIVE, 'beta': NOT_NEGATIVE, 'alpha': '(0, 1]',
        'target_sync_interval': COUNT,
    },
    'CriticConfig': {'gamma': SHARE},
    'RFTConfig': {
        'num_rounds': COUNT, 'num_samples_per_prompt': '[2, inf): RFT keeps some and drops some', 'start_quantile': SHARE,
        'end_quantile': SHARE,
    },
    'Run': {
        'lora_dropout': '[0, 1)', 'lora_rank': NOT_NEGATIVE, 'lora_alpha': POSITIVE, 'lr': NOT_NEGATIVE,
        'weight_decay': NOT_NEGATIVE, 'tensor_parallel': COUNT, 'sequence_parallel': COUNT, 'atoms': COUNT, 'rank_timeout_s': POSITIVE, 'keep_last': COUNT,
        'checkpoint_interval': NOT_NEGATIVE, 'checkpoint_minutes': NOT_NEGATIVE, 'card_samples': NOT_NEGATIVE,
    },
    'DataRun': {'max_len': COUNT},
    'PPORun': {
        'num_episodes': COUNT, 'max_timesteps': COUNT, 'update_timesteps': COUNT, 'max_prompt_tokens': COUNT, 'sample_interval': COUNT,
        'eval_interval': COUNT, 'eval_episodes': NOT_NEGATIVE, 'num_layers_unfrozen': '[-1, inf)', 'ema_decay': '(0, 1)', 'critic_lr': NOT_NEGATIVE,
        'rollout_workers': NOT_NEGATIVE, 'rollout_chunk_size': COUNT, 'rollout_slice_tokens': COUNT, 'vllm_tensor_parallel': COUNT,
    },
}  # fmt: skip
"""class -> setting -> interval (round brackets exclude the end), with the reason where it is not obvious; derived
classes inherit it"""


def range_of(cls: type, name: str) -> str | None:
    """Returns the range of a setting: that of its class, or of the nearest base that has one."""
    return next((RANGES[base.__name__][name] for base in cls.__mro__ if name in RANGES.get(base.__name__, ())), None)


@cache
def numeric_fields(cls: type) -> dict[str, tuple[bool, bool]]:
    """Returns setting -> (only whole numbers, accepts None) of a settings class."""
    found = {name: set(typing.get_args(given)) or {given} for name, given in typing.get_type_hints(cls).items()}
    return {name: (float not in kinds, type(None) in kinds) for name, kinds in found.items() if kinds & {int, float}}


@cache
def choices(cls: type) -> dict[str, list[Any]]:
    """Returns setting -> allowed values, for settings of type `Literal` or bool."""
    found = {}
    for name, given in typing.get_type_hints(cls).items():
        kinds = (given, *typing.get_args(given))
        values = [v for kind in kinds if typing.get_origin(kind) is typing.Literal for v in typing.get_args(kind)]
        if bool in kinds:
            values += [True, False]
        if values:
            found[name] = [None, *values] if type(None) in kinds else values
    return found


def check_values(settings: Any) -> None:
    """Raises ValueError for the first setting that is not a number, not finite, or out of its range; then for the first
    that is none of its choices."""
    for name, (whole, optional) in numeric_fields(type(settings)).items():  # type: ignore[arg-type]
        spec, value = range_of(type(settings), name), getattr(settings, name)
        if spec is not None and not (optional and value is None) and (wrong := _wrong(value, spec, whole)):
            raise ValueError(f'{name}={value!r} must {wrong}')
    for name, allowed in choices(type(settings)).items():  # type: ignore[arg-type]
        if getattr(settings, name) not in allowed:
            raise ValueError(f'{name}={getattr(settings, name)!r} is not known; choose one of {allowed}')


def _wrong(value: Any, spec: str, whole: bool) -> str:
    """Returns the violated condition; '' if there is none."""
    interval, colon, why = spec.partition(': ')
    low, high = (float(end) for end in interval[1:-1].split(', '))
    if not isinstance(value, Integral if whole else Real) or isinstance(value, bool):
        return 'be a whole number' if whole else 'be a number'
    number = float(value)
    if low < number < high or (interval[0] == '[' and number == low) or (interval[-1] == ']' and number == high):
        return ''
    if not math.isfinite(number):
        return 'be a finite number'
    if high < math.inf:
        return f'lie in {interval}{colon}{why}'
    if low == 0 or (low == 1 and interval[0] == '['):
        return 'not be negative' if interval[0] == '[' and low == 0 else 'be positive'
    return f'be {"at least" if interval[0] == "[" else "above"} {low:g}{colon}{why}'


@dataclass(kw_only=True)
class Settings:
    """Base of the settings dataclasses: made from checked keywords, converted to a dict."""

    def __new__(cls, *args: Any, **values: Any) -> Self:
        cls.check_names(values)
        return super().__new__(cls)

    @classmethod
    def check_names(cls, names: Iterable[str]) -> None:
        """Raises ValueError for the first name that is not a field, with the nearest ones."""
        known = cls.field_names()
        for name in names:
            if name not in known:
                raise ValueError(f'{cls.__name__} has no setting {name!r}{hint(name, known)}')

    def __post_init__(self) -> None:
        check_values(self)

    @classmethod
    def field_names(cls) -> list[str]:
        return [f.name for f in fields(cls)]

    @classmethod
    def from_dict(cls: type[C], values: Mapping[str, Any]) -> C:
        """Makes settings from keywords; an unknown one is a ValueError with the nearest names."""
        return cls(**values)

    @classmethod
    def split(cls: type[C], owner: str, config: C | None, kwargs: Mapping[str, Any]) -> tuple[C, dict[str, Any]]:
        """Splits the keywords of a trainer that also generates into settings (over those of `config`) and generation
        keywords.

        Raises:
            ValueError: a keyword that is neither; lists the nearest known ones.
        """
        settings, generation = cls.field_names(), generation_fields()
        for name in kwargs:
            if name not in settings and name not in generation:
                raise ValueError(f'{owner} got an unknown keyword {name!r}{hint(name, [*settings, *generation])}')
        own = {k: v for k, v in kwargs.items() if k in settings}
        return replace(config, **own) if config is not None else cls(**own), {
            k: v for k, v in kwargs.items() if k not in settings
        }

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def check_cut(name: str, value: int, world_size: int) -> None:
    """Raises ValueError if a global batch size is not a multiple of the number of ranks."""
    if value % world_size:
        lower = value // world_size * world_size
        near = f'{lower} or {lower + world_size}' if lower else str(world_size)
        raise ValueError(
            f'{name}={value} cannot be split over {world_size} ranks; use a multiple of {world_size}, such as {near}'
        )


@dataclass(kw_only=True)
class LearningSettings(Settings):
    """Settings of all trainers. Batch sizes are global: all ranks together."""

    max_tokens_per_batch: int | None = None
    """maximum tokens, with padding, that one rank computes at once; lower it when memory runs out. none: its whole
    share of a train batch"""
    packing: bool = True
    """compute without padding where the model supports it, which is faster (`chatgpt.nn.packing`); false: pad every row
    of a batch to the longest"""
    max_grad_norm: float | None = 1.0
    """clip the gradient norm of each model to this; none: only measure it"""
    lr_schedule: Schedule = 'constant'
    """learning rate after the warm-up: constant, or linear or cosine decay to 0 at the end of the run"""
    lr_end_factor: float = 0.0
    """a decaying learning rate ends at this multiple of lr instead of 0"""
    lr_decay_steps: int | None = None
    """optimizer step at which a decaying learning rate reaches its end and stays there; none: the end of the run"""
    warmup_steps: int = 0
    """optimizer steps in which the learning rate rises from 0 to lr"""
    dataloader_pin_memory: bool = True
    """copy batches to the GPU from pinned host memory, which is faster; false if host memory is short"""

    def validate(self, world_size: int = 1) -> None:
        check_values(self)  # again: fields may have been set since
        check(self, LEARNING_RULES)
