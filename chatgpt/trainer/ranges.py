"""The range of every numeric setting of the trainers, and the check of a settings object against it and against its
`Literal` types, done when it is made."""

from __future__ import annotations

import math
import typing
from functools import cache
from numbers import Integral, Real
from typing import Any

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
        'dynamic_sampling_rounds': NOT_NEGATIVE, 'gamma': SHARE, 'lam': SHARE, 'lam_length': POSITIVE, 'value_lam': SHARE, 'tis_cap': POSITIVE, 'dual_clip': '(1, inf)',
        'train_batch_size': COUNT, 'max_epochs': COUNT, 'eps_clip': '(0, 1)',
        'eps_clip_high': POSITIVE, 'value_clip': POSITIVE, 'value_coef': NOT_NEGATIVE, 'entropy_coef': '(-inf, inf)',
        'ptx_coef': NOT_NEGATIVE, 'ratio_threshold': POSITIVE, 'target_kl': POSITIVE,
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
    'RFTConfig': {
        'num_rounds': COUNT, 'num_samples_per_prompt': '[2, inf): RFT keeps some and drops some', 'start_quantile': SHARE,
        'end_quantile': SHARE,
    },
    'Run': {
        'lora_dropout': '[0, 1)', 'lora_rank': NOT_NEGATIVE, 'lora_alpha': POSITIVE, 'lr': NOT_NEGATIVE,
        'weight_decay': NOT_NEGATIVE, 'tensor_parallel': COUNT, 'atoms': COUNT, 'rank_timeout_s': POSITIVE, 'keep_last': COUNT,
        'checkpoint_interval': NOT_NEGATIVE, 'checkpoint_minutes': NOT_NEGATIVE, 'card_samples': NOT_NEGATIVE,
    },
    'DataRun': {'max_len': COUNT},
    'PPORun': {
        'num_episodes': COUNT, 'max_timesteps': COUNT, 'update_timesteps': COUNT, 'max_prompt_tokens': COUNT, 'sample_interval': COUNT,
        'eval_interval': COUNT, 'eval_episodes': NOT_NEGATIVE, 'num_layers_unfrozen': '[-1, inf)', 'ema_decay': '(0, 1)', 'critic_lr': NOT_NEGATIVE,
        'rollout_workers': NOT_NEGATIVE, 'rollout_chunk_size': COUNT,
    },
}  # fmt: skip
"""Of each class and those derived from it: setting → interval, round brackets without the end, and why, where that is
not plain."""


def range_of(cls: type, name: str) -> str | None:
    """The range of a setting: that of its class, or of the nearest base that has one."""
    return next((RANGES[base.__name__][name] for base in cls.__mro__ if name in RANGES.get(base.__name__, ())), None)


@cache
def numeric_fields(cls: type) -> dict[str, tuple[bool, bool]]:
    """Setting → (takes whole numbers only, takes None) of a settings class."""
    hints = {name: set(typing.get_args(hint)) or {hint} for name, hint in typing.get_type_hints(cls).items()}
    return {name: (float not in kinds, type(None) in kinds) for name, kinds in hints.items() if kinds & {int, float}}


@cache
def choices(cls: type) -> dict[str, list[Any]]:
    """Setting → the values it may have, of those whose type is a `Literal` or bool."""
    found = {}
    for name, hint in typing.get_type_hints(cls).items():
        kinds = (hint, *typing.get_args(hint))
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
    """What a value must be and is not; '' where nothing is wrong."""
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
