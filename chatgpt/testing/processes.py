"""Run a function on several local processes, as torchrun would, and bring its results or its traceback back.

A new interpreter needs seconds to import torch and transformers. Where that is safe, ranks are forked from one that has
done so: a server of `multiprocessing` in which nothing but imports ever runs. Every rank is a process of its own.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_THREADS = {'OMP_NUM_THREADS': '1', 'MKL_NUM_THREADS': '1'}
_WARM = ['torch._dynamo', 'torch.distributed.fsdp', 'torch.distributed.checkpoint.state_dict']
_WARM += ['transformers.models.gpt2.modeling_gpt2', 'transformers.models.llama.modeling_llama']
_WARM += ['chatgpt.trainer', 'chatgpt.strategies', 'chatgpt.testing.conformance']
"""what the server imports: what most jobs would"""


def free_port() -> int:
    """A TCP port that nothing listens on right now."""
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        return probe.getsockname()[1]


def torchrun_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The variables that torchrun sets for one process of one machine."""
    ranks = {'RANK': rank, 'LOCAL_RANK': rank, 'WORLD_SIZE': world_size, 'LOCAL_WORLD_SIZE': world_size}
    return {name: str(value) for name, value in ranks.items()} | {'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(port)}


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
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 600.0,
    init_group: bool = False,
    fresh: bool = False,
) -> list[Any]:
    """`fn(*args)` in `world_size` new processes with torchrun's environment; what each returned, in rank order.

    `fn` must be importable (a module's own function) and its results picklable. With `init_group=True` a gloo group is
    running while it is called, with `fresh=True` each rank is an interpreter of its own, with its own order of sets and
    its own memory. A child's exception is raised here with its traceback; after `timeout_s` all are killed and
    TimeoutError is raised.
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
    """This process's environment, with one thread for each rank."""
    return {**os.environ, **_THREADS}


@contextmanager
def start_method(fresh: bool = False) -> Iterator[str]:
    """How to start ranks, with the server running if they come from it.

    A fork of a process that has used a GPU cannot use it, and macOS does not forgive a fork: there each rank is a new
    interpreter.
    """
    import torch

    paths = os.pathsep.join(path for path in sys.path if path)  # the server knows the package as this process does
    with environment(**_THREADS):
        if fresh or not sys.platform.startswith('linux') or torch.cuda.is_available():
            yield 'spawn'
            return
        multiprocessing.set_forkserver_preload(_WARM)
        with environment(PYTHONPATH=paths):
            multiprocessing.forkserver.ensure_running()
        yield 'forkserver'


def end_all(processes: Sequence[Any]) -> None:
    """Kill those that have not ended."""
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()


def become_rank(rank: int, variables: dict[str, str], world_size: int, port: int) -> None:
    """Give a process that was just started the environment of a rank."""
    import torch

    torch.set_num_threads(1)
    os.environ.clear()  # those of the server are of the time when it was started
    os.environ.update(variables | torchrun_environment(rank, world_size, port))


def _child(rank: int, job: tuple[Any, ...]) -> None:
    variables, world_size, port, folder, init_group, fn, args = job
    become_rank(rank, variables, world_size, port)
    if init_group:
        from chatgpt.strategies.processes import ProcessGroupStrategy

        with ProcessGroupStrategy(device='cpu'):  # joins the group, and leaves it at the end
            result = fn(*args)
    else:
        result = fn(*args)
    (Path(folder) / str(rank)).write_bytes(pickle.dumps(result))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the result is written; the interpreter's teardown would take as long as a small test
