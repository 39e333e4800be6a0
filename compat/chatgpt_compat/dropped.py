"""Names and arguments that transformers 5, peft and datasets dropped, available again while a program runs.

`NAMES`, `ARGUMENTS` and `METHODS` are the tables. `restore_dropped()` makes their rows available inside its block and
restores the packages at its end; `used` collects the rows that a program uses.
"""

from __future__ import annotations

import argparse
import builtins
import functools
import importlib
import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

_AUXILIARY = ('transformers', 'peft', 'datasets', 'accelerate', 'chatgpt', 'chatgpt_compat', 'torch', 'trl')
"""packages that call one another by the current names"""
used: dict[str, str] = {}
"""dropped name that the program used → its sentence in the report"""


@dataclass(frozen=True)
class Name:
    """A dropped name.

    Args:
        since: the first version without it.
        target: 'module:attribute' that replaces it; 'module:' is the module.
    """

    since: str
    target: str

    def get(self) -> Any:
        module, _, attribute = self.target.partition(':')
        found = importlib.import_module(module)
        return getattr(found, attribute) if attribute else found

    @property
    def sentence(self) -> str:
        return f'dropped by {self.since}; replaced by {self.target.removesuffix(":").replace(":", ".")}'


def _names(module: str, since: str, target: str, names: str) -> dict[str, Name]:
    """Rows of one module; a target that ends in ':' is a module with attributes of the same names."""
    return {f'{module}.{n}': Name(since, target + n if target.endswith(':') else target) for n in names.split()}


_HERE = 'chatgpt_compat.dropped'
NAMES: dict[str, Name] = {
    **_names(
        'transformers',
        'transformers 5',
        'transformers:PreTrainedTokenizerFast',
        'BloomTokenizerFast GPTNeoXTokenizerFast GPTNeoXJapaneseTokenizerFast CodeGenTokenizerFast GPTJTokenizerFast '
        'ElectraTokenizerFast CohereTokenizerFast RetriBertTokenizerFast RealmTokenizerFast '
        'BlenderbotSmallTokenizerFast',
    ),
    **_names('transformers', 'transformers 5', f'{_HERE}:', 'AdamW'),
    **_names('transformers.optimization', 'transformers 5', f'{_HERE}:', 'AdamW'),
    **_names('transformers', 'transformers 5', 'transformers:AutoModelForCausalLM', 'AutoModelWithLMHead'),
    **_names('transformers', 'transformers 5', 'transformers:AutoModelForImageTextToText', 'AutoModelForVision2Seq'),
    **_names('transformers', 'transformers 5', 'transformers:LogitsProcessor', 'LogitsWarper'),
    **_names('transformers', 'transformers 4.43', 'chatgpt_compat.trl.core:', 'top_k_top_p_filtering'),
    **_names('transformers', 'transformers 4.52', f'{_HERE}:', 'load_tool Tool'),
    **_names('transformers', 'transformers 5', f'{_HERE}:not_available', 'is_tf_available is_flax_available'),
    **_names('transformers.utils', 'transformers 5', f'{_HERE}:not_available', 'is_tf_available is_flax_available'),
    **_names('transformers', 'transformers 4.41', f'{_HERE}:not_available', 'is_torch_tpu_available'),
    **_names('transformers.modeling_utils', 'transformers 5', 'transformers.initialization:', 'no_init_weights'),
    **_names('peft', 'peft 0.10', f'{_HERE}:', 'prepare_model_for_int8_training'),
    **_names('peft.utils', 'peft 0.10', f'{_HERE}:', 'prepare_model_for_int8_training'),
    'peft.utils.config': Name('peft 0.5', f'{_HERE}:peft_config_module'),
    'transformers.deepspeed': Name('transformers 5', 'transformers.integrations.deepspeed:'),
    'transformers.generation_utils': Name('transformers 4.25', 'transformers.generation.utils:'),
    'transformers.generation_logits_process': Name('transformers 4.25', 'transformers.generation.logits_process:'),
}
"""dropped name → what replaces it"""


@dataclass(frozen=True)
class Argument:
    """A dropped keyword argument: its current name in `today`, or '' and in `effect` why it has no effect."""

    since: str
    today: str = ''
    effect: str = 'no effect'

    @property
    def sentence(self) -> str:
        return f'dropped by {self.since}; {f"given as {self.today}=" if self.today else self.effect}'


_WHOLE = 'no effect: weights are loaded whole'
_TOKEN = Argument('transformers 5', 'token')
_QUANTIZED = {name: Argument('transformers 5', effect=_WHOLE) for name in ('load_in_8bit', 'load_in_4bit')}
ARGUMENTS: dict[str, dict[str, Argument]] = {
    'transformers.TrainingArguments': {
        'evaluation_strategy': Argument('transformers 4.46', 'eval_strategy'),
        'no_cuda': Argument('transformers 5', 'use_cpu'),
        'warmup_ratio': Argument('transformers 5', 'warmup_steps'),
        'push_to_hub_token': Argument('transformers 5', 'hub_token'),
        'per_gpu_train_batch_size': Argument('transformers 5', 'per_device_train_batch_size'),
        'per_gpu_eval_batch_size': Argument('transformers 5', 'per_device_eval_batch_size'),
        **{
            name: Argument('transformers 5')
            for name in (
                'overwrite_output_dir logging_dir save_safetensors group_by_length half_precision_backend fp16_backend '
                'fp16_opt_level jit_mode_eval use_ipex include_inputs_for_metrics use_mps_device ray_scope '
                'dispatch_batches split_batches past_index mp_parameters tpu_num_cores tpu_metrics_debug'
            ).split()
        },
    },
    'transformers.Trainer': {'tokenizer': Argument('transformers 5', 'processing_class')},
    'transformers.PreTrainedModel.from_pretrained': {'use_auth_token': _TOKEN, **_QUANTIZED},
    'transformers.models.auto.auto_factory._BaseAutoModelClass.from_pretrained': {
        'use_auth_token': _TOKEN,
        **_QUANTIZED,
    },
    'transformers.AutoConfig.from_pretrained': {'use_auth_token': _TOKEN},
    'transformers.AutoTokenizer.from_pretrained': {'use_auth_token': _TOKEN},
    'transformers.PreTrainedTokenizerBase.from_pretrained': {'use_auth_token': _TOKEN},
    'transformers.PreTrainedModel.push_to_hub': {'use_auth_token': _TOKEN},
    'transformers.PreTrainedTokenizerBase.push_to_hub': {'use_auth_token': _TOKEN},
    'datasets.load_dataset': {
        'use_auth_token': Argument('datasets 3', 'token'),
        'ignore_verifications': Argument('datasets 3'),
        'task': Argument('datasets 3'),
        'trust_remote_code': Argument('datasets 4'),
    },
}
"""callable → its dropped keyword arguments"""

_READ = {
    **dict.fromkeys(ARGUMENTS['transformers.TrainingArguments'], False),
    **dict.fromkeys(('logging_dir', 'dispatch_batches', 'split_batches', 'tpu_num_cores')),
    **dict.fromkeys(('half_precision_backend', 'fp16_backend'), 'auto'),
    'save_safetensors': True,
    'fp16_opt_level': 'O1',
    'ray_scope': 'last',
    'past_index': -1,
    'mp_parameters': '',
    'warmup_ratio': 0.0,
}
"""dropped argument of TrainingArguments → what reading it gives where it was not given; current names give theirs"""

METHODS = {
    'transformers.PreTrainedTokenizerBase.encode_plus': 'dropped by transformers 5; replaced by calling the tokenizer',
    'transformers.PreTrainedTokenizerBase.batch_encode_plus': 'dropped by transformers 5; replaced by calling the '
    'tokenizer',
    'transformers.PreTrainedTokenizerBase.apply_chat_template': 'returns ids, as before transformers 5',
    'transformers.TextClassificationPipeline(return_all_scores=)': 'dropped by transformers 5; every label, in the '
    'order of the labels',
    'transformers.Trainer.compute_loss': 'of a subclass, called without num_items_in_batch (transformers 4.46)',
}
"""method that works as before → its sentence in the report"""

_TOKENIZER = re.compile(r'transformers\.models\.\w+\.tokenization_\w+_fast')


def dropped(name: str) -> Name | None:
    """Returns the row of a dotted name or module, or None if it is not in the table."""
    if name in NAMES:
        return NAMES[name]
    if _TOKENIZER.fullmatch(name):
        return Name('transformers 5', 'transformers:')
    return None


def argument(function: str, keyword: str) -> Argument | None:
    """Returns the row of a callable's keyword argument, or None. `function` is a dotted name."""
    return next((rows[keyword] for name, rows in ARGUMENTS.items() if name == function and keyword in rows), None)


def note(name: str, sentence: str) -> None:
    used.setdefault(name, sentence)


def report() -> None:
    """Prints on stderr the dropped names that the program used."""
    if used:
        width = max(map(len, used))
        lines = [f'  {name:{width}}  {sentence}' for name, sentence in used.items()]
        print('chatgpt_compat: dropped names that it used', *lines, sep='\n', file=sys.stderr, flush=True)


# ---------------------------------------------------------------------- while a program runs


class _Modules(MetaPathFinder, Loader):
    """Finds the modules of the table, after all other finders."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        row = dropped(fullname)
        return None if row is None else ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        row = dropped(spec.name)
        assert row is not None
        note(spec.name, row.sentence)
        found = row.get()
        source = found() if callable(found) and not isinstance(found, ModuleType) else found
        module = ModuleType(spec.name, row.sentence)
        module.__dict__['__getattr__'] = functools.partial(getattr, source)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing: the attributes are set already."""


def _from_program() -> bool:
    """Returns True if the caller of a wrapped function is the program, not a package in `_AUXILIARY`."""
    frame = sys._getframe(2)
    return frame.f_globals.get('__name__', '').partition('.')[0] not in _AUXILIARY


def prepare(module: ModuleType, update: Callable[[], None] = lambda: None) -> None:
    """Makes the table's names of an imported module available as its attributes. update: called after a lazy module has
    loaded one of its own."""
    if '_dropped' in vars(module):
        return
    inner = {name.rpartition('.')[2] for name in NAMES if name.rpartition('.')[0] == module.__name__}
    own, lazy = vars(module).get('__getattr__'), getattr(module, '__getattr__', None)

    def find(name: str) -> Any:
        if name in inner and name not in vars(module):
            try:
                if lazy is not None:
                    return lazy(name)
            except (AttributeError, ImportError):
                pass
            row = NAMES[f'{module.__name__}.{name}']
            note(f'{module.__name__}.{name}', row.sentence)
            return row.get()
        if own is not None:
            return own(name)
        if lazy is None or name.startswith('__'):
            raise AttributeError(f'module {module.__name__!r} has no attribute {name!r}')
        found = lazy(name)
        update()
        return found

    vars(module).update(_dropped=own, __getattr__=find)


_MODULES = {name.rpartition('.')[0] for name in NAMES}


def _renamed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    rows = ARGUMENTS[name]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for old in rows.keys() & kwargs.keys():
            value = kwargs.pop(old)
            if value is not None:
                note(f'{name}({old}=)', rows[old].sentence)
                if rows[old].today:
                    kwargs.setdefault(rows[old].today, value)
                if name == _ARGUMENTS and hasattr(type(args[0]), old):
                    setattr(args[0], old, value)  # scripts read it
        return function(*args, **kwargs)

    return call


def _argument_patches(trainer: bool) -> Iterator[tuple[Any, str, Any]]:
    """Yields (owner, attribute, value) for each row of `ARGUMENTS`, either of transformers' trainer or all others."""
    for name in ARGUMENTS:
        owner_name, _, attribute = name.rpartition('.')
        if trainer != (attribute in ('Trainer', 'TrainingArguments')):
            continue
        owner: Any = _resolve(owner_name)
        value: Any = vars(owner).get(attribute) or getattr(owner, attribute)
        if inspect.isclass(value):
            yield value, '__init__', _renamed(name, inspect.getattr_static(value, '__init__'))
        elif isinstance(value, classmethod):
            yield owner, attribute, classmethod(_renamed(name, value.__func__))
        else:
            yield owner, attribute, _renamed(name, value)


def _patches() -> Iterator[tuple[Any, str, Any]]:
    """Yields (owner, attribute, value) for each attribute that is replaced, without those of transformers' trainer."""
    from transformers import PreTrainedTokenizerBase, TextClassificationPipeline

    yield from _argument_patches(trainer=False)

    def encode(self: Any, *args: Any, **kwargs: Any) -> Any:
        note(f'{_TOKENIZERS}.encode_plus', METHODS[f'{_TOKENIZERS}.encode_plus'])
        return self(*args, **kwargs)

    def batch_encode(self: Any, batch_text_or_text_pairs: Any, *args: Any, **kwargs: Any) -> Any:
        note(f'{_TOKENIZERS}.batch_encode_plus', METHODS[f'{_TOKENIZERS}.batch_encode_plus'])
        rows = list(batch_text_or_text_pairs)
        if rows and isinstance(rows[0], tuple):  # pairs of texts
            return self([row[0] for row in rows], [row[1] for row in rows], *args, **kwargs)
        return self(rows, *args, **kwargs)

    apply = PreTrainedTokenizerBase.apply_chat_template

    @functools.wraps(apply)
    def template(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _from_program() and 'return_dict' not in kwargs and kwargs.get('tokenize', True):
            note(f'{_TOKENIZERS}.apply_chat_template', METHODS[f'{_TOKENIZERS}.apply_chat_template'])
            kwargs['return_dict'] = False
        return apply(self, *args, **kwargs)

    sanitize = TextClassificationPipeline._sanitize_parameters

    def parameters(self: Any, return_all_scores: bool | None = None, **kwargs: Any) -> Any:
        before, forward, after = sanitize(self, **kwargs)
        if return_all_scores is not None:
            key = 'transformers.TextClassificationPipeline(return_all_scores=)'
            note(key, METHODS[key])
            after |= {'top_k': None if return_all_scores else 1, '_legacy': True}
        return before, forward, after

    yield PreTrainedTokenizerBase, 'apply_chat_template', template
    yield TextClassificationPipeline, '_sanitize_parameters', parameters
    for attribute, function in (('encode_plus', encode), ('batch_encode_plus', batch_encode)):
        if not hasattr(PreTrainedTokenizerBase, attribute):
            yield PreTrainedTokenizerBase, attribute, function


def _reads(today: str) -> property:
    """Returns an attribute under its old name."""
    return property(lambda self: getattr(self, today), lambda self, value: setattr(self, today, value))


def _add_flags(parser: Any, arguments: Any) -> None:
    """Adds the dropped flags of TrainingArguments to a parser, unless one of its classes has them."""

    class Old(argparse.Action):
        def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
            row, default = ARGUMENTS[_ARGUMENTS][self.dest], _READ[self.dest]
            note(f'{_ARGUMENTS}({self.dest}=)', row.sentence)
            if row.today:
                setattr(namespace, row.today, values)
            if not isinstance(vars(arguments).get(self.dest), property):  # the object has no field for it
                value = str(values).lower() in ('true', '1', 'yes') if isinstance(default, bool) else values
                setattr(arguments, self.dest, value)

    for name, row in ARGUMENTS[_ARGUMENTS].items():
        if f'--{name}' not in parser._option_string_actions:
            current = parser._option_string_actions.get(f'--{row.today}')
            given: dict[str, Any] = {'nargs': '?', 'const': 'True'} if current is None else {'type': current.type}
            parser.add_argument(f'--{name}', action=Old, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **given)


def _trainer_patches() -> Iterator[tuple[Any, str, Any]]:
    """As `_patches`, of transformers' trainer, which takes seconds to import."""
    from transformers import HfArgumentParser, Trainer, TrainingArguments

    yield from _argument_patches(trainer=True)
    for name, row in ARGUMENTS[_ARGUMENTS].items():
        if not hasattr(TrainingArguments, name):
            renamed = row.today and name != 'warmup_ratio'  # which is no number of steps
            yield TrainingArguments, name, _reads(row.today) if renamed else _READ[name]

    make_parser = HfArgumentParser.__init__

    def parser_init(self: Any, *args: Any, **kwargs: Any) -> None:
        make_parser(self, *args, **kwargs)
        if any(issubclass(kind, TrainingArguments) for kind in self.dataclass_types):
            _add_flags(self, TrainingArguments)

    yield HfArgumentParser, '__init__', parser_init

    start = TrainingArguments.__post_init__

    def post_init(self: Any) -> None:
        if self.optim == 'adamw_hf':
            note("transformers.TrainingArguments(optim='adamw_hf')", "dropped by transformers 5; 'adamw_torch'")
            self.optim = 'adamw_torch'
        if not torch.cuda.is_available():  # 16 bits are an error then, unless on a CPU
            self.use_cpu = self.use_cpu or self.bf16 or self.bf16_full_eval
        start(self)

    trainer = Trainer.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        loss = type(self).compute_loss
        parameters = inspect.signature(loss).parameters.values()
        if not any(p.name == 'num_items_in_batch' or p.kind is p.VAR_KEYWORD for p in parameters):
            note('transformers.Trainer.compute_loss', METHODS['transformers.Trainer.compute_loss'])

            def compute(model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
                return loss(self, model, inputs, return_outputs)

            self.compute_loss = compute
        trainer(self, *args, **kwargs)

    yield TrainingArguments, '__post_init__', post_init
    yield Trainer, '__init__', init


_TOKENIZERS, _ARGUMENTS = 'transformers.PreTrainedTokenizerBase', 'transformers.TrainingArguments'


def _resolve(name: str) -> Any:
    """Returns the module, class or function of a dotted name."""
    parts = name.split('.')
    for end in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module('.'.join(parts[:end]))
        except ImportError:
            continue
        return functools.reduce(getattr, parts[end:], found)
    raise ImportError(f'no module {parts[0]}')


def _is_loaded(name: str) -> bool:
    """Returns True if a package has been imported to its end."""
    spec = getattr(sys.modules.get(name), '__spec__', None)
    return spec is not None and not getattr(spec, '_initializing', False)


def _is_loading() -> bool:
    """Returns True while a module of transformers is being imported: an import that a patch needs may be circular."""
    names = [name for name in sys.modules if name.startswith('transformers.')]
    return any(getattr(getattr(sys.modules.get(name), '__spec__', None), '_initializing', False) for name in names)


@contextmanager
def restore_dropped() -> Iterator[None]:
    """Makes the names and arguments of the tables available inside the block, and restores the packages at the end."""
    used.clear()
    finder = _Modules()
    sys.meta_path.append(finder)
    with ExitStack() as stack:
        original = builtins.__import__
        waiting = [  # modules, and what is patched once one of them has been imported
            (('transformers', 'datasets'), _patches),
            (('transformers.trainer', 'transformers.training_args'), _trainer_patches),
        ]

        def update() -> None:
            while row := next((row for row in waiting if any(map(_is_loaded, row[0])) and not _is_loading()), None):
                waiting.remove(row)  # first, since patches import, which calls this again
                for owner, attribute, value in row[1]():
                    stack.enter_context(patch.object(owner, attribute, value, create=True))
            for name in _MODULES:
                if (module := sys.modules.get(name)) is not None:
                    prepare(module, update)

        def import_(*args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            update()
            return found

        stack.enter_context(patch.object(builtins, '__import__', import_))
        update()
        try:
            yield
        finally:
            sys.meta_path.remove(finder)
            for module in [sys.modules[name] for name in _MODULES if name in sys.modules]:
                vars(module).pop('__getattr__', None)
                if (own := vars(module).pop('_dropped', None)) is not None:
                    vars(module)['__getattr__'] = own
            for name, module in list(sys.modules.items()):
                if isinstance(getattr(module, '__loader__', None), _Modules):
                    del sys.modules[name]


# ---------------------------------------------------------------------- replacements


def not_available(*_: Any, **__: Any) -> bool:
    """Returns False: the package is no longer supported."""
    return False


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` with the arguments and defaults of transformers' class. Raises ValueError for
    `correct_bias=False`."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        correct_bias: bool = True,
        no_deprecation_warning: bool = False,
    ) -> None:
        if not correct_bias:
            raise ValueError('AdamW: correct_bias=False cannot be honoured: torch.optim.AdamW corrects; leave it out')
        super().__init__(params, lr, betas, eps, weight_decay)


def prepare_model_for_int8_training(
    model: Any,
    output_embedding_layer_name: str = 'lm_head',
    use_gradient_checkpointing: bool = True,
    layer_norm_names: Any = (),
) -> Any:
    """Calls `peft.prepare_model_for_kbit_training`. Names of layers have no effect, since weights are not quantized."""
    from peft import prepare_model_for_kbit_training

    return prepare_model_for_kbit_training(model, use_gradient_checkpointing=use_gradient_checkpointing)


def peft_config_module() -> ModuleType:
    """Returns `peft.config` with the enums that were in `peft.utils.config`."""
    import peft

    module = ModuleType('peft.utils.config')
    module.__dict__.update({n: v for n, v in vars(peft.config).items() if not n.startswith('__')})
    module.__dict__.update(TaskType=peft.TaskType, PeftType=peft.PeftType)
    return module


class Tool:
    """Base class of the tools that `load_tool` loads, with `name`, `description` and `__call__`."""

    name = description = ''

    def setup(self) -> None:
        """Does nothing; a subclass may load models here."""


def load_tool(task_or_repo_id: str, *_: Any, **__: Any) -> Any:
    """Returns the tool of a local folder with `tool_config.json`; its `tool_class` is 'module.Class' of a file in the
    folder. Raises ValueError for any other name: code from the hub is not run."""
    config = Path(task_or_repo_id) / 'tool_config.json'
    if not config.is_file():
        raise ValueError(f'load_tool({task_or_repo_id!r}): not a folder with tool_config.json; download the tool first')
    module_name, _, attribute = json.loads(config.read_text(encoding='utf-8'))['tool_class'].partition('.')
    spec = importlib.util.spec_from_file_location(f'tool_{module_name}', config.parent / f'{module_name}.py')
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, attribute)()
