"""Python as a tool: runs generated code in a separate process, under bubblewrap.

    outcome = run_python('print(6 * 7)')            # Outcome(output='42\\n', end='ok')
    tool = PythonTool(Limits(wall_s=2.0)); tool.python('print(6 * 7)')

bubblewrap (`bwrap`) gives each call its own namespaces: no network, no other processes, no environment variables, and
of the file system only Python's library, read-only, and an empty folder in memory. Resource limits bound time, memory,
files and processes. docs/environments/python.md lists what is guaranteed and what is not.
"""

from __future__ import annotations

import functools
import json
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from chatgpt.environments.confined import CONFINED
from chatgpt.environments.host import kill_group

PROGRAM = Path(__file__).with_name('confined.py')
POLL_S = 0.05
"""interval of checking the files of a running process"""

End = Literal['ok', 'error', 'time', 'output', 'files', 'killed']


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Resource limits of code. Raises ValueError for a limit that is not positive."""

    wall_s: float = 5.0
    cpu_s: int = 5
    """CPU seconds of all threads together"""
    memory_mib: int = 256
    """address space of a process; Python itself takes 20 to 40"""
    output_bytes: int = 10_000
    """of standard output and error together"""
    file_bytes: int = 1 << 20
    """of one file"""
    folder_bytes: int = 1 << 23
    """of all files together"""
    folder_entries: int = 100
    """checked twenty times per second, so fast code may exceed it a little"""
    open_files: int = 32
    processes: int = 16
    """processes and threads together; `memory_mib` and `cpu_s` apply to each process"""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float('inf'):
                raise ValueError(f'Limits({name}={value!r}): give a number above 0')
            if name != 'wall_s' and not isinstance(value, int):
                raise ValueError(f'Limits({name}={value!r}): give a whole number')


class Outcome(NamedTuple):
    """The result of running code."""

    output: str
    """standard output and error together; bytes that are not UTF-8 are replaced"""
    end: End
    """ok: exit code 0. error: another exit code, as after an exception. time, output, files: ended by that limit.
    killed: ended by a signal, as after a crash or at the limit of CPU seconds"""


def run_python(code: str, limits: Limits | None = None, *, unsafe: bool = False) -> Outcome:
    """Runs code as a script in a separate process. Blocks for at most `limits.wall_s` plus the time of starting and
    cleaning up.

    Args:
        code: the script.
        limits: its resource limits.
        unsafe: trusts the code and runs it without bubblewrap, as a process of this user in a temporary folder, with
            limits of time, memory, output and size per file.

    Raises:
        ValueError: bubblewrap is missing or does not work here; nothing was run.
        RuntimeError: the process could not be started; nothing was run.
    """
    limits = limits or Limits()
    if not unsafe:
        check_sandbox()
        return _run(code, limits, bubblewrap=True)
    with tempfile.TemporaryDirectory(prefix='python-tool-', ignore_cleanup_errors=True) as folder:
        return _run(code, limits, bubblewrap=False, folder=folder)


def check_sandbox() -> None:
    """Tests bubblewrap, once per process. Raises ValueError of one line: what is missing, and how to install it."""
    problem = _problem()
    if problem:
        raise ValueError(
            f'PythonTool: {problem}; it needs bubblewrap 0.8 or newer (apt-get install bubblewrap, or dnf install '
            'bubblewrap) and user namespaces; trusted code runs without it by PythonTool(unsafe=True)'
        )


@functools.cache
def _problem() -> str:
    if shutil.which('bwrap') is None:
        return 'bwrap is not installed'
    if os.geteuid() == 0 and shutil.which('setpriv') is None:
        return 'setpriv (package util-linux) is not installed'
    try:
        outcome = _run('', Limits(wall_s=60.0), bubblewrap=True)
    except RuntimeError as error:
        return f'bwrap does not work here ({str(error).rpartition("nothing was run: ")[2]})'
    return '' if outcome.end == 'ok' else f'bwrap does not work here ({outcome.end})'


def _run(code: str, limits: Limits, *, bubblewrap: bool, folder: str | None = None) -> Outcome:
    settings = {
        'cpu_s': limits.cpu_s,
        'memory': limits.memory_mib << 20,
        'file_bytes': limits.file_bytes,
        'open_files': limits.open_files,
        # Outside of a user namespace the limit counts all processes of the user.
        'processes': limits.processes if bubblewrap else None,
    }
    info_read, info_write = os.pipe()
    program = [_interpreter(), '-I', '-S', INSIDE if bubblewrap else str(PROGRAM), json.dumps(settings)]
    try:
        process = subprocess.Popen(
            [*_bubblewrap(limits, info_write), *program] if bubblewrap else program,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={},
            start_new_session=True,
            pass_fds=[info_write] if bubblewrap else [],
        )
        os.close(info_write)
        info_write = -1
        try:
            output, end = _follow(process, code.encode('utf-8', 'replace'), info_read, limits)
        finally:
            # Before reaping, so that the group's id cannot be reused. bwrap's children end with it.
            kill_group(process.pid)
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()
    finally:
        os.close(info_read)
        if info_write >= 0:
            os.close(info_write)
    text = output.removeprefix(CONFINED)[: limits.output_bytes].decode('utf-8', 'replace')
    if end == 'ok' and not output.startswith(CONFINED):
        raise RuntimeError(f'PythonTool: nothing was run: {" ".join(text.split())}')
    if end == 'ok' and process.returncode:
        # bwrap's exit code is 128 plus the number of the signal
        signalled = bubblewrap and 128 < process.returncode < 128 + signal.NSIG
        end = 'killed' if process.returncode < 0 or signalled else 'error'
    return Outcome(text, end)


# ---------------------------------------------------------------------- the command line of bubblewrap

INSIDE = '/confined.py'
NOBODY = 65534
NAMESPACES = [
    *('--unshare-all', '--unshare-user', '--disable-userns', '--cap-drop', 'ALL', '--hostname', 'python'),
    *('--clearenv', '--new-session', '--die-with-parent'),
]


def _bubblewrap(limits: Limits, info: int) -> list[str]:
    """Returns bwrap with its options. The code must not be pid 1, which ignores signals without a handler."""
    bwrap, outer = shutil.which('bwrap') or 'bwrap', []
    shown, hidden = _places()
    if os.geteuid() == 0:
        # The kernel does not limit the processes of root, so the sandbox runs as the user nobody. That user may not be
        # able to read all of the paths, so root mounts them under /tmp first.
        outer = [bwrap, '--die-with-parent', '--dev-bind', '/', '/', '--tmpfs', '/tmp']
        for number, (source, _) in enumerate(shown):
            outer += ['--ro-bind', source, f'/tmp/{number}']
        setpriv = shutil.which('setpriv') or 'setpriv'
        outer += [setpriv, f'--reuid={NOBODY}', f'--regid={NOBODY}', '--clear-groups', '--pdeathsig=KILL']
        shown = [(f'/tmp/{number}', place) for number, (_, place) in enumerate(shown)]
    inner = [bwrap, *NAMESPACES, '--info-fd', str(info)]
    for source, place in shown:
        inner += ['--ro-bind', source, place]
    for place in hidden:
        inner += ['--tmpfs', place, '--remount-ro', place]
    for device in ('/dev/null', '/dev/zero', '/dev/urandom'):
        inner += ['--dev-bind', device, device]
    inner += ['--size', str(limits.folder_bytes), '--tmpfs', '/tmp', '--remount-ro', '/', '--chdir', '/tmp']
    return [*outer, *inner]


def _interpreter() -> str:
    """Returns the base interpreter, not that of a virtual environment, which the code must not read."""
    return os.path.realpath(getattr(sys, '_base_executable', '') or sys.executable)


@functools.cache
def _places() -> tuple[list[tuple[str, str]], list[str]]:
    """Returns the paths that Python needs, each with its path inside the sandbox: its library and the system's shared
    libraries; and folders of installed packages in these, which are empty inside."""
    library = sysconfig.get_path('stdlib')
    own = [os.path.join(sys.base_prefix, 'lib'), os.path.join(sys.base_exec_prefix, sys.platlibdir), library]
    system = ['/lib', '/lib64', '/usr/lib', '/usr/lib64', '/etc/ld.so.cache', '/usr/share/zoneinfo']
    shown = [(path, path) for path in dict.fromkeys([*system, *own, _interpreter()]) if os.path.exists(path)]
    hidden = [os.path.join(library, 'site-packages'), os.path.join(library, 'dist-packages')]
    hidden += ['/usr/lib/python3/dist-packages']
    return [*shown, (str(PROGRAM), INSIDE)], [path for path in hidden if os.path.isdir(path)]


# ---------------------------------------------------------------------- following the process


def _follow(process: subprocess.Popen[bytes], code: bytes, info_read: int, limits: Limits) -> tuple[bytes, End]:
    """Writes the code and reads output until the process ends ('ok') or reaches a limit."""
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None and stdout is not None
    os.set_blocking(stdin.fileno(), False)
    output, written, deadline = bytearray(), 0, time.monotonic() + limits.wall_s
    folder: int | None = None
    with selectors.DefaultSelector() as selector, _exit_descriptor(process.pid) as its_end, ExitStack() as stack:
        if its_end is not None:
            selector.register(its_end, selectors.EVENT_READ)
        selector.register(stdout, selectors.EVENT_READ)
        selector.register(stdin, selectors.EVENT_WRITE)
        while True:
            ready = selector.select(max(0.0, min(POLL_S, deadline - time.monotonic())))
            for key, _ in ready:
                if key.fileobj is stdin:
                    written = _write(stdin, code, written)
                    if written >= len(code):
                        selector.unregister(stdin)
                        stdin.close()
                if key.fileobj is not stdout:
                    continue
                chunk = os.read(stdout.fileno(), 65536)
                if not output and chunk.startswith(CONFINED):
                    folder = _open_folder(info_read, stack)
                output += chunk
                if len(output) > limits.output_bytes + len(CONFINED):
                    return bytes(output), 'output'
                if not chunk:
                    selector.unregister(stdout)
            # WNOWAIT leaves the process unreaped, so that its pid is not reused
            ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
            if ended and any(key.fileobj is stdout for key, _ in selector.select(0)):
                continue  # what it wrote last is not read yet
            if folder is not None:
                held = os.fstatvfs(folder)
                if held.f_bfree == 0 or held.f_files - held.f_ffree - 1 > limits.folder_entries:
                    return bytes(output), 'files'
            if ended:
                return bytes(output), 'ok'
            if time.monotonic() >= deadline:
                return bytes(output), 'time'


def _open_folder(info_read: int, stack: ExitStack) -> int | None:
    """Opens the sandbox's folder through the pid that bwrap reports; None without bwrap."""
    os.set_blocking(info_read, False)
    try:
        child = json.loads(os.read(info_read, 4096) or 'null')
        if child is None:
            return None
        opened = os.open(f'/proc/{child["child-pid"]}/root/tmp', os.O_PATH | os.O_DIRECTORY)
    except OSError:  # it has ended
        return None
    stack.callback(os.close, opened)
    return opened


@contextmanager
def _exit_descriptor(pid: int) -> Iterator[int | None]:
    """Yields a descriptor that becomes readable when the process ends, or None on systems without pidfd, where the loop
    polls."""
    try:
        opened = os.pidfd_open(pid)
    except (AttributeError, OSError):
        yield None
        return
    try:
        yield opened
    finally:
        os.close(opened)


def _write(stdin: IO[bytes], code: bytes, written: int) -> int:
    try:
        return written + os.write(stdin.fileno(), code[written : written + 65536])
    except BlockingIOError:
        return written
    except BrokenPipeError:
        return len(code)


# ---------------------------------------------------------------------- as a tool


NOTES = {
    'ok': '',
    'error': '',
    'time': '[stopped after {limits.wall_s:g} s]',
    'output': '[stopped after {limits.output_bytes} bytes of output]',
    'files': '[stopped: its files are too many or too large]',
    'killed': '[ended by a signal]',
}


class PythonTool:
    """A class with one tool, `python`, for TRL's `environment_factory`. To use it in your own environment, derive from
    it or call its method.

    Args:
        limits: resource limits of the code.
        unsafe: trusts the code and runs it without bubblewrap (see `run_python`).

    Raises:
        ValueError: bubblewrap is missing or does not work here.
    """

    def __init__(self, limits: Limits | None = None, *, unsafe: bool = False) -> None:
        self._limits, self._unsafe = limits or Limits(), unsafe
        if not unsafe:
            check_sandbox()

    def reset(self, **columns: Any) -> None:
        """Does nothing: calls share no state."""

    def python(self, code: str) -> str:
        """Run Python code and return what it prints. Nothing is kept between calls; there is no network.

        Args:
            code: The code to run. Print what you want to see.

        Returns:
            What the code printed, and the traceback of an exception.
        """
        outcome = run_python(code, self._limits, unsafe=self._unsafe)
        note = NOTES[outcome.end].format(limits=self._limits)
        lines = [outcome.output.rstrip('\n'), note]
        return '\n'.join(line for line in lines if line) or '[no output]'


BLOCK = re.compile(r'```[ \t]*([\w+-]*)[ \t]*\n(.*?)(?:```|\Z)', re.DOTALL)
PYTHON = ('', 'python', 'py', 'python3')
"""languages of fenced blocks that are Python"""


def python_block(response: str) -> str | None:
    """Returns the last fenced block of Python in a response, for an environment that runs it in `step`; None without
    one. A block without an end fence extends to the end of the response.

    >>> python_block('So:\\n```python\\nprint(6 * 7)\\n```')
    'print(6 * 7)\\n'
    """
    blocks = [code for language, code in BLOCK.findall(response) if language.lower() in PYTHON]
    return blocks[-1] if blocks else None
