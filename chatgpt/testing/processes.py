"""Runs a function on several local processes, as under torchrun, and returns its results or raises its traceback.

A new interpreter takes seconds to import torch and transformers. Where it is safe, ranks are forked from a server of
`multiprocessing` that has imported them and runs nothing else. Every rank is a new process.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import random
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_THREADS = {'OMP_NUM_THREADS': '1', 'MKL_NUM_THREADS': '1'}
_WARM = ['torch._dynamo', 'torch.distributed.fsdp', 'torch.distributed.checkpoint.state_dict']
_WARM += ['transformers.models.gpt2.modeling_gpt2', 'transformers.models.llama.modeling_llama']
_WARM += ['chatgpt.trainer', 'chatgpt.strategies', 'chatgpt.testing.conformance']
"""modules that the server imports, since most jobs need them"""


def free_port() -> int:
    """Returns an unused TCP port, none of those that the kernel hands to other programs before it is used."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(('127.0.0.1', port))
            return port


def torchrun_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Returns the variables that torchrun sets for a process on one machine."""
    ranks = {'RANK': rank, 'LOCAL_RANK': rank, 'WORLD_SIZE': world_size, 'LOCAL_WORLD_SIZE': world_size}
    return {name: str(value) for name, value in ranks.items()} | {'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(port)}


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """A context with these environment variables, which are restored on exit."""
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
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 600.0,
    init_group: bool = False,
    fresh: bool = False,
) -> list[Any]:
    """Calls `fn(*args)` in `world_size` new processes with torchrun's environment; returns the results in rank order.

    `fn` must be importable, and its results picklable. An exception in a process is raised here with its traceback.

    Args:
        timeout_s: after this time all processes are killed and TimeoutError is raised.
        init_group: call `fn` inside a gloo group.
        fresh: start each rank as a new interpreter, with its own order of sets and its own memory.
    """
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory(prefix='run-distributed-') as folder, start_method(fresh) as method:
        job = (own_variables(), world_size, free_port(), folder, init_group, fn, args)
        context = mp.start_processes(_child, (job,), nprocs=world_size, join=False, start_method=method)
        assert context is not None
        end = time.monotonic() + timeout_s
        try:
            while not context.join(timeout=1.0):
                if time.monotonic() > end:
                    raise TimeoutError(f'{fn.__name__} on {world_size} processes did not end within {timeout_s} s')
        finally:
            end_all(context.processes)
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(world_size)]


def own_variables() -> dict[str, str]:
    """Returns this process's environment, with one thread for each rank."""
    return {**os.environ, **_THREADS}


@contextmanager
def start_method(fresh: bool = False) -> Iterator[str]:
    """Yields the start method of ranks, with the server running for 'forkserver'.

    It is 'spawn' with a GPU, which cannot be used in a fork of a process that has used it, and on macOS.
    """
    import torch

    paths = os.pathsep.join(path for path in sys.path if path)  # the server imports the same package
    with environment(**_THREADS):
        if fresh or not sys.platform.startswith('linux') or torch.cuda.is_available():
            yield 'spawn'
            return
        multiprocessing.set_forkserver_preload(_WARM)
        with environment(PYTHONPATH=paths):
            multiprocessing.forkserver.ensure_running()
        yield 'forkserver'


def end_all(processes: Sequence[Any]) -> None:
    """Kills the processes that are still running."""
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()


def become_rank(rank: int, variables: dict[str, str], world_size: int, port: int) -> None:
    """Sets the environment of a rank in a new process."""
    import torch

    torch.set_num_threads(1)
    os.environ.clear()  # the server's variables are those of its start
    os.environ.update(variables | torchrun_environment(rank, world_size, port))


def _child(rank: int, job: tuple[Any, ...]) -> None:
    variables, world_size, port, folder, init_group, fn, args = job
    become_rank(rank, variables, world_size, port)
    if init_group:
        from chatgpt.strategies.processes import ProcessGroupStrategy

        with ProcessGroupStrategy(device='cpu') as strategy:  # joins the group, and leaves it on exit
            strategy.barrier()  # a rank that fails at once would end the joining of another
            result = fn(*args)
    else:
        result = fn(*args)
    (Path(folder) / str(rank)).write_bytes(pickle.dumps(result))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # skips the interpreter's shutdown, which takes as long as a small test
