"""Rollout workers as Ray actors.

Where ranks cannot connect to them, a bucket of weights is put into the object store of the trainer's node as one array;
each node fetches it once, and its workers read it from shared memory without a copy. `RemoteEngine` replaces dead
actors, so Ray neither restarts actors nor retries calls.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from chatgpt.rollout.cluster import import_ray, lack_of_room
from chatgpt.rollout.remote import WorkerDied
from chatgpt.rollout.wire import Around, ModelSpec, Request

START_S = 60.0
"""seconds before a warning that workers are still starting"""


class RayWorkers:
    """`num_workers` actors for a `RemoteEngine`.

    Args:
        num_workers: number of actors.
        resources: resources of each worker, such as {'CPU': 2, 'GPU': 1, 'any label': 1}. The GPUs of a vLLM worker are
            a placement group on one node and share its model. CPU is also the number of threads, which affects the last
            bits of a log-prob: by default this process's number, or 1 for workers with a GPU.
        address: address of a running cluster, such as 'auto'. None uses the Ray that this process has initialised, or
            RAY_ADDRESS, or starts a local one that `close` shuts down.
        timeout_s: seconds to wait for an answer before a worker is replaced, including the start of a replacement;
            None waits without limit. The first start has at least START_S.

    Raises ImportError without ray, ValueError for an invalid number of workers, timeout or amount of resources.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        resources: Mapping[str, float] | None = None,
        address: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self.ray = import_ray('a rollout worker')
        if num_workers < 1:
            raise ValueError(f'num_workers={num_workers} must be at least 1')
        if timeout_s is not None and not timeout_s > 0:
            raise ValueError(f'timeout_s={timeout_s} must be positive')
        for name, amount in (resources or {}).items():
            if not amount >= 0:
                raise ValueError(f'resources: {name}={amount} must not be negative')
        self.num_workers, self.address, self.timeout_s = num_workers, address, timeout_s
        given = dict(resources or {})
        self.resources = {'CPU': 1.0 if given.get('GPU') else float(torch.get_num_threads())} | given
        self.actors: list[Any] = []
        self._groups: list[Any] = []  # placement group of each actor, or None
        self._places: list[Any] = []  # reference to process and node of each actor
        self._actor_class: Any = None
        self._options: dict[str, Any] = {}
        self._arguments: tuple[Any, ...] = ()
        self._started_ray = False

    beside = True

    def dumps(self, value: Any) -> bytes:
        """Pickles with Ray's cloudpickle, which includes classes and functions defined in a script."""
        return self.ray.cloudpickle.dumps(value)

    def start(self, spec: ModelSpec, engine_options: Mapping[str, Any], around: Around | None = None) -> None:
        """Starts the actors and waits until all are running.

        Raises:
            ValueError: the cluster's nodes do not have the resources.
            RuntimeError: an actor failed to start, or did not within `timeout_s`.
        """
        ray = self.ray
        tensor_parallel = getattr(spec, 'tensor_parallel', 0)
        """number of GPUs for the processes that vLLM starts; the actor itself then has none"""
        if tensor_parallel:
            self.resources.setdefault('GPU', tensor_parallel)
        self._connect()
        if lack := lack_of_room(ray, self.num_workers, 'rollout worker', self.resources):
            raise ValueError(f'{lack}; ask for fewer workers or less for each, or add nodes with ray start --address')
        custom = {k: v for k, v in self.resources.items() if k not in ('CPU', 'GPU')}
        self._actor_class = ray.remote(_Actor)
        self._options = {
            'num_cpus': self.resources['CPU'],
            'num_gpus': 0 if tensor_parallel else self.resources.get('GPU', 0),
            'resources': custom,
            'max_restarts': 0,
            'max_task_retries': 0,
        }
        # kept for replacements; the spec is stored once
        device = 'cuda' if self.resources.get('GPU') else 'cpu'
        self._arguments = (ray.put(spec), dict(engine_options), max(1, int(self.resources['CPU'])), device, around)
        self._groups = [self._group(custom) if tensor_parallel else None for _ in range(self.num_workers)]
        self.actors = [self._new_actor(worker) for worker in range(self.num_workers)]
        self._places = [actor.place.remote() for actor in self.actors]
        late = self._late(START_S)
        if late and (self.timeout_s is None or self.timeout_s > START_S):
            warnings.warn(f'rollout workers still wait for {self.resources} each; is the cluster busy?', stacklevel=3)
            late = self._late(None if self.timeout_s is None else self.timeout_s - START_S)
        if late:
            self.close()
            raise RuntimeError(
                f'rollout workers {late} have not started within {max(START_S, self.timeout_s or 0):g} s: they wait '
                f'for {self.resources} each (ray status shows who uses the cluster), or hang (ray list actors)'
            )
        try:
            ray.get(self._places)
        except (ray.exceptions.RayActorError, ray.exceptions.RaySystemError) as error:
            self.close()
            lines = [line for line in str(error).splitlines() if line.strip()]
            raise RuntimeError(f'the rollout workers could not start: {lines[-1].strip()}') from error

    def _group(self, custom: Mapping[str, float]) -> Any:
        """Creates the placement group of one worker on one node, with a bundle per GPU as vLLM requires."""
        first = {'CPU': self.resources['CPU'], 'GPU': 1.0, **custom}
        further = [{'GPU': 1.0} for _ in range(int(self.resources['GPU']) - 1)]
        return self.ray.util.placement_group([first, *further], strategy='STRICT_PACK')

    def _new_actor(self, worker: int) -> Any:
        group = self._groups[worker]
        if group is None:
            return self._actor_class.options(**self._options).remote(*self._arguments)
        strategy = self.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=0, placement_group_capture_child_tasks=True
        )
        # Ray hides all GPUs from an actor that requests none, but vLLM assigns one to each of its processes.
        see_all = {'env_vars': {'RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES': '1'}}
        placed = self._actor_class.options(**self._options, scheduling_strategy=strategy, runtime_env=see_all)
        return placed.remote(*self._arguments)

    def _late(self, timeout_s: float | None) -> str:
        """Returns the numbers of the actors that have not started after `timeout_s`, or '' if all have."""
        late = self.ray.wait(self._places, num_returns=len(self._places), timeout=timeout_s)[1]
        return ', '.join(str(number) for number, place in enumerate(self._places) if place in late)

    def _connect(self) -> None:
        """Connects to the given cluster, or starts a local one."""
        if self.ray.is_initialized():
            return
        address = self.address or os.environ.get('RAY_ADDRESS')
        # a local Ray gets as many CPUs as the workers request, even if the machine has fewer cores
        num_cpus = max(1, math.ceil(self.num_workers * self.resources['CPU']))
        own = {'address': 'local', 'include_dashboard': False, 'num_cpus': num_cpus}
        # Ray installs a handler of SIGTERM that exits, but a training run saves a checkpoint first
        handler = signal.getsignal(signal.SIGTERM)
        self.ray.init(log_to_driver=False, logging_level='error', **({'address': address} if address else own))
        if callable(handler) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
        self._started_ray = not address

    def put(self, bucket: Tensor) -> Any:
        return self.ray.put(bucket.numpy())

    def submit(self, worker: int, request: Request) -> Any:
        return self.call(worker, 'generate', request)

    def call(self, worker: int, method: str, *args: Any) -> Any:
        # Ray passes the value of a handle in place of the handle, unless it is inside of something
        return _PendingCall(self.actors[worker].call.remote(method, args), self._places[worker], time.monotonic())

    def first(self, handles: Sequence[Any], timeout_s: float | None = None) -> int | None:
        answers = [handle.answer for handle in handles]
        found = self.ray.wait(answers, timeout=timeout_s, fetch_local=False)[0]
        if found:
            return answers.index(found[0])
        late = time.monotonic() - (self.timeout_s or math.inf)
        return next((at for at, handle in enumerate(handles) if handle.since < late), None)

    def wait(self, handle: Any) -> Any:
        exceptions = self.ray.exceptions
        try:
            return self.ray.get(handle.answer, timeout=self.timeout_s)
        except (
            exceptions.RayActorError,
            exceptions.ObjectLostError,
            exceptions.WorkerCrashedError,
            exceptions.NodeDiedError,
            exceptions.OutOfMemoryError,
        ) as error:
            raise WorkerDied(_reason(error)) from None
        except exceptions.GetTimeoutError:
            started = self.ray.wait([handle.place], timeout=0)[0]
            where = self.ray.get(handle.place) if started else 'an actor that has not started'
            raise WorkerDied(f'no answer within {self.timeout_s:g} s from {where}') from None
        except exceptions.RayTaskError as error:
            # a node that held the task's arguments is gone
            if isinstance(error.cause, (exceptions.ObjectLostError, exceptions.RayActorError)):
                raise WorkerDied(_reason(error.cause)) from None
            raise error.cause or error from error

    def cancel(self, handle: Any) -> None:
        self.ray.cancel(handle.answer)

    def add(self) -> None:
        custom = {k: v for k, v in self.resources.items() if k not in ('CPU', 'GPU')}
        self._groups.append(None if all(g is None for g in self._groups) else self._group(custom))
        self.actors.append(self._new_actor(self.num_workers))
        self._places.append(self.actors[-1].place.remote())
        self.num_workers += 1

    def replace(self, worker: int) -> None:
        self.ray.kill(self.actors[worker], no_restart=True)  # it may still run if it hangs or only its answer was lost
        self.actors[worker] = self._new_actor(worker)
        self._places[worker] = self.actors[worker].place.remote()

    def close(self) -> None:
        if self.ray.is_initialized():
            for actor in self.actors:
                self.ray.kill(actor, no_restart=True)
            for group in self._groups:
                if group is not None:
                    self.ray.util.remove_placement_group(group)
            if self._started_ray:
                self.ray.shutdown()
        self.actors, self._groups, self._places, self._arguments, self._started_ray = [], [], [], (), False


class _PendingCall(NamedTuple):
    """A call of an actor in progress."""

    answer: Any
    place: Any  # of the actor
    since: float  # seconds of the monotonic clock


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


class _Actor:
    """The Ray actor: runs a worker, such as a `RolloutWorker`."""

    def __init__(
        self,
        spec: ModelSpec,
        engine_options: Mapping[str, Any],
        num_threads: int,
        device: str,
        around: Around | None = None,
    ) -> None:
        from chatgpt.rollout.vllm_worker import make_worker

        torch.set_num_threads(num_threads)
        self.ray = import_ray('a rollout worker')
        self.worker = make_worker(spec, engine_options, fetch=self.fetch, device=device, around=around)
        self.worker.host = self.ray.util.get_node_ip_address()

    def fetch(self, handle: Any) -> Tensor:
        with warnings.catch_warnings():
            warnings.filterwarnings('ignore', message='The given NumPy array is not writable')  # it is only read
            return torch.from_numpy(self.ray.get(handle))

    def pid(self) -> int:
        return os.getpid()

    def place(self) -> str:
        return f'process {os.getpid()} on {self.ray.util.get_node_ip_address()}'

    def call(self, method: str, args: Sequence[Any] = ()) -> Any:
        return getattr(self.worker, method)(*args)
