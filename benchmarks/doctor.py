"""What the doctor says of good runs, and which planted faults it finds.

    python benchmarks/doctor.py --model stories260K --stories stories.txt --reviews movie_reviews.jsonl \\
        --prompts prompts.jsonl [--seeds 1 2 3] [--runs outputs/doctor] [--only demo faults ...]
    python benchmarks/doctor.py --page [--runs outputs/doctor]

Good runs are the tasks of the other benchmarks with their settings, shortened (`doctor_runs.py`); faults are tiny runs
with one thing wrong, and the same runs without it (`doctor_faults.py`). What is in --runs already is not run again;
--page only looks at it. Writes docs/results/doctor.md: every finding, exactly as it was.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from doctor_faults import FAULTS, key_of
from doctor_runs import GOOD, Files

from chatgpt.doctor import CHECKS, Finding, diagnose
from chatgpt.run_folder.reading import RunFolder

ROOT = Path(__file__).resolve().parent.parent
FAULTY = 'faults'
DONE = 'done'
SEEDS = (1, 2, 3)


def make_good(folder: Path, name: str, seed: int, files: Files) -> None:
    if (folder / DONE).exists():
        return
    start = time.perf_counter()
    GOOD[name](folder, seed, files)
    (folder / DONE).touch()
    print(f'{name} seed {seed}: {time.perf_counter() - start:.0f} s', flush=True)


def make_faulty(folder: Path) -> None:
    """Each fault, and each run without it once, for several faults have the same."""
    made: dict[object, Path] = {}
    for name, fault in FAULTS.items():
        for which, make in (('planted', fault.planted), ('without', fault.without)):
            path = folder / which / name.replace(' ', '_')
            if make in made:
                path.parent.mkdir(parents=True, exist_ok=True)
                if not path.exists():
                    path.symlink_to(made[make].absolute())
            elif not (path / 'metrics.jsonl').exists():
                make(path)
            made.setdefault(make, path)


def found_in(folder: Path) -> tuple[int, list[Finding]]:
    """Phases and findings of a run, which said the same while it went on."""
    run = RunFolder(folder)
    return run.phase, diagnose(run)


def told(findings: list[Finding]) -> str:
    return cell('; '.join(f'{f.key} ({f.level}, phase {f.step}: {f.evidence})' for f in findings)) or 'none'


def cell(text: str) -> str:
    return text.replace('|', '\\|')


def good_rows(folder: Path) -> tuple[list[str], int, int]:
    """A table's rows, the number of runs and that of findings."""
    rows, num_runs, num_findings = [], 0, 0
    for name in GOOD:
        for task in sorted({p.parent.name for p in folder.glob(f'{name}/*/*/metrics.jsonl')}):
            for path in sorted(folder.glob(f'{name}/*/{task}/metrics.jsonl')):
                if not (path.parents[1] / DONE).exists():
                    continue
                phases, findings = found_in(path.parent)
                num_runs, num_findings = num_runs + 1, num_findings + len(findings)
                rows.append(f'| {name} | {task} | {path.parents[1].name} | {phases} | {told(findings)} |')
    return rows, num_runs, num_findings


def fault_rows(folder: Path) -> tuple[list[str], int, int, int]:
    """A table's rows, the number of faults, of those found, and of runs in which it was found without the fault."""
    rows, num_found, num_false = [], 0, 0
    made = [name for name in FAULTS if (folder / 'planted' / name.replace(' ', '_') / 'metrics.jsonl').exists()]
    for name in made:
        key, path = key_of(name), name.replace(' ', '_')
        of = [f for f in found_in(folder / 'planted' / path)[1] if f.key == key]
        without = [f for f in found_in(folder / 'without' / path)[1] if f.key == key]
        num_found, num_false = num_found + bool(of), num_false + bool(without)
        seen = cell(f'phase {of[0].step}: {of[0].evidence}') if of else '**not found**'
        rows.append(f'| {name} | {FAULTS[name].about} | {seen} | {"**found**" if without else "silent"} |')
    return rows, len(made), num_found, num_false


def write_page(runs: Path, out: Path) -> None:
    good, num_runs, num_findings = good_rows(runs)
    faulty, num_faults, num_found, num_false = fault_rows(runs / FAULTY)
    missing = ', '.join(f'{name} {s}' for name in GOOD for s in SEEDS if not (runs / name / str(s) / DONE).exists())
    lines = [
        '# What the doctor finds',
        '',
        f'`python benchmarks/doctor.py`. {len(CHECKS)} kinds of finding ([doctor.md](../doctor.md)).',
        '',
        f'- **{num_found} of {num_faults} planted faults found**, and {num_false} of {num_faults} in the same run '
        'without the fault.',
        f'- **{num_findings} findings in {num_runs} good runs.** These are the tasks of the other benchmarks with their '
        'settings, shortened (`benchmarks/doctor_runs.py`).',
        *([f'- Not made yet, of three seeds each: {missing}.'] if missing else []),
        '',
        '## Good runs',
        '',
        '| task | run | seed | phases | findings |',
        '|---|---|---|---|---|',
        *good,
        '',
        '## Planted faults',
        '',
        'Tiny runs of the trainers with one thing wrong (`benchmarks/doctor_faults.py`). The last column is the same run '
        'without it.',
        '',
        '| finding | planted | seen | without |',
        '|---|---|---|---|',
        *faulty,
    ]
    out.parent.mkdir(parents=True, exist_ok=True)
    before = out.read_text() if out.exists() else ''
    mark = '\n## What was learned from false findings\n'
    rest = mark + before.split(mark)[1] if mark in before else ''
    out.write_text('\n'.join(lines) + '\n' + rest)
    print(f'{num_found} of {num_faults} faults found; {num_findings} findings in {num_runs} good runs; {out}')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ('model', 'stories', 'reviews', 'prompts'):
        parser.add_argument(f'--{name}', type=Path)
    parser.add_argument('--seeds', type=int, nargs='+', default=list(SEEDS))
    parser.add_argument('--runs', type=Path, default=ROOT / 'outputs' / 'doctor')
    parser.add_argument('--only', nargs='+', choices=[*GOOD, FAULTY], default=[FAULTY, *GOOD])
    parser.add_argument('--page', action='store_true', help='make no runs')
    parser.add_argument('--out', type=Path, default=ROOT / 'docs' / 'results' / 'doctor.md')
    args = parser.parse_args()
    if not args.page:
        if None in (args.model, args.stories, args.reviews, args.prompts):
            parser.error('give --model, --stories, --reviews and --prompts, or --page')
        torch.set_num_threads(1)
        files = Files(args.model, args.stories, args.reviews, args.prompts)
        if FAULTY in args.only:
            make_faulty(args.runs / FAULTY)
        for seed in args.seeds:
            for name in (name for name in GOOD if name in args.only):
                make_good(args.runs / name / str(seed), name, seed, files)
    write_page(args.runs, args.out)


if __name__ == '__main__':
    main()
