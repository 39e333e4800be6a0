"""Python as a tool: code that a model wrote runs in a process of its own, which has nothing and leaves nothing.

    outcome = run_python('print(6 * 7)')            # Outcome(output='42\\n', end='ok')
    tool = PythonTool(Limits(wall_s=2.0)); tool.python('print(6 * 7)')

What holds on Linux, by the kernel (`guards` tells whether it does here):

- *time*: wall and CPU seconds. *Memory*: address space; no shared memory that stays.
- *Output*: of standard output and error together; what is more ends the process.
- *Files*: an empty temporary folder, removed afterwards. Landlock refuses to open, make, rename or remove anything
  else, and to read anything but Python's own library; a size per file and of the folder.
- *Network*: none; seccomp refuses to make a socket, which asyncio's event loop needs too.
- *Processes*: none; seccomp refuses new processes and programs, and signals to others. Threads are allowed.
- *Secrets*: no environment variables, no open files, no standard input.

What it does not do: hide which paths exist and how large files are (`os.stat`), spare CPU and disk below these limits,
or hold against an error in the kernel. Who runs code of people who mean harm puts the whole run into a virtual machine.
Where the kernel has no Landlock (before Linux 5.13, or switched off) or no seccomp (other systems), Python's audit
hooks refuse in its place: they hold back code that errs, and code that means harm gets round them; a warning says so.
"""

from __future__ import annotations

import functools
import json
import os
import re
import selectors
import signal
import stat
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from chatgpt.environments.confined import CONFINED, MACHINES

PROGRAM = Path(__file__).with_name('confined.py')
LOOK_EVERY_S = 0.05
"""how often a running process is looked at for its files"""

End = Literal['ok', 'error', 'time', 'output', 'files', 'killed']


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What code may use.

    Raises:
        ValueError: a limit that is not positive.
    """

    wall_s: float = 5.0
    cpu_s: int = 5
    """CPU seconds of all threads together"""
    memory_mib: int = 256
    """address space, of which Python itself takes 20 to 40"""
    output_bytes: int = 10_000
    """of standard output and error together"""
    file_bytes: int = 1 << 20
    """of one file"""
    folder_bytes: int = 1 << 23
    """of all files together; looked at twenty times a second, so a fast writer gets a little further"""
    folder_entries: int = 100
    open_files: int = 32

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float('inf'):
                raise ValueError(f'Limits({name}={value!r}): give a number above 0')


class Outcome(NamedTuple):
    """What running code came to."""

    output: str
    """standard output and error as they were written; bytes that are no UTF-8 are replaced"""
    end: End
    """ok: exit code 0. error: another one, as after an exception. time, output, files: that limit ended it. killed: a
    signal did, as after a crash or at the limit of CPU seconds"""


class Guards(NamedTuple):
    """Which guards the kernel has, tried out."""

    files: bool
    """Landlock"""
    filter: bool
    """seccomp: sockets, processes, signals to others"""


def run_python(code: str, limits: Limits | None = None) -> Outcome:
    """Run code as a script in a confined process. Blocks for at most `limits.wall_s` and the moment that starting and
    clearing up take.

    Raises:
        RuntimeError: the process could not be confined, so nothing was run.
    """
    limits = limits or Limits()
    held = guards()
    if not all(held):
        _warn_once(held)
    return _run(code, limits, held)


@functools.cache
def guards() -> Guards:
    """What this machine's kernel can keep, tried out in a process once."""
    none = Guards(False, False)
    if sys.platform != 'linux' or os.uname().machine not in MACHINES or sys.byteorder != 'little':
        return none
    for held in (Guards(True, True), Guards(False, True), Guards(True, False)):
        try:
            if _run('', Limits(), held).end == 'ok':
                return held
        except RuntimeError:
            pass
    return none


@functools.cache
def _warn_once(held: Guards) -> None:
    missing = [
        *([] if held.files else ['Landlock, so files outside of the folder']),
        *([] if held.filter else ['seccomp, so network, processes and signals']),
    ]
    warnings.warn(
        f'PythonTool: this machine has no {" and no ".join(missing)} are guarded by Python alone, which code '
        'that means harm gets round; run it where nothing is worth taking',
        stacklevel=4,
    )


def _run(code: str, limits: Limits, held: Guards) -> Outcome:
    with tempfile.TemporaryDirectory(prefix='python-tool-', ignore_cleanup_errors=True) as place:
        folder = os.path.realpath(os.path.join(place, 'work'))
        os.mkdir(folder)
        settings = {
            'folder': folder,
            'readable': _readable(),
            'parent': os.getpid(),
            'cpu_s': limits.cpu_s,
            'memory': limits.memory_mib << 20,
            'file_bytes': limits.file_bytes,
            'open_files': limits.open_files,
            **held._asdict(),
        }
        # Not the interpreter of a virtual environment, whose folder the process has no business in.
        interpreter = getattr(sys, '_base_executable', '') or sys.executable
        process = subprocess.Popen(
            [interpreter, '-I', '-S', str(PROGRAM), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={},
            start_new_session=True,
        )
        try:
            output, end = _follow(process, code.encode('utf-8', 'replace'), folder, limits)
        finally:
            # Not reaped yet, so that the number of the group is still its own.
            _kill_group(process.pid)
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()
            _clear(folder)
    confined = output.startswith(CONFINED)
    text = output.removeprefix(CONFINED)[: limits.output_bytes].decode('utf-8', 'replace')
    if end == 'ok' and not confined:
        raise RuntimeError(f'PythonTool: the process could not be confined, and nothing was run: {text.strip()}')
    if end == 'ok' and process.returncode:
        end = 'killed' if process.returncode < 0 else 'error'
    return Outcome(text, end)


def _follow(process: subprocess.Popen[bytes], code: bytes, folder: str, limits: Limits) -> tuple[bytes, End]:
    """Hand over the code and read until the process ends or a limit is reached; 'ok' stands for its own end."""
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None and stdout is not None
    os.set_blocking(stdin.fileno(), False)
    output, written, deadline = bytearray(), 0, time.monotonic() + limits.wall_s
    with selectors.DefaultSelector() as selector, _told_of_its_end(process.pid) as its_end:
        if its_end is not None:
            selector.register(its_end, selectors.EVENT_READ)
        selector.register(stdout, selectors.EVENT_READ)
        selector.register(stdin, selectors.EVENT_WRITE)
        while True:
            ready = selector.select(max(0.0, min(LOOK_EVERY_S, deadline - time.monotonic())))
            for key, _ in ready:
                if key.fileobj is stdin:
                    written = _write(stdin, code, written)
                    if written >= len(code):
                        selector.unregister(stdin)
                        stdin.close()
                if key.fileobj is not stdout:
                    continue
                chunk = os.read(stdout.fileno(), 65536)
                output += chunk
                if len(output) > limits.output_bytes + len(CONFINED):
                    return bytes(output), 'output'
                if not chunk:
                    selector.unregister(stdout)
            ended = _has_ended(process.pid)
            if ended and not any(key.fileobj is stdout for key, _ in ready):
                return bytes(output), 'ok'
            if not ended and _too_much(folder, limits):
                return bytes(output), 'files'
            if time.monotonic() >= deadline and not ended:
                return bytes(output), 'time'


@contextmanager
def _told_of_its_end(pid: int) -> Iterator[int | None]:
    """A descriptor that can be read from when the process has ended, where the system has such; without it, the loop
    looks now and then."""
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


def _has_ended(pid: int) -> bool:
    """Whether the process has ended; leaves it to be waited for, so that its number is not given to another."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # it ended before; macOS says so of a group that has only ended ones
        pass


def _too_much(folder: str, limits: Limits) -> bool:
    total, entries, waiting = 0, 0, [folder]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as found:
                for entry in found:
                    entries += 1
                    if entries > limits.folder_entries:
                        return True
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    else:
                        total += entry.stat(follow_symlinks=False).st_blocks * 512
        except OSError:  # removed or locked meanwhile
            continue
    return total > limits.folder_bytes


def _clear(folder: str) -> None:
    """Empty the folder, whatever its modes and however deep: by open folders, since paths may be too long, and without
    recursion."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    here, entered = os.open(folder, flags), list[str]()
    try:
        while True:
            inner = None
            with os.scandir(here) as found:
                for entry in found:
                    if entry.is_dir(follow_symlinks=False):
                        inner = entry.name
                        break
                    os.unlink(entry.name, dir_fd=here)
            if inner is not None:
                os.chmod(inner, stat.S_IRWXU, dir_fd=here)
                entered.append(inner)
            elif not entered:
                return
            there = os.open('..' if inner is None else inner, flags, dir_fd=here)
            os.close(here)
            here = there
            if inner is None:
                os.rmdir(entered.pop(), dir_fd=here)
    finally:
        os.close(here)


@functools.cache
def _readable() -> list[str]:
    """What Python needs of the file system: its own library, the system's shared libraries."""
    import sysconfig

    own = [sysconfig.get_path('stdlib'), sysconfig.get_path('platstdlib'), os.path.join(sys.base_prefix, 'lib')]
    system = ['/lib', '/lib64', '/usr/lib', '/usr/lib64', '/etc/ld.so.cache', '/usr/share/zoneinfo']
    devices = ['/dev/null', '/dev/zero', '/dev/urandom']
    return [path for path in dict.fromkeys([*own, *system, *devices]) if path and os.path.exists(path)]


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
    """A class with one tool, `python`, in the shape that TRL's `environment_factory` takes. As the tools of an
    environment of your own, make it a base class or call its method from yours.

    Args:
        limits: what the code may use.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()

    def reset(self, **columns: Any) -> None:
        """Nothing is kept from one call to the next."""

    def python(self, code: str) -> str:
        """Run Python code and return what it prints. Nothing is kept between calls; there is no network.

        Args:
            code: The code to run. Print what you want to see.

        Returns:
            What the code printed, and the traceback of an exception.
        """
        outcome = run_python(code, self._limits)
        note = NOTES[outcome.end].format(limits=self._limits)
        lines = [outcome.output.rstrip('\n'), note]
        return '\n'.join(line for line in lines if line) or '[no output]'


BLOCK = re.compile(r'```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)', re.DOTALL)


def python_block(response: str) -> str | None:
    """The last fenced block of Python in a response, for an environment whose `step` runs it; None without one. A block
    that the response does not close counts as far as it goes.

    >>> python_block('So:\\n```python\\nprint(6 * 7)\\n```')
    'print(6 * 7)\\n'
    """
    blocks: list[str] = BLOCK.findall(response)
    return blocks[-1] if blocks else None
