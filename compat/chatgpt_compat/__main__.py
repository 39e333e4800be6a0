"""Runs scripts written for other systems on this library, or lists what they need.

    python -m chatgpt_compat run script.py [ARGUMENTS of the script]
    python -m chatgpt_compat check script.py [MORE.py ...]
    torchrun --nproc-per-node=2 -m chatgpt_compat run script.py [ARGUMENTS of the script]

run: this library serves `import trl`, `import trlx`, `import coati` and the names of ColossalAI's `chatgpt`; other
names come from the installed package, if there is one. check: does not run the script; lists each such name with its
line, whether it is served and what to write instead, and each missing import. Exit code 0: nothing is missing, 1:
something is, 2: a file is not Python. See docs/compat.md.
"""

from __future__ import annotations

from chatgpt.launch.arguments import Parser, run_main


def parser() -> Parser:
    out = Parser(prog='python -m chatgpt_compat', description=__doc__)
    verbs = out.add_subparsers(dest='verb', required=True, metavar='run|check')
    running = verbs.add_parser('run', help='run a script on this library')
    running.add_argument('script')
    running.add_argument('arguments', nargs='...', help='arguments of the script').required = False
    checking = verbs.add_parser('check', help='list the names of other systems that scripts use')
    checking.add_argument('scripts', nargs='+', metavar='script')
    return out


def main() -> int:
    given = parser().parse_args()
    if given.verb == 'check':
        from chatgpt_compat.check import check

        return check(given.scripts)
    from chatgpt_compat.runner import run

    return run(given.script, given.arguments)


if __name__ == '__main__':
    run_main(main)
