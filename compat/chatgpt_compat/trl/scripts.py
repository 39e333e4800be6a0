"""Functions of TRL 0.12 to 1.12 that scripts call around a trainer: command line, `ModelConfig`, chat templates and
conversion of rows."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from transformers import HfArgumentParser, TrainerCallback
from transformers.utils import logging as transformers_logging


@dataclass
class ModelConfig:
    """Options of the model and its adapters. `dtype`, the newer name of `torch_dtype`, has the same value."""

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
    """Options of the data set."""

    dataset_name: str | None = None
    dataset_config: str | None = None
    dataset_train_split: str = 'train'
    dataset_test_split: str = 'test'
    dataset_streaming: bool = False
    gradient_checkpointing_use_reentrant: bool = False
    ignore_bias_buffers: bool = False
    sanity_check: bool = False


@dataclass
class DPOScriptArguments(ScriptArguments):
    """`ScriptArguments` with further arguments of DPO's scripts up to 0.8."""

    beta: float = 0.1
    max_length: int = 512
    max_prompt_length: int = 128
    max_target_length: int = 128
    generate_during_eval: bool = False


@dataclass
class SFTScriptArguments(ScriptArguments):
    """`ScriptArguments` with further arguments of SFT's scripts up to 0.8."""

    dataset_text_field: str | None = None
    max_seq_length: int = 512
    packing: bool = False
    config: str | None = None


@dataclass
class DatasetMixtureConfig:
    """Data sets to join, each a dict of arguments of `datasets.load_dataset` and `columns` to keep."""

    datasets: list[Any] = field(default_factory=list)
    streaming: bool = False
    test_split_size: float | None = None


def get_dataset(mixture_config: DatasetMixtureConfig) -> Any:
    """Returns the rows of a mixture's data sets as a DatasetDict with the split train, and test if its size is given.
    Raises ValueError without data sets."""
    from datasets import DatasetDict, concatenate_datasets, load_dataset

    parts = []
    for item in mixture_config.datasets:
        given = dict(item if isinstance(item, Mapping) else vars(item))
        columns = given.pop('columns', None)
        found = load_dataset(**{'split': 'train'} | given, streaming=mixture_config.streaming)
        parts.append(found if columns is None else found.select_columns(columns))
    if not parts:
        raise ValueError('get_dataset: the mixture has no data sets; give datasets in the config file')
    rows = concatenate_datasets(parts)
    if mixture_config.test_split_size is None:
        return DatasetDict({'train': rows})
    return rows.train_test_split(test_size=mixture_config.test_split_size)


class TrlParser(HfArgumentParser):
    """transformers' parser with `--config FILE.yaml`, which sets defaults of the command line."""

    def __init__(self, dataclass_types: Any = None, **options: Any) -> None:
        """From 0.9 on `SFTConfig` and `DPOConfig` have the further arguments of `SFTScriptArguments` and
        `DPOScriptArguments`, which are `ScriptArguments` beside them."""
        types: list[Any] = [dataclass_types] if isinstance(dataclass_types, type) else list(dataclass_types or ())
        names = [{f.name for f in fields(kind)} for kind in types]
        for i, kind in enumerate(types):
            if issubclass(kind, ScriptArguments) and any(names[i] & other for other in names[:i] + names[i + 1 :]):
                types[i] = ScriptArguments
        super().__init__(types, **options)

    def parse_args_and_config(
        self,
        args: Iterable[str] | None = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
    ) -> tuple[Any, ...]:
        """Returns an object for each dataclass, and with `return_remaining_strings` a list of unknown arguments.
        Raises ValueError for --config without a file, a file that is not a mapping, or an unknown name."""
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
            variables = content.pop('env', {}) if isinstance(content, dict) else None
            if not isinstance(variables, dict):
                raise ValueError(f'{path}: it, and env in it, must hold names with values')
            os.environ.update({name: str(value) for name, value in variables.items()})
            rest = self.set_defaults_with_config(**content)
        found = self.parse_args_into_dataclasses(args=given, return_remaining_strings=True)
        rest += found[-1]
        if rest and fail_with_unknown_args and not return_remaining_strings:
            raise ValueError(f'no argument of this script: {" ".join(rest)}')
        return (*found[:-1], rest) if return_remaining_strings else found[:-1]

    def set_defaults_with_config(self, **values: Any) -> list[str]:
        """Sets `values` as defaults and returns unknown ones as command-line arguments."""
        known = {action.dest: action for action in self._actions}
        self.set_defaults(**{name: value for name, value in values.items() if name in known})
        for name, action in known.items():
            if name in values:
                action.required = False
        return [part for name, value in values.items() if name not in known for part in (f'--{name}', str(value))]


def get_peft_config(model_args: ModelConfig) -> Any:
    """Returns a PEFT `LoraConfig` of the arguments; None without `use_peft`. Raises ValueError for use_dora and
    lora_target_parameters, and if the package peft is missing."""
    if not model_args.use_peft:
        return None
    if model_args.use_dora or model_args.lora_target_parameters:
        raise ValueError('ModelConfig: use_dora and lora_target_parameters cannot be honoured here; leave them out')
    try:
        from peft import LoraConfig
    except ImportError:
        raise ValueError('ModelConfig: use_peft=True needs the package peft: pip install peft') from None
    names = ('task_type', 'r', 'target_modules', 'lora_alpha', 'lora_dropout', 'modules_to_save')
    values = {name: getattr(model_args, f'lora_{name.removeprefix("lora_")}') for name in names}
    return LoraConfig(bias='none', use_rslora=model_args.use_rslora, **values)


def get_quantization_config(model_args: ModelConfig) -> None:
    """Returns None: models are trained without quantization. Raises ValueError if 4 or 8 bits are requested."""
    for name in ('load_in_4bit', 'load_in_8bit'):
        if getattr(model_args, name):
            raise ValueError(
                f'ModelConfig: {name}=True cannot be honoured here; models are trained in whole weights. '
                'use_peft=True saves most of the memory'
            )


def get_kbit_device_map() -> None:
    """Returns None: the strategy moves models to its device."""


def init_zero_verbose() -> None:
    """Limits messages on the console to warnings."""
    logging.basicConfig(level=logging.ERROR)
    transformers_logging.set_verbosity_error()


class RichProgressCallback(TrainerCallback):
    """A callback that does nothing: trainers show a progress bar unless `disable_tqdm=True`."""


# ---------------------------------------------------------------------- chat templates, kinds of rows

SIMPLE_CHAT_TEMPLATE = (
    '{% for message in messages %}'
    "{{ message['role'].capitalize() + ': ' + message['content'] + '\n\n' }}"
    '{% endfor %}'
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""roles in capitals, each turn in its own paragraph"""

_CHATML = (
    '{% for message in messages %}'
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_TURNS = ('prompt', 'chosen', 'rejected', 'completion', 'messages')


def is_conversational(example: Mapping[str, Any]) -> bool:
    """Returns True if a column of the row has turns with a role."""
    values = [example.get(name) for name in _TURNS]
    lists = [value for value in values if isinstance(value, (list, tuple)) and value]
    return any(isinstance(value[0], Mapping) and 'role' in value[0] for value in lists)


def apply_chat_template(
    example: Mapping[str, Any], tokenizer: Any, tools: Any = None, **template_kwargs: Any
) -> dict[str, Any]:
    """Returns the row with rendered turns: messages becomes text; prompt ends where the response begins, and
    completion, chosen and rejected contain the rest. Raises ValueError for unknown columns, and for a template that
    changes the prompt when a response follows."""
    known = set(example) & {*_TURNS, 'label'}
    options = dict(template_kwargs) | ({'tools': tools} if tools is not None else {})

    def render(turns: Any, **more: Any) -> str:
        return tokenizer.apply_chat_template(turns, tokenize=False, **options, **more)

    if 'messages' in known:
        return {'text': render(example['messages'])}
    answers = [name for name in ('completion', 'chosen', 'rejected') if name in known]
    if 'prompt' not in known:
        if not answers:
            raise ValueError(f'apply_chat_template: no turns in the columns {", ".join(example)}')
        return {name: render(example[name]) for name in answers}
    last = example['prompt'][-1]['role']
    begun = {'continue_final_message': True} if last == 'assistant' else {'add_generation_prompt': True}
    prompt = render(example['prompt'], **begun)
    rendered: dict[str, Any] = {'prompt': prompt}
    for name in answers:
        whole = render([*example['prompt'], *example[name]])
        if not whole.startswith(prompt):
            raise ValueError('apply_chat_template: this template renders the prompt otherwise once an answer follows')
        rendered[name] = whole[len(prompt) :]
    return rendered | ({'label': example['label']} if 'label' in known else {})


def maybe_apply_chat_template(
    example: Mapping[str, Any], tokenizer: Any, tools: Any = None, **template_kwargs: Any
) -> Mapping[str, Any]:
    """Applies `apply_chat_template` to a row with turns; returns any other row unchanged."""
    return apply_chat_template(example, tokenizer, tools, **template_kwargs) if is_conversational(example) else example


def extract_prompt(example: Mapping[str, Any]) -> dict[str, Any]:
    """Returns prompt, chosen and rejected of a row with chosen and rejected; their common beginning is the prompt,
    which in texts ends before a space."""
    chosen, rejected = example['chosen'], example['rejected']
    shared = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), None)
    if shared is None:
        shared = min(len(chosen), len(rejected))
    if shared and isinstance(chosen, str) and chosen[shared - 1] == ' ':
        shared -= 1
    return {'prompt': chosen[:shared], 'chosen': chosen[shared:], 'rejected': rejected[shared:]}


def maybe_extract_prompt(example: Mapping[str, Any]) -> Mapping[str, Any]:
    """Applies `extract_prompt` if chosen and rejected contain the prompt; returns any other row unchanged."""
    is_pair = 'chosen' in example and 'rejected' in example
    kinds = [isinstance(example.get(name), (list, tuple)) for name in ('prompt', 'chosen')]  # turns, or texts
    if not is_pair or ('prompt' in example and kinds[0] == kinds[1]):
        return example
    return {**example, **extract_prompt(example)}


def unpair_preference_dataset(dataset: Any, num_proc: int | None = None, desc: str | None = None) -> Any:
    """Splits each row of a `datasets` dataset with chosen and rejected in two, with completion and a bool label."""

    def two(batch: Mapping[str, Any]) -> dict[str, Any]:
        size = len(batch['chosen'])
        made = {'completion': [*batch['chosen'], *batch['rejected']], 'label': [True] * size + [False] * size}
        return made | ({'prompt': batch['prompt'] * 2} if 'prompt' in batch else {})

    return dataset.map(two, batched=True, remove_columns=['chosen', 'rejected'], num_proc=num_proc, desc=desc)


def maybe_unpair_preference_dataset(dataset: Any, num_proc: int | None = None, desc: str | None = None) -> Any:
    """Applies `unpair_preference_dataset` to a dataset with chosen and rejected; returns any other unchanged."""
    columns = dataset.column_names
    columns = next(iter(columns.values())) if isinstance(columns, Mapping) else columns
    return unpair_preference_dataset(dataset, num_proc, desc) if {'chosen', 'rejected'} <= set(columns) else dataset


def setup_chat_format(
    model: Any, tokenizer: Any, format: str = 'chatml', resize_to_multiple_of: int | None = None
) -> tuple[Any, Any]:
    """Sets up ChatML for a base model: two special tokens with embeddings, the template, and the ends in the configs.
    Raises ValueError if the tokenizer has a template, and for another format."""
    if tokenizer.chat_template is not None:
        raise ValueError('setup_chat_format: the tokenizer has a chat template; set it to None to replace it')
    if format != 'chatml':
        raise ValueError(f"setup_chat_format: format={format!r} is not known; use 'chatml'")
    begin, end = '<|im_start|>', '<|im_end|>'
    tokenizer.add_special_tokens({'bos_token': begin, 'eos_token': end, 'pad_token': end})
    tokenizer.chat_template = _CHATML
    model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=resize_to_multiple_of)
    for config in (model.config, getattr(model, 'generation_config', None)):
        if config is not None:
            for name in ('bos_token_id', 'eos_token_id', 'pad_token_id'):
                setattr(config, name, getattr(tokenizer, name))
    return model, tokenizer
