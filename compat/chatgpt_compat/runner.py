"""Runs a script of another system with the served names of that system.

The script runs as `__main__` in this process, with its folder first in `sys.path`, as under `python script.py`.
"""

from __future__ import annotations

import ast
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from unittest.mock import patch

from chatgpt_compat import modules
from chatgpt_compat.accelerator import without_gpu
from chatgpt_compat.check import findings, read_script, uses
from chatgpt_compat.dropped import report as report_dropped
from chatgpt_compat.dropped import restore_dropped
from chatgpt_compat.modules import NotServed, serving
from chatgpt_compat.tables import load


def run(script: str, arguments: Sequence[str]) -> int:
    """Runs a script and returns the exit code: 1 if it raised. A `SystemExit` of the script propagates.

    Raises:
        ValueError: the file does not exist or is not Python.
    """
    tree = read_script(script)
    if os.environ.get('RANK', '0') == '0':
        report(script, tree)
    code = compile(tree, script, 'exec', dont_inherit=True)
    main = ModuleType('__main__')
    main.__dict__.update(__file__=script, __builtins__=__builtins__, __cached__=None)
    before = sys.modules['__main__'], sys.argv, sys.path[:]
    sys.modules['__main__'] = main
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        for system in {use.system for use in uses(tree)}:
            if system.before and modules.installed(system.package) is not None:
                load(system.before)()
        with patch.object(warnings, 'formatwarning', with_place), serving(), without_gpu(), restore_dropped():
            exec(code, main.__dict__)
    except NotServed as error:
        print(f'ImportError: {error} ({place(error, script)})', file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        raise
    except Exception as error:
        traceback.print_exception(error.with_traceback(from_script(error.__traceback__)))
        return 1
    finally:
        sys.modules['__main__'], sys.argv, sys.path[:] = before
        if os.environ.get('RANK', '0') == '0':
            report_dropped()
    return 0


def report(script: str, tree: ast.Module) -> None:
    """Prints on stderr which names of other systems the script uses and what serves each."""
    rows = {f.name: f.what for f in findings([u for u in uses(tree) if not u.keywords])}
    if not rows:
        print(f'chatgpt_compat: {script} uses no other system', file=sys.stderr, flush=True)
        return
    width = max(map(len, rows))
    lines = [f'chatgpt_compat: {script} uses', *(f'  {name:{width}}  {what}' for name, what in rows.items())]
    print(*lines, sep='\n', file=sys.stderr, flush=True)


def with_place(message: object, category: type[Warning], filename: str, lineno: int, line: str | None = None) -> str:
    """Formats a warning with the file and line of the script that caused it."""
    return f'{filename}:{lineno}: {category.__name__}: {message}\n'


def from_script(trace: TracebackType | None) -> TracebackType | None:
    """Returns a traceback without this package's frames."""
    frames = []
    while trace is not None:
        if Path(trace.tb_frame.f_code.co_filename).parent != Path(__file__).parent:
            frames.append(trace)
        trace = trace.tb_next
    for frame, following in zip(frames, [*frames[1:], None], strict=True):
        frame.tb_next = following
    return frames[0] if frames else None


def place(error: BaseException, script: str) -> str:
    """Returns the file and line of the script, or of a module beside it, that raised the error."""
    frames = [f for f in traceback.extract_tb(from_script(error.__traceback__)) if not f.filename.startswith('<frozen')]
    return f'{frames[-1].filename}, line {frames[-1].lineno}' if frames else script
