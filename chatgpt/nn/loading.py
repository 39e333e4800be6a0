"""Loading Hugging Face models, configs and tokenizers: one-line errors, nothing unpickled but tensors, no remote code
unless asked for.

On the meta device (inside a sharded strategy's `model_init_context`) nothing is read: the model carries a
`WeightsSource`, and the strategy fills its shards from it.
"""

from __future__ import annotations

import copy
import difflib
import inspect
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel

from chatgpt.nn import lora
from chatgpt.nn.encoder_decoder import check_encoder_decoder, encoder_decoder_trunk, has_no_base, seq2seq_class
from chatgpt.nn.files import remove_heads, share_by_umask
from chatgpt.nn.peft_format import MergedAdapter, adapter_base
from chatgpt.nn.sources import (
    Uninitialised,
    WeightsSource,
    all_to_meta,
    draw_seed,
    fill_model,
    reset_adapter,
    seeded,
    weight_files,
)
from chatgpt.nn.stored_dtype import say_dtype, stored_dtype, to_dtype
from chatgpt.nn.trunk import base_model, cut_over, is_encoder_decoder
from chatgpt.nn.unfit import candidates, check_finite, check_fit, fits, not_tied, open_weights

HUB_OPTIONS = ('revision', 'subfolder', 'cache_dir', 'local_files_only', 'token')
"""where a pretrained model comes from; all but `token` are kept in its `WeightsSource`"""
OTHER_TOKENIZER = (
    "; give the hub name or folder of the model's tokenizer with --tokenizer (in Python: load_tokenizer, or tokenizer=)"
)
TOKENIZER_FILES = ('tokenizer*', 'vocab*', 'merges.txt', '*.model', '*.tiktoken', 'tekken.json')
LOAD_OPTIONS = ('trust_remote_code', 'attn_implementation', *HUB_OPTIONS)


def check_options(options: dict[str, Any]) -> None:
    """Raises ValueError for a loading option that is not known."""
    for name in options:
        if name not in LOAD_OPTIONS:
            near = difflib.get_close_matches(name, LOAD_OPTIONS, n=1)
            hint = f'did you mean {near[0]!r}?' if near else f'known are {", ".join(LOAD_OPTIONS)}'
            raise ValueError(f'unknown argument {name!r}; {hint}')


def checked_path(pretrained: Any) -> str:
    """`pretrained` as text. Raises ValueError for something else than a name, and for a path where there is no model
    folder."""
    if not isinstance(pretrained, (str, os.PathLike)):
        raise ValueError(
            f'pretrained: a {type(pretrained).__name__} given; it must be a hub name or a folder (for a model that you '
            'have: Actor(model))'
        )
    name = os.fspath(pretrained)
    if name and Path(name).is_dir():
        return name
    if name and Path(name).exists():
        raise ValueError(f'pretrained={name!r} is a file; give the folder that save_pretrained wrote')
    if name.startswith(('/', '.', '~')) or name.count('/') > 1 or '\\' in name or not name.strip('/'):
        raise ValueError(
            f'pretrained={name!r}: there is no such folder, and it cannot be a hub name (name or owner/name)'
        )
    return name


def _explained(what: str, name: str, error: Exception) -> ValueError:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if 'trust_remote_code' in str(error):
        lines = [
            'it brings code of its own (auto_map in config.json), which is not run unless that is allowed: read it, '
            'then give --trust_remote_code (in Python trust_remote_code=True)'
        ]
    # A list follows a colon.
    reason = ' '.join(' '.join(lines).split()) if lines[0].rstrip().endswith(':') else lines[0]
    where = 'folder' if Path(name).is_dir() else 'hub name (there is no such folder)'
    return ValueError(f'cannot load {what} from the {where} {name!r}: {reason}')


def _models_inside(name: str) -> str:
    """What to give instead of a folder that holds no model: those inside it, where it is a training run's."""
    root = Path(name)
    inside = sorted(str(path.parent) for path in root.glob('*/config.json') if path.parent.name != 'initial')
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
    """The config of a hub name or folder; an adapter's is its base's. ValueError in one line when there is none, and
    for weights in fewer bits that cannot be read."""
    config = _read_config(pretrained, trust_remote_code, hub)
    to_be_dense(config, os.fspath(pretrained))
    return config


def _read_config(pretrained: str | os.PathLike[str], trust_remote_code: bool, hub: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    name = checked_path(pretrained)
    name = adapter_base(name) or name
    if Path(name).is_dir() and not Path(name, hub.get('subfolder', ''), 'config.json').is_file():
        raise ValueError(f'the folder {name!r} has no config.json, so it holds no model{_models_inside(name)}')
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, **hub)
    except (OSError, ValueError) as error:
        raise _explained('a model config', name, error) from None


QUANTIZED = {
    'bitsandbytes': 'bitsandbytes, 8 bits',
    'gptq': 'GPTQ',
    'awq': 'AWQ',
    'fp8': 'fp8',
    'mxfp4': 'MXFP4',
    'compressed-tensors': 'compressed-tensors',
}
"""how people call the methods of `quantization_config`; others by the name that stands there"""


def to_be_dense(config: Any, name: str) -> bool:
    """Whether the weights lie in bitsandbytes' 4 bits, which are made dense as they are read; that mark is then taken
    off the config. Raises ValueError for other quantized weights."""
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
        f'{name!r} holds quantized weights ({QUANTIZED.get(method, method)}), which cannot be trained here, nor be the '
        'frozen base of adapters; give the model in 16 bits that it was made from (--quantize nf4 puts its blocks into '
        '4 bits while it is loaded)'
    )


def load_tokenizer(pretrained: str | os.PathLike[str], *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a hub name or folder. Without a padding token it gets the end token's, which the masks tell
    apart. `for_encoder_decoder` on it says whether the model beside it is one (`chatgpt.dataset.formats`).

    An adapter's folder without one gives its base's. Raises ValueError where there is none.
    """
    from transformers import AutoTokenizer

    name = checked_path(pretrained)
    if not Path(name, 'tokenizer_config.json').is_file():
        name = adapter_base(name) or name
    if Path(name).is_dir() and not any(file for pattern in TOKENIZER_FILES for file in Path(name).glob(pattern)):
        raise ValueError(f'the folder {name!r} holds no tokenizer{_models_inside(name) or OTHER_TOKENIZER}')
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f'{_explained("a tokenizer", name, error)}{OTHER_TOKENIZER}') from None
    if not tokenizer.vocab_size:  # transformers makes an empty one of the config's family where files lack
        raise ValueError(f'{name!r} holds no whole tokenizer: it has an empty vocabulary{OTHER_TOKENIZER}')
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    with suppress(ValueError):  # a folder may hold a tokenizer alone
        config = load_config(name, trust_remote_code=trust_remote_code)
        tokenizer.for_encoder_decoder = bool(getattr(config, 'is_encoder_decoder', False))
    return tokenizer


def on_meta() -> bool:
    """Whether modules are built on the meta device now."""
    return torch.empty(0).device.type == 'meta'


def load_model(
    auto_class: str, pretrained: str | os.PathLike[str] | None, config: Any, *, checkpoint: bool = False, **options: Any
) -> Any:
    """A model of transformers' `auto_class` from a hub name or folder, or a new one from a config, in fp32.

    Args:
        config: is not changed.
        checkpoint: recompute activations in the backward pass (gradient checkpointing).
        options: see `LOAD_OPTIONS`.

    Raises:
        ValueError: both or neither of `pretrained` and `config`, an unknown option, or nothing can be loaded; one line.
    """
    if (pretrained is None) == (config is None):
        raise ValueError('give either pretrained (a hub name or folder) or config, not both')
    check_options(options)
    hub = _hub(options)
    build = {k: v for k, v in options.items() if k not in HUB_OPTIONS}
    if pretrained is None:
        cls = _class_for(auto_class, config, type(config).__name__)
        model = _from_config(cls, config, WeightsSource(kind='config', seed=draw_seed()), build)
    else:
        name = checked_path(pretrained)
        adapter = name if (base := adapter_base(name)) is not None else ''
        name = checked_path(base or name)
        source = WeightsSource(
            kind='pretrained',
            path=name,
            adapter=adapter,
            seed=draw_seed(),
            **{k: v for k, v in hub.items() if k != 'token'},
        )
        config = _read_config(name, options.get('trust_remote_code', False), hub)
        in_4bit = to_be_dense(config, name)
        cls = _class_for(auto_class, config, repr(name))
        if on_meta() or in_4bit:
            model = _from_config(cls, config, source, build)
            _take_generation_config(model, name, hub)
        else:
            # transformers draws what Marian's files lack before it is computed: as on the meta device, no draw counts
            apart = getattr(config, 'is_encoder_decoder', False)
            with torch.random.fork_rng(devices=[]) if apart else nullcontext():
                model = _from_files(cls, source, options)
        model.weights_source = _with_dtype(model.weights_source)
    if checkpoint:
        # transformers 5.17 has only the older name, which 5.23 deprecates
        enable = getattr(model, 'activation_checkpointing_enable', model.gradient_checkpointing_enable)
        try:
            enable({'use_reentrant': False})
        except ValueError:
            raise ValueError(
                f'checkpoint=True: {type(model).__name__} cannot recompute its activations; leave it out'
            ) from None
    return model


def _with_dtype(source: WeightsSource) -> WeightsSource:
    try:
        dtype, wide = stored_dtype(weight_files(source))
    except (OSError, ValueError):  # of a hub name, transformers may have found files elsewhere
        return source
    return replace(source, dtype=dtype, wide=wide)


def _class_for(auto_class: str, config: Any, name: str) -> Any:
    """transformers would make a causal language model of an encoder-decoder's decoder alone."""
    import transformers

    if getattr(config, 'is_encoder_decoder', False):
        auto_class = seq2seq_class(auto_class, config, name)
    return getattr(transformers, auto_class)


def _take_generation_config(model: Any, name: str, hub: dict[str, Any]) -> None:
    """The folder's generation settings, as `from_pretrained` would take them; those of the config where it has none."""
    from transformers import GenerationConfig

    if model.can_generate():
        with suppress(OSError):
            model.generation_config = GenerationConfig.from_pretrained(name, **hub)


def _from_files(cls: Any, source: WeightsSource, options: dict[str, Any]) -> Any:
    """`from_pretrained`, refusing what it only reports: a layer that it would draw at random, one that it would leave
    out, NaN."""
    from safetensors import SafetensorError

    safe = True
    with nullcontext() if Path(source.path).is_dir() else suppress(OSError):  # transformers may know the way
        for file in weight_files(source):
            open_weights(file)
            safe = file.suffix == '.safetensors'
    try:
        with _without_report():
            model, info = cls.from_pretrained(
                source.path,
                use_safetensors=safe,
                dtype=torch.float32,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **options,
            )
    except (OSError, ValueError, SafetensorError) as error:
        raise _explained('a model', source.path, error) from None
    except RuntimeError as error:  # parts that cannot be put together; what follows names them
        if 'conversion' not in str(error):
            raise
        model, info = None, {}
    problems = [info.get(f'{kind}_keys', ()) for kind in ('missing', 'unexpected', 'mismatched')]
    if model is None or (not fits(model, *problems) and _is_native(model)):
        # Tensor by tensor by the same tables of transformers: it finds some that `from_pretrained` misses in a bare
        # trunk, and names what is wrong.
        config = load_config(source.path, trust_remote_code=options.get('trust_remote_code', False), **_hub(options))
        model = _from_config(cls, config, source, {k: v for k, v in options.items() if k not in HUB_OPTIONS})
        _take_generation_config(model, source.path, _hub(options))
        return model

    def file_of(name: str) -> Any:
        files = weight_files(source) if Path(source.path).is_dir() else []
        if len(files) == 1:
            return files[0]
        named = (file for file in files if set(candidates(model, name)) & set(open_weights(file).keys()))
        return next(named, source.path)

    check_fit(model, file_of, *problems)
    for one, other in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        if model.get_parameter_or_buffer(one) is not model.get_parameter_or_buffer(other):
            raise not_tied(file_of(one), other, one)
    for name, parameter in model.named_parameters():
        check_finite(parameter, name, file_of)
    if source.adapter:
        adapter = MergedAdapter(model, source.adapter)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                adapter.add_to(name, parameter)
    model.weights_source = source
    return model


def _is_native(model: Any) -> bool:
    """Whether transformers has its code, and not the folder."""
    return type(model).__module__.startswith('transformers.')


def _hub(options: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in options.items() if k in HUB_OPTIONS}


@contextmanager
def _without_report() -> Iterator[None]:
    """Inside, transformers does not print its table of missing and unexpected tensors: what matters of it is an error
    here."""
    logger = logging.getLogger('transformers.modeling_utils')

    def is_other(record: logging.LogRecord) -> bool:
        return 'LOAD REPORT' not in str(record.msg)

    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


def _from_config(cls: Any, config: Any, source: WeightsSource, build: dict[str, Any]) -> Any:
    """A model that carries `source`; with its numbers, unless modules are built on the meta device now."""
    meta, device = on_meta(), torch.empty(0).device
    config = copy.deepcopy(config)
    try:
        with torch.device('meta'):
            model = cls.from_config(config, dtype=torch.float32, **build)
        native = _is_native(model)
        if native:
            all_to_meta(model)
        if not meta and not native:  # code of its own may fill buffers in its constructor
            with seeded(source.seed):
                model = cls.from_config(config, dtype=torch.float32, **build)
    except ValueError as error:
        raise ValueError(str(error).strip().splitlines()[0]) from None
    model.weights_source = source
    if not meta:
        if native:
            try:
                fill_model(model, source)
            except Uninitialised:
                with seeded(source.seed):
                    model = cls.from_config(config, dtype=torch.float32, **build)
                model.weights_source = source
        model.to(device)
    return model


def add_lora(model: Any, rank: int, bias: str, options: Mapping[str, Any] | None = None) -> None:
    """Adapters on `model`, drawn from the seed of its `WeightsSource`, or a new one. `options`: alpha, dropout,
    targets."""
    unknown = set(options or ()) - {'alpha', 'dropout', 'targets'}
    if unknown:
        raise ValueError(f'lora_options: {sorted(unknown)[0]!r} is not known; there are alpha, dropout and targets')
    lora.convert_to_lora(model, rank, bias=bias, **(options or {}))  # type: ignore[arg-type]
    source = getattr(model, 'weights_source', None)
    seed = draw_seed() if source is None else source.seed
    for name, layer in lora.lora_layers(model).items():
        reset_adapter(layer, seed, name)


def trunk_of(model: Any) -> Any:
    """The base model of `model`, with the record of where its weights come from. Raises ValueError for no transformers
    model."""
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f'model: a {type(model).__name__} given; it must be a transformers PreTrainedModel')
    base, source = base_model(model), getattr(model, 'weights_source', None)
    prefix = f'{model.base_model_prefix}.'
    if is_encoder_decoder(model):
        check_encoder_decoder(model.config, type(model).__name__)
        if has_no_base(model):
            base, prefix = encoder_decoder_trunk(model), ''
    if base is not model and source is not None and not hasattr(base, 'weights_source'):
        base.weights_source = replace(source, prefix=prefix)  # type: ignore[assignment]
    return base


class TakesModel:
    """Of a class that is built from a model: called with a name or folder, it says which class loads one."""

    by_name: ClassVar[str]

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


def load_causal_lm(pretrained: str | os.PathLike[str] | None = None, config: Any = None, **kwargs: Any) -> Any:
    """A causal language model, or an encoder-decoder's; see `load_model`."""
    return load_model('AutoModelForCausalLM', pretrained, config, **kwargs)


def load_base_model(pretrained: str | os.PathLike[str] | None = None, config: Any = None, **kwargs: Any) -> Any:
    """A model without a head; see `load_model`.

    Where transformers' AutoModel does not read a causal language model's folder (decoders of BART's kind, DeepSeek-V4),
    the trunk of that model.
    """
    try:
        return load_model('AutoModel', pretrained, config, **kwargs)
    except ValueError:
        if pretrained is None or on_meta():
            raise
        with suppress(ValueError):
            return trunk_of(load_causal_lm(pretrained, **kwargs))
        raise


def load_classifier(pretrained: str | os.PathLike[str], **kwargs: Any) -> Any:
    """A sequence-classification model; see `load_model`."""
    return load_model('AutoModelForSequenceClassification', pretrained, None, **kwargs)


def write_folder(
    model: Any,
    folder: str | os.PathLike[str],
    state_dict: dict[str, Any] | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """`model.save_pretrained` without its progress bar, in place of what was saved there before with its heads.

    Args:
        state_dict: replaces the model's own weights.
        dtype: of the weights in the files; None: that of the folder which the model was loaded from, and of a new model
            the one it has.

    Raises:
        ValueError: parts of weights, which a folder cannot hold.
    """
    from transformers.utils import logging

    if state_dict is None and cut_over(model) is not None:
        raise ValueError(
            'save_pretrained: this process has parts of the weights (tensor_parallel); save with '
            'trainer.save_pretrained or inside strategy.full_model(model, on_disk=FOLDER)'
        )
    source = getattr(model, 'weights_source', None)
    wanted: torch.dtype | None = dtype or getattr(source, 'dtype', None)
    if wanted is not None and (dtype is not None or wanted.itemsize < 4):
        state = model.state_dict() if state_dict is None else state_dict
        wide = source.wide if source is not None and dtype is None else ()
        state_dict = to_dtype(model, state, wanted, wide, widen=dtype is not None)
    else:
        wanted = None
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder, state_dict=state_dict)
        remove_heads(folder)  # not before: transformers may refuse, and then the earlier model still needs them
        share_by_umask(folder)
    finally:
        if shown:
            logging.enable_progress_bar()
    if wanted is not None:
        say_dtype(Path(folder), wanted)
