"""Every layout to every other: runs the slow tests of tests/trainer/test_layouts.py and writes their outcome as a table.

    python benchmarks/layouts.py [--out docs/results/layouts.md] [--log FILE]

Row: the layout that ran three learning phases and wrote the checkpoint; column: the one that went on for three more. 'equal' means that the
six phases drew the same tokens as six straight ones under Naive (but for draws within 1e-5 of an edge), that losses agree within 2e-3 and
parameters within 0.05 · lr per step, in fp32. --log takes the output of an earlier `pytest -v` run instead of running the tests.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORDS = {'PASSED': 'equal', 'SKIPPED': 'equal up to an edge draw', 'FAILED': 'FAILED'}


def outcomes(log: str) -> dict[tuple[str, str], str]:
    """(first, second) → outcome; where a pair was run again, the last run counts."""
    names = 'naive|ddp\\(2\\)|fsdp\\(2\\) offloaded|fsdp\\(2\\)|zero1\\(2\\)|zero2\\(2\\) offloaded'
    found = re.findall(rf'test_every_layout_to_every_other\[({names})-({names})\] (PASSED|FAILED|SKIPPED)', log)
    return {(first, second): WORDS[word] for first, second, word in found}


def table(results: dict[tuple[str, str], str]) -> list[str]:
    layouts = list(dict.fromkeys(first for first, _ in results))
    rows = ['| written under ↓, continued under → | ' + ' | '.join(layouts) + ' |', '|---' * (len(layouts) + 1) + '|']
    return rows + [f'| {a} | ' + ' | '.join(results.get((a, b), 'not run') for b in layouts) + ' |' for a in layouts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', type=Path, default=ROOT / 'docs' / 'results' / 'layouts.md')
    parser.add_argument('--log', type=Path, nargs='+')
    args = parser.parse_args()
    if args.log:
        log = '\n'.join(path.read_text(errors='replace') for path in args.log)
    else:
        command = [sys.executable, '-m', 'pytest', '-v', '-m', 'slow', 'tests/trainer/test_layouts.py']
        log = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    results = outcomes(log)
    legend = ' '.join((__doc__ or '').split('\n\n')[2].split())
    args.out.write_text('\n'.join(['# Layouts', '', f'`python benchmarks/layouts.py`. {legend}', '', *table(results)]) + '\n')
    print('\n'.join(table(results)))


if __name__ == '__main__':
    main()
