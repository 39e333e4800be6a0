"""Runs a script under torchrun, with the settings of this package's launcher.

`python -m chatgpt.launch.torchrun ARGUMENTS OF TORCHRUN` is torchrun without a traceback when a script fails or is
stopped, and without restarts of a script with wrong arguments.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chatgpt
from chatgpt.launch.relaunch import MISTAKE, REPORT_MARKER


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The settings of every launcher."""

    script: str
    script_args: Sequence[str] = ()
    num_workers: int = 1
    """total number over all nodes"""
    max_failures: int = 3
    """number of times that failed workers are replaced"""

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise ValueError(f'num_workers={self.num_workers} must be at least 1')
        if self.max_failures < 0:
            raise ValueError(f'max_failures={self.max_failures} must not be negative')
        if not Path(self.script).is_file():
            raise ValueError(f'{self.script}: there is no such script')


def python_path(given: str | None) -> dict[str, str]:
    """Returns PYTHONPATH with this package's checkout before what is `given`; nothing if the package is installed."""
    root = Path(chatgpt.__file__).resolve().parents[1]
    if 'site-packages' in root.parts:
        return {}
    return {'PYTHONPATH': os.pathsep.join(dict.fromkeys([str(root), *filter(None, [given])]))}


@dataclass(frozen=True, kw_only=True)
class TorchrunLaunch(Launch):
    """The settings of a launch with torchrun; with several nodes the same command is started on each."""

    cpus_per_worker: float | None = None
    """threads of a process, unless OMP_NUM_THREADS is set; none: 1 if there are several processes"""
    num_nodes: int = 1
    """number of nodes of this launch"""
    rdzv_endpoint: str | None = None
    """host:port of one of the nodes, the same on all, where they find each other; none: a free port of this node"""
    run_id: str | None = None
    """name of the launch, the same on every node; a later launch of the same name continues its run. none: a new one"""
    local_addr: str | None = None
    """address of this node as the others reach it; none: from the host name"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_nodes < 1:
            raise ValueError(f'num_nodes={self.num_nodes} must be at least 1')
        if self.num_workers % self.num_nodes:
            raise ValueError(f'num_workers={self.num_workers} cannot be split over num_nodes={self.num_nodes}')
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

    def command(self) -> list[str]:
        """Returns the torchrun command, which runs `main` of this module."""
        rdzv = ['--standalone']
        if self.run_id:
            endpoint = self.rdzv_endpoint or 'localhost:0'
            rdzv = [
                '--rdzv_backend=c10d',
                f'--rdzv_endpoint={endpoint}',
                f'--rdzv_id={self.run_id}',
                f'--nnodes={self.num_nodes}',
            ]
        if self.local_addr:
            rdzv.append(f'--local_addr={self.local_addr}')
        return [
            sys.executable,
            '-m',
            'chatgpt.launch.torchrun',
            *rdzv,
            f'--nproc_per_node={self.num_workers // self.num_nodes}',
            f'--max_restarts={self.max_failures}',
            self.script,
            *self.script_args,
        ]


def run_on_torchrun(launch: TorchrunLaunch) -> None:
    """Replaces this process by torchrun.

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE gives every restart an empty store. Otherwise the new processes use the agent's
    store too (torch 2.13), and some connect to addresses of dead processes in it.
    """
    command = launch.command()
    os.environ.setdefault('TORCH_DISABLE_SHARE_RDZV_TCP_STORE', '1')
    # Otherwise torchrun sets it to 1 itself and prints a warning.
    if launch.cpus_per_worker is not None or launch.num_workers > launch.num_nodes:
        os.environ.setdefault('OMP_NUM_THREADS', str(max(1, int(launch.cpus_per_worker or 1))))
    os.environ.update(python_path(os.environ.get('PYTHONPATH')))
    os.environ[REPORT_MARKER] = str(Path(tempfile.mkdtemp(prefix='chatgpt-launch-'), 'told'))
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], command)


def main() -> None:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    _end_at_mistakes()
    try:
        run(parse_args(sys.argv[1:]))
    except SignalException as stop:
        raise SystemExit(128 + int(stop.sigval)) from None
    except ChildFailedError as error:
        if any(failure.exitcode == MISTAKE for failure in error.failures.values()):  # it has printed its error
            raise SystemExit(MISTAKE) from None
        rank, failure = error.get_first_failure()
        print(f'[launch] rank {rank} {_ending(failure.exitcode)}; giving up', file=sys.stderr, flush=True)
        raise SystemExit(failure.exitcode if failure.exitcode > 0 else 1) from None
    finally:
        if marker := os.environ.get(REPORT_MARKER):
            shutil.rmtree(Path(marker).parent, ignore_errors=True)


def _end_at_mistakes() -> None:
    """Makes torchrun's agent end the launch when a script ends with `MISTAKE`, and print a line before a restart."""
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.launcher import api

    class Agent(LocalElasticAgent):
        def _monitor_workers(self, worker_group: Any) -> Any:
            result = super()._monitor_workers(worker_group)
            if any(failure.exitcode == MISTAKE for failure in result.failures.values()):
                self._remaining_restarts = 0
            elif result.failures and self._remaining_restarts > 0:
                rank, failure = min(result.failures.items(), key=lambda item: item[1].timestamp)
                most = worker_group.spec.max_restarts
                print(
                    f'[launch] rank {rank} {_ending(failure.exitcode)}; restart {most - self._remaining_restarts + 1} '
                    f'of {most}',
                    file=sys.stderr,
                    flush=True,
                )
            return result

    api.LocalElasticAgent = Agent  # type: ignore[misc]
    remarks = ('Sending process', 'failed (exitcode')
    logging.getLogger('torch.distributed.elastic.multiprocessing.api').addFilter(
        lambda record: not str(record.msg).startswith(remarks)
    )


def _ending(code: int) -> str:
    return f'was ended by {signal.Signals(-code).name}' if code < 0 else f'ended with exit code {code}'


if __name__ == '__main__':
    main()
