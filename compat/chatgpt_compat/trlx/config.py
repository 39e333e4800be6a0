"""trlX's config objects of 0.5 to 0.7: `TRLConfig` with its sections and method configs. The flat YAML files of 2022
are translated when they are read.

An unknown name is a ValueError with the nearest one, in a constructor, a file, `update`, `evolve` and an assignment.
`settings` converts the values to this library's.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Self

from chatgpt.names import hint, near

MOVED = {
    'model.tokenizer_path': 'tokenizer.tokenizer_path',
    'model.model_type': 'train.trainer',
    'train.n_ctx': 'train.seq_length',
    'train.lr_init': 'optimizer.kwargs.lr',
    'train.learning_rate_init': 'optimizer.kwargs.lr',
    'train.opt_betas': 'optimizer.kwargs.betas',
    'train.opt_eps': 'optimizer.kwargs.eps',
    'train.weight_decay': 'optimizer.kwargs.weight_decay',
    'train.lr_target': 'scheduler.kwargs.eta_min',
    'train.learning_rate_target': 'scheduler.kwargs.eta_min',
    'train.lr_decay_steps': 'scheduler.kwargs.T_max',
    'train.lr_ramp_steps': 'scheduler.kwargs.warmup_steps',
    'train.gen_size': 'method.gen_kwargs.max_length',
    'method.betas': 'method.gen_kwargs.beta',
}
"""field of a flat file of 2022 → its later place"""
REMOVED = (
    *('model.device', 'train.orchestrator', 'train.log_interval', 'train.accelerate', 'train.accelerate_config_path'),
    *('train.grad_clip', 'train.input_size'),
)


def _numbers(value: Any) -> Any:
    """Converts texts such as 1e-3, which YAML does not read as numbers, to floats."""
    if isinstance(value, dict):
        return {name: _numbers(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_numbers(part) for part in value]
    return float(value) if isinstance(value, str) and re.fullmatch(r'[-+]?\d+[eE][-+]?\d+', value) else value


def convert_2022(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the later sections of a flat file of 2022; other files are unchanged. Warns of fields without a place."""
    if 'optimizer' in config or not isinstance(config.get('train'), Mapping):
        return config
    found = {name: dict(section) for name, section in config.items()}
    found |= {
        'tokenizer': {},
        'optimizer': {'name': 'adamw', 'kwargs': {}},
        'scheduler': {'name': 'cosine_annealing', 'kwargs': {}},
    }
    for place in [*MOVED, *REMOVED]:
        section, name = place.split('.')
        if name in found.get(section, {}) and (value := found[section].pop(name)) is not None:
            if place in REMOVED:
                warnings.warn(f'trlx: {place}={value!r} has no place in a config of today', stacklevel=3)
                continue
            target, *inner = MOVED[place].split('.')
            where = found[target] if len(inner) == 1 else found[target].setdefault(inner[0], {})
            where.setdefault(inner[-1], value)
    found['scheduler']['kwargs'].setdefault('T_max', found['train'].get('total_steps'))
    found['scheduler']['kwargs'].setdefault('eta_min', found['optimizer']['kwargs'].get('lr', 1e-3))
    return found


def unknown(what: str, name: str, known: Iterable[str]) -> ValueError:
    """Returns the error for an unknown name, with the nearest ones."""
    return ValueError(f'{what} has no {name!r}{hint(name, list(known)) or "; see its fields"}')


class Section:
    """Base of the sections; accepts known names only."""

    def __new__(cls, *args: Any, **values: Any) -> Self:
        cls.check_names(values)
        return super().__new__(cls)

    @classmethod
    def names(cls) -> list[str]:
        return [f.name for f in fields(cls)]  # type: ignore[arg-type]

    @classmethod
    def check_names(cls, names: Iterable[str]) -> None:
        for name in names:
            if name not in cls.names():
                raise unknown(cls.__name__, name, cls.names())

    def __setattr__(self, name: str, value: Any) -> None:
        """Raises ValueError for a name similar to a field's; any other may be set, for a script's own notes."""
        if name not in self.names():
            if near(name, self.names()):
                raise unknown(type(self).__name__, name, self.names())
            text = f'trlx: {type(self).__name__}.{name} is kept as a note of yours: nothing here reads it'
            warnings.warn(text, stacklevel=2)
        super().__setattr__(name, value)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        return cls(**config)

    def to_dict(self) -> dict[str, Any]:
        return {name: deepcopy(getattr(self, name)) for name in self.names()}


@dataclass
class ModelConfig(Section):
    """The model. `model_path` is a hub name, a folder, a transformers config (new weights) or a transformers model."""

    model_path: Any
    model_arch_type: str = 'causal'
    num_layers_unfrozen: int = -1
    peft_config: Any = None
    model_extra_configs: dict[str, Any] = field(default_factory=dict)


@dataclass
class TokenizerConfig(Section):
    tokenizer_path: Any
    padding_side: str = 'left'
    truncation_side: str = 'right'
    tokenizer_extra_configs: dict[str, Any] = field(default_factory=dict)


@dataclass
class OptimizerConfig(Section):
    name: str
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class SchedulerConfig(Section):
    name: str
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class TrainConfig(Section):
    total_steps: int
    epochs: int
    batch_size: int
    seq_length: int | None = None
    checkpoint_interval: int
    eval_interval: int
    pipeline: str = 'PromptPipeline'
    trainer: str | None = None
    trainer_kwargs: dict[str, Any] = field(default_factory=dict)
    project_name: str = 'trlx'
    run_name: str | None = None
    entity_name: str | None = None
    group_name: str | None = None
    checkpoint_dir: str = 'ckpts'
    rollout_logging_dir: str | None = None
    save_best: bool = True
    save_optimizer: bool = True
    resume_from_checkpoint: str | None = None
    tracker: str | None = 'wandb'
    logging_dir: str | None = None
    tags: list[str] | None = field(default_factory=list)
    seed: int = 1000
    minibatch_size: int | None = None


# ---------------------------------------------------------------------- methods


class Register:
    """A register of classes by their name or a given one, ignoring case; `add` is the decorator.

    Args:
        what: the kind of the classes, for messages.
        refused: beginning of a refused name in lower case → what to do instead.
    """

    def __init__(self, what: str, refused: Mapping[str, str] | None = None) -> None:
        self.what, self.refused, self.known = what, refused or {}, dict[str, type[Any]]()

    def add(self, name: Any) -> Any:
        if isinstance(name, str):
            return partial(self._put, name)
        return self._put(name.__name__, name)

    def _put(self, name: str, cls: type[Any]) -> type[Any]:
        self.known[name.lower()] = cls
        return cls

    def find(self, name: str) -> type[Any]:
        """Returns the class of a name. Raises ValueError for a name that is refused or not registered."""
        key = str(name).lower()
        if why := next((why for start, why in self.refused.items() if key.startswith(start)), None):
            raise ValueError(f'trlx: {name} is not served: {why}')
        if key not in self.known:
            raise unknown(f'the registry of {self.what}', str(name), [cls.__name__ for cls in self.known.values()])
        return self.known[key]


NEMO = (
    'this library shards with FSDP or ColossalAI; start from default_ppo_config, default_ilql_config or '
    'default_sft_config and the Accelerate trainer, under torchrun'
)
_METHODS = Register('method configs')
register_method, get_method = _METHODS.add, _METHODS.find


@register_method
@dataclass(kw_only=True)
class MethodConfig(Section):
    name: str = ''

    def __post_init__(self) -> None:
        self.name = self.name or type(self).__name__


@register_method
@dataclass(kw_only=True)
class PPOConfig(MethodConfig):
    """PPO. Defaults are those of the flat files of 2022; trlX 0.7 has none here, but in `default_ppo_config`."""

    ppo_epochs: int = 4
    num_rollouts: int = 128
    chunk_size: int = 128
    init_kl_coef: float = 0.2
    target: float | None = None
    horizon: float = 10000
    gamma: float = 1
    lam: float = 0.95
    cliprange: float = 0.2
    cliprange_value: float = 0.2
    vf_coef: float = 1
    scale_reward: Any = None
    ref_mean: float | None = None
    ref_std: float | None = None
    cliprange_reward: float | None = None
    gen_kwargs: dict[str, Any] = field(default_factory=dict)
    gen_experience_kwargs: dict[str, Any] | None = None
    num_value_layers_unfrozen: int = 0


@register_method
@dataclass(kw_only=True)
class ILQLConfig(MethodConfig):
    tau: float = 0.7
    gamma: float = 0.99
    cql_scale: float = 0.1
    awac_scale: float = 1
    alpha: float = 0.001
    beta: float = 0
    steps_for_target_q_sync: int = 5
    two_qs: bool = True
    gen_kwargs: dict[str, Any] = field(default_factory=dict)


@register_method
@dataclass(kw_only=True)
class SFTConfig(MethodConfig):
    gen_kwargs: dict[str, Any] = field(default_factory=dict)


@register_method
@dataclass(kw_only=True)
class RFTConfig(MethodConfig):
    gen_kwargs: dict[str, Any] = field(default_factory=dict)
    start_percentile: float = 0.7
    end_percentile: float = 0.95
    n_improve_steps: int = 4
    n_generations_per_prompt: int = 32


# ---------------------------------------------------------------------- the whole config

KINDS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    'method': lambda given: get_method(given.get('name', '')).from_dict(given),
    'model': ModelConfig.from_dict,
    'optimizer': OptimizerConfig.from_dict,
    'scheduler': SchedulerConfig.from_dict,
    'tokenizer': TokenizerConfig.from_dict,
    'train': TrainConfig.from_dict,
}
SECTIONS, REQUIRED = tuple(KINDS), ('method', 'model', 'train')


@dataclass
class TRLConfig(Section):
    """The config of a run with all sections."""

    method: Any
    model: Any
    optimizer: Any = None
    scheduler: Any = None
    tokenizer: Any = None
    train: Any = None

    def __post_init__(self) -> None:
        for name in REQUIRED:
            if getattr(self, name) is None:
                raise ValueError(f'TRLConfig needs the section {name}; its sections are {", ".join(SECTIONS)}')

    @classmethod
    def load_yaml(cls, yml_fp: str | Path) -> TRLConfig:
        import yaml

        with open(yml_fp, encoding='utf-8') as file:
            return cls.from_dict(convert_2022(_numbers(yaml.safe_load(file))))

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> TRLConfig:
        """Returns a config from a dict of sections.

        Raises:
            ValueError: an unknown section, method or name; the message has the nearest one.
        """
        cls.check_names(config)
        made = {name: KINDS[name](deepcopy(dict(given))) for name, given in config.items() if given is not None}
        return cls(**dict.fromkeys(REQUIRED) | made)

    def to_dict(self) -> dict[str, Any]:
        return {name: section.to_dict() for name in SECTIONS if (section := getattr(self, name)) is not None}

    def evolve(self, **changes: Any) -> TRLConfig:
        """Returns a copy with changed values, sections as dicts: `config.evolve(method=dict(gamma=0.99))`."""
        return self.update(self, changes)

    @classmethod
    def update(cls, baseconfig: Any, config: Mapping[str, Any]) -> TRLConfig:
        """Returns a copy of `baseconfig` (a `TRLConfig` or its dict) with changed values: sections as dicts, dotted
        names (`method.gamma`), or the bare name of a field that only one section has.

        Raises:
            ValueError: an unknown name; the message has the nearest one.
        """
        base = baseconfig if isinstance(baseconfig, TRLConfig) else cls.from_dict(baseconfig)
        result = base.to_dict()
        for name, value in config.items():
            for path, leaf in _leaves(name, value):
                _set(base, result, path, leaf)
        return cls.from_dict(result)

    def __str__(self) -> str:
        """Returns the config as indented JSON."""
        return json.dumps(self.to_dict(), indent=4, default=str)


def _leaves(name: str, value: Any) -> Iterable[tuple[list[str], Any]]:
    """Yields (path, value) of each value to set; descends into dicts of a section and below."""
    path = str(name).split('.')
    if isinstance(value, Mapping) and value and path[0] in SECTIONS:
        for inner, leaf in value.items():
            yield from _leaves(f'{name}.{inner}', leaf)
    else:
        yield path, value


def _set(base: TRLConfig, result: dict[str, Any], path: list[str], value: Any) -> None:
    section, *inner = path
    if not inner:
        owners = [s for s in SECTIONS if getattr(base, s) is not None and section in getattr(base, s).names()]
        if len(owners) != 1:
            if owners:
                raise ValueError(f'TRLConfig: {section!r} may be {" or ".join(f"{o}.{section}" for o in owners)}')
            known = [f'{s}.{n}' for s in SECTIONS if getattr(base, s) is not None for n in getattr(base, s).names()]
            raise unknown('TRLConfig', section, [*SECTIONS, *known])
        section, inner = owners[0], [section]
    if getattr(base, section, None) is None:
        raise unknown('TRLConfig', section, [s for s in SECTIONS if getattr(base, s) is not None])
    getattr(base, section).check_names(inner[:1])
    place = result[section]
    for name in inner[:-1]:
        if not isinstance(place.get(name), dict):
            place[name] = {}
        place = place[name]
    place[inner[-1]] = value


# ---------------------------------------------------------------------- defaults


def _default(method: Any, lr: float, model: ModelConfig, **train: Any) -> TRLConfig:
    """Returns a config with what the three defaults have in common."""
    return TRLConfig(
        method=method,
        model=model,
        tokenizer=TokenizerConfig('gpt2'),
        optimizer=OptimizerConfig('adamw', {'lr': lr, 'betas': (0.9, 0.95), 'eps': 1e-8, 'weight_decay': 1e-6}),
        scheduler=SchedulerConfig('cosine_annealing', {'T_max': 1e12, 'eta_min': lr}),
        train=TrainConfig(**{'seq_length': 1024, 'epochs': 100, 'eval_interval': 100} | train),
    )


def default_ppo_config() -> TRLConfig:
    """Returns trlX's defaults of PPO: GPT-2 trained on reviews, with the top two blocks trainable."""
    gen = {'max_new_tokens': 40, 'top_k': 0, 'top_p': 1.0, 'do_sample': True}
    method = PPOConfig(init_kl_coef=0.001, scale_reward='ignored', cliprange_reward=10, gen_kwargs=gen)
    model = ModelConfig('lvwerra/gpt2-imdb', num_layers_unfrozen=2)
    length = {'total_steps': 10000, 'batch_size': 32, 'checkpoint_interval': 10000}
    return _default(method, 3e-5, model, trainer='AcceleratePPOTrainer', **length)


def default_ilql_config() -> TRLConfig:
    """Returns trlX's defaults of ILQL on GPT-2."""
    method = ILQLConfig(gen_kwargs={'max_new_tokens': 56, 'top_k': 20, 'beta': 1, 'temperature': 1.0})
    length = {'seq_length': 64, 'total_steps': 1000, 'batch_size': 128, 'checkpoint_interval': 1000}
    return _default(method, 5e-5, ModelConfig('gpt2'), trainer='AccelerateILQLTrainer', **length)


def default_sft_config() -> TRLConfig:
    """Returns trlX's defaults of SFT on GPT-2."""
    method = SFTConfig(gen_kwargs={'max_new_tokens': 40, 'top_k': 0, 'top_p': 1.0, 'do_sample': True})
    length = {'total_steps': 1000, 'batch_size': 8, 'checkpoint_interval': 10000}
    return _default(method, 1e-4, ModelConfig('gpt2'), trainer='AccelerateSFTTrainer', **length)


def _no_nemo(*_: Any, **__: Any) -> Any:
    raise ValueError(f'NeMo configs are not served: {NEMO}')


default_nemo_20b_config = default_nemo_2b_config = default_nemo_1_3b_config = _no_nemo
