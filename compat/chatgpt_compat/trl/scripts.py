"""What scripts of TRL 0.12 to 1.12 read their command line with: `ModelConfig`, `ScriptArguments`, `TrlParser`, and
what they make of a `ModelConfig`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from transformers import HfArgumentParser


@dataclass
class ModelConfig:
    """Which model, and its adapters. `dtype` is the newer name of `torch_dtype`; each holds what is given as either."""

    model_name_or_path: str | None = None
    model_revision: str = 'main'
    torch_dtype: str | None = None
    dtype: str | None = None
    trust_remote_code: bool = False
    attn_implementation: str | None = None
    use_peft: bool = False
    lora_r: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.05
    lora_target_modules: list[str] | None = None
    lora_target_parameters: list[str] | None = None
    lora_modules_to_save: list[str] | None = None
    lora_task_type: str = 'CAUSAL_LM'
    use_rslora: bool = False
    use_dora: bool = False
    load_in_8bit: bool = False
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = 'nf4'
    use_bnb_nested_quant: bool = False
    bnb_4bit_quant_storage: str | None = None

    def __post_init__(self) -> None:
        self.torch_dtype = self.torch_dtype if self.torch_dtype is not None else self.dtype
        self.dtype = self.torch_dtype
        if self.load_in_8bit and self.load_in_4bit:
            raise ValueError('ModelConfig: load_in_8bit and load_in_4bit are given; give one of them')
        if self.lora_target_modules is not None and len(self.lora_target_modules) == 1:
            self.lora_target_modules = self.lora_target_modules[0]  # type: ignore[assignment]


@dataclass
class ScriptArguments:
    """Which data set, as TRL's scripts name it."""

    dataset_name: str | None = None
    dataset_config: str | None = None
    dataset_train_split: str = 'train'
    dataset_test_split: str = 'test'
    dataset_streaming: bool = False
    gradient_checkpointing_use_reentrant: bool = False
    ignore_bias_buffers: bool = False
    sanity_check: bool = False


class TrlParser(HfArgumentParser):
    """transformers' parser, and `--config FILE.yaml`, whose values are the defaults of that command line."""

    def parse_args_and_config(
        self,
        args: Iterable[str] | None = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
    ) -> tuple[Any, ...]:
        """One object for each dataclass.

        Args:
            return_remaining_strings: what no dataclass knows comes last, as a list of strings.
            fail_with_unknown_args: else it is an error.

        Raises:
            ValueError: --config without a file, a file that is no mapping, or a name in it that is not known.
        """
        import yaml

        given = list(sys.argv[1:] if args is None else args)
        rest: list[str] = []
        if '--config' in given:
            at = given.index('--config')
            if at + 1 == len(given):
                raise ValueError('--config needs a YAML file')
            _, path = given.pop(at), given.pop(at)
            with open(path, encoding='utf-8') as file:
                content = yaml.safe_load(file) or {}
            if not isinstance(content, dict):
                raise ValueError(f'{path}: it must hold names with values')
            variables = content.pop('env', {})
            if not isinstance(variables, dict):
                raise ValueError(f'{path}: env must hold names with values')
            os.environ.update({name: str(value) for name, value in variables.items()})
            rest = self.set_defaults_with_config(**content)
        found = self.parse_args_into_dataclasses(args=given, return_remaining_strings=True)
        rest += found[-1]
        if rest and fail_with_unknown_args and not return_remaining_strings:
            raise ValueError(f'no argument of this script: {" ".join(rest)}')
        return (*found[:-1], rest) if return_remaining_strings else found[:-1]

    def set_defaults_with_config(self, **values: Any) -> list[str]:
        """Take `values` as defaults; what is not known comes back as strings of a command line."""
        known = {action.dest: action for action in self._actions}
        self.set_defaults(**{name: value for name, value in values.items() if name in known})
        for name, action in known.items():
            if name in values:
                action.required = False
        return [part for name, value in values.items() if name not in known for part in (f'--{name}', str(value))]


def get_peft_config(model_args: ModelConfig) -> Any:
    """A PEFT `LoraConfig` of the arguments; None without `use_peft`.

    Raises:
        ValueError: use_dora, lora_target_parameters, or adapters without the package peft.
    """
    if not model_args.use_peft:
        return None
    if model_args.use_dora or model_args.lora_target_parameters:
        raise ValueError('ModelConfig: use_dora and lora_target_parameters cannot be honoured here; leave them out')
    try:
        from peft import LoraConfig
    except ImportError:
        raise ValueError('ModelConfig: use_peft=True needs the package peft: pip install peft') from None
    return LoraConfig(
        task_type=model_args.lora_task_type,
        r=model_args.lora_r,
        target_modules=model_args.lora_target_modules,
        lora_alpha=model_args.lora_alpha,
        lora_dropout=model_args.lora_dropout,
        bias='none',
        use_rslora=model_args.use_rslora,
        modules_to_save=model_args.lora_modules_to_save,
    )


def get_quantization_config(model_args: ModelConfig) -> None:
    """None: models are trained in whole weights. Raises ValueError where 4 or 8 bits are asked for."""
    for name in ('load_in_4bit', 'load_in_8bit'):
        if getattr(model_args, name):
            raise ValueError(
                f'ModelConfig: {name}=True cannot be honoured here; models are trained in whole weights. '
                'use_peft=True saves most of the memory'
            )


def get_kbit_device_map() -> None:
    """None: the strategy moves models to its device."""


def init_zero_verbose() -> None:
    """Warnings alone on the console."""
    import logging

    from transformers.utils import logging as transformers_logging

    logging.basicConfig(level=logging.ERROR)
    transformers_logging.set_verbosity_error()
