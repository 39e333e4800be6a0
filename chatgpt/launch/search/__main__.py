"""Search for settings of a method: Optuna proposes trials, each of which is a run.

    chatgpt-rlhf sweep sweep.yaml --jobs 2

The same command continues a sweep that was stopped. docs/sweep.md describes the file.
"""

from __future__ import annotations

from collections.abc import Sequence

from chatgpt.launch.arguments import Parser, run_main


def parser() -> Parser:
    out = Parser(prog='python -m chatgpt sweep', description=__doc__)
    out.add_argument('file', help='YAML, JSON or .conf: method, config, parameters, metric, direction, ...')
    out.add_argument('--jobs', type=int, default=1, metavar='N', help='number of trials at the same time (default: 1)')
    out.add_argument(
        '--launcher',
        choices=('torchrun', 'ray'),
        help='start each trial with torchrun or on Ray; the same as launch in the file',
    )
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0; 1 if no trial is complete; 130 or 143 after a signal."""
    args = parser().parse_args(argv)
    if args.jobs < 1:
        raise ValueError(f'--jobs={args.jobs} must be at least 1')
    from chatgpt.launch.search.settings import read_sweep
    from chatgpt.launch.search.sweep import run_sweep

    return run_sweep(read_sweep(args.file, launcher=args.launcher), jobs=args.jobs)


if __name__ == '__main__':
    run_main(main)
