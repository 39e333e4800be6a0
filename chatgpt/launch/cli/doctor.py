"""Find what is wrong with a run from the numbers in its folder.

    chatgpt-rlhf doctor outputs/ppo
    chatgpt-rlhf doctor outputs/* --json
    chatgpt-rlhf doctor --explain kl-runs-away

Prints each finding with the phase in which it began, the numbers, the likely cause and what to change; --explain
describes a finding in full. Runs that have not ended can be checked too. The exit code is 1 if any run has an error or
a warning, otherwise 0.
"""

from __future__ import annotations

import json
import sys

from chatgpt.launch.arguments import Parser


def parser() -> Parser:
    out = Parser(description=__doc__, usage='%(prog)s RUN [RUN ...] [--json]\n       %(prog)s --explain [KEY]')
    out.add_argument('runs', nargs='*', metavar='RUN', help='run folder, with metrics.jsonl')
    out.add_argument('--json', action='store_true', help='print one line of JSON per finding')
    out.add_argument(
        '--explain', nargs='?', const='', metavar='KEY', help='explain one finding and stop; without KEY: list all'
    )
    return out


def main() -> int:
    flags = parser()
    args = flags.parse_args(sys.argv[1:])
    from chatgpt.monitor.doctor import diagnose, worst_first
    from chatgpt.monitor.doctor.diagnosis import explain, overview
    from chatgpt.monitor.run_folder.reading import RunFolder

    if args.explain is not None:
        print(explain(args.explain) if args.explain else overview())
        return 0
    if not args.runs:
        flags.error('the following arguments are required: RUN')
    runs = []
    for path in args.runs:
        try:
            runs.append(RunFolder(path))
        except ValueError as no_run:
            if len(args.runs) == 1:
                raise
            print(f'left out: {no_run}', file=sys.stderr)
    if not runs:
        raise ValueError('none of the folders is that of a run')
    has_problems = False
    for run in runs:
        findings = worst_first(diagnose(run))
        has_problems = has_problems or any(f.level != 'note' for f in findings)
        if args.json:
            for f in findings:
                print(json.dumps({'run': str(run.path), 'step': f.step, **f.row()}, ensure_ascii=False))
            continue
        count = f'{len(findings)} finding{"s" * (len(findings) != 1)}' if findings else 'no findings'
        error = (run.record.error or 'no reason known').strip() if run.record and run.record.status == 'failed' else ''
        failed = f'; the run failed: {error.splitlines()[0]}' if error else ''
        print(f'{run.path}: {count} in {run.phase} phase{"s" * (run.phase != 1)}{failed}')
        if run.record is not None and run.record.starts and (line := run.record.starts[-1].machine.get('unused_card')):
            print(line)
        if run.record is None:
            print('(there is no run.json: checks that need settings, sizes or data were left out)')
        for f in findings:
            print(f'\n{f.text()}')
    return int(has_problems)
