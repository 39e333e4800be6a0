"""Every layout to every other: three phases of PPO under one, a checkpoint, three more under another.

    python benchmarks/layouts.py [--out docs/results/layouts.md]

Row: the layout that began the run and wrote the checkpoint; column: the one that went on. A number is the largest difference of a
weight to six straight phases under Naive, in learning rates per optimizer step (0.05 is allowed); sampled tokens are the same and
losses agree within 1e-4. 'bits': the same layout went on, and weights, optimizer states, metrics and tokens are those of its own six
straight phases to the last bit. 'edge, phase n': equal up to phase n, where a draw lay within 1e-5 of the edge between two tokens.
Gemini computes in bf16: its row is compared with Naive going on from its checkpoint, its column (in italics, within the tolerance of
bf16) with ZeRO-2 in bf16 going on from the same checkpoint, its phases counted from there: 'edge, phase 2' says that samples, scores
and losses of one phase agree and that the second has a draw within 2^-7 of an edge, after which neither tokens nor weights are
compared.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from dataclasses import replace
from pathlib import Path

from chatgpt.testing.layouts import (
    BF16,
    FP32,
    LAYOUTS,
    UPDATES_PER_PHASE,
    Leg,
    Log,
    Tolerance,
    compare_logs,
    compare_weights,
    differing,
    run_legs,
)

ROOT = Path(__file__).resolve().parent.parent
HALF, TOTAL = 3, 6
GEMINI, BF16_REFERENCE = 'gemini(2) bf16', 'zero2(2) bf16'
NAMES = [name for name in LAYOUTS if name != BF16_REFERENCE]


def every_pair(folder: Path, names: list[str] | None = None) -> dict[tuple[str, str], str]:
    """{(first, second): cell}; a cell that begins with FAILED says how the two disagree."""
    names = names or NAMES
    legs: dict[str, Leg] = {}
    for a in sorted(names, key=lambda name: LAYOUTS[name][1]):  # the legs of one world size share their processes
        begin = Leg(layout=a, until=HALF, total=TOTAL, target=folder / a)
        legs |= {a: begin, f'{a} straight': replace(begin, until=TOTAL, target=folder / f'{a} straight')}
    seconds = [*names, *([BF16_REFERENCE] if GEMINI in names else [])]
    for b in sorted(seconds, key=lambda name: LAYOUTS[name][1]):
        for a in names:
            target = folder / f'{a} to {b}'
            legs[target.name] = Leg(layout=b, until=TOTAL, total=TOTAL, source=folder / a, target=target)
    logs = dict(zip(legs, run_legs(list(legs.values()), timeout_s=1200.0), strict=True))
    return {(a, b): _cell(folder, logs, a, b) for a in names for b in names}


def _cell(folder: Path, logs: dict[str, Log], a: str, b: str) -> str:
    name = f'{a} to {b}'
    if a == b:
        straight = logs[f'{a} straight']
        same_numbers = logs[a].metrics + logs[name].metrics == straight.metrics
        different = differing(folder / f'{a} straight', folder / name)
        return 'bits' if same_numbers and not different else f'FAILED: {different[:3] or "metrics"}'
    if b == GEMINI:
        return _compared(folder, logs, f'{a} to {BF16_REFERENCE}', name, 0, BF16)
    if a == GEMINI:
        return 'itself' if b == 'naive' else _compared(folder, logs, f'{a} to naive', name, 0, FP32)
    return _compared(folder, logs, 'naive straight', name, HALF, FP32)


def _compared(folder: Path, logs: dict[str, Log], want: str, got: str, first: int, tolerance: Tolerance) -> str:
    try:
        report = compare_logs(logs[want], logs[got], first=first, tolerance=tolerance)
        if report is not None:
            text = 'edge, ' + (re.match(r'phase \d+', report) or [''])[0]
        else:
            steps = (TOTAL - (0 if first else HALF)) * UPDATES_PER_PHASE
            text = f'{compare_weights(folder / want, folder / got, steps=steps, tolerance=tolerance):.0e}'
    except AssertionError as error:
        return f'FAILED: {str(error).splitlines()[0]}'
    return f'*{text}*' if tolerance is BF16 else text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', type=Path, default=ROOT / 'docs' / 'results' / 'layouts.md')
    parser.add_argument('--layouts', nargs='+', choices=NAMES, default=NAMES)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix='layouts-') as folder:
        cells = every_pair(Path(folder), args.layouts)
    rows = ['| began under ↓, went on under → | ' + ' | '.join(args.layouts) + ' |', '|---' * (len(args.layouts) + 1) + '|']
    rows += [f'| {a} | ' + ' | '.join(cells[a, b] for b in args.layouts) + ' |' for a in args.layouts]
    legend = ' '.join((__doc__ or '').split('\n\n')[2].split())
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text('\n'.join(['# Layouts', '', f'`python benchmarks/layouts.py`. {legend}', '', *rows]) + '\n')
    print('\n'.join(rows))


if __name__ == '__main__':
    main()
