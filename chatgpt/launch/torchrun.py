"""A script under torchrun, with the names of this package's launcher. Left out: all that `torchrun --help` has beyond
them."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import chatgpt
from chatgpt.launch.relaunch import TOLD


@dataclass(frozen=True, kw_only=True)
class TorchrunLaunch:
    """What is asked for on this node; with several nodes the same command is started on each."""

    script: str
    script_args: Sequence[str] = ()
    num_workers: int = 1
    """of all nodes together"""
    cpus_per_worker: float | None = None
    """threads of a process, unless OMP_NUM_THREADS is set; none: 1 where there are several processes"""
    max_failures: int = 3
    num_nodes: int = 1
    """of this launch"""
    rdzv_endpoint: str | None = None
    """host:port of one of the nodes, where they meet; none: a free port of this one"""
    run_id: str | None = None
    """name of the launch, the same on every node; a later launch of the same name goes on with its run. None: a new
    one"""
    local_addr: str | None = None
    """this node's address as the others reach it; none: found by the host name"""

    def __post_init__(self) -> None:
        for name in ('num_workers', 'num_nodes'):
            if getattr(self, name) < 1:
                raise ValueError(f'{name}={getattr(self, name)} must be at least 1')
        if self.num_workers % self.num_nodes:
            raise ValueError(f'num_workers={self.num_workers} cannot be split over num_nodes={self.num_nodes}')
        if self.max_failures < 0:
            raise ValueError(f'max_failures={self.max_failures} must not be negative')
        if self.num_nodes > 1 and not (self.rdzv_endpoint and self.run_id):
            raise ValueError(
                'several nodes have to find each other: give --rdzv_endpoint HOST:PORT of one of them, and --run_id '
                'NAME'
            )
        if self.rdzv_endpoint and not self.run_id:
            raise ValueError(
                f'rdzv_endpoint={self.rdzv_endpoint} is where the launch of a --run_id NAME meets: give both, or '
                'neither'
            )
        if not Path(self.script).is_file():
            raise ValueError(f'{self.script}: there is no such script')

    def command(self) -> list[str]:
        """The torchrun command, through `chatgpt.launch.elastic`."""
        meet = ['--standalone']
        if self.run_id:
            endpoint = self.rdzv_endpoint or 'localhost:0'
            meet = [
                '--rdzv_backend=c10d',
                f'--rdzv_endpoint={endpoint}',
                f'--rdzv_id={self.run_id}',
                f'--nnodes={self.num_nodes}',
            ]
        if self.local_addr:
            meet.append(f'--local_addr={self.local_addr}')
        return [
            sys.executable,
            '-m',
            'chatgpt.launch.elastic',
            *meet,
            f'--nproc_per_node={self.num_workers // self.num_nodes}',
            f'--max_restarts={self.max_failures}',
            self.script,
            *self.script_args,
        ]


def run_on_torchrun(launch: TorchrunLaunch) -> None:
    """Become torchrun.

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE makes every restart begin with an empty store. Otherwise the agent's store serves
    the new processes too (torch 2.13), and some of them connect to the addresses of dead ones that they find there.
    """
    command = launch.command()
    os.environ.setdefault('TORCH_DISABLE_SHARE_RDZV_TCP_STORE', '1')
    # Otherwise torchrun sets it to 1 itself, and says so in four lines.
    if launch.cpus_per_worker is not None or launch.num_workers > launch.num_nodes:
        os.environ.setdefault('OMP_NUM_THREADS', str(max(1, int(launch.cpus_per_worker or 1))))
    root = Path(chatgpt.__file__).resolve().parents[1]
    if 'site-packages' not in root.parts:
        os.environ['PYTHONPATH'] = os.pathsep.join(
            dict.fromkeys([str(root), *filter(None, [os.environ.get('PYTHONPATH')])])
        )
    os.environ[TOLD] = str(Path(tempfile.mkdtemp(prefix='chatgpt-launch-'), 'told'))
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], command)
