"""One run, one hash: the SHA-256 of the final weights of every method, in every layout, killed and moved.

    python benchmarks/one_hash.py                                             # everything; hours on two cores
    python benchmarks/one_hash.py --only ppo,sft --layouts naive,ddp2,seed --precisions fp32
    python benchmarks/one_hash.py --layouts cost --only ppo,dpo
    python benchmarks/one_hash.py --page docs/results/one_hash.md             # the page of what has been measured

Parts may run at different times on one machine: results are added to --results, a part that is there is not run again,
and run folders stay in --work, where every run is compared with its Naive one as `chatgpt-rlhf verify` does. Runs are
those of one_hash_runs.py: 20 optimizer steps in 5 phases, with reproducible='exact'.
"""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import one_hash_runs
import torch
from one_hash_runs import METHODS, Job
from torch.multiprocessing.spawn import ProcessException

from chatgpt.checkpoint.files import write_atomically
from chatgpt.cli.verify import compare, hash_of
from chatgpt.launch.arguments import Parser, run_main
from chatgpt.run_folder import RunFolder
from chatgpt.testing.processes import run_distributed

HERE = Path(__file__).resolve().parent
RESULTS = HERE / 'results' / 'one_hash.json'
LAYOUTS: dict[str, tuple[str, str, int]] = {
    'naive': ('Naive', 'naive', 1),
    'ddp2': ('DDP, 2', 'ddp', 2),
    'ddp4': ('DDP, 4', 'ddp', 4),
    'fsdp2': ('FSDP2, 2', 'fsdp', 2),
    'fsdp4': ('FSDP2, 4', 'fsdp', 4),
    'zero1': ('ZeRO-1, 2', 'zero1', 2),
    'zero2': ('ZeRO-2, 2', 'zero2', 2),
    'torchrun': ('torchrun, DDP, 2', 'ddp', 2),
    'ray': ('Ray, DDP, 2', 'ddp', 2),
    'killed': ('FSDP2, 2, killed', 'fsdp', 2),
    'moved': ('FSDP2, 2, killed; then DDP, 4', 'fsdp', 2),
    'seed': ('other seed', 'naive', 1),
    'bit': ('one bit', 'naive', 1),
}
"""{name: (title, strategy, processes)}; the first is what others are compared with, the last two must differ"""
CONTROLS = ('seed', 'bit')
COST_LAYOUTS = ('naive', 'ddp2', 'fsdp2')
PRECISIONS = ('fp32', 'bf16')
TIMEOUT_S = 1500.0

TITLE = """# One run, one hash

`python benchmarks/one_hash.py`. Every method trains for {updates} optimizer steps with `reproducible='exact'` ([strategies.md](../strategies.md)): a small
GPT-2, on the CPU, one thread per process, and what a run leaves is compared with that of the Naive run as `chatgpt-rlhf verify` does:
recorded sequences, metrics but for `perf/`, and every tensor of every common checkpoint, optimizer states among them. `=` says that all of
it is the same to the bit; the SHA-256 is that of the final weights ([exact.md](../exact.md)), its first {digits} digits.

*Killed*: SIGKILL to the last rank amid the third of five phases, then resumed from the last checkpoint; *then* names the layout that it goes
on in. Controls, which must differ: another seed, and bit {bit} of one element of one gradient flipped in one backward of step {flipped}.

"""


def parser() -> Parser:
    out = Parser(description=__doc__)
    out.add_argument('--only', default=','.join(METHODS), help='methods, with commas between them')
    out.add_argument('--layouts', default=','.join([*LAYOUTS, 'cost']), help=f'of {", ".join(LAYOUTS)}, cost')
    out.add_argument('--precisions', default=','.join(PRECISIONS))
    out.add_argument('--updates', type=int, default=one_hash_runs.UPDATES)
    out.add_argument('--results', default=str(RESULTS))
    out.add_argument('--work', default=str(Path(tempfile.gettempdir()) / 'one_hash'), help='where run folders stay')
    out.add_argument('--again', action='store_true', help='run parts that have results, too')
    out.add_argument('--page', help='write this page from the results; nothing is run')
    return out


def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    results = Results(Path(args.results))
    if args.page:
        Path(args.page).write_text(page(results))
        return
    methods, layouts = chosen(args.only, METHODS), chosen(args.layouts, (*LAYOUTS, 'cost'))
    work = Work(Path(args.work), results, args.updates, args.again)
    for layout in layouts:
        parts = [(method, p) for method in methods for p in chosen(args.precisions, PRECISIONS)]
        if layout == 'cost':
            for method, precision in parts:
                work.cost(method, precision)
        elif layout in ('torchrun', 'ray'):
            work.launched(layout, parts)
        else:
            for method, precision in parts:
                work.run(method, precision, layout)


def chosen(text: str, known: tuple[str, ...]) -> list[str]:
    words = [word.strip() for word in text.split(',')]
    for word in words:
        if word not in known:
            raise ValueError(f'{word!r} is none of {", ".join(known)}')
    return words


class Results:
    """A JSON file of rows, written anew after each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = json.loads(path.read_text())['rows'] if path.is_file() else []

    def find(self, **key: Any) -> dict[str, Any] | None:
        return next((row for row in self.rows if key.items() <= row.items()), None)

    def add(self, row: dict[str, Any], *key: str) -> None:
        self.rows = [r for r in self.rows if any(r.get(name) != row[name] for name in key)] + [row]
        text = json.dumps({'machine': machine(), 'rows': self.rows}, indent=1) + '\n'
        write_atomically(self.path, lambda file: file.write(text.encode()))
        print(json.dumps(row), flush=True)


class Work:
    """Runs parts, and compares what they leave."""

    def __init__(self, folder: Path, results: Results, updates: int, again: bool) -> None:
        self.folder, self.results, self.updates, self.again = folder, results, updates, again

    def job(self, method: str, precision: str, layout: str, **more: Any) -> Job:
        place = self.folder / f'{method}-{precision}-{layout}'.replace(' ', '_')
        strategy = LAYOUTS[layout][1]
        return Job(method, precision, strategy, str(place), updates=self.updates, **more)

    def done(self, method: str, precision: str, layout: str) -> bool:
        found = self.results.find(method=method, precision=precision, layout=layout, updates=self.updates)
        return found is not None and not self.again

    def run(self, method: str, precision: str, layout: str) -> None:
        if self.done(method, precision, layout):
            return
        ranks, start = LAYOUTS[layout][2], time.perf_counter()
        more = {'seed': 2} if layout == 'seed' else {'flip': True} if layout == 'bit' else {}
        job = self.job(method, precision, layout, **more)
        shutil.rmtree(job.folder, ignore_errors=True)
        refused = None
        try:
            if layout in ('killed', 'moved'):
                self.killed(job, ranks)
                after = ('ddp', 4) if layout == 'moved' else (job.strategy, ranks)
                resumed = Job(**asdict(job) | {'strategy': after[0], 'kill': False, 'resume': True})
                run_distributed(one_hash_runs.run_all, after[1], [asdict(resumed)], timeout_s=TIMEOUT_S)
            else:
                run_distributed(one_hash_runs.run_all, ranks, [asdict(job)], timeout_s=TIMEOUT_S)
        except ProcessException as error:
            refused = refusal(str(error))
            if refused is None:
                raise
        self.note(job, layout, time.perf_counter() - start, refused)

    def killed(self, job: Job, ranks: int) -> None:
        try:
            run_distributed(one_hash_runs.run_all, ranks, [asdict(job) | {'kill': True}], timeout_s=TIMEOUT_S)
        except ProcessException as error:
            phase = RunFolder(job.folder).phase
            if phase != one_hash_runs.KILLED_AT // one_hash_runs.PER_PHASE:
                raise RuntimeError(f'{job.folder}: killed after {phase} phases') from error
            return
        raise RuntimeError(f'{job.folder}: nobody was killed')

    def launched(self, layout: str, parts: list[tuple[str, str]]) -> None:
        """All parts by one start of a launcher."""
        jobs = [self.job(*part, layout) for part in parts if not self.done(*part, layout)]
        if not jobs:
            return
        for job in jobs:
            shutil.rmtree(job.folder, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        list_of_jobs = self.folder / f'{layout}.json'
        list_of_jobs.write_text(json.dumps([asdict(job) for job in jobs]))
        command = [sys.executable, '-m', 'chatgpt.launch', '--num_workers', str(LAYOUTS[layout][2])]
        command += ['--launcher', 'ray', '--address', 'local', '--cpus_per_worker', '1'] if layout == 'ray' else []
        command += ['--max_failures', '0', str(HERE / 'one_hash_runs.py'), str(list_of_jobs)]
        paths = os.pathsep.join(p for p in (str(HERE.parent), os.environ.get('PYTHONPATH')) if p)
        start = time.perf_counter()
        subprocess.run(command, check=True, env=os.environ | {'PYTHONPATH': paths, 'OMP_NUM_THREADS': '1'})
        seconds = (time.perf_counter() - start) / len(jobs)
        for job in jobs:
            self.note(job, layout, seconds)

    def note(self, job: Job, layout: str, seconds: float, refused: str | None = None) -> None:
        row: dict[str, Any] = {'method': job.method, 'precision': job.precision, 'layout': layout}
        row |= {'updates': self.updates, 'seconds': round(seconds, 1)}
        if refused is not None:
            row['refused'] = refused
        else:
            run, reference = RunFolder(job.folder), RunFolder(self.job(job.method, job.precision, 'naive').folder)
            phase, digits = hash_of(run) or (0, '')
            if phase != math.ceil(self.updates / one_hash_runs.PER_PHASE):
                raise RuntimeError(f'{job.folder}: its last checkpoint is of phase {phase}')
            found = compare(reference, run)
            partings = [str(part.parting) for part in found.values() if part.parting is not None]
            row |= {'hash': digits, 'phases': {kind: part.phases for kind, part in found.items()}, 'parts': partings}
        self.results.add(row, 'method', 'precision', 'layout')

    def cost(self, method: str, precision: str) -> None:
        for layout in COST_LAYOUTS:
            known = self.results.find(method=method, precision=precision, cost=layout)
            if known is not None and not self.again:
                continue
            _, strategy, ranks = LAYOUTS[layout]
            found = run_distributed(one_hash_runs.cost, ranks, method, precision, strategy, timeout_s=TIMEOUT_S)[0]
            row = {'method': method, 'precision': precision, 'cost': layout}
            self.results.add(row | found, 'method', 'precision', 'cost')


def refusal(text: str) -> str | None:
    """What a strategy says that cannot do this; None of any other failure."""
    lines = [line for line in text.splitlines() if line.startswith('ValueError: ') and 'exact' in line]
    return lines[-1].removeprefix('ValueError: ') if lines else None


# ---------------------------------------------------------------------- the page

DIGITS = 16


def page(results: Results) -> str:
    rows = {(r['method'], r['precision'], r['layout']): r for r in results.rows if 'layout' in r}
    updates = max((r['updates'] for r in rows.values()), default=one_hash_runs.UPDATES)
    text = TITLE.format(
        updates=updates, digits=DIGITS, bit=one_hash_runs.FLIPPED_BIT, flipped=one_hash_runs.FLIPPED_AT + 1
    )
    titles = [title for title, _, _ in LAYOUTS.values()]
    table = [['method', 'precision', 'SHA-256 (Naive)', *titles[1:]]]
    refused: dict[str, str] = {}
    for method in METHODS:
        for precision in PRECISIONS:
            reference = rows.get((method, precision, 'naive'))
            if reference is None:
                continue
            cells = [method, precision, f'`{reference["hash"][:DIGITS]}`']
            for layout in list(LAYOUTS)[1:]:
                row = rows.get((method, precision, layout))
                cells.append(cell(row, reference))
                if row is not None and 'refused' in row:
                    refused[LAYOUTS[layout][0]] = row['refused']
            table.append(cells)
    text += markdown(table) + counts(rows)
    text += ''.join(f'\nRefused, {layout}: {message}\n' for layout, message in refused.items())
    parted = [r for r in rows.values() if r.get('parts') and r['layout'] not in CONTROLS]
    text += ''.join(
        f'\nNot the same: {r["method"]}, {r["precision"]}, {r["layout"]}: {r["parts"][0]}\n' for r in parted
    )
    return text + cost_text([r for r in results.rows if 'cost' in r]) + f'\n{machine()}\n'


def cell(row: dict[str, Any] | None, reference: dict[str, Any]) -> str:
    if row is None:
        return 'not run'
    if 'refused' in row:
        return 'refused'
    if row['hash'] == reference['hash'] and not row['parts']:
        return '='
    return f'`{row["hash"][:8]}`' if row['hash'] != reference['hash'] else 'weights only'


def counts(rows: dict[Any, dict[str, Any]]) -> str:
    compared = [r for (_, _, layout), r in rows.items() if layout not in ('naive', *CONTROLS) and 'refused' not in r]
    same = sum(not r['parts'] for r in compared)
    controls = [r for (_, _, layout), r in rows.items() if layout in CONTROLS]
    hashes = {(m, p): r['hash'] for (m, p, layout), r in rows.items() if layout == 'naive'}
    differ = sum(r['hash'] != hashes[r['method'], r['precision']] for r in controls)
    return f'\n{same} of {len(compared)} runs are the same as the Naive one; {differ} of {len(controls)} controls differ.\n'


def cost_text(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return ''
    sizes = one_hash_runs.LARGE
    text = f"""
## Cost

Seconds of a phase of {one_hash_runs.PER_PHASE} optimizer steps, of a GPT-2 with {sizes['layers']} blocks of width {sizes['hidden']}, ordinary and exact
runs in turn, in the same processes. The ratio is the median over pairs of neighbours, with the lowest and highest.

"""
    table = [['method', 'precision', 'layout', 'ordinary, s', 'exact, s', 'ratio']]
    for row in sorted(rows, key=lambda r: (METHODS.index(r['method']), r['precision'] != 'fp32', r['cost'])):
        ratios = sorted(exact / ordinary for ordinary, exact in zip(row['ordinary'], row['exact'], strict=True))
        shown = f'{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})'
        seconds = [f'{statistics.median(row[kind]):.2f}' for kind in ('ordinary', 'exact')]
        table.append([row['method'], row['precision'], LAYOUTS[row['cost']][0], *seconds, shown])
    return text + markdown(table)


def markdown(table: list[list[str]]) -> str:
    lines = [f'| {" | ".join(cells)} |' for cells in table]
    return '\n'.join([lines[0], '|' + '---|' * len(table[0]), *lines[1:]]) + '\n'


def machine() -> str:
    return (
        f'{os.cpu_count()} cores of {platform.machine()}, load average at the end '
        f'{", ".join(f"{x:.1f}" for x in os.getloadavg())}, Python {platform.python_version()}, torch {torch.__version__}.'
    )


if __name__ == '__main__':
    run_main(main)
