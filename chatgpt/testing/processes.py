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


def run_script(
    arguments: Sequence[str], world_size: int = 2, timeout_s: float = 90.0, folder: str | Path | None = None
) -> list[tuple[int, str]]:
    """`python ARGUMENTS` on every rank, from its first import to the interpreter's end; each rank's exit code and output."""
    port, children = free_port(), []
    paths = os.pathsep.join(path for path in (str(Path(__file__).parents[2]), os.environ.get('PYTHONPATH')) if path)
    for rank in range(world_size):
        variables = {**os.environ, **_THREADS, **torchrun_environment(rank, world_size, port), 'PYTHONPATH': paths}
        child = subprocess.Popen(
            [sys.executable, *arguments], env=variables, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        children.append(child)
    try:
        texts = [child.communicate(timeout=timeout_s)[0] for child in children]
    finally:
        for child in children:
            child.kill()
    return [(child.returncode, text) for child, text in zip(children, texts, strict=True)]


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
    os._exit(0)  # the result is written; the interpreter's teardown would take as long as a small test
