"""The settings of a launch on Ray, and checks of address, token, shared paths and packages. Does not import Ray."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

import chatgpt
from chatgpt.launch.torchrun import Launch, python_path
from chatgpt.rollout.cluster import request

SHARED_PREFIX = '.chatgpt-shared-'
_HTTP2 = b'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n' + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""start of a gRPC connection; a server answers with a settings frame, type 4"""
FORWARDED = (
    *('CHATGPT_', 'CUBLAS_', 'GLOO_', 'HF_', 'MKL_', 'NCCL_', 'OMP_', 'PYTHONHASHSEED', 'PYTHONPATH', 'TOKENIZERS_'),
    *('TORCH_', 'TRANSFORMERS_', 'WANDB_', 'TRACKIO_', 'MLFLOW_'),
)
"""prefixes of the environment variables that are passed to every worker"""


@dataclass(frozen=True, kw_only=True)
class RayLaunch(Launch):
    """The settings of a launch on Ray."""

    cpus_per_worker: float = 1
    """cores that Ray reserves, and threads of a process unless OMP_NUM_THREADS is set"""
    gpus_per_worker: int = 0
    """GPUs (or other accelerators) of a worker"""
    address: str | None = None
    """host:port of the cluster; none: RAY_ADDRESS, else the cluster of this node, else a local one; local: start one on
    this machine, for this run only; auto: the cluster of this node"""
    placement: Literal['pack', 'spread'] = 'pack'
    """pack: put workers on few nodes; spread: on many"""
    wait_s: float = 300.0
    """seconds to wait for resources that others use, or for a new node that replaces a failed one"""
    variables: Mapping[str, str] = field(default_factory=dict)
    """additional environment variables of the script"""
    shared_path: str | None = None
    """folder that all nodes must share, so that a run can resume on another node; none: the working directory"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cpus_per_worker < 0 or self.gpus_per_worker < 0 or self.cpus_per_worker + self.gpus_per_worker == 0:
            raise ValueError(
                f'cpus_per_worker={self.cpus_per_worker:g} and gpus_per_worker={self.gpus_per_worker:g}: give at least '
                'one above 0'
            )
        if self.gpus_per_worker != int(self.gpus_per_worker):
            raise ValueError(
                f'gpus_per_worker={self.gpus_per_worker:g}: a rank has devices of its own; give a whole number'
            )
        if self.placement not in ('pack', 'spread'):
            raise ValueError(f'placement={self.placement!r} is not one of pack, spread')

    @property
    def bundle(self) -> dict[str, float]:
        return {name: n for name, n in (('CPU', self.cpus_per_worker), ('GPU', self.gpus_per_worker)) if n}

    def __str__(self) -> str:
        return request(self.num_workers, 'worker', self.bundle)


def environment(launch: RayLaunch, run_id: str, failures: int) -> dict[str, str]:
    """Returns the environment variables that are the same on every rank."""
    forwarded = {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)}
    # so that workers import this package from a checkout on the shared path
    forwarded |= python_path(forwarded.get('PYTHONPATH'))
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


def check_address(address: str) -> None:
    """Raises ValueError if no Ray cluster answers at an address, within 5 s; Ray itself retries much longer."""
    if address.startswith('ray://'):
        raise ValueError(
            f'address {address}: the launcher passes paths of its own machine to the workers, so it has to run on a '
            'node of the cluster; log in there, or send the command with: ray job submit -- python -m chatgpt.launch '
            '...'
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
            f'no Ray cluster answers at {address} ({error.strerror or error}); look up the address with ray status on '
            'its head node, or start one there with: ray start --head --port=6379'
        ) from None


@contextmanager
def captured_stderr() -> Iterator[IO[bytes]]:
    """Redirects stderr of this process, C++ code included, to a temporary file."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield file
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def is_no_cluster(error: Exception) -> bool:
    """Returns True if the error of ray.init means that there is no cluster."""
    return 'Could not find any running Ray instance' in ' '.join(str(error).split())


def ray_error_text(address: str, error: Exception, output: str = '') -> str:
    """Returns why ray.init failed and what to do. `output`: what Ray's C++ code wrote to stderr."""
    text = ' '.join(str(error).split())
    if 'InvalidAuthToken' in text + output or 'auth_token' in text.lower():
        why = text[:200] if 'oken' in text else 'it is missing or another one'
        return (
            f'the Ray cluster at {address} does not accept the token of this process ({why}): every node and this '
            'command need the same RAY_AUTH_MODE (token or disabled) and the same token; copy ~/.ray/auth_token of '
            'the head node, or set RAY_AUTH_TOKEN'
        )
    if is_no_cluster(error):
        return (
            'there is no Ray cluster: start one with ray start --head (and ray start --address=HEAD:6379 on further '
            'nodes), name one with --address HOST:PORT or RAY_ADDRESS, or use this machine alone with --address local'
        )
    if 'ersion mismatch' in text:
        return (
            f'the Ray cluster at {address} runs other versions: {text}; install the same Ray and Python here as there'
        )
    return f'cannot join the Ray cluster at {address}: {type(error).__name__}: {text}'


def check_node(address: str, found: Mapping[str, Any], shared: str) -> None:
    """Raises ValueError if a worker's node lacks a path or package. `found`: the result of `Worker.inspect_node`."""
    where = f'node {address} ({found["host"]})'
    for path in found['missing']:
        if Path(path).name.startswith(SHARED_PREFIX):
            path = os.path.dirname(path)
        raise ValueError(
            f'{path} is not shared: {where} does not have it as it is here. Script, working directory and {shared} '
            'have to lie on a file system that all nodes mount at the same place; run the command from there and give '
            '--save_path there'
        )
    packages = found['packages']
    if packages.get('error'):
        raise ValueError(
            f'{where}: {packages["python"]} cannot import chatgpt: {packages["error"].strip().splitlines()[-1]}'
        )
    if packages['missing']:
        raise ValueError(
            f'{where}: {packages["python"]} has no package {", ".join(packages["missing"])}; install it there (pip '
            'install .), or put a checkout on the shared file system into PYTHONPATH'
        )
    if packages['version'] != chatgpt.__version__:
        raise ValueError(
            f'{where} has chatgpt {packages["version"]}, here is {chatgpt.__version__}; install the same on every node'
        )


@contextmanager
def shared_file(folder: str) -> Iterator[str]:
    """Writes a file into `folder`, or its nearest existing parent, by which nodes can check that they share it."""
    place = next(p for p in (Path(folder).absolute(), *Path(folder).absolute().parents) if p.is_dir())
    path = place / f'{SHARED_PREFIX}{uuid.uuid4().hex}'
    try:
        path.write_text(path.name)
    except OSError as error:
        raise ValueError(
            f'cannot write to {place}: {error.strerror}; every node needs a folder that it can write for this run'
        ) from None
    try:
        yield str(path)
    finally:
        path.unlink(missing_ok=True)
