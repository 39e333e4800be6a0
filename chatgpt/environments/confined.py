"""What `PythonTool` starts: `python -I -S confined.py SETTINGS`, which takes every power that it does not need from its
own process and then runs the code on standard input.

Standard library only, and nothing of this package: it is run by its path. Left out: wall time, the amount of output and
of files, and the end of the process, which the parent sees to.

Sources of the numbers: linux/landlock.h, linux/seccomp.h, linux/filter.h and the kernel's tables of system calls.
"""

from __future__ import annotations

import json
import linecache
import os
import resource
import signal
import struct
import sys
import traceback
from types import ModuleType
from typing import Any

CONFINED = b'\0'
"""the first byte of the output, written before the code is run; without it nothing was run"""

# ---------------------------------------------------------------------- system calls

MACHINES = {'x86_64': (0xC000003E, 0), 'aarch64': (0xC00000B7, 1)}
"""of `os.uname().machine`: the kernel's name of the architecture, and the column of the numbers below"""

DENIED: dict[str, tuple[int | None, int | None]] = {
    # sockets, and the one interface that makes them without `socket`
    'socket': (41, 198),
    'socketpair': (53, 199),
    'io_uring_setup': (425, 425),
    # other programs and processes; threads are `clone` with CLONE_THREAD
    'fork': (57, None),
    'vfork': (58, None),
    'execve': (59, 221),
    'execveat': (322, 281),
    # the memory, signals, limits and priorities of other processes of this user, the trainer among them
    'ptrace': (101, 117),
    'process_vm_readv': (310, 270),
    'process_vm_writev': (311, 271),
    'tkill': (200, 130),
    'rt_sigqueueinfo': (129, 138),
    'rt_tgsigqueueinfo': (297, 240),
    'pidfd_open': (434, 434),
    'pidfd_send_signal': (424, 424),
    'pidfd_getfd': (438, 438),
    'process_madvise': (440, 440),
    'setpriority': (141, 140),
    'ioprio_set': (251, 30),
    'sched_setaffinity': (203, 122),
    'sched_setscheduler': (144, 119),
    'sched_setparam': (142, 118),
    'sched_setattr': (314, 274),
    # memory that outlives a process
    'shmget': (29, 194),
    'semget': (64, 190),
    'msgget': (68, 186),
    'mq_open': (240, 180),
    'add_key': (248, 217),
    'request_key': (249, 218),
    'keyctl': (250, 219),
    # what Landlock does not know: owners, modes, times and attributes of files outside of the folder
    'chmod': (90, None),
    'fchmod': (91, 52),
    'fchmodat': (268, 53),
    'fchmodat2': (452, 452),
    'chown': (92, None),
    'fchown': (93, 55),
    'lchown': (94, None),
    'fchownat': (260, 54),
    'utime': (132, None),
    'utimes': (235, None),
    'futimesat': (261, None),
    'utimensat': (280, 88),
    'setxattr': (188, 5),
    'lsetxattr': (189, 6),
    'fsetxattr': (190, 7),
    'removexattr': (197, 14),
    'lremovexattr': (198, 15),
    'fremovexattr': (199, 16),
    'setxattrat': (463, 463),
    'removexattrat': (466, 466),
    'file_setattr': (469, 469),
    'truncate': (76, 45),
    # ways to new rights
    'unshare': (272, 97),
    'setns': (308, 268),
    'mount': (165, 40),
    'umount2': (166, 39),
    'fsopen': (430, 430),
    'open_tree': (428, 428),
    'move_mount': (429, 429),
    'open_by_handle_at': (304, 265),
    'bpf': (321, 280),
    'perf_event_open': (298, 241),
    'userfaultfd': (323, 282),
}
UNKNOWN: dict[str, tuple[int | None, int | None]] = {'clone3': (435, 435), 'openat2': (437, 437)}
"""answered as by a kernel without them, since their arguments cannot be looked at; libc then takes the older ones"""

OWN, THREAD, TRUNCATES, DEATH_SIGNAL = -1, 0x10000, 0x200, 1
CONDITIONS: dict[str, tuple[tuple[int | None, int | None], int, int, int, bool]] = {
    # numbers, argument, mask, value, whether it is allowed when equal (or else when not)
    'clone': ((56, 220), 0, THREAD, THREAD, True),
    'kill': ((62, 129), 0, 0xFFFFFFFF, OWN, True),
    'tgkill': ((234, 131), 0, 0xFFFFFFFF, OWN, True),
    'prlimit64': ((302, 261), 0, 0xFFFFFFFF, 0, True),
    'prctl': ((157, 167), 0, 0xFFFFFFFF, DEATH_SIGNAL, False),
    # a file opened for reading and truncated at once, which Landlock before Linux 6.2 lets pass
    'open': ((2, None), 1, 0x203, TRUNCATES, False),
    'openat': ((257, 56), 2, 0x203, TRUNCATES, False),
}

LOAD, AND, EQUAL, AT_LEAST, RETURN = 0x20, 0x54, 0x15, 0x35, 0x06  # BPF
ALLOW, KILL, ERROR, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x00050000, 1, 38


def filter_program(machine: str, pid: int) -> bytes:
    """The seccomp filter: what is named above is an error, everything else is allowed."""
    architecture, column = MACHINES[machine]
    lines = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, architecture), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0)]
    if machine == 'x86_64':  # the x32 interface has other numbers for the same calls
        lines += [(AT_LEAST, 0, 1, 0x40000000), (RETURN, 0, 0, KILL)]
    for calls, error in ((DENIED, EPERM), (UNKNOWN, ENOSYS)):
        for numbers in calls.values():
            if (number := numbers[column]) is not None:
                lines += [(EQUAL, 0, 1, number), (RETURN, 0, 0, ERROR | error)]
    for numbers, argument, mask, value, when_equal in CONDITIONS.values():
        if (number := numbers[column]) is None:
            continue
        lines += [
            (EQUAL, 0, 5, number),
            (LOAD, 0, 0, 16 + 8 * argument),  # the low half: both machines are little-endian
            (AND, 0, 0, mask),
            (EQUAL, 0, 1, pid if value == OWN else value),
            (RETURN, 0, 0, ALLOW if when_equal else ERROR | EPERM),
            (RETURN, 0, 0, ERROR | EPERM if when_equal else ALLOW),
        ]
    lines.append((RETURN, 0, 0, ALLOW))
    return b''.join(struct.pack('=HBBI', *line) for line in lines)


# ---------------------------------------------------------------------- files

READ_FILE, READ_FOLDER = 1 << 2, 1 << 3
WRITE = 1 << 1 | 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8 | 1 << 12  # write, remove, make folders, files, symbolic links
RENAME, TRUNCATE, DEVICES = 1 << 13, 1 << 14, 1 << 15


def landlock(libc: Any, folder: str, readable: list[str]) -> None:
    """Files below `folder` may be written, those below `readable` read, no others opened."""
    import ctypes

    version = call(libc, 444, None, 0, 1)
    handled = (1 << 13) - 1
    own = READ_FILE | READ_FOLDER | WRITE
    for since, right in ((2, RENAME), (3, TRUNCATE), (5, DEVICES)):
        if version >= since:
            handled |= right
            own |= right & ~DEVICES
    rules = call(libc, 444, ctypes.c_char_p(struct.pack('=Q', handled)), 8, 0)
    for path, rights in [(folder, own), *((path, READ_FILE | READ_FOLDER) for path in readable)]:
        try:
            opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        if not os.path.isdir(path):
            rights &= READ_FILE | WRITE & 2
        call(libc, 445, rules, 1, ctypes.c_char_p(struct.pack('=Qi', rights, opened)), 0)
        os.close(opened)
    call(libc, 446, rules, 0)
    os.close(rules)


def call(libc: Any, number: int, *arguments: Any) -> int:
    """A system call; OSError where it fails."""
    import ctypes

    result = libc.syscall(ctypes.c_long(number), *(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(result)


# ---------------------------------------------------------------------- the weaker guard

READ_ONLY_EVENTS = ('os.listdir', 'os.scandir', 'os.walk', 'os.chdir', 'os.fwalk', 'glob.')
FILE_EVENTS = ('os.remove', 'os.rename', 'os.rmdir', 'os.mkdir', 'os.link', 'os.symlink', 'os.truncate', 'shutil.')
DENIED_EVENTS = (
    *('socket.', 'subprocess.', 'ctypes.', 'os.fork', 'os.exec', 'os.spawn', 'os.posix_spawn', 'os.system', 'os.kill'),
    *('os.chmod', 'os.chown', 'os.chflags', 'os.lchmod', 'os.utime', 'os.setxattr', 'os.removexattr', 'signal.pthread'),
    *('resource.prlimit', 'pty.', 'webbrowser.'),
)


def watch(folder: str, readable: list[str]) -> None:
    """Refuse by Python's own audit events: for a machine whose kernel has no guard. Code that means harm gets round
    it; code that errs does not."""
    folder = os.path.realpath(folder)
    below = tuple(os.path.realpath(path).rstrip(os.sep) for path in readable)

    def inside(path: Any, *roots: str) -> bool:
        if not isinstance(path, (str, bytes, os.PathLike)):
            return True  # an open file
        real = os.path.realpath(os.fsdecode(path))
        return any(real == root or real.startswith(root + os.sep) for root in roots)

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event.startswith(DENIED_EVENTS):
            raise PermissionError(1, f'not permitted here: {event}')
        if event == 'open':
            writes = bool(set(str(arguments[1] or '')) & set('wax+')) or bool(
                (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            )
            if not inside(arguments[0], folder, *(() if writes else below)):
                raise PermissionError(1, f'not permitted here: {arguments[0]!r}')
        elif event.startswith(FILE_EVENTS) and not all(
            inside(path, folder) for path in arguments if not isinstance(path, int)
        ):
            raise PermissionError(1, f'not permitted here: {event}')
        elif event.startswith(READ_ONLY_EVENTS) and arguments and not inside(arguments[0] or '.', folder, *below):
            raise PermissionError(1, f'not permitted here: {event}')

    sys.addaudithook(refuse)


# ---------------------------------------------------------------------- all of it


def limit(settings: dict[str, Any]) -> None:
    for name, most in (
        ('RLIMIT_CPU', settings['cpu_s']),
        ('RLIMIT_AS', settings['memory']),
        ('RLIMIT_FSIZE', settings['file_bytes']),
        ('RLIMIT_NOFILE', settings['open_files']),
        ('RLIMIT_CORE', 0),
        # Counts every process of the user, and binds nobody who is root: the filter above is what forbids processes.
        ('RLIMIT_NPROC', None if settings['filter'] else 0),
    ):
        kind = getattr(resource, name, None)
        if kind is None or most is None:
            continue
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def confine(settings: dict[str, Any]) -> None:
    """Take the powers. Raises what a guard raises that was asked for and cannot be put up."""
    os.chdir(settings['folder'])
    if settings['files'] or settings['filter']:
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        prctl = libc.prctl
        prctl(DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != settings['parent']:  # it ended before it could be followed
            os._exit(1)
        if prctl(38, 1, 0, 0, 0):  # PR_SET_NO_NEW_PRIVS
            raise OSError('no_new_privs')
        if settings['files']:
            landlock(libc, settings['folder'], settings['readable'])
        if os.geteuid() == 0:  # root without its capabilities is a user like others
            libc.capset(struct.pack('=Ii', 0x20080522, 0), bytes(24))
    limit(settings)
    if not (settings['files'] and settings['filter']):
        watch(settings['folder'], settings['readable'])
    if settings['filter']:
        program = filter_program(os.uname().machine, os.getpid())
        held = ctypes.create_string_buffer(program, len(program))
        header = struct.pack('=HxxxxxxQ', len(program) // 8, ctypes.addressof(held))
        if prctl(22, 2, ctypes.c_char_p(header), 0, 0):  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
            raise OSError(ctypes.get_errno(), 'seccomp')


def run(source: bytes) -> int:
    """Run the code as a script of its own; an exception is printed as Python does, from the code's own frame on."""
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
    try:
        confine(settings)
    except Exception as error:
        print(f'{type(error).__name__}: {error}', flush=True)
        os._exit(1)
    os.write(1, CONFINED)
    sys.exit(run(source))


if __name__ == '__main__':
    main()
