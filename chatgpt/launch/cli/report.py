"""Write the page of a run, or of several with their curves in the same charts.

    chatgpt-rlhf report outputs/ppo
    chatgpt-rlhf report outputs/ppo outputs/grpo --out both.html

It is one file that opens anywhere. A run writes its own when it ends; this writes it anew, also while the run goes on.
"""

from __future__ import annotations

from chatgpt.launch.arguments import Parser


def parser() -> Parser:
    out = Parser(description=__doc__, usage='%(prog)s RUN [RUN ...] [--out FILE] [--title TITLE]')
    out.add_argument('runs', nargs='+', metavar='RUN', help='folder of a run, where metrics.jsonl is')
    out.add_argument(
        '--out', metavar='FILE', help='default: report.html in the folder of the run; of several, in the current one'
    )
    out.add_argument('--title', help='default: the name of the run')
    return out


def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    from chatgpt.monitor.report import write_report

    print(write_report(args.runs, args.out, args.title))
