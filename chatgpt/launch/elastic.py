"""torchrun as a module that ends in good order: `python -m chatgpt.launch.elastic ARGUMENTS OF TORCHRUN`.

torchrun itself ends with a traceback where a script failed, and where it was told to stop.
"""

from __future__ import annotations

import sys


def main() -> None:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    try:
        run(parse_args(sys.argv[1:]))
    except SignalException as stop:
        raise SystemExit(128 + int(stop.sigval)) from None
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f'[launch] rank {rank} failed first, with exit code {failure.exitcode}', file=sys.stderr, flush=True)
        raise SystemExit(failure.exitcode if failure.exitcode > 0 else 1) from None


if __name__ == '__main__':
    main()
