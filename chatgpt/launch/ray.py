"""A script on a Ray cluster: one actor per rank, torchrun's environment variables, a new group of workers when one dies.

    run_on_ray(RayLaunch(script='examples/train_prompts.py', script_args=['--strategy', 'ddp'], num_workers=2))

Every rank is `python script args` in a child process of its actor, so the script is the one that torchrun runs and knows nothing of Ray.
Rank 0's output is the launcher's. Weights never pass through here: ranks talk over their own process group, and what outlives a
worker are checkpoints on a path that all nodes share. Left out: what the script does after a restart (`relaunch`).
"""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any

import chatgpt
from chatgpt.launch import worker

GRACE_S = 6.0
"""how long the other ranks have, after one has failed, to say why and end by themselves"""
STOP_S = 90.0
"""how long ranks have to save and leave after SIGINT or SIGTERM"""
POLL_S = 0.5
READ_S = 5.0
_HTTP2 = b'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n' + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""how a gRPC connection begins; the other side answers with a frame of the same kind, 4"""
WITNESS = '.chatgpt-shared-'
MISTAKE = 2
"""exit code of a script that was called wrongly (`run_main`, argparse, python itself): the same call would fail again"""
INSTALL = "pip install 'chatgpt[ray]', or pip install -r requirements-ray.txt"

FORWARDED = (
    'CHATGPT_', 'CUBLAS_', 'GLOO_', 'HF_', 'MKL_', 'NCCL_', 'OMP_', 'PYTHONHASHSEED', 'PYTHONPATH', 'TOKENIZERS_', 'TORCH_',
    'TRANSFORMERS_', 'WANDB_',
)  # fmt: skip
"""beginnings of the environment variables that go with the script to every worker"""


@dataclass(frozen=True, kw_only=True)
class RayLaunch:
    """What is asked for."""

    script: str
    script_args: Sequence[str] = ()
    num_workers: int = 1
    cpus_per_worker: float = 1
    """cores that Ray reserves, and threads of a process unless OMP_NUM_THREADS is set"""
    gpus_per_worker: int = 0
    max_failures: int = 3
    """how many times the workers are replaced"""
    address: str | None = None
    """host:port of the cluster; none: RAY_ADDRESS, or the one this node belongs to; 'local': one that lives as long as this run"""
    placement: str = 'pack'
    """'pack' puts workers on few nodes, 'spread' on many"""
    wait_s: float = 300.0
    """longest wait for resources that others use now, or for a new node in place of a dead one"""
    variables: Mapping[str, str] = field(default_factory=dict)
    """further environment variables of the script"""
    shared_path: str | None = None
    """folder that all nodes must see, or the run could not go on elsewhere; none: the working directory"""

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise ValueError(f'num_workers={self.num_workers} must be at least 1')
        if self.cpus_per_worker < 0 or self.gpus_per_worker < 0 or self.cpus_per_worker + self.gpus_per_worker == 0:
            raise ValueError(
                f'cpus_per_worker={self.cpus_per_worker:g} and gpus_per_worker={self.gpus_per_worker:g}: give at least one above 0'
            )
        if self.gpus_per_worker != int(self.gpus_per_worker):
            raise ValueError(f'gpus_per_worker={self.gpus_per_worker:g}: a rank has devices of its own; give a whole number')
        if self.max_failures < 0:
            raise ValueError(f'max_failures={self.max_failures} must not be negative')
        if self.placement not in ('pack', 'spread'):
            raise ValueError(f'placement={self.placement!r} is not one of pack, spread')
        if not Path(self.script).is_file():
            raise ValueError(f'{self.script}: there is no such script')

    @property
    def bundle(self) -> dict[str, float]:
        return {name: n for name, n in (('CPU', self.cpus_per_worker), ('GPU', self.gpus_per_worker)) if n}

    def __str__(self) -> str:
        each = ' and '.join(f'{n:g} {name}' for name, n in self.bundle.items())
        return f'{self.num_workers} worker{"s" if self.num_workers > 1 else ""} with {each} each'


@dataclass
class Rank:
    """A worker and its place."""

    actor: Any
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


def say(text: str) -> None:
    print(f'[launch] {text}', file=sys.stderr, flush=True)


def run_on_ray(launch: RayLaunch) -> int:
    """Run the script to its end; its exit code.

    Raises:
        ValueError: no Ray, no cluster, a request that does not fit it, a path or package that a node does not have.
    """
    ray = import_ray(local=launch.address == 'local')
    with connected(launch, ray):
        run_id = uuid.uuid4().hex
        for failures in range(launch.max_failures + 1):
            check_fits(launch, ray, wait_s=launch.wait_s if failures else 0)
            with Group(launch, ray) as group:
                first = group.run(environment(launch, run_id, failures))
            if first is None:
                return 0
            what = group.describe(first)
            if group.signalled is not None:
                return first.code if first.code and first.code > 0 else 128 + group.signalled
            if first.code == MISTAKE:
                if first.rank:
                    say(what)
                return MISTAKE
            say(f'{what}; ' + (f'restart {failures + 1} of {launch.max_failures}' if failures < launch.max_failures else 'giving up'))
        return 1


def import_ray(*, local: bool = False) -> Any:
    os.environ.setdefault('RAY_USAGE_STATS_ENABLED', '0')
    if not local:
        os.environ.setdefault('RAY_NUM_REDIS_GET_RETRIES', '5')  # seconds of asking a cluster that is there and refuses
    try:
        import ray
        import ray.exceptions
        import ray.util.placement_group
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise ValueError(f'the launcher ray needs Ray, which cannot be imported here ({error}); {INSTALL}') from None
    return ray


# ---------------------------------------------------------------------- the cluster


@contextmanager
def connected(launch: RayLaunch, ray: Any) -> Iterator[None]:
    """This process as the driver of a cluster, until the end of the `with`."""
    address = launch.address or os.environ.get('RAY_ADDRESS') or 'auto'
    check_address(address)
    options: dict[str, Any] = {'include_dashboard': False} if address == 'local' else {}
    with stderr_aside() as said:
        try:
            ray.init(address=address, log_to_driver=False, logging_level='ERROR', **options)
        except Exception as error:  # ConnectionError, RuntimeError, ValueError, ray's own: its kind depends on how far it came
            said.seek(0)
            raise ValueError(explained(address, error, said.read().decode(errors='replace'))) from None
    try:
        yield
    finally:
        ray.shutdown()


def check_address(address: str) -> None:
    """Raises ValueError for an address that nobody answers at, long before Ray itself would give up."""
    if address.startswith('ray://'):
        raise ValueError(
            f'address {address}: the launcher passes paths of its own machine to the workers, so it has to run on a node of the '
            'cluster; log in there, or send the command with: ray job submit -- python -m chatgpt.launch ...'
        )
    if address in ('auto', 'local'):
        return
    host, _, port = address.rpartition(':')
    if not host or not port.isdigit():
        raise ValueError(f"address {address!r} is not host:port, such as 10.0.0.1:6379, nor 'auto' or 'local'")
    try:
        with socket.create_connection((host.strip('[]'), int(port)), timeout=5) as probe:
            probe.sendall(_HTTP2)
            if os.environ.get('RAY_USE_TLS', '0') != '1' and probe.recv(9)[3:4] != b'\4':
                raise OSError('what listens there is not Ray')
    except OSError as error:
        raise ValueError(
            f'no Ray cluster answers at {address} ({error.strerror or error}); look up the address with ray status on its head node, '
            'or start one there with: ray start --head --port=6379'
        ) from None


@contextmanager
def stderr_aside() -> Iterator[IO[bytes]]:
    """What this process writes to stderr, C++ included, in a file instead."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield file
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def explained(address: str, error: Exception, said: str = '') -> str:
    """What went wrong in ray.init, and what to do. `said` is what Ray's C++ had to say."""
    text = ' '.join(str(error).split())
    if 'InvalidAuthToken' in text + said or 'auth_token' in text.lower():
        why = text[:200] if 'oken' in text else 'it is missing or another one'
        return (
            f'the Ray cluster at {address} does not accept the token of this process ({why}): every node and this command need the same '
            'RAY_AUTH_MODE (token or disabled) and the same token; copy ~/.ray/auth_token of the head node, or set RAY_AUTH_TOKEN'
        )
    if 'Could not find any running Ray instance' in text:
        return (
            'there is no Ray cluster: start one with ray start --head (and ray start --address=HEAD:6379 on further nodes), name one with '
            '--address HOST:PORT or RAY_ADDRESS, or use this machine alone with --address local'
        )
    if 'ersion mismatch' in text:
        return f'the Ray cluster at {address} runs other versions: {text}; install the same Ray and Python here as there'
    return f'cannot join the Ray cluster at {address}: {type(error).__name__}: {text}'


def check_fits(launch: RayLaunch, ray: Any, *, wait_s: float) -> None:
    """Wait until the nodes of the cluster are big enough, whoever uses them now.

    Raises:
        ValueError: they are not after `wait_s`; says what was asked for and what there is.
    """
    end, told = time.monotonic() + wait_s, False
    while True:
        nodes = [n for n in ray.nodes() if n['Alive']]
        room = sum(int(min(n['Resources'].get(name, 0) // each for name, each in launch.bundle.items())) for n in nodes)
        if room >= launch.num_workers:
            return
        there = '; '.join(f'node {n["NodeManagerAddress"]}: {amounts(n["Resources"])}' for n in nodes)
        text = f'{launch} do not fit the Ray cluster, which has room for {room} ({there})'
        if time.monotonic() >= end:
            raise ValueError(
                f'{text}; ask for less with --num_workers, --cpus_per_worker, --gpus_per_worker, or add nodes with ray start --address'
            )
        if not told:
            say(f'{text}; waiting {wait_s:g} s for nodes')
            told = True
        time.sleep(POLL_S)


def amounts(resources: Mapping[str, float]) -> str:
    return ', '.join(f'{resources.get(name, 0):g} {name}' for name in ('CPU', 'GPU'))


def environment(launch: RayLaunch, run_id: str, failures: int) -> dict[str, str]:
    """Variables that are the same on every rank."""
    forwarded = {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)}
    root = Path(chatgpt.__file__).resolve().parents[1]
    if 'site-packages' not in root.parts:  # a checkout, which workers find on the shared path
        forwarded['PYTHONPATH'] = os.pathsep.join(dict.fromkeys([str(root), *filter(None, [forwarded.get('PYTHONPATH')])]))
    return {
        'OMP_NUM_THREADS': str(max(1, int(launch.cpus_per_worker))),
        'PYTHONUNBUFFERED': '1',
        **forwarded,
        'WORLD_SIZE': str(launch.num_workers),
        'TORCHELASTIC_RUN_ID': run_id,
        'TORCHELASTIC_RESTART_COUNT': str(failures),
        'TORCHELASTIC_MAX_RESTARTS': str(launch.max_failures),
        **launch.variables,
    }


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
        self._placement = ray.util.placement_group([launch.bundle] * launch.num_workers, strategy=launch.placement.upper())
        ready = self._placement.ready()
        if not ray.wait([ready], timeout=5)[0]:
            say(f'{launch}: waiting up to {launch.wait_s:g} s for others to leave ({amounts(ray.available_resources())} free)')
            if not ray.wait([ready], timeout=launch.wait_s)[0]:
                raise ValueError(
                    f'{launch} fit the Ray cluster, but for {launch.wait_s:g} s others have used it ({amounts(ray.available_resources())} '
                    'free now); wait for them (ray status shows what runs), raise --wait_s, or ask for less'
                )
        where = ray.util.placement_group_table(self._placement)['bundles_to_node_id']
        nodes = {n['NodeID']: n for n in ray.nodes()}
        actor_class = ray.remote(worker.Worker)
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        for bundle in range(launch.num_workers):
            options = {'num_cpus': launch.cpus_per_worker, 'num_gpus': launch.gpus_per_worker, 'max_concurrency': 4}
            actor = actor_class.options(scheduling_strategy=strategy(self._placement, bundle), **options).remote()
            self.ranks.append(Rank(actor, nodes[where[bundle]]))
        order = list(dict.fromkeys(r.node['NodeID'] for r in self.ranks))
        self.ranks.sort(key=lambda r: order.index(r.node['NodeID']))
        for number, node in enumerate(order):
            here = [r for r in self.ranks if r.node['NodeID'] == node]
            for local, rank in enumerate(here):
                rank.local_rank, rank.group_rank, rank.local_size = local, number, len(here)

    def _look(self) -> None:
        """Raises ValueError for a node that lacks a path or the package."""
        launch, variables = self.launch, environment(self.launch, '', 0)
        script, folder = os.path.abspath(launch.script), os.getcwd()
        with witness(launch.shared_path or folder) as token:
            seen = {path: worker.digest(path) or '' for path in (script, token)}
            answers = [r.actor.look.remote(r.address, folder, seen, variables) for r in self.ranks]
            try:
                for rank, found in zip(self.ranks, self.ray.get(answers), strict=True):
                    rank.found = found
            except self.ray.exceptions.RayError as error:
                raise ValueError(f'a worker could not be started: {" ".join(str(error).split())[:1000]}') from None
        for rank in self.ranks:
            check_node(rank, os.path.dirname(token))

    def run(self, shared: dict[str, str]) -> End | None:
        """The script on all ranks; None if it ended well everywhere, or who failed first. `signalled` is what the user sent meanwhile."""
        ray, ranks = self.ray, self.ranks
        command = [os.path.abspath(self.launch.script), *self.launch.script_args]
        waiting = {
            r.actor.run.remote(command, os.getcwd(), self._variables(r) | shared, n == 0): n for n, r in enumerate(ranks)
        }
        self._reading = ranks[0].actor.read.remote(READ_S)
        first: End | None = None
        deadline = math.inf
        with Signals() as signals:
            while waiting and time.monotonic() < deadline:
                for number in signals.take():
                    deadline = self._pass_on(number, again=self.signalled is not None)
                ready, _ = ray.wait([*waiting, *([self._reading] if self._reading else [])], num_returns=1, timeout=POLL_S)
                for reference in ready:
                    if reference not in waiting:
                        self._show()
                        continue
                    end = self._end(reference, waiting.pop(reference))
                    if end.code != 0 and (first is None or (end.died and not first.died)):  # complaints may come before the news of a death
                        first = end
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
        say(f'{signal.Signals(number).name} again: ending' if again else f'{signal.Signals(number).name}: passed on to all workers')
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
        said = f', its last words:\n{end.tail.rstrip()}\n' if end.rank and end.tail else ''  # rank 0's are on the screen
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


def check_node(rank: Rank, shared: str) -> None:
    """Raises ValueError when a worker's node lacks something, with what to do about it."""
    found, where = rank.found, f'node {rank.address} ({rank.found["host"]})'
    for path in found['missing']:
        if Path(path).name.startswith(WITNESS):
            path = os.path.dirname(path)
        raise ValueError(
            f'{path} is not shared: {where} does not have it as it is here. Script, working directory and {shared} have to lie on a file '
            'system that all nodes mount at the same place; run the command from there and give --save_path there'
        )
    packages = found['packages']
    if packages.get('error'):
        raise ValueError(f'{where}: {packages["python"]} cannot import chatgpt: {packages["error"].strip().splitlines()[-1]}')
    if packages['missing']:
        raise ValueError(
            f'{where}: {packages["python"]} has no package {", ".join(packages["missing"])}; install it there (pip install .), or put '
            'a checkout on the shared file system into PYTHONPATH'
        )
    if packages['version'] != chatgpt.__version__:
        raise ValueError(f'{where} has chatgpt {packages["version"]}, here is {chatgpt.__version__}; install the same on every node')


@contextmanager
def witness(folder: str) -> Iterator[str]:
    """A file in `folder`, or in the nearest folder above it that exists, which a node sees only if it sees the same folder."""
    place = next(p for p in (Path(folder).absolute(), *Path(folder).absolute().parents) if p.is_dir())
    path = place / f'{WITNESS}{uuid.uuid4().hex}'
    try:
        path.write_text(path.name)
    except OSError as error:
        raise ValueError(f'cannot write to {place}: {error.strerror}; every node needs a folder that it can write for this run') from None
    try:
        yield str(path)
    finally:
        path.unlink(missing_ok=True)


class Signals:
    """SIGINT and SIGTERM are kept for `take` while active, not acted on. Outside the main thread nothing is installed."""

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
