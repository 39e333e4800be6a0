"""TRL's models with a value head: a transformers causal LM or encoder-decoder, and a linear layer on its last hidden
state. `PPOTrainer` trains them as an `Actor` with a value head, over the very same modules."""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from chatgpt.hub import checked_path
from chatgpt.monitor.publish import push_folder
from chatgpt.nn import (
    LOAD_OPTIONS,
    adapter_base,
    cache_keyword,
    export_peft,
    has_lora,
    hidden_size,
    import_peft,
    is_encoder_decoder,
    load_causal_lm,
)
from chatgpt.strategies.checkpoint import save_tensors
from chatgpt_compat.peft import adapted

HEAD_FILE = 'value_head.safetensors'
"""file of the value head in this library's folders"""
HEAD = 'v_head.summary.'
"""prefix of the value head in TRL's checkpoints"""
_FILES = (
    *('model.safetensors', 'model.safetensors.index.json', HEAD_FILE),
    *('pytorch_model.bin', 'pytorch_model.bin.index.json'),
)
"""files that may have a value head, in the order of search"""
_PLACED = 'models are placed by the strategy: on the first GPU, or on the CPU; under torchrun each process on its own'
_WHOLE = (
    'weights are read and trained in 32 bits, without quantization; peft_config keeps the optimizer small, and '
    'torch_dtype=torch.bfloat16 computes in 16 bits'
)
_WITHOUT_EFFECT = (
    dict.fromkeys(('device_map', 'max_memory', 'offload_folder'), _PLACED)
    | dict.fromkeys(('load_in_8bit', 'load_in_4bit', 'quantization_config'), _WHOLE)
    | {'config': 'the config beside the weights is used'}
)
_FORWARDED = {
    *('prepare_inputs_for_generation', 'gradient_checkpointing_enable', 'gradient_checkpointing_disable'),
    *('enable_input_require_grads', 'generation_config', 'name_or_path', 'device', 'dtype'),
}
_HARMLESS = (
    *('low_cpu_mem_usage', 'use_safetensors', 'is_trainable', 'reward_adapter_name', 'offload_state_dict'),
    *('use_cache', 'return_dict'),
)


class ValueHead(nn.Module):
    """Dropout and Linear(width, 1), computed in the dtype of its weight.

    Dropout acts on `forward` of the model in train mode only; the trainer computes without it, as TRL's does.
    """

    def __init__(self, width: int, summary_dropout_prob: float = 0.1) -> None:
        super().__init__()
        self.dropout = nn.Dropout(summary_dropout_prob) if summary_dropout_prob else nn.Identity()
        self.summary = nn.Linear(width, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns values (..., 1) of hidden states (..., D)."""
        return self.summary(self.dropout(hidden).to(self.summary.weight.dtype))


class PreTrainedModelWrapper(nn.Module):
    """Base of TRL's models with a head: `pretrained_model`, and access to its attributes."""

    def __init__(self, pretrained_model: nn.Module) -> None:
        super().__init__()
        self.pretrained_model = pretrained_model
        self.is_peft_model = has_lora(pretrained_model)
        self.precision = _precision(next(pretrained_model.parameters()).dtype)
        """precision of the trainer: 'bf16' or 'fp16' if the model was loaded with such a dtype, else 'fp32'"""
        if self.precision != 'fp32':
            pretrained_model.float()  # 16 bits are too few for the small changes of an update
        self.is_sequential_parallel = self.is_loaded_in_8bit = self.is_loaded_in_4bit = False

    @property
    def config(self) -> Any:
        """The transformers config."""
        return self.pretrained_model.config

    def __getattr__(self, name: str) -> Any:
        if name in _FORWARDED:
            return getattr(self.pretrained_model, name)
        return super().__getattr__(name)


class AutoModelForCausalLMWithValueHead(PreTrainedModelWrapper):
    """A causal LM of transformers, with or without adapters, with a value head.

    Args:
        summary_dropout_prob: dropout of the head; by default the config's, else TRL's 0.1.
        v_head_init_strategy: None initialises as `nn.Linear`; 'normal' by N(0, v_head_initializer_range), bias 0.
    """

    _scorer: SequenceOf[Any] = ()
    """the reward model, in a list, so that it is not registered as a submodule"""
    supported_args = ('summary_dropout_prob', 'v_head_initializer_range', 'v_head_init_strategy')
    reads_apart: ClassVar[bool] = False
    """True for an encoder-decoder"""

    def __init__(
        self,
        pretrained_model: nn.Module,
        *,
        summary_dropout_prob: float | None = None,
        v_head_initializer_range: float = 0.2,
        v_head_init_strategy: str | None = None,
    ) -> None:
        if is_encoder_decoder(pretrained_model) != self.reads_apart:
            a, kind = ('no', 'CausalLM') if self.reads_apart else ('an', 'Seq2SeqLM')
            name = type(pretrained_model).__name__
            raise ValueError(f'{name} is {a} encoder-decoder: use AutoModelFor{kind}WithValueHead')
        if getattr(pretrained_model, 'get_output_embeddings', lambda: None)() is None:
            raise ValueError(f'{type(pretrained_model).__name__} has no language-model head; use a causal LM')
        super().__init__(pretrained_model)
        if summary_dropout_prob is None:
            summary_dropout_prob = getattr(self.config, 'summary_dropout_prob', 0.1)
        self.v_head = ValueHead(hidden_size(pretrained_model), summary_dropout_prob)
        if v_head_init_strategy == 'normal':
            nn.init.normal_(self.v_head.summary.weight, std=v_head_initializer_range)
            nn.init.zeros_(self.v_head.summary.bias)
        elif v_head_init_strategy is not None:
            raise ValueError(f"v_head_init_strategy={v_head_init_strategy!r} is not known; give None or 'normal'")

    # ------------------------------------------------------------------ loading

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path | nn.Module,
        *,
        peft_config: Any = None,
        reward_adapter: Any = None,
        torch_dtype: Any = None,
        dtype: Any = None,
        **kwargs: Any,
    ) -> AutoModelForCausalLMWithValueHead:
        """Loads a hub name or a folder of TRL, transformers or this library, or takes a transformers model.

        The value head is read from the checkpoint, else initialised. An adapter's folder gives its base model with the
        adapter, which stays trainable. Weights are kept in 32 bits; a `torch_dtype` of 16 bits is the precision of the
        trainer. `reward_adapter` is a folder or hub name of a classifier's adapter on the same base, loaded as a second
        model for `compute_reward_score`. `kwargs` are those of the constructor and of loading; `device_map` and
        quantization give a warning. Raises ValueError for arguments that are unknown or not supported.
        """
        own = {name: kwargs.pop(name) for name in cls.supported_args if name in kwargs}
        options = _loading_options(kwargs)
        model, head = _load(pretrained_model_name_or_path, options)
        if peft_config is not None:
            if has_lora(model):
                warnings.warn('peft_config has no effect: the folder holds an adapter already', stacklevel=2)
            else:
                adapted(model, peft_config)
        wrapper = cls(model, **own)
        if head is not None:
            wrapper._fill_head(head, pretrained_model_name_or_path)
        if (asked := torch_dtype if dtype is None else dtype) not in (None, 'auto'):
            wrapper.precision = _precision(asked)
        if reward_adapter is not None:
            wrapper._scorer = [_reward_model(reward_adapter, pretrained_model_name_or_path, options)]
        return wrapper

    @torch.no_grad()
    def compute_reward_score(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> Tensor:
        """Returns scores of `reward_adapter` at every position, (B, S, labels) fp32. Raises ValueError without it."""
        if not self._scorer:
            raise ValueError('compute_reward_score needs reward_adapter= of from_pretrained')
        (scorer,) = self._scorer
        trunk = getattr(scorer, scorer.base_model_prefix)
        hidden = trunk(input_ids=input_ids, attention_mask=attention_mask, return_dict=True).last_hidden_state
        return scorer.score(hidden).float()

    def _fill_head(self, head: Mapping[str, Tensor], where: Any) -> None:
        own = self.v_head.summary.state_dict()
        if {name: tensor.shape for name, tensor in head.items()} != {n: t.shape for n, t in own.items()}:
            shapes = {name: tuple(tensor.shape) for name, tensor in head.items()}
            raise ValueError(f'{where}: its value head is {shapes}, not a linear layer of {self.v_head.summary}')
        self.v_head.summary.load_state_dict(dict(head))

    # ------------------------------------------------------------------ use

    def forward(
        self,
        input_ids: Tensor | None = None,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        return_past_key_values: bool = False,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Returns (logits (B, S, V) fp32, loss or None, values (B, S) fp32), and the key-value cache if requested."""
        cache = cache_keyword(self.pretrained_model)
        kwargs |= {'output_hidden_states': True, 'return_dict': True}
        if past_key_values is not None:
            kwargs[cache] = past_key_values
        out = self.pretrained_model(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
        hidden = (out.decoder_hidden_states if self.reads_apart else out.hidden_states)[-1]
        values = self.v_head(hidden.to(self.v_head.summary.weight.device)).squeeze(-1)
        found = (out.logits.float(), out.loss, values)
        return (*found, out[cache]) if return_past_key_values else found

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Calls `generate` of the transformers model."""
        model: Any = self.pretrained_model
        return model.generate(*args, **kwargs)

    # ------------------------------------------------------------------ files

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:  # type: ignore[override]
        """Returns tensors by TRL's names: the model's without a prefix, `v_head.summary.*`; with adapters the head."""
        state = {} if self.is_peft_model else dict(self.pretrained_model.state_dict(*args, **kwargs))
        return state | {f'v_head.{name}': tensor for name, tensor in self.v_head.state_dict().items()}

    def load_state_dict(self, state_dict: Mapping[str, Tensor], strict: bool = True, assign: bool = False) -> Any:
        """Loads a result of `state_dict`, or a state dict of the transformers model with or without a head."""
        head = {k.removeprefix('v_head.'): v for k, v in state_dict.items() if k.startswith('v_head.')}
        rest = {k.removeprefix('pretrained_model.'): v for k, v in state_dict.items() if not k.startswith('v_head.')}
        if head:
            self.v_head.load_state_dict(head, strict=strict, assign=assign)
        return self.pretrained_model.load_state_dict(rest, strict=strict and bool(rest), assign=assign)

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """Writes a folder that TRL, this class, `Actor.from_pretrained` and, without the head, transformers load. With
        adapters it has the adapter in PEFT's format, and the head in `pytorch_model.bin`, where TRL looks for it.
        `kwargs`: `state_dict` and `max_shard_size` of transformers. Weights are always safetensors."""
        folder = Path(save_directory)
        if kwargs.pop('safe_serialization', True) is False:
            warnings.warn('safe_serialization=False has no effect: weights are written as safetensors', stacklevel=2)
        head = {name: tensor.detach().cpu() for name, tensor in self.v_head.summary.state_dict().items()}
        folder.mkdir(parents=True, exist_ok=True)
        if self.is_peft_model:
            export_peft(self.pretrained_model, folder)
            torch.save({HEAD + name: tensor for name, tensor in head.items()}, folder / 'pytorch_model.bin')
        else:
            state = kwargs.pop('state_dict', None) or self.state_dict()
            kept = {k: kwargs.pop(k) for k in ('max_shard_size',) if k in kwargs}
            model: Any = self.pretrained_model
            model.save_pretrained(folder, state_dict=state, **kept)
        for name in kwargs:
            warnings.warn(f'save_pretrained: {name} has no effect here', stacklevel=2)
        save_tensors(head, folder / HEAD_FILE)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> str:
        """Uploads the result of `save_pretrained` and returns its address."""
        return upload(self.save_pretrained, repo_id, **kwargs)


class AutoModelForSeq2SeqLMWithValueHead(AutoModelForCausalLMWithValueHead):
    """An encoder-decoder (T5, BART) with a value head on its decoder; else as `AutoModelForCausalLMWithValueHead`.

    `forward` takes `decoder_input_ids`; logits and values are those of its positions.
    """

    reads_apart = True


# ---------------------------------------------------------------- loading


def _loading_options(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the options of `load_model` among transformers' arguments; warns of those without effect."""
    options = dict(kwargs)
    if 'use_auth_token' in options:
        options['token'] = options.pop('use_auth_token')
    for name, instead in _WITHOUT_EFFECT.items():
        value = options.pop(name, None)
        if value not in (None, False):
            warnings.warn(f'from_pretrained: {name}={value!r} has no effect here: {instead}', stacklevel=3)
    for name in _HARMLESS:
        options.pop(name, None)
    for name in options:
        if name not in LOAD_OPTIONS:
            raise ValueError(
                f'from_pretrained: {name}={options[name]!r} is not served here; known are {", ".join(LOAD_OPTIONS)}'
            )
    return options


def _reward_model(adapter: Any, base: Any, options: Mapping[str, Any]) -> Any:
    """Returns the frozen sequence classifier of a PEFT adapter; its head gives the number of labels. Raises ValueError
    for an adapter without a head, or a model that was not loaded from a name."""
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    if isinstance(base, nn.Module):
        raise ValueError('reward_adapter: give the model as a name or folder, from which its base is loaded again')
    path = _file_of(str(adapter), 'adapter_model.safetensors', {})
    if path is None:
        raise ValueError(f'reward_adapter: {adapter} has no adapter_model.safetensors')
    with safe_open(path, 'pt') as file:
        heads = [name for name in file.keys() if name.endswith('score.weight')]
        if not heads:
            raise ValueError(f'reward_adapter: {adapter} has no score.weight; it must be one of a sequence classifier')
        labels = file.get_slice(heads[0]).get_shape()[0]
    known = {k: v for k, v in options.items() if k != 'trust_remote_code'}
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=labels, **known)
    return PeftModel.from_pretrained(model, adapter).merge_and_unload().float().eval().requires_grad_(False)


def _precision(dtype: Any) -> str:
    name = str(dtype).removeprefix('torch.')
    return {'bfloat16': 'bf16', 'float16': 'fp16', 'half': 'fp16'}.get(name, 'fp32')


def _load(source: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Tensor] | None]:
    """Returns the causal LM and the tensors of its value head, or None."""
    if isinstance(source, nn.Module):
        if not isinstance(source, PreTrainedModel) and not hasattr(source, 'peft_config'):
            raise ValueError(
                f'a {type(source).__name__} given; it must be a hub name, a folder or a transformers model'
            )
        return adapted(source, None), None
    name = checked_path(source)
    adapter = adapter_base(name)
    hub = {k: v for k, v in options.items() if k not in ('trust_remote_code', 'attn_implementation')}
    if adapter is not None:
        model = load_causal_lm(adapter, **options)
        import_peft(model, name)
    else:
        model = load_causal_lm(name, **options)
    return model, read_head(name, hub)


def read_head(name: str, hub: Mapping[str, Any] | None = None) -> dict[str, Tensor] | None:
    """Returns 'weight' and 'bias' of the value head of a folder or hub name; None if it has none.

    Reads TRL's `v_head.summary.*` in safetensors or pickled files, whole or sharded, and this library's own file.
    Raises ValueError for a damaged file, and for a file with other objects than tensors.
    """
    for file_name in _FILES:
        if (path := _file_of(name, file_name, hub or {})) is None:
            continue
        head: dict[str, Tensor] = {}
        if path.name.endswith('.index.json'):
            places = json.loads(path.read_text(encoding='utf-8'))['weight_map']
            for shard in sorted({file for tensor, file in places.items() if tensor.startswith(HEAD)}):
                if (part := _file_of(name, shard, hub or {})) is None:
                    raise ValueError(f'{path}: it names {shard} for the value head, which is not there')
                head |= _head_in(part)
        else:
            head = _head_in(path)
        if head:
            return head
    return None


def _file_of(name: str, file_name: str, hub: Mapping[str, Any]) -> Path | None:
    """Returns the path of a file of a folder or hub name; None if it does not exist."""
    from transformers.utils.hub import cached_file

    raised = ('gated_repo', 'missing_entries', 'connection_errors')
    found = cached_file(name, file_name, **{f'_raise_exceptions_for_{what}': False for what in raised}, **hub)
    return Path(found) if found else None


def _head_in(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == '.safetensors':
            with safe_open(path, 'pt') as file:
                names = [name for name in file.keys() if name.startswith(HEAD) or path.name == HEAD_FILE]
                return {name.removeprefix(HEAD): file.get_tensor(name) for name in names}
        state = torch.load(path, map_location='cpu', weights_only=True)
    except Exception as error:  # unpickling may raise anything
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f'{path}: not a file of tensors, and nothing else is unpickled ({reason})') from None
    return {name.removeprefix(HEAD): tensor for name, tensor in state.items() if name.startswith(HEAD)}


# ---------------------------------------------------------------- the reference


def create_reference_model(
    model: nn.Module, num_shared_layers: int | None = None, pattern: str | None = None
) -> nn.Module:
    """Returns a frozen copy of a model in eval mode.

    With `num_shared_layers`, counted from the embeddings, everything before that block is frozen in the model, too, and
    shared with the copy. `pattern` is the name of a block's parameters with `{layer}` for its number, if it is unusual.
    Raises ValueError if no parameter matches, and for a meta model.
    """
    if any(p.is_meta for p in model.parameters()):
        raise ValueError('create_reference_model: the model has no weights yet (meta device); load it first')
    shared: list[nn.Parameter] = []
    if num_shared_layers is not None:
        wanted = (pattern or _pattern(model)).format(layer=num_shared_layers)
        named = list(model.named_parameters())
        first = next((i for i, (name, _) in enumerate(named) if wanted in name), None)
        if first is None:
            raise ValueError(
                f'create_reference_model: no parameter of {type(model).__name__} is called {wanted!r}; give '
                f'num_shared_layers below the number of blocks, or pattern, such as {_pattern(model)!r}'
            )
        shared = [parameter for _, parameter in named[:first]]
        for parameter in shared:
            parameter.requires_grad_(False)
    reference = copy.deepcopy(model, {id(parameter): parameter for parameter in shared})
    return reference.requires_grad_(False).eval()


def _pattern(model: nn.Module) -> str:
    """Returns the name of the parameters of block `{layer}`."""
    config = getattr(model, 'config', None)
    count = getattr(config, 'num_hidden_layers', None)
    lists = [name for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if not lists:
        raise ValueError(f'create_reference_model: the blocks of {type(model).__name__} were not found; give pattern')
    return f'{lists[0]}.{{layer}}.'


# ---------------------------------------------------------------- the hub


def upload(save: Callable[[Path], Any], repo_id: str, **kwargs: Any) -> str:
    """Uploads a folder that `save` writes to a model repository of the hub, created if absent; returns its address.
    `kwargs`: `private`, `commit_message`, `token`, and `revision` or `branch`. Raises PushError if the hub cannot be
    reached or refuses, with the place of the files and how to upload them later."""
    kwargs = {('revision' if name == 'branch' else name): value for name, value in kwargs.items()}
    known = {name: kwargs.pop(name) for name in ('private', 'commit_message', 'token', 'revision') if name in kwargs}
    for name in kwargs:
        warnings.warn(f'push_to_hub: {name} has no effect here', stacklevel=3)
    folder = Path(tempfile.mkdtemp(prefix='upload-')) / repo_id.rpartition('/')[2]
    save(folder)
    address = push_folder(folder, repo_id, **known)
    shutil.rmtree(folder.parent)
    return address
