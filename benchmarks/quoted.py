"""Rewrites the numbers of README and guides, and the pages made of results alone, from the JSON files of results.

    python benchmarks/quoted.py [--check]     # make numbers [CHECK=1]

It measures and plots nothing. It prints a line for each number and table that differs; with --check it writes nothing,
and a difference is an error.

A guide holds a number as plain text. `quotes` has its page, the words around it with a format for each number, and the
values. Line breaks of the page do not matter; a change of the words must be repeated here.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import re
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from importlib import import_module
from string import Formatter
from typing import Any
from unittest.mock import patch

import harness
from harness import RESULTS, ROOT

CAPACITY = RESULTS / 'capacity' / 'cpu-512MiB.json'
PAGES = [
    'critic',
    'critic_starts',
    'formulas',
    'learning_vs_trl',
    'off_policy',
    'one_card',
    'one_hash',
    'phase_profile',
]
PAGES += ['plan_real', 'preference', 'randomwalks', 'real_model', 'scale', 'seventy_b', 'stories', 'streams']
PAGES += ['vs_peers', 'which_gpu']
"""scripts that write their page from their results with --page"""
ABSENT = 'places instead of one with the words of benchmarks/quoted.py,'
NUMBER = r'(?<![\d.])([-+]?\d+(?:[.,]\d+)*(?:e[-+]\d+)?)(?!\d)'
Values = Sequence[float] | Mapping[str, float]
Quote = tuple[str, str, Values]
"""page, words with formats, values in order or by name"""


def read(path: str) -> Any:
    return json.loads((ROOT / path).read_text())


def quotes() -> Iterator[Quote]:
    yield from real_model()
    costs = [run for run in read('benchmarks/results/one_hash.json').values() if 'cost' in run]
    ratios = [statistics.median(harness.ratios(run['exact'], run['ordinary'])) for run in costs]
    words = 'It takes {:.1f} to {:.1f} times the CPU time of the ordinary run if an atom has a thousand tokens'
    yield 'docs/exact.md', words, [min(ratios), max(ratios)]

    runs = [run for row in json.loads(CAPACITY.read_text())['rows'] for run in row['tried'].values() if run['trained']]
    error = max(abs(run['planned'] / run['peak'] - 1) for run in runs)
    words = 'the planned peak is within {:.0f} % of resident memory in every run'
    yield 'docs/plan.md', words, [math.ceil(100 * error)]
    run = read('benchmarks/results/plan_real.json')['PPO, four networks x 4']
    words = 'planned {:.2f} GiB, resident peak {:.2f} GiB'
    yield 'docs/plan.md', words, [run[key] / harness.GIB for key in ('planned', 'peak')]
    yield from peers()


def real_model() -> Iterator[Quote]:
    records = [r for r in read('benchmarks/results/real_model.json').values() if r['task'] == 'additions']
    records.sort(key=lambda record: record['seed'])
    runs = {run: [row for r in records for row in r['rows'] if row['run'] == run] for run in ('as it is', 'sft', 'ppo')}
    words = '{:.1f} % of held-out answers right before training, {:.1f} % after SFT, {:.1f} % after eight phases of PPO'
    yield 'README.md', words, [100 * statistics.mean(row['score'] for row in rows) for rows in runs.values()]
    sampled = [100 * statistics.mean(row['sampled'] for row in rows) for rows in runs.values()]
    yield 'README.md', 'sampled at temperature 1: {:.1f}, {:.1f} and {:.1f} %', sampled

    reviews = [r for r in read('benchmarks/results/real_model.json').values() if r['task'] == 'sentiment']
    scores = [[row['score'] for r in reviews for row in r['rows'] if row['run'] == run] for run in runs]
    words = 'rises from {:.1f} to {:.1f} after SFT and {:.1f} after sixteen phases of PPO'
    yield 'README.md', words, [statistics.mean(own) for own in scores]

    page = 'docs/first_hour.md'
    before, sft, _ = (rows[0]['score'] for rows in runs.values())
    yield page, '"ended": 0.005, "score_mean": {:.3f},', [before]
    yield page, '{:.0f} of 200 answers are right', [200 * before]
    yield page, 'Before training {:.1f} % are right, after SFT {:.1f} %,', [100 * before, 100 * sft]
    yield page, 'eval score {:.3f} →', [sft]
    # PPO of this page is a run of its own, whose output is on the page
    text = (ROOT / page).read_text()
    ppo = float(text.split(f'eval score {sft:.3f} → ')[1].split()[0])
    sampled = [rows[0]['sampled'] for rows in (runs['as it is'], runs['sft'])]
    sampled.append(float(text.split('"ended": 1.0, "score_mean": ')[1].split(',')[0]))
    words = 'after PPO {:.1f} %; sampled at temperature 1: {:.1f}, {:.1f} and {:.1f} %'
    yield page, words, [100 * share for share in (ppo, *sampled)]
    yield page, 'with 200 questions is {:.1f} %.', [100 * math.sqrt(ppo * (1 - ppo) / 200)]
    gain = harness.interval([row['score'] for row in runs['ppo']], [row['before'] for row in runs['ppo']])
    pairs = [[row['sampled'] for r in records for row in r['rows'] if row['run'] == run] for run in ('ppo', 'sft')]
    gains = [*gain.split(' ± '), *harness.interval(*pairs).split(' ± ')]
    words = 'With three seeds PPO gains {:.1f} ± {:.1f} % greedily and {:.1f} ± {:.1f} % sampled'
    yield page, words, [100 * float(part) for part in gains]


SPEEDS = {
    'trl': ('trl/numbers.md', '| CASE | {ours:.2f} | {theirs:.2f} | {min:.2f} | **{median:.2f}** | {max:.2f} |\n'),
    'trl_recent': ('trl/numbers.md', '| CASE | {ours:.2f} | {theirs:.2f} | {median:.2f} |\n'),
    'trlx': ('trlx/numbers.md', '| EPOCHS | {theirs:.2f} | {ours:.2f} | {median:.2f} ({min:.2f} to {max:.2f}) |\n'),
    'colossalai': ('colossalai.md', '| NUMBER | {theirs:.2f} | {ours:.2f} | {median:.2f} ({min:.2f} to {max:.2f}) |\n'),
    'llm_on_ray': ('llm_on_ray.md', '| {theirs:.2f} | {ours:.2f} | {median:.2f} ({min:.2f} to {max:.2f}) |\n'),
}
DIFFERENCES = {
    'trl': ('trl/numbers.md', 'rewards non_score_rewards values advantages returns gradients statistics'),
    'trl_recent': ('trl/numbers.md', 'scores kl rewards values returns advantages gradients logged'),
    'trlx': ('trlx/numbers.md', 'logprobs values rewards advantages returns gradients losses'),
}
"""by results of compat/benchmarks: a page of docs/coming_from, and a row of its table of speed, or the columns of its table
of numbers"""


def peers() -> Iterator[Quote]:
    for name, (page, words) in SPEEDS.items():
        results = read(f'compat/benchmarks/results/compat_{name}.json')
        if 'load' in results:
            yield f'docs/coming_from/{page}', 'shared with other work (load {:.0f})', [results['load']]
        speed = results['speed']
        for case, run in ({'': speed} if 'ratio' in speed else speed).items():
            if 'ratio' in run:
                case = case.partition(', ')[2]  # "trlx ppo, fixed, fp32, 1 epoch"
                epochs = case.rpartition(', ')[2]
                row = words.replace('CASE', case).replace('EPOCHS', epochs).replace('NUMBER', epochs.split(' ')[0])
                seconds = {side: run[side]['cpu_s'] for side in ('ours', 'theirs')}
                yield f'docs/coming_from/{page}', row, run['ratio'] | seconds
    for name, (page, columns) in DIFFERENCES.items():
        for case, row in read(f'compat/benchmarks/results/compat_{name}.json')['numbers'].items():
            losses = [value for key, value in row.items() if key.startswith('loss')]
            row = row | ({'losses': max(losses)} if losses else {})
            cells = [f'{{{key}:.0e}}' if key in row else '' for key in columns.split()]
            yield f'docs/coming_from/{page}', f'| {" | ".join([case, *cells])} |\n', row


def fill(page: str, text: str, words: str, values: Values, found: list[str]) -> str:
    """Returns the text with the values in it; a line is added to `found` for each old value that differs."""
    parts = list(Formatter().parse(words))
    fields = [(name, spec) for _, name, spec, _ in parts if spec is not None]
    numbers = [values[name] for name, _ in fields] if isinstance(values, Mapping) else values
    pattern = ''
    for literal, _, spec, _ in parts:
        pattern += r'\s+'.join(map(re.escape, re.split(' +', literal))) + (NUMBER if spec is not None else '')
    matches = list(re.finditer(pattern, text))
    if len(matches) != 1:
        found.append(f'{page}: {len(matches)} {ABSENT} {words.strip()!r}')
        return text
    for number, ((_, form), value) in reversed(list(enumerate(zip(fields, numbers, strict=True), 1))):
        old, new = matches[0][number], f'{value:{form}}'
        if old != new:
            found.append(f'{page}: {old} is {new} by its results, in {words.strip()!r}')
            text = text[: matches[0].start(number)] + new + text[matches[0].end(number) :]
    return text


def differing_quotes(write: bool) -> list[str]:
    found: list[str] = []
    for page, words, values in quotes():
        text = (ROOT / page).read_text()
        new = fill(page, text, words, values, found)
        if write and new != text:
            (ROOT / page).write_text(new)
    return found


def differing_pages(write: bool) -> list[str]:
    found: list[str] = []
    sys.path.append(str(ROOT / 'compat' / 'benchmarks'))
    with patch.multiple(harness, differences=found, checking=not write), redirect_stdout(io.StringIO()):
        for name in [*PAGES, 'published_programs']:
            try:
                with patch.object(sys, 'argv', [name, '--page']):
                    import_module(name).main()
            except ValueError as error:  # results or comments are missing
                found.append(f'{name}.py: {error}')
        capacity, rows = import_module('capacity'), json.loads(CAPACITY.read_text())['rows']
        harness.write_page('capacity.md', capacity=capacity.table(rows), planner=capacity.planner_table(rows))
        ppo = json.loads((RESULTS / 'ppo_speed.json').read_text())
        harness.write_page('speed.md', ppo=import_module('speed').ppo_table(ppo))
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--check', action='store_true', help='write nothing; fail if a number or table differs')
    args = parser.parse_args(argv)
    found = [*differing_quotes(not args.check), *differing_pages(not args.check)]
    print('\n'.join(found) or 'every number is that of its results')
    if args.check and found or any(ABSENT in line for line in found):
        sys.exit(1)


if __name__ == '__main__':
    main()
