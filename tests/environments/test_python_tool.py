"""Malicious and faulty code in the sandbox."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from limits import until

from chatgpt.environments import find_environment, python_tool
from chatgpt.environments.python_tool import Limits, PythonTool, python_block, run_python

WRONG = python_tool._problem()
BWRAP = pytest.mark.skipif(bool(WRONG), reason=f'{WRONG}; the Debian package is bubblewrap')
MODES = pytest.mark.parametrize('unsafe', [pytest.param(False, marks=BWRAP), True])
CALL = 'import ctypes; libc = ctypes.CDLL(None, use_errno=True)\n'


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path, monkeypatch):
    """Puts the folders of unsafe runs into `tmp_path`, and checks that they are removed."""
    folder = tmp_path / 'temporary'
    folder.mkdir()
    monkeypatch.setattr(tempfile, 'tempdir', str(folder))
    yield
    assert list(folder.iterdir()) == []


def run(code, unsafe=False, **limits):
    return run_python(code, Limits(**({'wall_s': 30.0} | limits)), unsafe=unsafe)


def refused(code, word='Error', unsafe=False):
    outcome = run(code, unsafe)
    assert outcome.end == 'error' and word in outcome.output, outcome


@MODES
def test_it_runs_code(unsafe):
    assert run('', unsafe) == ('', 'ok')
    code = """
import fractions, json, threading
print(json.dumps(str(fractions.Fraction(3, 6))))
if __name__ == '__main__':
    print('é')
thread = threading.Thread(target=print, args=('hi',)); thread.start(); thread.join()
"""
    assert run(code, unsafe) == ('"1/2"\né\nhi\n', 'ok')


@MODES
def test_exceptions_are_shown_from_the_codes_own_frames_on(unsafe):
    raised = run('x = 1\nprint(x / 0)', unsafe)
    first = 'Traceback (most recent call last):\n  File "main.py", line 2, in <module>\n    print(x / 0)\n'
    assert raised.end == 'error' and raised.output.startswith(first)
    assert raised.output.endswith('\nZeroDivisionError: division by zero\n')
    syntax = run('def f(', unsafe)
    assert syntax.end == 'error' and syntax.output.startswith('  File "main.py", line 1')
    assert 'confined' not in syntax.output


@MODES
def test_exits(unsafe):
    for code, end in (('sys.exit()', 'ok'), ('sys.exit(3)', 'error'), ('os.abort()', 'killed')):
        assert run(f'import os, sys\nprint("so far", flush=True)\n{code}', unsafe) == ('so far\n', end)
    assert run('import sys\nsys.exit(-1)', unsafe) == ('', 'error')  # exit code 255


@MODES
def test_a_file_of_its_own_in_an_empty_folder(unsafe):
    files = "os.mkdir('d'); open('d/x', 'w').write('hello'); os.rename('d/x', 'y'); os.rmdir('d')"
    code = f"import os\nprint(os.listdir('.'))\n{files}\nprint(open('y').read(), os.listdir('.'))"
    assert run(code, unsafe) == run(code, unsafe) == ("[]\nhello ['y']\n", 'ok')


@MODES
def test_the_tool(unsafe):
    tool = PythonTool(Limits(wall_s=30.0, output_bytes=20), unsafe=unsafe)
    assert tool.python('print(1)\nprint(2)') == '1\n2'
    assert tool.python('x = 1') == '[no output]'
    assert tool.python('print("x" * 100)') == f'{"x" * 20}\n[stopped after 20 bytes of output]'
    assert PythonTool(Limits(wall_s=0.4), unsafe=unsafe).python('while True: pass') == '[stopped after 0.4 s]'
    assert tool.python('import os; os.abort()') == '[ended by a signal]'
    factory = find_environment(PythonTool, {'unsafe': unsafe})
    (schema,) = factory.tools  # any other public method would be a tool too
    assert schema['function']['name'] == 'python'
    assert list(schema['function']['parameters']['properties']) == ['code']
    environment = factory()
    environment.reset(1, answer='7')
    call = {'type': 'function', 'function': {'name': 'python', 'arguments': {'code': 'print(6 * 7)'}}}
    messages, _, terminated, truncated, _ = environment.step({'role': 'assistant', 'content': '', 'tool_calls': [call]})
    assert [(m['role'], m['content']) for m in messages] == [('tool', '42')] and not terminated and not truncated


def test_the_block_of_a_response():
    for response, block in {
        'So:\n```python\nprint(1)\n```\nand\n```py\nprint(2)\n```': 'print(2)\n',
        '```\nx\n```': 'x\n',
        '```python\nprint(1)': 'print(1)',
        '```json\n{}\n```': None,
        '```json\n{}\n```\n```text\nx\n```': None,
        '```python\nprint(1)\n```\nThis prints 1:\n```text\n1\n```\nDone.\n': 'print(1)\n',
        '```\nx\n```\nOr so:\n': 'x\n',
        '```Python\nx\n```': 'x\n',
        '```PY \nx\n```': 'x\n',
        '``` python3\nx\n```': 'x\n',
        'Use ```x``` inline.\n```python\ny\n```': 'y\n',
        'nothing': None,
    }.items():
        assert python_block(response) == block


@pytest.mark.parametrize('wrong', [{'wall_s': 0}, {'memory_mib': -1}, {'cpu_s': float('inf')}, {'open_files': True}])
def test_limits_are_numbers_above_0(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=rf'Limits\({name}=.*: give a number above 0'):
        Limits(**wrong)


@pytest.mark.parametrize('name', ['cpu_s', 'memory_mib', 'output_bytes', 'open_files'])
def test_limits_are_whole_except_for_the_time(name):
    with pytest.raises(ValueError, match=rf'Limits\({name}=1.5\): give a whole number'):
        Limits(**{name: 1.5})
    assert Limits(wall_s=1.5).wall_s == 1.5


@MODES
def test_time(unsafe):
    assert run('import time; time.sleep(600)', unsafe, wall_s=0.5) == ('', 'time')
    assert run('while True: pass', unsafe, cpu_s=1) == ('', 'killed')


@pytest.mark.parametrize('code', ['bytearray(10**10)', 'x = []\nwhile True: x.append(bytes(10**7))'])
@MODES
def test_memory(code, unsafe):
    refused(code, 'MemoryError', unsafe)


@MODES
def test_output(unsafe):
    outcome = run('import sys\nwhile True: sys.stdout.write("x" * 10**6)', unsafe, output_bytes=5000)
    assert outcome == ('x' * 5000, 'output')
    assert run('print("x" * 4999)', unsafe, output_bytes=5000).end == 'ok'
    assert run('import sys; sys.stdout.buffer.write(bytes([0, 65, 255, 128]))', unsafe) == ('\0A��', 'ok')
    assert run('import os; os.close(1); os.close(2); print(1)', unsafe).end in ('ok', 'error')
    assert run('print("\\ud800")', unsafe) == ('\\ud800\n', 'ok')


def test_what_is_written_last_is_read_if_the_process_ends_before_its_output_is_seen(monkeypatch):
    wait = os.waitid

    def wait_for_the_end(kind, pid, options):
        wait(kind, pid, os.WEXITED | os.WNOWAIT)
        return wait(kind, pid, options)

    monkeypatch.setattr(os, 'waitid', wait_for_the_end)
    assert run('print(6 * 7)', unsafe=True) == ('42\n', 'ok')


@BWRAP
def test_files():
    refused('open("a", "wb").write(bytes(2 << 20))', 'File too large')
    fill = 'import time\ntry:\n  n = 0\n  while True:\n    n += 1; open(f"f{n}", "wb").write(bytes(%d))\n'
    fill += 'except OSError:\n  time.sleep(60)'  # the folder is looked at every 50 ms, on a busy machine later
    assert run(fill % 1000).end == run(fill % 10**6).end == 'files'
    assert run('open("a", "wb").write(bytes(10**6))').end == 'ok'
    refused('x = [open("a", "w") for _ in range(100)]', 'Too many open files')
    assert run('open("a", "w")\nfor n in range(8): open("/tmp/b", "w")', folder_entries=2).end == 'ok'


@pytest.mark.parametrize('output', [None, 'bwrap: No permissions to create new namespace', 'bwrap: Unknown option'])
def test_without_bubblewrap_it_refuses_in_one_line(output, monkeypatch, tmp_path):
    """It is not installed, or too old, or user namespaces are switched off."""
    if output is not None:
        (tmp_path / 'bwrap').write_text(f'#!/bin/sh\necho "{output}" >&2\nexit 1\n')
        (tmp_path / 'bwrap').chmod(0o755)
    found = {'bwrap': None if output is None else str(tmp_path / 'bwrap'), 'setpriv': '/usr/bin/setpriv'}
    monkeypatch.setattr(shutil, 'which', found.get)
    python_tool._problem.cache_clear()
    try:
        for use in (PythonTool, lambda: run('print(1)')):
            with pytest.raises(ValueError, match=r'install bubblewrap.*unsafe=True') as error:
                use()
            assert (output or 'bwrap is not installed') in str(error.value) and '\n' not in str(error.value)
        assert PythonTool(unsafe=True).python('print(6 * 7)') == '42', 'trusted code runs without it'
    finally:
        python_tool._problem.cache_clear()


REFUSED = {
    'network': 'import socket; socket.create_connection(("127.0.0.1", {port}), 2)',
    'url': 'import urllib.request as u; u.urlopen("http://127.0.0.1:{port}", timeout=2)',
    'abstract unix socket': 'import socket; socket.socket(socket.AF_UNIX).connect("\\0python-tool-{pid}")',
    'unix socket': 'import socket; socket.socket(socket.AF_UNIX).connect("{tmp}/socket")',
    'read': 'open("{secret}").read()',
    'write': 'open("{secret}", "w")',
    'write beside it': 'open("{tmp}/new", "w")',
    'remove': 'import os; os.remove("{secret}")',
    'rename': 'import os; os.rename("{secret}", "mine")',
    'truncate': 'import os; os.truncate("{secret}", 0)',
    'chmod': 'import os; os.chmod("{secret}", 0)',
    'times': 'import os; os.utime("{secret}")',
    'hard link': 'import os; os.link("{secret}", "mine")',
    'symbolic link': 'import os; os.symlink("{secret}", "l"); open("l").read()',
    'folder': 'import os; os.listdir("{tmp}")',
    'accounts': 'open("/etc/passwd").read()',
    'the root': 'open("/new", "w")',
    'the library': 'import json; open(json.__file__, "a")',
    'its own program': 'open("/confined.py", "a")',
    'environment of the trainer': 'open("/proc/{pid}/environ").read()',
    'memory of the trainer': 'open("/proc/{pid}/mem", "r+b")',
    'its own process': 'open("/proc/self/status")',
    'devices': 'open("/dev/mem", "rb")',
    'a device of its own': 'import os, stat; os.mknod("d", 0o600 | stat.S_IFBLK, os.makedev(8, 0))',
    'the kernel': 'open("/sys/kernel/mm/transparent_hugepage/enabled")',
    'a shell': 'import os; os.execv("/bin/sh", ["sh", "-c", "echo out"])',
    'a program': 'import subprocess; subprocess.Popen(["/bin/sleep", "600"])',
    'signal': 'import os; os.kill({pid}, 10)',
    'signal by a descriptor': 'import os, signal; signal.pidfd_send_signal(os.pidfd_open({pid}), 10)',
    'priority': 'import os; os.setpriority(os.PRIO_PROCESS, {pid}, 19)',
    'processors': 'import os; os.sched_setaffinity({pid}, [0])',
    'limits of the trainer': 'import resource as r; r.prlimit({pid}, r.RLIMIT_NOFILE, (3, 3))',
    'its own address space': 'import resource as r; r.setrlimit(r.RLIMIT_AS, (-1, -1))',
    'its own seconds': 'import resource as r; r.setrlimit(r.RLIMIT_CPU, (600, 600))',
    'memory that stays': 'import multiprocessing.shared_memory as m; m.SharedMemory(create=True, size=10**9)',
    'root': 'import os; os.setuid(0)',
    'installed packages': 'import sys; sys.path.append("{site}"); import pytest',
    'input': 'input()',
}
"""code that ends with an exception"""


@BWRAP
def test_refused(tmp_path, world):
    known = {**world, 'tmp': tmp_path, 'pid': os.getpid(), 'site': Path(pytest.__file__).parents[1]}
    attacks = {name: code.format(**known) for name, code in REFUSED.items()}
    code = f"""
for name, attack in {attacks!r}.items():
    try: exec(attack, {{}})
    except Exception as error: print(name)
    else: print(name, 'was not refused')
"""
    assert run(code).output.splitlines() == list(REFUSED)


@BWRAP
@pytest.mark.parametrize('code', ['os.fork()', '_thread.start_new_thread(time.sleep, (9,))'])
def test_bombs(code):
    refused(f'import _thread, os, time\nwhile True: {code}')


MINUS_1 = {
    'ptrace': 'ptrace(16, {pid}, 0, 0)',
    'tgkill': 'tgkill({pid}, {pid}, 10)',
    'reading its memory': 'process_vm_readv({pid}, place, 1, place, 1, 0)',
    'a namespace of its own': 'unshare(0x10000000)',
    'mount': 'mount(b"/", b"/tmp", b"", 4096, 0)',
    'leaving the root': 'chroot(b"/tmp")',
    'the clock': 'settimeofday(bytes(16), 0)',
    'the name of the host': 'sethostname(b"x", 1)',
    'counters': 'syscall(298, bytes(128), {pid}, -1, -1, 0)',
}


@BWRAP
def test_system_calls():
    calls = [f'print({name!r}, libc.{call.format(pid=os.getpid())})' for name, call in MINUS_1.items()]
    place = 'place = (ctypes.c_size_t * 2)(id(ctypes), 8)\n'
    assert run(CALL + place + '\n'.join(calls)).output == ''.join(f'{name} -1\n' for name in MINUS_1)


SIGNALS = {
    'owner of a pipe': """
import fcntl, os
r, w = os.pipe()
for owner in ({pid}, -{pid}, os.getppid()):
    try:
        fcntl.fcntl(r, fcntl.F_SETOWN, owner); fcntl.fcntl(r, 10, 10)  # F_SETSIG
        fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
        os.write(w, b'x')
    except OSError: pass
""",
    'all processes': 'import os, signal; signal.signal(10, signal.SIG_IGN); os.kill(-1, 10); os.kill(0, 10)',
    'its parent': 'import os; os.kill(os.getppid(), 10)',
    'queued': CALL + 'libc.sigqueue({pid}, 10, 0)',
}


@pytest.fixture
def signals():
    """Returns the list of signals that this process receives."""
    found, old = [], signal.signal(signal.SIGUSR1, lambda *_: found.append(1))
    yield found
    signal.signal(signal.SIGUSR1, old)


@BWRAP
@pytest.mark.parametrize('code', SIGNALS.values(), ids=SIGNALS)
def test_no_signal_reaches_the_trainer(code, signals):
    run(code.format(pid=os.getpid()))
    assert not signals


@pytest.mark.skipif(sys.platform != 'linux', reason='F_SETSIG is of Linux')
def test_the_signals_of_a_pipe_reach_the_trainer_without_bubblewrap(signals):
    """Negative control: the code does send signals."""
    run(SIGNALS['owner of a pipe'].format(pid=os.getpid()), unsafe=True)
    assert signals


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A file, a port and two listening sockets; checks that they have not changed."""
    monkeypatch.setenv('TOKEN', 's3cret')
    secret = tmp_path / 'secret'
    secret.write_text('s3cret')
    secret.chmod(0o666)
    tmp_path.chmod(0o777)
    os.utime(secret, (1e9, 1e9))
    before = sorted(tmp_path.iterdir())
    with (
        socket.create_server(('127.0.0.1', 0)) as server,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_UNIX) as named,
    ):
        abstract.bind(f'\0python-tool-{os.getpid()}')
        monkeypatch.chdir(tmp_path)  # a path of a socket is at most 107 bytes long
        named.bind('socket')
        for listener in (server, abstract, named):
            listener.listen()
            listener.setblocking(False)
        yield {'secret': secret, 'port': server.getsockname()[1]}
        for listener in (server, abstract, named):
            with pytest.raises(BlockingIOError):
                listener.accept()
    after = secret.stat()
    assert (after.st_mode & 0o777, after.st_mtime, after.st_nlink) == (0o666, 1e9, 1)
    assert secret.read_text() == 's3cret' and sorted(tmp_path.iterdir()) == sorted([*before, tmp_path / 'socket'])


@BWRAP
def test_it_has_nothing(monkeypatch):
    monkeypatch.setenv('TOKEN', 's3cret')
    code = """
import os, socket, sys
print(sorted({*os.environ} - {'LC_CTYPE', 'PWD'}), repr(sys.stdin.read()), sys.argv, socket.gethostname())
print(os.getuid() != 0, os.listdir('.'), sorted({*os.listdir('/')} & {'home', 'proc', 'sys', 'var', 'run', 'mnt'}))
for n in range(3, 32):
    try: os.fstat(n); print('open', n)
    except OSError: pass
"""
    with open(os.devnull) as kept:
        os.set_inheritable(kept.fileno(), True)
        assert run(code).output == "[] '' ['main.py'] python\nTrue [] []\n"
    assert run('import os; os.kill(os.getpid(), 9)').end == 'killed', 'itself it may'
    assert run('import os\nif not os.fork(): os.setsid(); [print(1) for _ in iter(int, 1)]').end in ('ok', 'output')
    refused('def f(): return f()\nf()', 'RecursionError')
    deep = 'import sys; sys.setrecursionlimit(10**8)\nclass A:\n  __getattr__ = lambda s, n: getattr(s, n)\nA().x'
    assert run(deep).end in ('error', 'killed')


@BWRAP
def test_keys_of_the_session_stay_with_the_trainer():
    """The kernel's session keyring is inherited, and no namespace isolates it."""
    keyctl, add, ask = {'x86_64': (250, 248, 249), 'aarch64': (219, 217, 218)}.get(os.uname().machine, (0, 0, 0))
    code = f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
if libc.syscall({keyctl}, 1, None) < 0 or libc.syscall({add}, b'user', b'key', b's3cret', 6, ctypes.c_long(-3)) < 0:
    raise SystemExit('none')
from chatgpt.environments.python_tool import run_python
print([run_python({CALL!r} + 'print(libc.syscall({ask}, b"user", b"key", None, 0) > 0)', unsafe=u)[0] for u in (0, 1)])
"""
    answer = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    if not keyctl or answer.returncode:
        pytest.skip(f'no keyrings here: {answer.stderr[-200:]}')
    assert answer.stdout == "['False\\n', 'True\\n']\n"


@BWRAP
def test_it_ends_with_the_trainer(tmp_path):
    """A sleeping process must end when the trainer is killed."""
    code = 'from chatgpt.environments.python_tool import *; check_sandbox(); print(1, flush=True); '
    trainer = subprocess.Popen(
        [sys.executable, '-c', code + 'run_python("import time; time.sleep(600)", Limits(wall_s=600))'],
        env=os.environ | {'PYTHONPATH': str(Path(python_tool.__file__).parents[2])},
        stdout=subprocess.PIPE,
    )
    trainer.stdout.readline()
    trainer.stdout.close()

    def descendants(pid):
        """Returns all descendants of a process, each with its command."""
        children = Path(f'/proc/{pid}/task/{pid}/children').read_text().split()
        found = {int(child): Path(f'/proc/{child}/cmdline').read_text() for child in children}
        return found | {p: c for child in children for p, c in descendants(child).items()}

    def of_the_sandbox():
        found = descendants(trainer.pid)
        return any(command.startswith(python_tool._interpreter()) for command in found.values()) and found

    found = until(of_the_sandbox)
    trainer.kill()
    trainer.wait()
    until(lambda: not any(Path(f'/proc/{pid}').exists() for pid in found), lambda: found)
