"""torchrun as a module that ends in good order: `python -m chatgpt.launch.elastic ARGUMENTS OF TORCHRUN`.

torchrun itself ends with a traceback where a script failed, and where it was told to stop; and it starts a script again
that was called wrongly.
"""

from __future__ import annotations

import logging
import signal
import sys
from typing import Any

from chatgpt.launch.relaunch import MISTAKE


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
        if any(failure.exitcode == MISTAKE for failure in error.failures.values()):  # which has said itself what it is
            raise SystemExit(MISTAKE) from None
        rank, failure = error.get_first_failure()
        print(f'[launch] rank {rank} {_ending(failure.exitcode)}; giving up', file=sys.stderr, flush=True)
        raise SystemExit(failure.exitcode if failure.exitcode > 0 else 1) from None


def _end_at_mistakes() -> None:
    """Take a script that ends with `MISTAKE` as the end of the launch, and say in a line why workers are started
    again."""
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
