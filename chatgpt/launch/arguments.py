"""Command lines: flags made from settings dataclasses, strategies and functions by name, errors in one line.

Every field of a settings class becomes a flag with the field's default and docstring, so that flags and Python API have
the same settings.
"""

from __future__ import annotations

import argparse
import ast
import errno
import inspect
import os
import select
import signal
import sys
import textwrap
import time
import typing
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import Field, fields
from functools import cache, partial
from types import MappingProxyType, SimpleNamespace
from typing import Any, NoReturn

from chatgpt.data.rewards.calling import made
from chatgpt.launch.config_values import metavar_of, typed_text
from chatgpt.launch.relaunch import is_reported, mark_reported
from chatgpt.names import choice_hint, hint
from chatgpt.registry import load_object
from chatgpt.rules import check
from chatgpt.strategies.registry import STRATEGY_OPTIONS, strategy_flag
from chatgpt.strategies.rules import PRECISION_RULES

ENVIRONMENT_ERRORS = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EISDIR))
"""errors of the operating system about a path, which the user can correct"""
OTHER_RANKS_WAIT_S = 1.0
"""seconds that ranks other than 0 wait before they print an error: torchrun ends them once rank 0 has ended"""


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` with errors of one line. Flags cannot be abbreviated; an error names the nearest flag."""

    def __init__(self, **options: Any) -> None:
        formatter = partial(argparse.RawDescriptionHelpFormatter, max_help_position=30)
        super().__init__(allow_abbrev=False, formatter_class=formatter, **options)
        if self.add_help:  # a parser with add_help=False adds --help and --help-all itself
            self.add_argument('--help-all', action='help', help=argparse.SUPPRESS)

    def error(self, message: str) -> NoReturn:
        print_error(f'error: {message}{choice_hint(message)} (--help lists what there is)')
        raise SystemExit(2)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        parsed, unknown = self.parse_known_args(args, namespace)
        if hasattr(parsed, 'words') and not any(text.startswith('-') for text in unknown):
            parsed.words, unknown = [*parsed.words, *unknown], []  # argparse leaves over words behind a flag
        if unknown:
            known = [name.lstrip('-') for action in self._actions for name in action.option_strings]
            flag = next((text for text in unknown if text.startswith('-')), unknown[0]).split('=')[0]
            self.error(f'unknown argument {flag!r}{hint(flag.lstrip("-"), known, "--")}')
        return parsed


hints_of: Callable[[type], dict[str, Any]] = cache(typing.get_type_hints)
"""returns the types of a settings class's fields"""


def field_docs(cls: type) -> dict[str, str]:
    """Returns the docstring under each field of a dataclass and its bases."""
    bases = [b for b in cls.__mro__[:-1] if '__annotations__' in vars(b)]
    return {name: doc for base in reversed(bases) for name, doc in _own_docs(base).items()}


@cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    """Returns the top-level classes of a module, which is parsed once for all of them."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


@cache
def _own_docs(cls: type) -> dict[str, str]:
    """Returns the docstring under each field that the class itself defines."""
    docs: dict[str, str] = {}
    definition = _classes(cls.__module__).get(cls.__qualname__)
    try:
        body = (definition or ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]).body  # type: ignore[attr-defined]
    except OSError:  # a class made by `type` has no source
        return docs
    for item, following in zip(body, body[1:], strict=False):
        is_doc = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and is_doc:
            docs[item.target.id] = ' '.join(str(following.value.value).split())  # type: ignore[attr-defined]
    return docs


def add_flag(
    group: Any,
    name: str,
    kind: Any,
    text: str,
    default: Any = argparse.SUPPRESS,
    *,
    choices: Iterable[str] = (),
    read: Callable[[str], Any] | None = None,
) -> None:
    """Adds a flag with a value of the annotated type, or of `read(text)`. A flag of a list may be given several times;
    a flag with default False needs no value. `choices`: see `metavar_of`."""
    options: dict[str, Any] = {
        'default': default,
        'help': text.replace('%', '%%'),
        'metavar': metavar_of(kind, choices),
    }
    if 'list[' in str(kind):
        group.add_argument(f'--{name}', action='append', **options)
    else:
        options |= {'nargs': '?', 'const': True} if default is False else {}
        group.add_argument(f'--{name}', type=read or partial(typed_text, hint=kind), **options)


def choices_of(f: Field[Any]) -> Iterable[str]:
    """Returns the names in the field's metadata: a registry, or the result of a function."""
    choices = f.metadata.get('choices', ())
    return choices() if callable(choices) else choices


def add_settings(
    parser: Any,
    cls: type,
    *,
    only: Iterable[str] = (),
    skip: Iterable[str] = (),
    read: Mapping[str, Callable[[str], Any]] = MappingProxyType({}),
) -> None:
    """Adds one flag per field of `cls`, or per field in `only`, with its default. `read`: functions that read the text
    of some fields."""
    hints, docs = hints_of(cls), field_docs(cls)
    for f in fields(cls):
        if f.name in (only or hints) and f.name not in skip:
            text = f'{docs.get(f.name, "")} (default: {"none" if f.default is None else f.default})'
            choices, reader = choices_of(f), read.get(f.name)
            add_flag(parser, f.name, hints[f.name], text, f.default, choices=choices, read=reader)


def add_strategy(parser: Any) -> None:
    """Adds the flags that `strategy_of` reads, for commands that do not train."""
    from chatgpt.launch.runs import StrategySettings

    of_training = ('deterministic', 'reproducible', 'atoms')
    add_settings(parser, StrategySettings, skip=of_training, read={'strategy': strategy_flag})


def world_size_from_env() -> int:
    return int(os.environ.get('WORLD_SIZE', '1'))


def processes_here() -> int:
    """Returns the number of processes of this launch on this machine."""
    return int(os.environ.get('LOCAL_WORLD_SIZE') or world_size_from_env())


def make_strategy(
    name: str, *, seed: int, precision: Any, remote_code: bool = False, timeout_s: float = 1800.0, **options: Any
) -> Any:
    """Returns a strategy by its command-line name, with the options of `strategy_by_name`.

    FSDP builds models on the meta device, so that no rank holds a whole one; not with `remote_code`, since code from a
    hub may compute buffers in the constructor, and the meta device would lose them.
    """
    from chatgpt.strategies.registry import strategy_by_name

    check(SimpleNamespace(strategy=name, precision=precision), PRECISION_RULES)
    options |= {'meta_init': not remote_code, 'timeout_s': timeout_s}
    return strategy_by_name(name, seed=seed, precision=precision, **options)


@contextmanager
def strategy_of(run: Any) -> Iterator[Any]:
    """Makes the strategy of a `chatgpt.launch.runs.Run`, or of the flags of `add_strategy`, and closes it at the end.

    A failure of one rank inside ends all ranks, also before training has begun.
    """
    strategy = make_strategy(
        run.strategy,
        seed=run.seed,
        precision=run.precision,
        remote_code=getattr(run, 'trust_remote_code', False),
        timeout_s=run.rank_timeout_s,
        **{name: getattr(run, name) for name in STRATEGY_OPTIONS if hasattr(run, name)},
    )
    with strategy, strategy.failure_guard():
        yield strategy


def load_function(spec: str) -> Callable[..., Any]:
    """Loads a function by 'package.module:name' or 'path/to/file.py:name'. A class is called without arguments.

    Raises:
        ValueError: if `spec` has another form, the module or name does not exist, or the class needs arguments.
    """
    function = load_object(spec)
    if not callable(function):
        raise ValueError(f'{spec!r} is of type {type(function).__name__}, which cannot be called')
    try:
        return made(function)
    except ValueError as error:
        raise ValueError(
            f'{spec!r}: {_one_line(error)}; name a function or object of your own file that does'
        ) from None


def run_main(main: Callable[[], Any]) -> None:
    """Runs the main function of a script and prints errors and warnings of this package as one line on stderr. An int
    that it returns is the exit code.

    A wrong argument ends with exit code 2, without a traceback. An error inside the user's reward function, in
    environments, of lost rollout workers or in writing the trained model ends with exit code 1: the same call may
    succeed, so a launcher tries it again. With CHATGPT_TRACEBACK=1 in the environment every error is raised with its
    traceback.
    """
    if hasattr(sys.stdout, 'reconfigure') and sys.stdout.errors == 'strict':
        sys.stdout.reconfigure(errors='backslashreplace')
    try:
        with _short_warnings():
            code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        if not _stdout_is_closed():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout at its exit
        raise SystemExit(128 + signal.SIGPIPE) from None
    except KeyboardInterrupt:
        if os.environ.get('RANK', '0') == '0':
            print('interrupted', file=sys.stderr, flush=True)
        raise SystemExit(130) from None
    except Exception as error:
        if os.environ.get('CHATGPT_TRACEBACK') or not _is_explained(error, main):
            raise
        print_error(f'error: {_one_line(error)}')
        # by name: importing the classes would import torch
        failed = ('RewardFunctionError', 'SaveError', 'WorkersLost', 'EnvironmentsHang', 'EpisodesFailed')
        again = type(error).__name__ in failed or str(error).startswith(tuple(f'rank 0: {name}: ' for name in failed))
        raise SystemExit(1 if again else 2) from None  # 2: the same call would fail again
    if isinstance(code, int) and code:
        raise SystemExit(code)


def _stdout_is_closed() -> bool:
    """Returns True if the closed pipe is stdout, as with `| head`, and not another pipe of the run."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)  # poll always reports errors
    except (OSError, ValueError):  # stdout has no file descriptor
        return False
    return any(events & select.POLLERR for _, events in poll.poll(0))


def print_error(what: str) -> None:
    """Prints an error, once for all ranks if the launcher makes that possible."""
    if os.environ.get('RANK', '0') != '0':
        time.sleep(OTHER_RANKS_WAIT_S)
    if not is_reported():
        print(what, file=sys.stderr, flush=True)
        mark_reported()


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f'{error.filename}: {error.strerror}'
    return ' '.join(str(error).split())


@contextmanager
def _short_warnings() -> Iterator[None]:
    """Shows warnings without the line of code that raised them."""
    before = warnings.formatwarning
    warnings.formatwarning = lambda message, category, filename, lineno, line=None: f'warning: {message}\n'
    try:
        yield
    finally:
        warnings.formatwarning = before


def _is_explained(error: Exception, main: Callable[[], Any]) -> bool:
    """Returns True for an error that needs no traceback: of a class of this package, or of one below raised in it."""
    if type(error).__module__.startswith('chatgpt.'):
        return True
    if os.environ.get('RANK', '0') != '0' and str(error).startswith('rank 0: '):  # rank 0 prints the traceback
        return True
    if isinstance(error, OSError) and error.errno in ENVIRONMENT_ERRORS and error.filename:
        return True
    if not isinstance(error, (ValueError, FileNotFoundError, ImportError, FloatingPointError)):
        return False
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None:
        return True
    return (
        traceback.tb_frame.f_globals.get('__name__', '').startswith('chatgpt')
        or traceback.tb_frame.f_code.co_filename == main.__code__.co_filename
    )
