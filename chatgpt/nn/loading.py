"""Loads Hugging Face models, configs and tokenizers: one-line errors, nothing unpickled but tensors, remote code only
with `trust_remote_code`. On the meta device (inside a sharded strategy's `model_init_context`) no weights are read
(`chatgpt.nn.weights`)."""

from __future__ import annotations

import copy
import inspect
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from chatgpt.data.formats import note_model, save_tokenizer
from chatgpt.hub import checked_path, nearest
from chatgpt.names import hint
from chatgpt.nn import lora
from chatgpt.nn.computed import ComputedTensors, on_disk
from chatgpt.nn.heads import load_head, save_head
from chatgpt.nn.layouts import layout_of
from chatgpt.nn.peft_format import CONFIG_FILE, MergedAdapter, adapter_base, remove_adapter
from chatgpt.nn.quantized import NF4Linear
from chatgpt.nn.tensor_files import (
    check_finite,
    check_fit,
    remove_heads,
    share_by_umask,
    stored_dtype,
    stored_file,
    to_dtype,
    write_dtype,
)
from chatgpt.nn.trunk import check_whole, recompute_activations
from chatgpt.nn.weights import (
    Uninitialised,
    WeightsSource,
    all_to_meta,
    draw_seed,
    fill_model,
    reset_adapter,
    seeded,
    weight_files,
)

HUB_OPTIONS = ('revision', 'subfolder', 'cache_dir', 'local_files_only', 'token')
"""options of the hub; all but `token` are kept in a model's `WeightsSource`"""
OTHER_TOKENIZER = (
    "; give the hub name or folder of the model's tokenizer with --tokenizer (in Python: load_tokenizer, or tokenizer=)"
)
TOKENIZER_FILES = ('tokenizer*', 'vocab*', 'merges.txt', '*.model', '*.tiktoken', 'tekken.json')
LOAD_OPTIONS = ('trust_remote_code', 'attn_implementation', *HUB_OPTIONS)


def hub_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those of `options` that are of the hub."""
    return {name: value for name, value in options.items() if name in HUB_OPTIONS}


def check_options(options: dict[str, Any]) -> None:
    """Raises ValueError for an unknown loading option."""
    for name in options:
        if name not in LOAD_OPTIONS:
            known = ', '.join(LOAD_OPTIONS)
            raise ValueError(f'unknown argument {name!r}{hint(name, LOAD_OPTIONS) or f"; known are {known}"}')


def _explained(what: str, name: str, error: Exception) -> ValueError:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if 'trust_remote_code' in str(error):
        lines = [
            'it brings code of its own (auto_map in config.json), which is not run unless that is allowed: read it, '
            'then give --trust_remote_code (in Python trust_remote_code=True)'
        ]
    # After a colon comes a list, which is kept.
    reason = ' '.join(' '.join(lines).split()) if lines[0].rstrip().endswith(':') else lines[0]
    where = 'folder' if Path(name).is_dir() else f'hub name (there is no such folder{nearest(name)})'
    return ValueError(f'cannot load {what} from the {where} {name!r}: {reason}')


def _models_inside(name: str) -> str:
    """Returns a hint for a folder without a model: the models in its subfolders."""
    root = Path(name)
    inside = sorted(str(path.parent) for path in root.glob('*/config.json') if path.parent.name != 'initial')
    inside = [path for path in inside if Path(path).name != 'critic'] or inside
    if inside:
        is_run = any((root / file).exists() for file in ('metrics.jsonl', 'config.yaml', 'checkpoints'))
        return (
            f'; {"it is the folder of a training run, and the model" if is_run else "one"} is in '
            f'{" or ".join(inside[:3])}'
        )
    if (root / 'checkpoints').is_dir():
        return (
            '; it is the folder of a training run that has not ended, and the model is written at its end: go on with '
            '--resume auto'
        )
    return ''


def load_config(pretrained: str | os.PathLike[str], *, trust_remote_code: bool = False, **hub: Any) -> Any:
    """Returns the config of a hub name or folder; of an adapter, that of its base. Raises ValueError of one line if
    there is none, or for unsupported quantized weights."""
    config = _read_config(pretrained, trust_remote_code, hub)
    make_config_dense(config, os.fspath(pretrained))
    return config


def _read_config(pretrained: str | os.PathLike[str], trust_remote_code: bool, hub: Mapping[str, Any]) -> Any:
    name = checked_path(pretrained, hub)
    name = checked_path(adapter_base(name) or name, hub)
    if Path(name).is_dir() and not Path(name, hub.get('subfolder', ''), 'config.json').is_file():
        raise ValueError(f'the folder {name!r} has no config.json, so it holds no model{_models_inside(name)}')
    try:
        return transformers.AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, **hub)
    except (OSError, ValueError) as error:
        adapter = None
        with suppress(ValueError):
            adapter = None if Path(name).is_dir() else stored_file(name, CONFIG_FILE, **hub)
        if adapter is not None:
            raise ValueError(
                f'{name!r} is an adapter; download it, and give the folder: hf download {name} --local-dir FOLDER'
            ) from None
        raise _explained('a model config', name, error) from None


def make_config_dense(config: Any, name: str) -> bool:
    """Removes the quantization config of weights in bitsandbytes' 4 bits, which are dequantized when read. Returns True
    if there was one. Raises ValueError for other quantized weights."""
    found = getattr(config, 'quantization_config', None) or getattr(config, 'compression_config', None)
    if found is None:
        return False
    settings = found if isinstance(found, Mapping) else vars(found)
    in_4bit = bool(settings.get('load_in_4bit') or settings.get('_load_in_4bit'))
    method = settings.get('quant_method') or ('bitsandbytes' if in_4bit else 'quantization_config')
    method = str(getattr(method, 'value', method))
    if method == 'bitsandbytes' and in_4bit:
        del config.quantization_config
        return True
    raise ValueError(
        f'{name!r} holds quantized weights ({method}), which cannot be trained here, nor be the '
        'frozen base of adapters; give the model in 16 bits that it was made from (--quantize nf4 puts its blocks into '
        '4 bits while it is loaded)'
    )


def load_tokenizer(pretrained: str | os.PathLike[str], *, trust_remote_code: bool = False) -> Any:
    """Returns the tokenizer of a hub name or folder, or of the base of an adapter's folder without one. Without a
    padding token it uses the end token. Notes whether the model in that folder is an encoder-decoder
    (`chatgpt.data.formats.notes_of`). Raises ValueError if there is no tokenizer."""
    name = checked_path(pretrained)
    if not Path(name, 'tokenizer_config.json').is_file():
        name = checked_path(adapter_base(name) or name)
    if Path(name).is_dir() and not any(file for pattern in TOKENIZER_FILES for file in Path(name).glob(pattern)):
        raise ValueError(f'the folder {name!r} holds no tokenizer{_models_inside(name) or OTHER_TOKENIZER}')
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f'{_explained("a tokenizer", name, error)}{OTHER_TOKENIZER}') from None
    if not tokenizer.vocab_size:  # transformers makes an empty one of the config's family if files are missing
        raise ValueError(f'{name!r} holds no whole tokenizer: it has an empty vocabulary{OTHER_TOKENIZER}')
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    with suppress(ValueError):  # a folder may hold only a tokenizer
        config = load_config(name, trust_remote_code=trust_remote_code)
        note_model(tokenizer, config)
    return tokenizer


def on_meta() -> bool:
    """Returns True inside a context that builds modules on the meta device."""
    return torch.empty(0).device.type == 'meta'


def load_model(
    auto_class: str, pretrained: str | os.PathLike[str] | None, config: Any, *, checkpoint: bool = False, **options: Any
) -> Any:
    """Loads a model of transformers' `auto_class` from a hub name or folder, or makes a new one from a config, in fp32.

    Args:
        config: not modified.
        checkpoint: recompute activations in the backward pass (gradient checkpointing).
        options: see `LOAD_OPTIONS`.

    Raises:
        ValueError: of one line: both or neither of `pretrained` and `config`, an unknown option, or loading failed.
    """
    if (pretrained is None) == (config is None):
        raise ValueError('give either pretrained (a hub name or folder) or config, not both')
    check_options(options)
    hub = hub_options(options)
    if pretrained is None:
        cls = getattr(transformers, layout_of(config).auto_class(auto_class, config, type(config).__name__))
        model = _made(cls, config, WeightsSource(kind='config', seed=draw_seed()), options)
    else:
        name = checked_path(pretrained, hub)
        adapter = partial(MergedAdapter, folder=name) if (base := adapter_base(name)) is not None else None
        name = checked_path(base or name, hub)
        source = WeightsSource(
            kind='pretrained',
            path=name,
            adapter=adapter,
            seed=draw_seed(),
            hub={k: v for k, v in hub.items() if k != 'token'},
        )
        config = _read_config(name, options.get('trust_remote_code', False), hub)
        make_config_dense(config, name)
        cls = getattr(transformers, layout_of(config).auto_class(auto_class, config, repr(name)))
        try:
            model = _made(cls, config, source, options)
            dtype, wide = stored_dtype(weight_files(source))
        except (OSError, SafetensorError) as error:
            raise _explained('a model', name, error) from None
        model.weights_source = replace(source, dtype=dtype, wide=wide)
        if model.can_generate():
            with suppress(OSError):  # without that file, those of the config are used
                model.generation_config = GenerationConfig.from_pretrained(name, **hub)
    if checkpoint:
        try:
            recompute_activations(model)
        except ValueError:
            raise ValueError(
                f'checkpoint=True: {type(model).__name__} cannot recompute its activations; leave it out'
            ) from None
    return model


def _made(cls: Any, config: Any, source: WeightsSource, options: dict[str, Any]) -> Any:
    """Makes a model with the record `source`, and loads its weights unless on the meta device."""
    meta, device = on_meta(), torch.empty(0).device
    build: dict[str, Any] = {k: v for k, v in options.items() if k not in HUB_OPTIONS} | {'dtype': torch.float32}
    config = copy.deepcopy(config)

    def built() -> Any:
        with seeded(source.seed):
            return cls.from_config(config, **build)

    try:
        with torch.device('meta'):
            model = cls.from_config(config, **build)
        native = type(model).__module__.startswith('transformers.')
        if native:
            all_to_meta(model)
        if not meta and not native:  # remote code may fill buffers in its constructor
            model = built() if source.kind == 'config' else _from_remote_code(cls, source, options)
    except (ValueError, ImportError) as error:  # such as an attention that is not installed
        raise ValueError(str(error).strip().splitlines()[0]) from None
    model.weights_source = source
    if meta:
        return model
    if native:
        try:
            fill_model(model, source)
        except Uninitialised:
            if source.kind == 'pretrained':
                raise
            model = built()
            model.weights_source = source
    if source.kind == 'pretrained':
        model.eval()
    return model.to(device)


def _from_remote_code(cls: Any, source: WeightsSource, options: dict[str, Any]) -> Any:
    """`from_pretrained` of a model with remote code. Raises ValueError for missing, unexpected and NaN weights, which
    transformers only reports."""
    safe = all(file.suffix == '.safetensors' for file in weight_files(source))
    with _without_report(), torch.random.fork_rng(devices=[]):
        model, info = cls.from_pretrained(
            source.path,
            use_safetensors=safe,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **options,
        )
    problems = [info.get(f'{kind}_keys', ()) for kind in ('missing', 'unexpected', 'mismatched')]
    check_fit(model, lambda _: source.path, *problems)
    adapter = None if source.adapter is None else source.adapter(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            check_finite(parameter, name, lambda _: source.path)
            if adapter is not None:
                adapter.add_to(name, parameter)
    return model


@contextmanager
def _without_report() -> Iterator[None]:
    """Inside this context transformers does not print its table of missing and unexpected tensors, which are errors
    here."""
    logger = logging.getLogger('transformers.modeling_utils')

    def is_other(record: logging.LogRecord) -> bool:
        return 'LOAD REPORT' not in str(record.msg)

    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


def add_lora(model: Any, rank: int, bias: str, options: Mapping[str, Any] | None = None) -> None:
    """Adds adapters to `model`, initialised from the seed of its `WeightsSource`, or a new one; none for rank 0.
    `options`: alpha, dropout, targets."""
    if not rank:
        if bias != 'none' or any((options or {}).values()):
            raise ValueError('lora_options and lora_train_bias are of adapters: give lora_rank')
        return
    unknown = set(options or ()) - {'alpha', 'dropout', 'targets'}
    if unknown:
        raise ValueError(f'lora_options: {sorted(unknown)[0]!r} is not known; there are alpha, dropout and targets')
    lora.convert_to_lora(model, rank, bias=bias, **(options or {}))  # type: ignore[arg-type]
    source = getattr(model, 'weights_source', None)
    seed = draw_seed() if source is None else source.seed
    for name, layer in lora.lora_layers(model).items():
        reset_adapter(layer, seed, name)


def check_given(model: Any) -> None:
    """Raises ValueError if `model` is not a transformers model, or one with adapters that transformers loaded, of which
    it would save nothing else."""
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f'model: a {type(model).__name__} given; it must be a transformers PreTrainedModel')
    if getattr(model, '_hf_peft_config_loaded', False):
        raise ValueError(
            f'model: a {type(model).__name__} with adapters that transformers loaded; give the folder of the adapter '
            'by name, which folds it in, or the base alone and import_peft'
        )


def trunk_of(model: Any) -> Any:
    """Returns the base model of `model`, with the record of its weights' source. Raises ValueError as `check_given`."""
    check_given(model)
    (base, prefix), source = layout_of(model).base(model), getattr(model, 'weights_source', None)
    if base is not model and source is not None and not hasattr(base, 'weights_source'):
        base.weights_source = replace(source, prefix=prefix)  # type: ignore[assignment]
    return base


class Role(nn.Module):
    """Base class of actors, critics and reward models: loading by name, and saving."""

    by_name: ClassVar[str]
    """how to load a model, for errors"""
    build_options: ClassVar[tuple[str, ...]] = ('lora_rank', 'lora_train_bias', 'lora_options')
    """keywords of `_build`"""
    _build: ClassVar[Callable[..., None]]
    """initialises the object from a loaded model: the role's own constructor, since a family's takes a name"""
    model: Any  # transformers' PreTrainedModel, whose attributes nn.Module does not know
    value_head: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        takes = inspect.signature(cls.__init__).parameters
        named = kwargs.keys() & {'pretrained', 'config'} or isinstance(
            args[0] if args else kwargs.get('model'), (str, os.PathLike)
        )
        if named and 'pretrained' not in takes and not any(p.kind == p.VAR_KEYWORD for p in takes.values()):
            raise ValueError(
                f'{cls.__name__} is built from a model that you have, {cls.__name__}(model); to load one: {cls.by_name}'
            )
        return super().__new__(cls)

    @classmethod
    def _load(cls, pretrained: Any = None, config: Any = None, **options: Any) -> Any:
        raise NotImplementedError

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, value_head: Any = None, **options: Any) -> Any:
        """Loads a folder or hub name of `save_pretrained` with its head; any model with a new head where it needs one.

        Args:
            value_head: replaces the saved one.
            options: keywords of the constructor, and those of `load_model`.
        """
        own = {name: options.pop(name) for name in cls.build_options if name in options}
        role = cls.__new__(cls)
        value_head = load_head(folder, **hub_options(options)) if value_head is None else value_head
        cls._build(role, cls._load(folder, **options), value_head=value_head, **own)
        return role

    def parameter_groups(self, head_lr: float) -> list[dict[str, Any]]:
        """Returns the trained parameters as groups of an optimizer, those of the value head with the learning rate
        `head_lr`.

        A head is new where the rest is pretrained: at the rate of the rest it hardly learns (docs/critic.md). Raises
        ValueError without a value head.
        """
        if self.value_head is None:
            raise ValueError(f'{type(self).__name__}.parameter_groups: the model has no value head')
        own = {id(p) for p in self.value_head.parameters()}
        learned = [p for p in self.parameters() if p.requires_grad]
        head, rest = ([p for p in learned if (id(p) in own) is inside] for inside in (True, False))
        groups: list[dict[str, Any]] = [{'params': rest}, {'params': head, 'lr': head_lr}]
        return [group for group in groups if group['params']]

    @torch.no_grad()
    def save_pretrained(
        self,
        folder: str | Path,
        tokenizer: Any = None,
        *,
        state_dict: dict[str, Tensor] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Writes a Hugging Face folder of the model with its adapters merged, and files of its heads.

        Args:
            state_dict: full weights by this module's parameter names, if the module itself does not hold them. dtype:
            of the weights in the files; None for that of the folder the model was loaded from, or for a new model
                its own. Heads stay in fp32.
        """
        weights: Mapping[str, Tensor] | None
        if state_dict is None:
            check_whole(self.model)
        if not lora.has_lora(self.model):
            if any(isinstance(part, NF4Linear) for part in self.model.modules()):
                raise ValueError('save_pretrained: a model in 4 bits has no adapters, and is written only with them')
            weights = None if state_dict is None else part_of(state_dict, 'model')
        elif state_dict is None:
            weights = lora.merged_tensors(self.model)
        else:
            raise ValueError('save_pretrained with given weights cannot fold adapters in; merge them first')
        self._write(folder, weights, self.state_dict() if state_dict is None else state_dict, tokenizer, dtype)
        if tokenizer is not None:
            save_tokenizer(tokenizer, folder)

    def _write(self, folder: str | Path, weights: Any, state: dict[str, Tensor], tokenizer: Any, dtype: Any) -> None:
        """Writes model and heads. `weights` are the model's by its own names, or None if the model holds them. `state`
        is the role's."""
        write_folder(self.model, folder, weights, dtype=dtype)
        if self.value_head is not None:
            save_head(self.value_head, part_of(state, 'value_head'), folder)


def part_of(state: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Returns the state of one submodule, by its own names."""
    return {k.removeprefix(f'{name}.'): v for k, v in state.items() if k.startswith(f'{name}.')}


def load_causal_lm(pretrained: str | os.PathLike[str] | None = None, config: Any = None, **kwargs: Any) -> Any:
    """Loads a causal language model, or an encoder-decoder's; see `load_model`."""
    return load_model('AutoModelForCausalLM', pretrained, config, **kwargs)


def load_base_model(pretrained: str | os.PathLike[str] | None = None, config: Any = None, **kwargs: Any) -> Any:
    """Loads a model without a head; see `load_model`. If transformers' AutoModel does not read a causal language
    model's folder (decoders of BART's kind), loads that model and returns its trunk. BERT's pooler is unused and not
    loaded."""
    try:
        model = load_model('AutoModel', pretrained, config, **kwargs)
        if 'add_pooling_layer' in inspect.signature(type(model).__init__).parameters:
            model.pooler = None
        return model
    except ValueError:
        if pretrained is None or on_meta():
            raise
        with suppress(ValueError):
            return trunk_of(load_causal_lm(pretrained, **kwargs))
        raise


def trained_dtype(model: nn.Module) -> torch.dtype | None:
    """Returns the dtype of a trained model's files: fp32, in which weights are trained, for rounding to 16 bits loses
    what low learning rates change. None for adapters on weights in 16 or 4 bits: that of the folder it was loaded from.
    """
    held = {t.dtype for t in (*model.parameters(), *model.buffers())} - {torch.bool}
    narrow = any(dtype.itemsize < 4 for dtype in held)
    return None if narrow and lora.has_lora(model) else torch.float32


def _valid(config: GenerationConfig | None) -> GenerationConfig | None:
    """Returns a generation config that transformers writes: many published ones have sampling settings without
    `do_sample`, which it reads and refuses to write."""
    try:
        if config is not None:
            config.validate(strict=True)
    except ValueError:
        valid = copy.deepcopy(config)
        if valid.do_sample is False:  # type: ignore[union-attr]
            for name in ('temperature', 'top_p', 'top_k', 'min_p', 'typical_p'):  # which have no effect
                setattr(valid, name, None)
        else:
            valid.do_sample = True  # type: ignore[union-attr]
        return valid
    return config


def write_folder(
    model: Any,
    folder: str | os.PathLike[str],
    state_dict: Mapping[str, Tensor] | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """Writes `model.save_pretrained` without its progress bar, and replaces an earlier model there with its heads.

    state_dict: replaces the model's own weights; tensors that it computes wait in unnamed files in `folder`. dtype: as
    of `Role.save_pretrained`. Raises ValueError for a shard of the weights, OSError for a full disk.
    """
    from transformers.utils import logging

    if state_dict is None:
        check_whole(model)
    source = getattr(model, 'weights_source', None)
    wanted: torch.dtype | None = dtype or getattr(source, 'dtype', None)
    state = model.state_dict() if state_dict is None else state_dict
    tensors: Iterable[tuple[str, Tensor]] = state.items()
    if wanted is not None and (dtype is not None or wanted.itemsize < 4):
        wide = source.wide if source is not None and dtype is None else ()
        tensors = to_dtype(model, state, wanted, wide, widen=dtype is not None)
    else:
        wanted = None
    computed = state.computed if isinstance(state, ComputedTensors) else {}
    if computed:
        Path(folder).mkdir(parents=True, exist_ok=True)
    whole = {name: on_disk(tensor, folder) if name in computed else tensor for name, tensor in tensors}
    shown, own = logging.is_progress_bar_enabled(), getattr(model, 'generation_config', None)
    logging.disable_progress_bar()
    try:
        model.generation_config = _valid(own)
        model.save_pretrained(folder, state_dict=whole)
        remove_heads(folder)  # not before: if transformers raises, the earlier model still needs them
        remove_adapter(folder)
        share_by_umask(folder)
    finally:
        model.generation_config = own
        if shown:
            logging.enable_progress_bar()
    if wanted is not None:
        write_dtype(Path(folder), wanted)
