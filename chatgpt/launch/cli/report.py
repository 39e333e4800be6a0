"""Write the report of a run, or of several runs with their curves in the same charts.

    chatgpt-rlhf report outputs/ppo
    chatgpt-rlhf report outputs/ppo outputs/grpo --out both.html

The report is one HTML file that needs no other file. A run writes it when it ends; this command also works before that.
"""

from __future__ import annotations

from chatgpt.launch.arguments import Parser


def parser() -> Parser:
    out = Parser(description=__doc__, usage='%(prog)s RUN [RUN ...] [--out FILE] [--title TITLE]')
    out.add_argument('runs', nargs='+', metavar='RUN', help='run folder, with metrics.jsonl')
    out.add_argument(
        '--out',
        metavar='FILE',
        help='file to write (default: report.html in the run folder; of several runs, in this folder)',
    )
    out.add_argument('--title', help='title of the page (default: the name of the run)')
    return out


def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    from chatgpt.monitor.report import write_report

    print(write_report(args.runs, args.out, args.title))
