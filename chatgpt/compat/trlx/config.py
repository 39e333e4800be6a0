"""trlX's config objects: `TRLConfig` with its sections and method configs, of 0.5 to 0.7 and of the flat YAML files of
2022.

A name that no section has is a ValueError with the nearest one, in a constructor, a file, `update`, `evolve` and an
assignment alike (trlX drops it). Left out: what the values mean here (`settings`).
"""

from __future__ import annotations

import difflib
import json
import warnings
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Self

from chatgpt.launch.config_values import read_file

SECTIONS = ('method', 'model', 'optimizer', 'scheduler', 'tokenizer', 'train')
REQUIRED = ('method', 'model', 'train')


def unknown(what: str, name: str, known: Iterable[str]) -> ValueError:
    """The error for a name that is not known, with the nearest ones."""
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return ValueError(f'{what} has no {name!r}; ' + (f'did you mean {", ".join(near)}?' if near else 'see its fields'))


class Section:
    """Base of the sections: known names only."""

    old_fields: ClassVar[frozenset[str]] = frozenset()
    """of the config files of 2022; None where they are not given"""

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
        """A name near one of the fields is a mistake; scripts also keep notes of their own in a section."""
        if name not in self.names():
            if difflib.get_close_matches(name.lower(), self.names(), n=1, cutoff=0.7):
                raise unknown(type(self).__name__, name, self.names())
            text = f'trlx: {type(self).__name__}.{name} is kept as a note of yours: nothing here reads it'
            warnings.warn(text, stacklevel=2)
        super().__setattr__(name, value)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        return cls(**config)

    def to_dict(self) -> dict[str, Any]:
        """A copy, without the fields of 2022 that are not given."""
        return {
            name: deepcopy(value)
            for name in self.names()
            if (value := getattr(self, name)) is not None or name not in self.old_fields
        }


@dataclass
class ModelConfig(Section):
    """`model_path` is a hub name, a folder, a transformers config (new weights) or a transformers model."""

    model_path: Any
    model_arch_type: str = 'causal'
    num_layers_unfrozen: int = -1
    peft_config: Any = None
    model_extra_configs: dict[str, Any] = field(default_factory=dict)
    tokenizer_path: str | None = None
    model_type: str | None = None
    device: str | None = None

    old_fields = frozenset({'tokenizer_path', 'model_type', 'device'})


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
    # the files of 2022
    orchestrator: str | None = None
    n_ctx: int | None = None
    lr_init: float | None = None
    lr_target: float | None = None
    learning_rate_init: float | None = None
    learning_rate_target: float | None = None
    lr_ramp_steps: int | None = None
    lr_decay_steps: int | None = None
    opt_betas: Any = None
    opt_eps: float | None = None
    weight_decay: float | None = None
    grad_clip: float | None = None
    log_interval: int | None = None
    input_size: int | None = None
    gen_size: int | None = None
    accelerate: bool | None = None
    accelerate_config_path: str | None = None

    old_fields = frozenset(
        'orchestrator n_ctx lr_init lr_target learning_rate_init learning_rate_target lr_ramp_steps lr_decay_steps '
        'opt_betas opt_eps weight_decay grad_clip log_interval input_size gen_size accelerate '
        'accelerate_config_path'.split()
    )


# ---------------------------------------------------------------------- methods

_METHODS: dict[str, type[Any]] = {}


def register_method(name: Any) -> Any:
    """Decorator: a method config under its class's name, or under the name given."""

    def register(cls: type[Any], key: str) -> type[Any]:
        _METHODS[key.lower()] = cls
        return cls

    return (lambda cls: register(cls, name)) if isinstance(name, str) else register(name, name.__name__)


def get_method(name: str) -> type[Any]:
    """The method config of a name, in any case.

    Raises:
        ValueError: none is registered under it.
    """
    if str(name).lower() not in _METHODS:
        raise unknown('the registry of method configs', str(name), [cls.__name__ for cls in _METHODS.values()])
    return _METHODS[str(name).lower()]


@register_method
@dataclass(kw_only=True)
class MethodConfig(Section):
    name: str = ''

    def __post_init__(self) -> None:
        self.name = self.name or type(self).__name__


@register_method
@dataclass(kw_only=True)
class PPOConfig(MethodConfig):
    """Defaults are those of the flat files of 2022; trlX 0.7 has none here, and `default_ppo_config` gives its own."""

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
    betas: list[float] | None = None
    """of 2022: the β that an evaluation decodes with"""

    old_fields = frozenset({'betas'})


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


# ---------------------------------------------------------------------- all of it

KINDS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    'method': lambda given: get_method(given.get('name', '')).from_dict(given),
    'model': ModelConfig.from_dict,
    'optimizer': OptimizerConfig.from_dict,
    'scheduler': SchedulerConfig.from_dict,
    'tokenizer': TokenizerConfig.from_dict,
    'train': TrainConfig.from_dict,
}


@dataclass
class TRLConfig(Section):
    """All sections. Optimizer, scheduler and tokenizer are None in the files of 2022, which have them in the others."""

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
        return cls.from_dict(read_file(yml_fp))

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> TRLConfig:
        """From sections.

        Raises:
            ValueError: an unknown section, method or name; says which is nearest.
        """
        cls.check_names(config)
        missing = [name for name in REQUIRED if name not in config]
        if missing:
            raise ValueError(f'TRLConfig needs the section {missing[0]}; got {", ".join(config) or "none"}')
        return cls(**{name: KINDS[name](deepcopy(dict(given))) for name, given in config.items() if given is not None})

    def to_dict(self) -> dict[str, Any]:
        return {name: section.to_dict() for name in SECTIONS if (section := getattr(self, name)) is not None}

    def evolve(self, **changes: Any) -> TRLConfig:
        """A copy with other values, sections as dicts: `config.evolve(method=dict(gamma=0.99))`."""
        return self.update(self, changes)

    @classmethod
    def update(cls, baseconfig: Any, config: Mapping[str, Any]) -> TRLConfig:
        """A copy of `baseconfig` (a `TRLConfig` or a dict of one) with other values: sections as dicts, dotted names
        (`method.gamma`), or the bare name of a field that one section alone has.

        Raises:
            ValueError: a name that is not there; says which is nearest.
        """
        base = baseconfig if isinstance(baseconfig, TRLConfig) else cls.from_dict(baseconfig)
        result = base.to_dict()
        for name, value in config.items():
            for path, leaf in _leaves(name, value):
                _set(base, result, path, leaf)
        return cls.from_dict(result)

    def __str__(self) -> str:
        """As JSON, in human-readable form."""
        return json.dumps(self.to_dict(), indent=4, default=str)


def _leaves(name: str, value: Any) -> Iterable[tuple[list[str], Any]]:
    """(path, value) of what is to be set; a dict under a section, or below one, is gone into."""
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


def _sections(trainer: str, lr: float, train: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    """What the three defaults have in common."""
    return {
        'train': TrainConfig(trainer=trainer, **train),
        'model': ModelConfig(**model),
        'tokenizer': TokenizerConfig('gpt2'),
        'optimizer': OptimizerConfig('adamw', {'lr': lr, 'betas': (0.9, 0.95), 'eps': 1e-8, 'weight_decay': 1e-6}),
        'scheduler': SchedulerConfig('cosine_annealing', {'T_max': 1e12, 'eta_min': lr}),
    }


def default_ppo_config() -> TRLConfig:
    """trlX's defaults of PPO: GPT-2 trained on reviews, of which the top two blocks learn."""
    length = {'seq_length': 1024, 'epochs': 100, 'total_steps': 10000, 'batch_size': 32}
    train = length | {'checkpoint_interval': 10000, 'eval_interval': 100}
    model = {'model_path': 'lvwerra/gpt2-imdb', 'num_layers_unfrozen': 2}
    method = PPOConfig(
        init_kl_coef=0.001,
        scale_reward='ignored',
        cliprange_reward=10,
        gen_kwargs={'max_new_tokens': 40, 'top_k': 0, 'top_p': 1.0, 'do_sample': True},
    )
    return TRLConfig(method=method, **_sections('AcceleratePPOTrainer', 3e-5, train, model))


def default_ilql_config() -> TRLConfig:
    """trlX's defaults of ILQL, on GPT-2."""
    length = {'seq_length': 64, 'epochs': 100, 'total_steps': 1000, 'batch_size': 128}
    train = length | {'checkpoint_interval': 1000, 'eval_interval': 100}
    method = ILQLConfig(gen_kwargs={'max_new_tokens': 56, 'top_k': 20, 'beta': 1, 'temperature': 1.0})
    return TRLConfig(method=method, **_sections('AccelerateILQLTrainer', 5e-5, train, {'model_path': 'gpt2'}))


def default_sft_config() -> TRLConfig:
    """trlX's defaults of SFT, on GPT-2."""
    length = {'seq_length': 1024, 'epochs': 100, 'total_steps': 1000, 'batch_size': 8}
    train = length | {'checkpoint_interval': 10000, 'eval_interval': 100}
    method = SFTConfig(gen_kwargs={'max_new_tokens': 40, 'top_k': 0, 'top_p': 1.0, 'do_sample': True})
    return TRLConfig(method=method, **_sections('AccelerateSFTTrainer', 1e-4, train, {'model_path': 'gpt2'}))


def _no_nemo(*_: Any, **__: Any) -> Any:
    raise ValueError(
        'NeMo configs are not served: this library shards with FSDP or ColossalAI; start from default_ppo_config, '
        'default_ilql_config or default_sft_config, and run the script under torchrun'
    )


default_nemo_20b_config = default_nemo_2b_config = default_nemo_1_3b_config = _no_nemo
