"""Runs a script on a Ray cluster: one actor per rank, torchrun's environment variables, and a new group of workers when
one dies.

    run_on_ray(RayLaunch(script='examples/train_prompts.py', script_args=['--strategy', 'ddp'], num_workers=2))

Every rank is `python script args` in a child process of its actor, so scripts are the same as under torchrun. The
launcher prints the output of rank 0. No weights pass through Ray: ranks communicate over their own process group, and
checkpoints are on a path that all nodes share. See `relaunch` for how a script resumes after a restart.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from chatgpt.launch import worker
from chatgpt.launch.ray_request import (
    RayLaunch,
    captured_stderr,
    check_address,
    check_node,
    environment,
    is_no_cluster,
    ray_error_text,
    shared_file,
)
from chatgpt.launch.relaunch import MISTAKE
from chatgpt.rollout.cluster import amounts, import_ray, lack_of_room

GRACE_S = 6.0
"""seconds that the other ranks have to print their errors and end after one has failed"""
START_S = 120.0
"""maximum seconds until an actor's first answer, after its resources are reserved"""
STOP_S = 90.0
"""seconds that ranks have to save and end after SIGINT or SIGTERM"""
POLL_S = 0.5
READ_S = 5.0


@dataclass
class Rank:
    """A worker and its node."""

    actor: Any
    bundle: int
    node: dict[str, Any]
    local_rank: int = 0
    group_rank: int = 0
    """number of its node"""
    local_size: int = 1
    found: dict[str, Any] = field(default_factory=dict)
    """result of `Worker.inspect_node`"""

    @property
    def address(self) -> str:
        return self.node['NodeManagerAddress']


@dataclass
class End:
    """The end of a rank."""

    rank: int
    code: int | None
    """exit code of the script, or minus the number of a signal; None: the worker or node was lost"""
    tail: str = ''

    @property
    def died(self) -> bool:
        """True if the rank was killed or lost, so that no error message of it can follow."""
        return self.code is None or self.code < 0


class NoCluster(ValueError):
    """No Ray cluster was found."""


class GroupLost(RuntimeError):
    """Workers or nodes were lost before the script was started."""


def say(text: str) -> None:
    print(f'[launch] {text}', file=sys.stderr, flush=True)


def run_on_ray(launch: RayLaunch) -> int:
    """Runs the script to its end and returns its exit code.

    Raises:
        ImportError: if Ray is not installed.
        ValueError: if there is no cluster, the request does not fit it, or a node lacks a path or package.
    """
    if launch.address != 'local':
        os.environ.setdefault('RAY_NUM_REDIS_GET_RETRIES', '5')  # about 5 s
    ray = import_ray('the launcher ray')
    with connected(launch, ray):
        run_id = uuid.uuid4().hex
        for failures in range(launch.max_failures + 1):
            check_fits(launch, ray, wait_s=launch.wait_s if failures else 0)
            group = Group(launch, ray)
            try:
                with group:
                    first = group.run(environment(launch, run_id, failures))
                if first is None:
                    return 0
                what = group.describe(first)
            except GroupLost as error:
                first, what = End(0, None), str(error)
            if group.signalled is not None:
                return first.code if first.code and first.code > 0 else 128 + group.signalled
            if first.code == MISTAKE:
                if first.rank:
                    say(what)
                return MISTAKE
            say(
                f'{what}; '
                + (
                    f'restart {failures + 1} of {launch.max_failures}'
                    if failures < launch.max_failures
                    else 'giving up'
                )
            )
        return 1


# ---------------------------------------------------------------------- the cluster


@contextmanager
def connected(launch: RayLaunch, ray: Any) -> Iterator[None]:
    """Connects this process to a cluster as its driver, until the end of the `with`."""
    named = launch.address or os.environ.get('RAY_ADDRESS')
    address = named or 'auto'
    check_address(address)
    try:
        join(address, ray)
    except NoCluster:
        if named:
            raise
        say(
            'there is no Ray cluster: starting one on this machine, which ends with this run (--address HOST:PORT '
            'joins another)'
        )
        join('local', ray)
    try:
        yield
    finally:
        ray.shutdown()


def join(address: str, ray: Any) -> None:
    """Calls ray.init. Raises ValueError if it fails, `NoCluster` if there is no cluster."""
    options: dict[str, Any] = {'include_dashboard': False} if address == 'local' else {}
    with captured_stderr() as captured:
        try:
            ray.init(address=address, log_to_driver=False, logging_level='ERROR', **options)
        # ConnectionError, RuntimeError, ValueError or Ray's own, depending on the step that failed
        except Exception as error:
            captured.seek(0)
            kind = NoCluster if is_no_cluster(error) else ValueError
            raise kind(ray_error_text(address, error, captured.read().decode(errors='replace'))) from None


def check_fits(launch: RayLaunch, ray: Any, *, wait_s: float) -> None:
    """Waits until the cluster has enough resources in total, in use or free.

    Raises:
        ValueError: if it does not after `wait_s` seconds; names the requested and the existing resources.
    """
    end, printed = time.monotonic() + wait_s, False
    while True:
        text = lack_of_room(ray, launch.num_workers, 'worker', launch.bundle)
        if text is None:
            return
        if time.monotonic() >= end:
            raise ValueError(
                f'{text}; ask for less with --num_workers, --cpus_per_worker, --gpus_per_worker, or add nodes with ray '
                'start --address'
            )
        if not printed:
            say(f'{text}; waiting {wait_s:g} s for nodes')
            printed = True
        time.sleep(POLL_S)


# ---------------------------------------------------------------------- one group of workers


class Group:
    """The workers of one attempt. Leaving the context ends them and their scripts."""

    def __init__(self, launch: RayLaunch, ray: Any) -> None:
        self.launch, self.ray = launch, ray
        self.ranks: list[Rank] = []
        self._placement: Any = None
        self._reading: Any = None
        """reference to rank 0's next output"""
        self.signalled: int | None = None

    def __enter__(self) -> Group:
        try:
            self._place()
            self._inspect_nodes()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        """Stops the scripts and waits for them, so that the next group finds the run's folder released."""
        ray = self.ray
        stops = [r.actor.stop.remote() for r in self.ranks]
        if stops:
            ray.wait(stops, num_returns=len(stops), timeout=10)
        for rank in self.ranks:
            ray.kill(rank.actor)
        if self._placement is not None:
            ray.util.remove_placement_group(self._placement)

    def _place(self) -> None:
        """Reserves resources, starts the actors, and numbers them node by node."""
        ray, launch = self.ray, self.launch
        ray.cloudpickle.register_pickle_by_value(worker)
        self._placement = ray.util.placement_group(
            [launch.bundle] * launch.num_workers, strategy=launch.placement.upper()
        )
        ready = self._placement.ready()
        if not ray.wait([ready], timeout=2)[0]:
            say(
                f'{launch}: waiting up to {launch.wait_s:g} s for others to leave '
                f'({amounts(ray.available_resources())} free)'
            )
            if not ray.wait([ready], timeout=launch.wait_s)[0]:
                raise ValueError(
                    f'{launch} fit the Ray cluster, but for {launch.wait_s:g} s others have used it '
                    f'({amounts(ray.available_resources())} free now); wait for them (ray status shows what runs), '
                    'raise --wait_s, or ask for less'
                )
        where = self._nodes_of_bundles()
        nodes = {n['NodeID']: n for n in ray.nodes()}
        if any(where.get(bundle) not in nodes for bundle in range(launch.num_workers)):
            raise GroupLost('a node has died while workers were placed')
        actor_class = ray.remote(worker.Worker)
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        for bundle in range(launch.num_workers):
            options = {'num_cpus': launch.cpus_per_worker, 'num_gpus': launch.gpus_per_worker, 'max_concurrency': 4}
            actor = actor_class.options(scheduling_strategy=strategy(self._placement, bundle), **options).remote()
            self.ranks.append(Rank(actor, bundle, nodes[where[bundle]]))
        order = list(dict.fromkeys(r.node['NodeID'] for r in self.ranks))
        self.ranks.sort(key=lambda r: order.index(r.node['NodeID']))
        for number, node in enumerate(order):
            here = [r for r in self.ranks if r.node['NodeID'] == node]
            for local, rank in enumerate(here):
                rank.local_rank, rank.group_rank, rank.local_size = local, number, len(here)

    def _nodes_of_bundles(self) -> dict[int, str]:
        return dict(self.ray.util.placement_group_table(self._placement)['bundles_to_node_id'])

    def _inspect_nodes(self) -> None:
        """Raises ValueError if a node lacks a path or the package, GroupLost if a node has died."""
        launch, variables = self.launch, environment(self.launch, '', 0)
        script, folder = os.path.abspath(launch.script), os.getcwd()
        with shared_file(launch.shared_path or folder) as token:
            seen = {path: worker.digest(path) or '' for path in (script, token)}
            answers = [r.actor.inspect_node.remote(r.address, folder, seen, variables) for r in self.ranks]
            try:
                for rank, found in zip(self.ranks, self.ray.get(answers, timeout=START_S), strict=True):
                    rank.found = found
            except self.ray.exceptions.RayError as error:
                raise GroupLost(f'a worker could not be started: {" ".join(str(error).split())[:1000]}') from None
        # Ray moves the workers of a node that dies to another node.
        if any(self._nodes_of_bundles().get(r.bundle) != r.node['NodeID'] for r in self.ranks):
            raise GroupLost('a node has died while its workers were started')
        for rank in self.ranks:
            check_node(rank.address, rank.found, os.path.dirname(token))

    def run(self, shared: dict[str, str]) -> End | None:
        """Runs the script on all ranks. Returns None if all succeeded, else the end of the rank that failed first. Sets
        `signalled` to the signal that the user sent."""
        ray, ranks = self.ray, self.ranks
        command = [os.path.abspath(self.launch.script), *self.launch.script_args]
        waiting = {
            r.actor.run.remote(command, os.getcwd(), self._variables(r) | shared, n == 0): n
            for n, r in enumerate(ranks)
        }
        self._reading = ranks[0].actor.read.remote(READ_S)
        first: End | None = None
        deadline = math.inf
        with Signals() as signals:
            while waiting and time.monotonic() < deadline:
                for number in signals.take():
                    deadline = self._forward(number, again=self.signalled is not None)
                ready, _ = ray.wait(
                    [*waiting, *([self._reading] if self._reading else [])], num_returns=1, timeout=POLL_S
                )
                for reference in ready:
                    if reference not in waiting:
                        self._show()
                        continue
                    end = self._end(reference, waiting.pop(reference))
                    # A rank that waits for a dead one may report its error before the death is known.
                    if end.code != 0 and (first is None or (end.died and not first.died)):
                        first = end
                        if self.signalled is None:
                            deadline = min(deadline, time.monotonic() + (0 if end.died else GRACE_S))
        ended = 0 not in waiting.values()
        while self._reading and ray.wait([self._reading], timeout=READ_S if ended else 0)[0]:
            self._show()
        if first is None and waiting:
            first = End(min(waiting.values()), None, 'it had not ended in time')
        return first

    def _forward(self, number: int, *, again: bool) -> float:
        """Sends a signal to all scripts. Returns the time by which they have to end."""
        self.signalled = number
        say(
            f'{signal.Signals(number).name} again: ending'
            if again
            else f'{signal.Signals(number).name}: passed on to all workers'
        )
        for rank in self.ranks:
            rank.actor.signal.remote(number)
        return time.monotonic() + (0 if again else STOP_S)

    def _show(self) -> None:
        """Prints rank 0's output and requests more."""
        try:
            chunks = self.ray.get(self._reading)
        except self.ray.exceptions.RayError:  # the worker was lost, with the output that it had not sent
            self._reading = None
            return
        for name, chunk in chunks:
            stream = sys.stdout if name == 'stdout' else sys.stderr
            stream.buffer.write(chunk)
            stream.flush()
        self._reading = None if chunks and chunks[-1][0] == worker.END else self.ranks[0].actor.read.remote(READ_S)

    def _end(self, reference: Any, number: int) -> End:
        try:
            return End(number, *self.ray.get(reference))
        except self.ray.exceptions.RayActorError:
            return End(number, None, 'its worker or node is gone')
        except self.ray.exceptions.RayError as error:
            return End(number, None, ' '.join(str(error).split())[:1000])

    def describe(self, end: End) -> str:
        where = f'rank {end.rank} on {self.ranks[end.rank].address}'
        if end.code is None:
            return f'{where} was lost: {end.tail}'
        if end.code < 0:
            return f'{where} was ended by {signal.Signals(-end.code).name}'
        # Rank 0's output is printed already.
        output = f', its last words:\n{end.tail.rstrip()}\n' if end.rank and end.tail else ''
        return f'{where} ended with exit code {end.code}{output}'

    def _variables(self, rank: Rank) -> dict[str, str]:
        """Returns the environment variables that torchrun would set for this rank."""
        master = self.ranks[0]
        variables = {
            'RANK': str(self.ranks.index(rank)),
            'LOCAL_RANK': str(rank.local_rank),
            'LOCAL_WORLD_SIZE': str(rank.local_size),
            'GROUP_RANK': str(rank.group_rank),
            'GROUP_WORLD_SIZE': str(len({r.group_rank for r in self.ranks})),
            'MASTER_ADDR': master.address,
            'MASTER_PORT': str(master.found['port']),
        }
        if rank.found['interface']:  # without it gloo takes the address of the host name, which may be 127.0.0.1
            variables['GLOO_SOCKET_IFNAME'] = rank.found['interface']
        return variables


class Signals:
    """Collects SIGINT and SIGTERM for `take` while active. Does nothing outside the main thread."""

    def __init__(self) -> None:
        self._new: list[int] = []
        self._old: dict[int, Any] = {}

    def _keep(self, number: int, frame: FrameType | None) -> None:
        self._new.append(number)

    def take(self) -> list[int]:
        new, self._new = self._new, []
        return new

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            self._old = {number: signal.signal(number, self._keep) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
