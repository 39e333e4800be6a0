"""Run a function on several local processes, as torchrun would, and bring its results or its traceback back.

Left out: more than one machine.
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_THREADS = {'OMP_NUM_THREADS': '1', 'MKL_NUM_THREADS': '1'}


def free_port() -> int:
    """A TCP port that nothing listens on right now."""
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        return probe.getsockname()[1]


def torchrun_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The variables that torchrun sets for one process of one machine."""
    return {
        'RANK': str(rank),
        'LOCAL_RANK': str(rank),
        'WORLD_SIZE': str(world_size),
        'LOCAL_WORLD_SIZE': str(world_size),
        'MASTER_ADDR': '127.0.0.1',
        'MASTER_PORT': str(port),
    }


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Environment variables set inside and as before after."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def run_distributed(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 100.0, init_group: bool = False
) -> list[Any]:
    """`fn(*args)` in `world_size` new processes with torchrun's environment; what each returned, in rank order.

    `fn` must be importable (a module's own function) and its results picklable. With `init_group=True` a gloo group is running
    while it is called. A child's exception is raised here with its traceback; after `timeout_s` all are killed and TimeoutError is raised.
    """
    try:
        return _run(fn, world_size, args, timeout_s, init_group)
    except Exception as error:
        # Seldom, and under load, a gloo process dies in torch's teardown ("terminate called without an active exception"), after
        # its work is done. Such a run is started once more; any other failure, and a second one of this kind, is raised.
        if 'SIGABRT' not in str(error):
            raise
        warnings.warn(f'{fn.__name__}: a process was aborted ({error}); running it once more', stacklevel=2)
        return _run(fn, world_size, args, timeout_s, init_group)


def run_command(command: Sequence[str], timeout_s: float = 100.0) -> subprocess.CompletedProcess[str]:
    """A command that starts processes of its own, such as torchrun, with its output; started once more after the abort named above."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    if done.returncode != 0 and 'terminate called without an active exception' in done.stderr:
        warnings.warn(f'{command[-1]}: a process was aborted; running it once more', stacklevel=2)
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    return done


def _run(fn: Callable[..., Any], world_size: int, args: tuple[Any, ...], timeout_s: float, init_group: bool) -> list[Any]:
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory(prefix='run-distributed-') as folder, environment(**_THREADS):
        context = mp.start_processes(
            _child, (world_size, free_port(), folder, init_group, fn, args), nprocs=world_size, join=False, start_method='spawn'
        )
        assert context is not None
        end = time.monotonic() + timeout_s
        try:
            while not context.join(timeout=1.0):
                if time.monotonic() > end:
                    raise TimeoutError(f'{fn.__name__} on {world_size} processes did not end within {timeout_s} s')
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
                    process.join()
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(world_size)]


def _child(
    rank: int, world_size: int, port: int, folder: str, init_group: bool, fn: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ.update(torchrun_environment(rank, world_size, port))
    if init_group:
        from chatgpt.trainer.strategies.processes import ProcessGroupStrategy

        with ProcessGroupStrategy(device='cpu', timeout_s=60):  # joins the group, and leaves it at the end
            result = fn(*args)
    else:
        result = fn(*args)
    (Path(folder) / str(rank)).write_bytes(pickle.dumps(result))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the result is written; the interpreter's own teardown can only go wrong now
