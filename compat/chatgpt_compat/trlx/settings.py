"""Converts the fields of trlX's config to this library's settings; docs/coming_from/trlx/fields.md lists them.

An unsupported field gives a ValueError or a warning that names it.
"""

from __future__ import annotations

import math
import netrc
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from chatgpt.names import hint
from chatgpt.trainer import ILQLConfig, PPOConfig
from chatgpt.trainer.callbacks import TRACKERS, MLflow, TensorBoard, Trackio, WandB
from chatgpt_compat.peft import lora_values
from chatgpt_compat.trlx.config import TRLConfig, unknown


def warn(text: str) -> None:
    warnings.warn(f'trlx: {text}', stacklevel=3)


RULES: list[tuple[Callable[..., Any], str]] = [
    (
        lambda model, train: model.model_arch_type not in ('causal', 'seq2seq'),
        "model_arch_type={model.model_arch_type!r} is not known; give 'causal', or 'seq2seq' for an encoder-decoder",
    ),
    (
        lambda model, train: model.num_layers_unfrozen == 0,
        'num_layers_unfrozen=0 leaves no block to train; give -1 (all), how many top blocks, or peft_config',
    ),
    (
        lambda model, train: train.minibatch_size and train.batch_size % train.minibatch_size,
        'minibatch_size={train.minibatch_size} must divide batch_size={train.batch_size}; give a divisor',
    ),
    *(
        (
            lambda model, train, name=name: not getattr(train, name) >= 1,
            f'train.{name}={{train.{name}!r}} must be at least 1',
        )
        for name in ('total_steps', 'epochs', 'batch_size', 'checkpoint_interval', 'eval_interval')
    ),
]
"""(predicate of the sections model and train, error message)"""


def check(config: TRLConfig) -> None:
    """Raises ValueError for unsupported fields and invalid values, before anything is loaded."""
    model, train = config.model, config.train
    for is_wrong, sentence in RULES:
        if is_wrong(model, train):
            raise ValueError(f'trlx: {sentence.format(model=model, train=train)}')
    if train.tracker is not None and train.tracker not in TRACKERS:
        raise ValueError(
            f'trlx: train.tracker={train.tracker!r} is not known; choose one of '
            f'{", ".join(TRACKERS.registered())}, or None{hint(train.tracker, TRACKERS)}'
        )
    tokenizer_path(config)
    if hasattr(config.method, 'two_qs') and model.peft_config is not None:
        raise ValueError('trlx: peft_config with ILQL is not served: its heads and trunk are trained whole')
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # the warnings follow at the conversion
        if model.peft_config is not None:
            lora_values(model.peft_config)
        learning(config)
        if hasattr(config.method, 'gen_kwargs'):
            sweep_of(generation(config))
            longest_prompt(config)
        if hasattr(config.method, 'ppo_epochs'):
            ppo_settings(config)


def is_seq2seq(config: TRLConfig) -> bool:
    """Returns True if the model is an encoder-decoder."""
    return bool(config.model.model_arch_type == 'seq2seq')


def separator(config: TRLConfig) -> str:
    """Returns the text between prompt and output in the `samples` of reward and metric functions."""
    return '<sep>' if is_seq2seq(config) else ''


def processes() -> int:
    """Returns the number of processes that `torchrun` or `accelerate launch` started."""
    return int(os.environ.get('WORLD_SIZE', '1'))


def strategy_name() -> str:
    """Returns the name of the strategy that the launcher's environment selects."""
    if processes() == 1:
        return 'naive'
    if os.environ.get('ACCELERATE_DEEPSPEED_ZERO_STAGE') in ('2', '3') or os.environ.get('ACCELERATE_USE_FSDP'):
        return 'fsdp'
    return 'ddp'


def precision() -> str:
    """Returns the precision of `accelerate launch`; fp32 without it."""
    given = os.environ.get('ACCELERATE_MIXED_PRECISION', 'no')
    return given if given in ('bf16', 'fp16') else 'fp32'


def tokenizer_path(config: TRLConfig) -> Any:
    path = None if config.tokenizer is None else config.tokenizer.tokenizer_path
    if path is None or path == '':
        raise ValueError(
            'trlx: there is no tokenizer_path; token ids without a tokenizer are not served: give a hub name, a '
            'folder or a tokenizer'
        )
    return path


# ---------------------------------------------------------------------- optimizer, learning rate

_ADAM: dict[str, Any] = {'lr': 1e-3, 'betas': None, 'eps': None, 'weight_decay': None}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    'adamw': _ADAM,
    'sgd': {'lr': 1e-3, 'weight_decay': None, 'momentum': None},
    'adam': _ADAM,
}
SCHEDULERS: dict[str, dict[str, Any]] = {
    'cosine_annealing': {'T_max': None, 'eta_min': 0.0, 'warmup_steps': 0},
    'linear': {'start_factor': 1 / 3, 'end_factor': 1.0, 'total_iters': 5},
}
"""name → its keywords with their defaults; None stands for torch's"""


def _chosen(what: str, section: Any, known: Mapping[str, Mapping[str, Any]]) -> tuple[str, dict[str, Any]]:
    """Returns the name and all keywords of an optimizer or scheduler. Raises ValueError for an unknown one."""
    name = str(getattr(section.name, 'value', section.name))
    if name not in known:
        raise ValueError(f'trlx: {what} {name!r} is not served; choose one of {", ".join(known)}')
    for key in section.kwargs:
        if key not in known[name]:
            raise unknown(f'trlx: {what} {name}', key, known[name])
    return name, dict(known[name]) | dict(section.kwargs)


def optimizer_of(config: TRLConfig) -> tuple[str, dict[str, Any]]:
    """Returns 'adamw' or 'sgd' and its keywords with `lr`."""
    if config.optimizer is None:
        return 'adamw', {'lr': 1e-3}
    name, kwargs = _chosen('optimizer', config.optimizer, OPTIMIZERS)
    kwargs = {key: value for key, value in kwargs.items() if value is not None}
    if name == 'adam' and kwargs.get('weight_decay', 0):
        warn(f'optimizer adam: weight_decay={kwargs["weight_decay"]} is decoupled here, as in adamw')
    if 'betas' in kwargs:
        kwargs['betas'] = tuple(kwargs['betas'])
    return ('sgd' if name == 'sgd' else 'adamw'), kwargs


def schedule_of(config: TRLConfig) -> dict[str, Any]:
    """Returns the fields of `LearningSettings` for the learning-rate schedule."""
    if config.scheduler is None:
        return {'lr_schedule': 'constant'}
    name, values = _chosen('scheduler', config.scheduler, SCHEDULERS)
    if name == 'cosine_annealing':
        if values['T_max'] is None:
            raise ValueError('trlx: scheduler cosine_annealing needs kwargs.T_max, its length in optimizer steps')
        warmup = {'warmup_steps': int(values['warmup_steps'])} if values['warmup_steps'] else {}
        return warmup | _cosine(optimizer_of(config)[1]['lr'], float(values['eta_min']), values['T_max'])
    start, end, length = float(values['start_factor']), float(values['end_factor']), int(values['total_iters'])
    if start == end == 1.0:
        return {'lr_schedule': 'constant'}
    if start == 1.0 and end < 1.0:
        return {'lr_schedule': 'linear', 'lr_end_factor': end, 'lr_decay_steps': length}
    if end == 1.0:
        warn(f'scheduler linear: the rate rises over {length} steps from 1/{length} of it, not from {start:g}')
        return {'lr_schedule': 'constant', 'warmup_steps': length}
    raise ValueError(f'trlx: scheduler linear from {start:g} to {end:g} is not served; let one of them be 1')


def _cosine(lr: float, end: float, length: float) -> dict[str, Any]:
    """Returns a cosine from `lr` to `end` in `length` steps, or no decay if it is longer than any run."""
    if end == lr or length >= 1e9:
        return {'lr_schedule': 'constant'}
    return {'lr_schedule': 'cosine', 'lr_end_factor': end / lr, 'lr_decay_steps': int(length)}


def learning(config: TRLConfig) -> dict[str, Any]:
    """Returns the fields of `LearningSettings`."""
    train = config.train
    bound = {'max_tokens_per_batch': train.minibatch_size * longest(config)} if train.minibatch_size else {}
    return {'max_grad_norm': None} | bound | schedule_of(config)


def longest(config: TRLConfig) -> int:
    """Returns the maximum number of tokens of a sample."""
    return int(config.train.seq_length or 1024)


def longest_prompt(config: TRLConfig) -> int:
    """Returns the maximum number of tokens of a prompt that leaves enough positions for a response."""
    gen = generation(config)
    room = longest(config) - gen['max_new_tokens'] if 'max_new_tokens' in gen else gen.get('max_length', 2) - 1
    if room < 1:
        raise ValueError(
            f'trlx: seq_length={longest(config)} leaves no token for a prompt with '
            f'max_new_tokens={gen.get("max_new_tokens")}; give a longer one'
        )
    return int(room)


# ---------------------------------------------------------------------- generation


class Sweep(NamedTuple):
    """Evaluations with several values of a generation keyword."""

    name: str
    values: list[Any]


def generation(config: TRLConfig, *, experience: bool = False) -> dict[str, Any]:
    """Returns the generation keywords of an evaluation, or of rollouts, which use the first value of a list."""
    method = config.method
    given = getattr(method, 'gen_experience_kwargs', None) if experience else None
    gen = dict(method.gen_kwargs if given is None else given)
    is_ilql, is_ppo = hasattr(method, 'two_qs'), hasattr(method, 'ppo_epochs')
    if is_ilql:
        gen = {'beta': 1, 'top_k': 20, 'temperature': 1.0} | gen
    if 'max_new_tokens' not in gen and 'max_length' not in gen:
        gen['max_new_tokens'] = 32
    if is_ilql or is_ppo:
        gen.setdefault('do_sample', True)
    if experience:
        for name, value in gen.items():
            if isinstance(value, list):
                warn(f'gen_kwargs.{name}={value} is a sweep of the evaluation; rollouts take {value[0]}')
                gen[name] = value[0]
    if is_seq2seq(config) and (length := gen.pop('max_length', None)):  # of the decoder, with its start token
        gen.setdefault('max_new_tokens', int(length) - 1)
    if gen.get('min_length') and gen['min_length'] >= gen.get('max_length', math.inf):
        gen |= {'eos_token_id': [], 'min_length': None}  # it includes the prompt, so no end token is possible
    if isinstance(end := gen.get('eos_token_id'), int) and end < 0:
        gen['eos_token_id'] = []  # -1 is transformers' old value for no end token
    if gen.get('temperature') == 0:
        gen |= {'do_sample': False, 'temperature': None}
    return gen


def sweep_of(gen: Mapping[str, Any]) -> Sweep | None:
    """Returns the sweep of the only list among the generation keywords, or None. Raises ValueError for two lists."""
    lists = [Sweep(name, list(value)) for name, value in gen.items() if isinstance(value, list)]
    if len(lists) > 1:
        raise ValueError(
            f'trlx: gen_kwargs has several lists, {" and ".join(s.name for s in lists)}; an evaluation sweeps one'
        )
    return lists[0] if lists else None


def sampling_keywords(gen: Mapping[str, Any], stop_sequences: Any) -> dict[str, Any]:
    """Returns keywords for this library's engines, without ILQL's β and with the stop strings."""
    stop = {'stop_strings': list(stop_sequences)} if stop_sequences else {}
    return {name: value for name, value in gen.items() if name != 'beta'} | stop


# ---------------------------------------------------------------------- methods


class PPOLength(NamedTuple):
    """The length of a PPO run."""

    chunks: int
    """timesteps of one learning phase"""
    phases: int
    steps_per_phase: int


def ppo_length(config: TRLConfig) -> PPOLength:
    m, train = config.method, config.train
    chunks = -(-m.num_rollouts // m.chunk_size)
    steps = m.ppo_epochs * -(-chunks * m.chunk_size // train.batch_size)
    total = min(train.epochs * steps, train.total_steps)
    return PPOLength(chunks, -(-total // steps), steps)


SCALING = {'running': 'running', 'ref': 'ref', 'ignored': 'none', 'none': 'none', 'false': 'none'}


def score_scaling(config: TRLConfig) -> tuple[Any, float]:
    """Returns `PPOConfig.score_scaling` and a divisor of scores."""
    given = str(config.method.scale_reward or 'none').lower()
    if given not in SCALING:
        raise ValueError(
            f"trlx: method.scale_reward={config.method.scale_reward!r} is not known; choose 'running', 'ref' or None"
        )
    if SCALING[given] == 'ref' and config.method.ref_std is not None:
        if not config.method.ref_std > 0:
            raise ValueError(f'trlx: method.ref_std={config.method.ref_std!r} must be positive')
        return 'none', float(config.method.ref_std)
    return SCALING[given], 1.0


def ppo_settings(config: TRLConfig) -> PPOConfig:
    m, world = config.method, processes()
    length = ppo_length(config)
    rollouts = length.chunks * m.chunk_size
    adaptive: dict[str, Any] = {}
    if m.init_kl_coef and m.target is not None:
        # trlX updates after each pass, by batch_size / horizon
        horizon = float(m.horizon) * rollouts * world / (config.train.batch_size * m.ppo_epochs)
        adaptive = {'kl_target': m.target, 'kl_horizon': horizon}
    return PPOConfig(
        experience_batch_size=m.chunk_size * world,
        train_batch_size=config.train.batch_size * world,
        max_epochs=m.ppo_epochs,
        kl_coef=float(m.init_kl_coef),
        **adaptive,
        score_scaling=score_scaling(config)[0],
        gamma=m.gamma,
        lam=m.lam,
        eps_clip=m.cliprange,
        value_clip=m.cliprange_value,
        value_coef=m.vf_coef,
        ratio_threshold=None,
        **learning(config),
    )


def offline_settings(config: TRLConfig) -> dict[str, Any]:
    """Returns the fields of `SupervisedConfig`. The evaluation interval is a multiple of a logged phase."""
    train = config.train
    return learning(config) | {
        'train_batch_size': train.batch_size * processes(),
        'log_interval': max(n for n in range(1, min(train.eval_interval, 10) + 1) if train.eval_interval % n == 0),
        'max_epochs': train.epochs,
        'max_steps': train.total_steps,
    }


def ilql_settings(config: TRLConfig) -> ILQLConfig:
    m = config.method
    own = {name: getattr(m, name) for name in ('tau', 'gamma', 'cql_scale', 'awac_scale', 'beta', 'alpha')}
    return ILQLConfig(target_sync_interval=m.steps_for_target_q_sync, **own, **offline_settings(config))


# ---------------------------------------------------------------------- trackers


def tracker(config: TRLConfig) -> list[Any]:
    """Returns the callbacks of `train.tracker`."""
    t = config.train
    if t.tracker is None:
        return []
    if t.tracker == 'tensorboard':
        return [TensorBoard(t.logging_dir)]
    of_wandb = {'run_name': 'name', 'entity_name': 'entity', 'group_name': 'group', 'tags': 'tags'}
    given = {name: value for name in of_wandb if (value := getattr(t, name))}
    try:
        if t.tracker == 'wandb':
            return [WandB(t.project_name, mode=_wandb_mode(), **{of_wandb[name]: given[name] for name in given})]
        if given:
            warn(f'{", ".join(f"train.{name}" for name in given)} have no effect with tracker={t.tracker!r}')
        made: Any = TRACKERS.find(t.tracker)
        return [made(t.project_name) if made in (MLflow, Trackio) else made()]
    except ImportError as error:
        warn(f'tracker {t.tracker!r}: {error}; metrics are in {t.checkpoint_dir}/metrics.jsonl')
        return []


def _wandb_mode() -> str | None:
    """Returns None if WANDB_MODE decides; 'offline' without a login, since W&B's prompt would stop the run."""
    if os.environ.get('debug'):
        return 'disabled'
    if os.environ.get('WANDB_MODE') or os.environ.get('WANDB_API_KEY'):
        return None
    try:
        logged_in = any('wandb' in host for host in netrc.netrc().hosts)
    except (OSError, netrc.NetrcParseError):
        logged_in = False
    if logged_in:
        return None
    warn("tracker 'wandb': nobody is logged in, so the run is written offline; `wandb login`, or tracker=None")
    return 'offline'
