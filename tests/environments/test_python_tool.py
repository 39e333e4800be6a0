"""Code that a model may write, at its worst, against a process that should not care."""

from __future__ import annotations

import inspect
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import pytest

from chatgpt.environments import confined, find_environment, python_tool
from chatgpt.environments.python_tool import Guards, Limits, PythonTool, guards, python_block, run_python

KERNEL = pytest.mark.skipif(
    guards() != Guards(True, True), reason='this kernel has no Landlock or no seccomp, or forbids them'
)
CALL = 'import ctypes; libc = ctypes.CDLL(None, use_errno=True)\n'


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path, monkeypatch):
    """The tool's folders are made in here, and all of them are gone afterwards."""
    folder = tmp_path / 'temporary'
    folder.mkdir()
    monkeypatch.setattr(tempfile, 'tempdir', str(folder))
    yield
    assert list(folder.iterdir()) == []


def run(code, **limits):
    return run_python(code, Limits(**({'wall_s': 30.0} | limits)))


def refused(code, word='PermissionError'):
    outcome = run(code)
    assert outcome.end == 'error' and word in outcome.output, outcome


# ---------------------------------------------------------------------- what it is for


def test_it_runs_code():
    assert run('print(6 * 7)') == ('42\n', 'ok')
    assert run('') == ('', 'ok')
    assert run('import fractions, json\nprint(json.dumps(str(fractions.Fraction(3, 6))))').output == '"1/2"\n'
    assert run("if __name__ == '__main__':\n    print('é')").output == 'é\n'
    assert run('import threading as t; x = t.Thread(target=print, args=("hi",)); x.start(); x.join()').output == 'hi\n'


def test_exceptions_are_shown_from_the_codes_own_frames_on():
    raised = run('x = 1\nprint(x / 0)')
    first = 'Traceback (most recent call last):\n  File "main.py", line 2, in <module>\n    print(x / 0)\n'
    assert raised.end == 'error' and raised.output.startswith(first)
    assert raised.output.endswith('\nZeroDivisionError: division by zero\n')
    syntax = run('def f(')
    assert (
        syntax.end == 'error' and syntax.output.startswith('  File "main.py", line 1') and 'confined' not in syntax[0]
    )


@pytest.mark.parametrize(('code', 'end'), [('sys.exit()', 'ok'), ('sys.exit(3)', 'error'), ('os._exit(0)', 'ok')])
def test_exits(code, end):
    assert run(f'import os, sys\nprint("so far", flush=True)\n{code}') == ('so far\n', end)


def test_a_file_of_its_own_in_an_empty_folder():
    code = """
import os
print(os.listdir('.'))
os.mkdir('d'); open('d/x', 'w').write('hello'); os.rename('d/x', 'y'); os.rmdir('d')
print(open('y').read(), os.listdir('.'))
"""
    assert run(code) == ("[]\nhello ['y']\n", 'ok')


def test_the_tool():
    tool = PythonTool(Limits(wall_s=30.0, output_bytes=20))
    assert tool.python('print(1)\nprint(2)') == '1\n2'
    assert tool.python('x = 1') == '[no output]'
    assert tool.python('print("x" * 100)') == f'{"x" * 20}\n[stopped after 20 bytes of output]'
    assert PythonTool(Limits(wall_s=0.4)).python('while True: pass') == '[stopped after 0.4 s]'
    assert tool.python('import os; os.abort()') == '[ended by a signal]'
    assert tool.reset(answer='7') is None
    public = [name for name in vars(PythonTool) if not name.startswith('_')]
    assert public == ['reset', 'python'], 'every further public method would be offered to the model'
    assert inspect.signature(tool.python).parameters['code'].annotation == 'str'


@pytest.mark.parametrize(
    ('response', 'block'),
    [
        ('So:\n```python\nprint(1)\n```\nand\n```py\nprint(2)\n```', 'print(2)\n'),
        ('```\nx\n```', 'x\n'),
        ('```python\nprint(1)', 'print(1)'),
        ('```json\n{}\n```', None),
        ('nothing', None),
    ],
)
def test_the_block_of_a_response(response, block):
    assert python_block(response) == block


@pytest.mark.parametrize('wrong', [{'wall_s': 0}, {'memory_mib': -1}, {'cpu_s': float('inf')}, {'open_files': True}])
def test_limits_are_numbers_above_0(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=rf'Limits\({name}=.*: give a number above 0'):
        Limits(**wrong)


# ---------------------------------------------------------------------- limits


@pytest.mark.parametrize('code', ['while True: pass', 'import time; time.sleep(600)'])
def test_time(code):
    assert run(code, wall_s=0.5) == ('', 'time')


def test_cpu_seconds():
    assert run('while True: pass', cpu_s=1) == ('', 'killed')


@pytest.mark.parametrize('code', ['bytearray(10**10)', 'x = []\nwhile True: x.append(bytes(10**7))'])
def test_memory(code):
    refused(code, 'MemoryError')


def test_recursion():
    refused('def f(): return f()\nf()', 'RecursionError')
    deep = 'import sys; sys.setrecursionlimit(10**8)\nclass A:\n  __getattr__ = lambda s, n: getattr(s, n)\nA().x'
    assert run(deep).end in ('error', 'killed')


def test_output():
    outcome = run('import sys\nwhile True: sys.stdout.write("x" * 10**6)', output_bytes=5000)
    assert outcome == ('x' * 5000, 'output')
    assert run('print("x" * 4999)', output_bytes=5000).end == 'ok'
    assert run('import sys; sys.stdout.buffer.write(bytes([0, 65, 255, 128]))') == ('\0A��', 'ok')
    assert run('import os; os.close(1); os.close(2); print(1)').end in ('ok', 'error')
    assert run('print("\\ud800")') == ('\\ud800\n', 'ok')


def test_files():
    refused('open("a", "wb").write(bytes(2 << 20))', 'File too large')
    many = 'n = 0\nwhile True:\n  n += 1; open(f"f{n}", "wb").write(bytes(1000))'
    assert run(many).end == 'files'
    assert (
        run('n = 0\nwhile True:\n  n += 1; open(f"f{n}", "wb").write(bytes(10**6))', folder_entries=10**6).end
        == 'files'
    )
    refused('x = [open("a", "w") for _ in range(100)]', 'Too many open files')
    deep = 'import os\nfor n in range(40): os.mkdir("d" * 200); os.chdir("d" * 200)'
    assert run(deep).end == 'ok', 'deeper than a path may be long'
    assert run('import os; os.mkdir("a"); os.mkdir("a/b"); os.umask(0o777); os.mkdir("c")').end == 'ok'


# ---------------------------------------------------------------------- attacks


@KERNEL
def test_no_new_processes():
    refused('import os\nwhile True: os.fork()')
    refused('import subprocess; subprocess.Popen(["/bin/sleep", "600"])')
    refused('import os; os.execv("/bin/sh", ["sh", "-c", "echo out"])')
    refused('import os; os.posix_spawn("/bin/sh", ["sh"], {})')
    refused('import multiprocessing as m; m.Process(target=print).start()')
    assert run(CALL + 'print(libc.fork(), libc.vfork(), ctypes.get_errno())').output == '-1 -1 1\n'


@KERNEL
def test_no_network():
    with socket.create_server(('127.0.0.1', 0)) as server:
        server.settimeout(0.2)
        address = server.getsockname()
        refused(f'import socket; socket.create_connection({address})')
        refused('import socket; socket.socket(socket.AF_UNIX)')
        refused(f'import urllib.request as u; u.urlopen("http://127.0.0.1:{address[1]}")', 'Operation not permitted')
        code = CALL + 'print(libc.socket(2, 1, 0), libc.syscall(425, 8, 0), libc.socketpair(1, 1, 0, bytes(8)))'
        assert run(code).output == '-1 -1 -1\n'
        with pytest.raises(TimeoutError):
            server.accept()


@KERNEL
def test_other_files_are_not_read_and_not_written(tmp_path):
    secret = tmp_path / 'secret'
    secret.write_text('s3cret')
    secret.chmod(0o640)
    os.utime(secret, (1e9, 1e9))
    before = secret.stat()
    for path in (secret, '/etc/passwd', f'/proc/{os.getpid()}/environ', '/proc/self/status', __file__):
        refused(f'open({str(path)!r}).read()')
    for code in (
        f'open({str(secret)!r}, "w")',
        f'open({str(tmp_path / "new")!r}, "w")',
        'open("/tmp/new", "w")',
        f'os.remove({str(secret)!r})',
        f'os.rename({str(secret)!r}, "mine")',
        f'os.truncate({str(secret)!r}, 0)',
        f'os.open({str(secret)!r}, os.O_TRUNC)',
        f'os.chmod({str(secret)!r}, 0)',
        f'os.utime({str(secret)!r})',
        f'os.chown({str(secret)!r}, 1, 1)',
        f'os.setxattr({str(secret)!r}, "user.x", b"y")',
        f'os.mkdir({str(tmp_path / "folder")!r})',
        f'os.listdir({str(tmp_path)!r})',
        f'os.symlink({str(secret)!r}, "l"); open("l").read()',
        'os.mkfifo("fifo")',
    ):
        refused(f'import os; {code}')
    outcome = run(f'import os; os.link({str(secret)!r}, "mine"); print(open("mine").read())')
    assert outcome.end == 'error' and 's3cret' not in outcome.output
    after = secret.stat()
    assert (after.st_mode, after.st_mtime, after.st_uid, after.st_nlink) == (before.st_mode, 1e9, before.st_uid, 1)
    assert secret.read_text() == 's3cret' and sorted(p.name for p in tmp_path.iterdir()) == ['secret', 'temporary']


@KERNEL
def test_the_trainer_is_out_of_reach():
    asked = []
    old = signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
    limits = os.sched_getaffinity(0)
    try:
        for code in (
            'os.kill(os.getppid(), signal.SIGUSR1)',
            'os.kill(-1, signal.SIGUSR1)',
            'os.kill(0, signal.SIGKILL)',
            'signal.pidfd_send_signal(os.pidfd_open(os.getppid()), signal.SIGUSR1)',
            'os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)',
            'os.sched_setaffinity(os.getppid(), {0})',
            'resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (3, 3))',
            'open(f"/proc/{os.getppid()}/mem", "r+b")',
        ):
            refused(f'import os, resource, signal; {code}')
        code = (
            CALL + 'import os; print(libc.ptrace(16, os.getppid(), 0, 0), libc.tgkill(os.getppid(), os.getppid(), 10))'
        )
        assert run(code).output == '-1 -1\n'
        assert run('import os, signal; os.kill(os.getpid(), signal.SIGKILL)').end == 'killed', 'itself it may'
    finally:
        signal.signal(signal.SIGUSR1, old)
    assert not asked and os.sched_getaffinity(0) == limits


@KERNEL
def test_limits_are_not_raised():
    refused('import resource as r; r.setrlimit(r.RLIMIT_AS, (-1, -1))', 'ValueError')
    refused('import resource as r; r.setrlimit(r.RLIMIT_CPU, (600, 600))', 'ValueError')
    code = CALL + 'print(libc.unshare(0x10000000), libc.prctl(1, 0, 0, 0, 0), libc.mount(b"/", b".", b"", 4096, 0))'
    assert run(code).output == '-1 -1 -1\n'
    refused('import multiprocessing.shared_memory as m; m.SharedMemory(create=True, size=10**9)')
    assert run(CALL + 'print(libc.shmget(0, 10**8, 0o1600))').output == '-1\n'


def test_it_has_nothing(monkeypatch):
    monkeypatch.setenv('TOKEN', 's3cret')
    code = """
import os, sys
print({k: v for k, v in os.environ.items() if k != 'LC_CTYPE'}, repr(sys.stdin.read()), sys.argv)
for n in range(3, 32):
    try: os.fstat(n); print('open', n)
    except OSError: pass
"""
    with open(os.devnull):
        assert run(code).output == "{} '' ['main.py']\n"
    refused('input()', 'EOFError')
    refused('import numpy', 'ModuleNotFoundError')


def test_it_ends_with_the_trainer(tmp_path):
    """Nobody else would end a process that sleeps when the trainer is killed."""
    code = 'from chatgpt.environments.python_tool import *; guards(); print(1, flush=True); '
    trainer = subprocess.Popen(
        [sys.executable, '-c', code + 'run_python("import time; time.sleep(600)", Limits(wall_s=600))'],
        env=os.environ | {'PYTHONPATH': str(Path(python_tool.__file__).parents[2]), 'TMPDIR': tempfile.gettempdir()},
        stdout=subprocess.PIPE,
    )
    trainer.stdout.readline()
    trainer.stdout.close()
    children = Path(f'/proc/{trainer.pid}/task/{trainer.pid}/children')
    deadline = time.monotonic() + 30
    while not (found := children.read_text().split()) and time.monotonic() < deadline:
        time.sleep(0.01)
    # It follows its parent from the moment on that it is confined, in which it has closed its standard input.
    child = int(found[0])
    while os.readlink(f'/proc/{child}/fd/0') != os.devnull and time.monotonic() < deadline:
        time.sleep(0.01)
    trainer.kill()
    trainer.wait()
    while Path(f'/proc/{child}').exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not Path(f'/proc/{child}').exists()
    for left in Path(tempfile.gettempdir()).iterdir():  # of a trainer that was killed its folders stay
        (left / 'work').rmdir()
        left.rmdir()


def decision(program, machine, number, *arguments, architecture=None):
    """What a filter decides of a system call, by running its instructions one at a time."""
    named = {'x86_64': 0xC000003E, 'aarch64': 0xC00000B7}[machine] if architecture is None else architecture
    data = struct.pack('=IIQ6Q', number, named, 0, *arguments, *[0] * (6 - len(arguments)))
    at = value = 0
    while True:
        code, when, otherwise, k = struct.unpack_from('=HBBI', program, 8 * at)
        at += 1
        if code == 0x20:
            (value,) = struct.unpack_from('=I', data, k)
        elif code == 0x54:
            value &= k
        elif code in (0x15, 0x35):
            at += when if (value == k if code == 0x15 else value >= k) else otherwise
        else:
            assert code == 0x06
            return {0x7FFF0000: 'allowed', 0x80000000: 'killed', 0x50001: 'EPERM', 0x50026: 'ENOSYS'}[k]


@pytest.mark.parametrize('machine', ['x86_64', 'aarch64'])
def test_what_the_filter_decides(machine):
    first = machine == 'x86_64'
    numbers = {'read': (0, 63), 'openat': (257, 56), 'socket': (41, 198), 'clone': (56, 220), 'clone3': (435, 435)}
    numbers |= {'kill': (62, 129), 'prlimit64': (302, 261), 'prctl': (157, 167), 'execve': (59, 221)}
    program = confined.filter_program(machine, 4242)

    def of(name, *arguments, **how):
        return decision(program, machine, numbers[name][0 if first else 1], *arguments, **how)

    assert of('read', 3) == 'allowed' and of('socket', 2, 1) == of('execve') == 'EPERM' and of('clone3') == 'ENOSYS'
    assert of('clone', 0x3D0F00) == 'allowed', 'a thread, with the flags of glibc'
    assert of('clone', 0x1200011) == of('clone', 0x10000000) == 'EPERM', 'a process, with those of fork; a namespace'
    assert of('kill', 4242, 9) == 'allowed'
    assert of('kill', 4241, 9) == of('kill', 0, 9) == of('kill', 2**64 - 1, 9) == 'EPERM'
    assert of('kill', (1 << 32) + 4242, 9) == 'allowed', 'the kernel reads 32 bits of it too'
    assert of('prlimit64', 0, 7) == 'allowed' and of('prlimit64', 17, 7) == 'EPERM'
    assert of('prctl', 1, 0) == 'EPERM' and of('prctl', 15) == 'allowed'
    assert of('openat', 0, 0, 0o1000) == 'EPERM', 'read-only and truncated'
    assert of('openat', 0, 0, 0o1101) == of('openat', 0, 0, 0) == 'allowed', 'written and truncated is for Landlock'
    assert of('read', architecture=0x40000003) == 'killed', 'system calls of i386'
    if first:
        assert decision(program, machine, 0x40000000 + 41) == 'killed', 'of x32'


@pytest.mark.parametrize(
    ('column', 'header'),
    list(enumerate(('/usr/include/x86_64-linux-gnu/asm/unistd_64.h', '/usr/include/asm-generic/unistd.h'))),
)
def test_numbers_of_system_calls(column, header):
    if not Path(header).exists():
        pytest.skip(f'{header} is not there')
    known = dict(re.findall(r'#define __NR(?:3264)?_(\w+)\s+(\d+)', Path(header).read_text()))
    calls = confined.DENIED | confined.UNKNOWN | {name: of[0] for name, of in confined.CONDITIONS.items()}
    newer = {'fchmodat2', 'setxattrat', 'removexattrat', 'file_setattr'} - known.keys()  # than these headers
    own = {name: str(numbers[column]) for name, numbers in calls.items() if numbers[column] is not None}
    assert {name: number for name, number in own.items() if name not in newer} == {
        name: known.get(name) for name in own if name not in newer
    }
    assert not (set(calls) - set(own)) & known.keys(), 'none is left out that this machine has'


# ---------------------------------------------------------------------- machines with less


def test_without_the_kernels_guards_it_says_so_once(monkeypatch, tmp_path):
    monkeypatch.setattr(python_tool, 'guards', lambda: Guards(False, False))
    python_tool._warn_once.cache_clear()
    with pytest.warns(UserWarning, match='this machine has no Landlock, so files .* and no seccomp, so network'):
        assert run('print(1)') == ('1\n', 'ok')
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        for code in (
            'import socket; socket.socket()',
            'import os; os.fork()',
            'import subprocess; subprocess.run(["true"])',
            'import os; os.kill(os.getppid(), 10)',
            'open("/etc/passwd")',
            f'open({str(tmp_path / "new")!r}, "w")',
            'import os; os.remove("/tmp/x")',
            'import os; os.listdir("/")',
            'import os; os.chmod(".", 0)',
            'import ctypes; ctypes.CDLL(None)',
        ):
            refused(code)
        assert run('import json; open("x", "w").write("y"); print(open("x").read())').output == 'y\n'
    python_tool._warn_once.cache_clear()


def test_a_process_that_cannot_be_confined_runs_nothing(monkeypatch):
    if guards() == Guards(False, False):
        pytest.skip('nothing to fail at')
    monkeypatch.setattr(python_tool.os, 'getpid', lambda: 1)  # its parent is another than it is told
    with pytest.raises(RuntimeError, match='could not be confined, and nothing was run'):
        run('print(1)')
    # What the code does at its end is no such sign.
    monkeypatch.undo()
    assert run('import os; os._exit(1)') == ('', 'error')


def test_as_an_environment_of_tools():
    environment = find_environment(PythonTool)()
    environment.reset(1)
    call = {'type': 'function', 'function': {'name': 'python', 'arguments': {'code': 'print(6 * 7)'}}}
    messages, _, terminated, truncated, _ = environment.step({'role': 'assistant', 'content': '', 'tool_calls': [call]})
    assert [(m['role'], m['content']) for m in messages] == [('tool', '42')] and not terminated and not truncated
    schema = find_environment(PythonTool).tools[0]['function']
    assert schema['name'] == 'python' and list(schema['parameters']['properties']) == ['code']
