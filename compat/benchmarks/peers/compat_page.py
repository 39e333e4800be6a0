"""What the scripts that compare programs of other systems share: their command line, the table of differences, the
speed of each case."""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import machine
from vs_peers import compare, save_model
from work import Case

Numbers = dict[str, dict[str, float]]


def table(found: Numbers) -> str:
    """The differences as Markdown."""
    kinds = list(next(iter(found.values())))
    lines = ['| case | ' + ' | '.join(k.replace('_', ' ') for k in kinds) + ' |', '|---' * (len(kinds) + 1) + '|']
    for name, row in found.items():
        lines.append(f'| {name} | ' + ' | '.join(f'{row[k]:.0e}' if k in row else '' for k in kinds) + ' |')
    return '\n'.join(lines)


def speed(cases: Sequence[Case], mine: Sequence[Any], theirs: Sequence[Any], work: Path, rounds: int) -> dict[str, Any]:
    """CPU seconds by case of what the two workers do in one update, A B A B."""
    folders = {lengths: save_model(work, lengths) for lengths in {case.lengths for case in cases}}
    found = {}
    for case in cases:
        case = Case(**{**vars(case), 'model': folders[case.lengths]})
        result = compare(case, mine, theirs, rounds=rounds, warmup=1, logs=work / 'logs')
        found[case.name] = {
            k: result[k] for k in ('ratio', 'ratio_wall', 'ratio_total', 'ours', 'theirs', 'about', 'rounds')
        }
        here, there = result['ours']['cpu_s'], result['theirs']['cpu_s']
        print(f'{case.name}: {here:.2f} s here, {there:.2f} s there, {result["ratio"]["median"]:.2f} times', flush=True)
    return found


def checkout(source: str, work: Path, wanted: str, *, commit: str = '', paths: Sequence[str] = ()) -> Path:
    """The folder that holds the file `wanted`; git+URL is cloned into `work`, of `commit` the `paths` alone.

    Raises:
        SystemExit: the file is not there.
    """
    folder = Path(source)
    if source.startswith('git+'):
        address = source.removeprefix('git+')
        folder = work / f'{address.rstrip("/").rpartition("/")[2]}_source'
        if not folder.is_dir():
            git = ['git', 'clone', '--quiet', '--filter=blob:none', *(['--no-checkout'] if commit else ['--depth=1'])]
            subprocess.run([*git, address, folder], check=True)
            if commit:
                subprocess.run(['git', '-C', folder, 'checkout', '--quiet', commit, '--', *paths], check=True)
    if not (folder / wanted).is_file():
        raise SystemExit(
            f'error: --source {source}: {folder / wanted} is not there; give a checkout, or git+https://...'
        )
    return folder.resolve()


def arguments(about: str | None, **source: Any) -> argparse.Namespace:
    """What the command line says; `source`: options of the argument --source, where a script has it."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('what', nargs='?', choices=('numbers', 'speed'), default='numbers')
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--work-dir', type=Path, default=Path('outputs/peers'), help='environments, models and logs')
    if source:
        parser.add_argument('--source', **source)
    args = parser.parse_args()
    if source and args.what == 'speed' and args.source is None:
        parser.error('speed needs --source')
    args.work_dir = args.work_dir.resolve()
    args.work_dir.mkdir(parents=True, exist_ok=True)
    return args


def write(
    what: str, path: Path, numbers: Callable[[], Numbers], speed: Callable[[], Mapping[str, Any]], show: Any = table
) -> None:
    """Do what was asked for, and put it into the file of results."""
    results = json.loads(path.read_text()) if path.exists() else {}
    if what == 'numbers':
        results['numbers'] = numbers()
        print(show(results['numbers']))
    else:
        results['speed'] = {**speed(), 'machine': machine()}
    path.write_text(json.dumps(results, indent=1) + '\n')
