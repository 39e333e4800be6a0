"""Compares the SHA-256 of the final weights of every method across layouts, killed and resumed runs included.

    python benchmarks/one_hash.py                                             # everything; hours on two cores
    python benchmarks/one_hash.py --only ppo sft --layouts naive ddp2 seed --precisions fp32
    python benchmarks/one_hash.py --layouts cost --only ppo dpo
    python benchmarks/one_hash.py --page                                      # the page of earlier measurements

Parts may run at different times on one machine: results are added to --results and not measured again, and run folders
stay in --work, where every run is compared with its Naive one as by `chatgpt-rlhf verify`. Runs are those of
one_hash_runs.py: 20 optimizer steps in 5 phases, with reproducible='exact'.
"""

from __future__ import annotations

import math
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import one_hash_runs
from harness import RESULTS, Results, environment, markdown, ratios, spread, write_json, write_page
from one_hash_runs import METHODS, Job
from torch.multiprocessing.spawn import ProcessException

from chatgpt.launch.arguments import Parser, run_main
from chatgpt.launch.cli.verify import compare, hash_of
from chatgpt.monitor.run_folder import RunFolder
from chatgpt.testing.processes import run_distributed

HERE = Path(__file__).resolve().parent
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
"""{name: (title, strategy, processes)}; the first is the reference, the last two must differ"""
CONTROLS = ('seed', 'bit')
COST_LAYOUTS = ('naive', 'ddp2', 'fsdp2')
PRECISIONS = ('fp32', 'bf16')
TIMEOUT_S = 1500.0


def parser() -> Parser:
    out = Parser(description=__doc__)
    out.add_argument('--only', nargs='+', default=list(METHODS), choices=METHODS)
    out.add_argument('--layouts', nargs='+', default=[*LAYOUTS, 'cost'], choices=[*LAYOUTS, 'cost'])
    out.add_argument('--precisions', nargs='+', default=list(PRECISIONS), choices=PRECISIONS)
    out.add_argument('--results', type=Path, default=RESULTS / 'one_hash.json')
    out.add_argument(
        '--work', type=Path, default=Path(tempfile.gettempdir()) / 'one_hash', help='folder of the run folders'
    )
    out.add_argument(
        '--page', action='store_true', help='write docs/results/one_hash.md from the results, without runs'
    )
    return out


def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    results = Results(args.results)
    if args.page:
        write_page('one_hash.md', runs=runs_table(results), cost=cost_table(results))
        return
    parts = list(product(args.only, args.precisions))
    for layout in args.layouts:
        if layout in ('torchrun', 'ray'):
            launch(layout, parts, args.work, results)
        for method, precision in parts:
            if layout == 'cost':
                for place in COST_LAYOUTS:
                    key = f'{method}, {precision}, cost {place}'
                    results.measure(key, lambda asked=(method, precision, place): cost(*asked))
            else:
                key = f'{method}, {precision}, {layout}'
                results.measure(key, lambda asked=(method, precision, layout): one_run(args.work, *asked))


def job_of(folder: Path, method: str, precision: str, layout: str, **more: Any) -> Job:
    place = folder / f'{method}-{precision}-{layout}'.replace(' ', '_')
    return Job(method, precision, LAYOUTS[layout][1], str(place), **more)


def one_run(folder: Path, method: str, precision: str, layout: str) -> dict[str, Any]:
    """Runs a part in processes of this program, unless a launcher ran it, and compares it with the Naive run."""
    ranks = LAYOUTS[layout][2]
    more = {'seed': 2} if layout == 'seed' else {'flip': True} if layout == 'bit' else {}
    job = job_of(folder, method, precision, layout, **more)
    if layout not in ('torchrun', 'ray'):
        shutil.rmtree(job.folder, ignore_errors=True)
        try:
            if layout in ('killed', 'moved'):
                kill(job, ranks)
                after = ('ddp', 4) if layout == 'moved' else (job.strategy, ranks)
                resumed = asdict(job) | {'strategy': after[0], 'kill': False, 'resume': True}
                run_distributed(one_hash_runs.run_all, after[1], [resumed], timeout_s=TIMEOUT_S)
            else:
                run_distributed(one_hash_runs.run_all, ranks, [asdict(job)], timeout_s=TIMEOUT_S)
        except ProcessException as error:
            refused = refusal(str(error))
            if refused is None:
                raise
            return {'refused': refused}
    run, reference = RunFolder(job.folder), RunFolder(job_of(folder, method, precision, 'naive').folder)
    phase, digits = hash_of(run) or (0, '')
    if phase != math.ceil(job.updates / one_hash_runs.PER_PHASE):
        raise RuntimeError(f'{job.folder}: its last checkpoint is of phase {phase}')
    found = compare(reference, run)
    return {'hash': digits, 'parts': [str(part.difference) for part in found.values() if part.difference is not None]}


def kill(job: Job, ranks: int) -> None:
    try:
        run_distributed(one_hash_runs.run_all, ranks, [asdict(job) | {'kill': True}], timeout_s=TIMEOUT_S)
    except ProcessException as error:
        phase = RunFolder(job.folder).phase
        if phase != one_hash_runs.KILLED_AT // one_hash_runs.PER_PHASE:
            raise RuntimeError(f'{job.folder}: killed after {phase} phases') from error
        return
    raise RuntimeError(f'{job.folder}: no process was killed')


def launch(layout: str, parts: list[tuple[str, str]], folder: Path, results: Results) -> None:
    """Runs all parts without results by one start of a launcher."""
    jobs = [job_of(folder, *part, layout) for part in parts if f'{part[0]}, {part[1]}, {layout}' not in results]
    if not jobs:
        return
    for job in jobs:
        shutil.rmtree(job.folder, ignore_errors=True)
    list_of_jobs = folder / f'{layout}.json'
    write_json(list_of_jobs, [asdict(job) for job in jobs])
    command = [sys.executable, '-m', 'chatgpt.launch', '--num_workers', str(LAYOUTS[layout][2])]
    command += ['--launcher', 'ray', '--address', 'local', '--cpus_per_worker', '1'] if layout == 'ray' else []
    command += ['--max_failures', '0', str(HERE / 'one_hash_runs.py'), str(list_of_jobs)]
    subprocess.run(command, check=True, env=environment(HERE, OMP_NUM_THREADS='1'))


def cost(method: str, precision: str, layout: str) -> dict[str, list[float]]:
    _, strategy, ranks = LAYOUTS[layout]
    return run_distributed(one_hash_runs.cost, ranks, method, precision, strategy, timeout_s=TIMEOUT_S)[0]


def refusal(text: str) -> str | None:
    """Returns the message of a strategy that does not support this; None for any other failure."""
    lines = [line for line in text.splitlines() if line.startswith('ValueError: ') and 'exact' in line]
    return lines[-1].removeprefix('ValueError: ') if lines else None


# ---------------------------------------------------------------------- the page

DIGITS = 16


def runs_table(results: Mapping[str, Any]) -> str:
    """Returns a row for each method and precision, the refused and different cells, and the counts."""
    rows, notes, same, compared, differ, controls = [], list[str](), 0, 0, 0, 0
    for method, precision in product(METHODS, PRECISIONS):
        reference = results.get(f'{method}, {precision}, naive')
        if reference is None:
            continue
        cells = [method, precision, f'`{reference["hash"][:DIGITS]}`']
        for layout in list(LAYOUTS)[1:]:
            row = results.get(f'{method}, {precision}, {layout}')
            cells.append(cell(row, reference))
            if row is None or 'refused' in row:
                notes += [f'Refused, {LAYOUTS[layout][0]}: {row["refused"]}'] if row else []
            elif layout in CONTROLS:
                controls, differ = controls + 1, differ + (row['hash'] != reference['hash'])
            else:
                compared, same = compared + 1, same + (not row['parts'])
                notes += [f'Not the same: {method}, {precision}, {layout}: {part}' for part in row['parts'][:1]]
        rows.append(cells)
    table = markdown(
        ['method', 'precision', 'SHA-256 (Naive)', *(title for title, _, _ in list(LAYOUTS.values())[1:])], rows
    )
    summary = f'{same} of {compared} runs are the same as the Naive one; {differ} of {controls} controls differ.'
    return '\n\n'.join([table, summary, *dict.fromkeys(notes)])


def cell(row: dict[str, Any] | None, reference: dict[str, Any]) -> str:
    if row is None:
        return 'not run'
    if 'refused' in row:
        return 'refused'
    if row['hash'] == reference['hash'] and not row['parts']:
        return '='
    return f'`{row["hash"][:8]}`' if row['hash'] != reference['hash'] else 'weights only'


def cost_table(results: Mapping[str, Any]) -> str:
    def ratio(kind: str, row: dict[str, Any]) -> str:
        found = spread(ratios(row[f'exact{kind}'], row[f'ordinary{kind}']))
        return f'{found["median"]:.2f} ({found["min"]:.2f} to {found["max"]:.2f})'

    rows = []
    for method, precision, layout in product(METHODS, PRECISIONS, sorted(COST_LAYOUTS)):
        row = results.get(f'{method}, {precision}, cost {layout}')
        if row:
            seconds = [f'{statistics.median(row[kind]):.2f}' for kind in ('ordinary', 'exact')]
            rows.append([method, precision, LAYOUTS[layout][0], *seconds, ratio('', row), ratio('_s', row)])
    return markdown('method | precision | layout | ordinary, CPU s | exact, CPU s | ratio | ratio of wall time', rows)


if __name__ == '__main__':
    run_main(main)
