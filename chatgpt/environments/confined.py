"""The program that `PythonTool` starts: `python -I -S confined.py SETTINGS`. It sets limits of its own process and runs
the code on standard input.

Imports only the standard library, because it is run by its path. bubblewrap isolates namespaces, files and the network;
the parent limits wall time and output, and ends the process.
"""

from __future__ import annotations

import json
import linecache
import os
import resource
import sys
import traceback
from types import ModuleType
from typing import Any

CONFINED = b'\0'
"""the first byte of the output, written before the code runs"""
KEYCTL = {'x86_64': 250, 'aarch64': 219}
"""number of the system call by `os.uname().machine`"""


def limit(settings: dict[str, Any]) -> None:
    for name, most in (
        ('RLIMIT_CPU', settings['cpu_s']),
        ('RLIMIT_AS', settings['memory']),
        ('RLIMIT_FSIZE', settings['file_bytes']),
        ('RLIMIT_NOFILE', settings['open_files']),
        ('RLIMIT_CORE', 0),
        ('RLIMIT_NPROC', settings['processes']),
    ):
        kind = getattr(resource, name, None)
        if kind is None or most is None:
            continue
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def run(source: bytes) -> int:
    """Runs the code as a script; prints an exception as Python does, beginning with the code's own frame."""
    text = source.decode('utf-8', 'replace')
    linecache.cache['main.py'] = (len(text), None, text.splitlines(keepends=True), 'main.py')
    module = ModuleType('__main__')
    sys.modules['__main__'] = module
    sys.argv = ['main.py']
    try:
        exec(compile(text, 'main.py', 'exec'), module.__dict__)
    except SystemExit:
        raise
    except SyntaxError as error:
        traceback.print_exception(error.with_traceback(None))
        return 1
    except BaseException as error:
        frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
        traceback.print_exception(error.with_traceback(frames))
        return 1
    return 0


def main() -> None:
    settings = json.loads(sys.argv[1])
    source = sys.stdin.buffer.read()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    sys.stdout.reconfigure(line_buffering=True, errors='backslashreplace')  # type: ignore[union-attr]
    if settings['processes'] is not None:
        # replaces the kernel's session keyring, which every namespace inherits, by an empty one
        import ctypes

        number = KEYCTL.get(os.uname().machine)
        if number is not None:
            ctypes.CDLL(None).syscall(ctypes.c_long(number), ctypes.c_long(1), None)  # KEYCTL_JOIN_SESSION_KEYRING
    limit(settings)
    os.write(1, CONFINED)
    sys.exit(run(source))


if __name__ == '__main__':
    main()
