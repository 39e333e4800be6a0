"""A script on a Ray cluster: one actor per rank, torchrun's environment variables, a new group of workers when one
dies.

    run_on_ray(RayLaunch(script='examples/train_prompts.py', script_args=['--strategy', 'ddp'], num_workers=2))

Every rank is `python script args` in a child process of its actor, so the script is the one that torchrun runs and
knows nothing of Ray. Rank 0's output is the launcher's. Weights never pass through here: ranks talk over their own
process group, and what outlives a worker are checkpoints on a path that all nodes share. Left out: what the script does
after a restart (`relaunch`).
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
    check_address,
    check_node,
    environment,
    explained,
    is_no_cluster,
    stderr_aside,
    witness,
)
from chatgpt.launch.relaunch import MISTAKE
from chatgpt.rollout.cluster import amounts, import_ray, lack_of_room

GRACE_S = 6.0
"""how long the other ranks have, after one has failed, to say why and end by themselves"""
START_S = 120.0
"""longest wait for an actor's first answer, once its resources are reserved"""
STOP_S = 90.0
"""how long ranks have to save and leave after SIGINT or SIGTERM"""
POLL_S = 0.5
READ_S = 5.0


@dataclass
class Rank:
    """A worker and its place."""

    actor: Any
    bundle: int
    node: dict[str, Any]
    local_rank: int = 0
    group_rank: int = 0
    """number of its node"""
    local_size: int = 1
    found: dict[str, Any] = field(default_factory=dict)
    """what `Worker.look` has seen"""

    @property
    def address(self) -> str:
        return self.node['NodeManagerAddress']


@dataclass
class End:
    """How a rank ended."""

    rank: int
    code: int | None
    """exit code of the script, or minus a signal's number; None: its worker or node is gone"""
    tail: str = ''

    @property
    def died(self) -> bool:
        """Without a word, so that nobody need wait for one."""
        return self.code is None or self.code < 0


class NoCluster(ValueError):
    """None runs here."""


class GroupLost(RuntimeError):
    """Workers or nodes have gone before the script was started."""


def say(text: str) -> None:
    print(f'[launch] {text}', file=sys.stderr, flush=True)


def run_on_ray(launch: RayLaunch) -> int:
    """Run the script to its end; its exit code.

    Raises:
        ImportError: no Ray.
        ValueError: no cluster, a request that does not fit it, a path or package that a node does not have.
    """
    if launch.address != 'local':
        os.environ.setdefault('RAY_NUM_REDIS_GET_RETRIES', '5')  # seconds of asking a cluster that is there and refuses
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
    """This process as the driver of a cluster, until the end of the `with`."""
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
    """Raises ValueError, `NoCluster` where that is the reason."""
    options: dict[str, Any] = {'include_dashboard': False} if address == 'local' else {}
    with stderr_aside() as said:
        try:
            ray.init(address=address, log_to_driver=False, logging_level='ERROR', **options)
        # ConnectionError, RuntimeError, ValueError, ray's own: its kind depends on how far it came.
        except Exception as error:
            said.seek(0)
            kind = NoCluster if is_no_cluster(error) else ValueError
            raise kind(explained(address, error, said.read().decode(errors='replace'))) from None


def check_fits(launch: RayLaunch, ray: Any, *, wait_s: float) -> None:
    """Wait until the nodes of the cluster are big enough, whoever uses them now.

    Raises:
        ValueError: they are not after `wait_s`; says what was asked for and what there is.
    """
    end, told = time.monotonic() + wait_s, False
    while True:
        text = lack_of_room(ray, launch.num_workers, 'worker', launch.bundle)
        if text is None:
            return
        if time.monotonic() >= end:
            raise ValueError(
                f'{text}; ask for less with --num_workers, --cpus_per_worker, --gpus_per_worker, or add nodes with ray '
                'start --address'
            )
        if not told:
            say(f'{text}; waiting {wait_s:g} s for nodes')
            told = True
        time.sleep(POLL_S)


# ---------------------------------------------------------------------- one group of workers


class Group:
    """The workers between two failures; leaving it ends them and their scripts."""

    def __init__(self, launch: RayLaunch, ray: Any) -> None:
        self.launch, self.ray = launch, ray
        self.ranks: list[Rank] = []
        self._placement: Any = None
        self._reading: Any = None
        """rank 0's output, asked for"""
        self.signalled: int | None = None

    def __enter__(self) -> Group:
        try:
            self._place()
            self._look()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        """Scripts first, and waited for: a new group must not find the run's folder still held."""
        ray = self.ray
        stops = [r.actor.stop.remote() for r in self.ranks]
        if stops:
            ray.wait(stops, num_returns=len(stops), timeout=10)
        for rank in self.ranks:
            ray.kill(rank.actor)
        if self._placement is not None:
            ray.util.remove_placement_group(self._placement)

    def _place(self) -> None:
        """Reserve, start the actors, and number them node by node."""
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

    def _look(self) -> None:
        """Raises ValueError for a node that lacks a path or the package, GroupLost when one has just died."""
        launch, variables = self.launch, environment(self.launch, '', 0)
        script, folder = os.path.abspath(launch.script), os.getcwd()
        with witness(launch.shared_path or folder) as token:
            seen = {path: worker.digest(path) or '' for path in (script, token)}
            answers = [r.actor.look.remote(r.address, folder, seen, variables) for r in self.ranks]
            try:
                for rank, found in zip(self.ranks, self.ray.get(answers, timeout=START_S), strict=True):
                    rank.found = found
            except self.ray.exceptions.RayError as error:
                raise GroupLost(f'a worker could not be started: {" ".join(str(error).split())[:1000]}') from None
        # Ray moves the workers of a node that dies.
        if any(self._nodes_of_bundles().get(r.bundle) != r.node['NodeID'] for r in self.ranks):
            raise GroupLost('a node has died while its workers were started')
        for rank in self.ranks:
            check_node(rank.address, rank.found, os.path.dirname(token))

    def run(self, shared: dict[str, str]) -> End | None:
        """The script on all ranks; None if it ended well everywhere, or who failed first. `signalled` is what the user
        sent meanwhile."""
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
                    deadline = self._pass_on(number, again=self.signalled is not None)
                ready, _ = ray.wait(
                    [*waiting, *([self._reading] if self._reading else [])], num_returns=1, timeout=POLL_S
                )
                for reference in ready:
                    if reference not in waiting:
                        self._show()
                        continue
                    end = self._end(reference, waiting.pop(reference))
                    # Complaints may come before the news of a death.
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

    def _pass_on(self, number: int, *, again: bool) -> float:
        """Give a signal to all scripts; until when they have to end."""
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
        """Write what rank 0 has written, and ask for more."""
        try:
            chunks = self.ray.get(self._reading)
        except self.ray.exceptions.RayError:  # it is gone, and what it had not yet sent with it
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
        # Rank 0's are on the screen.
        said = f', its last words:\n{end.tail.rstrip()}\n' if end.rank and end.tail else ''
        return f'{where} ended with exit code {end.code}{said}'

    def _variables(self, rank: Rank) -> dict[str, str]:
        """What torchrun would set for this rank."""
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
    """SIGINT and SIGTERM are kept for `take` while active, not acted on. Outside the main thread nothing is
    installed."""

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
