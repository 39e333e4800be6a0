"""Records the fixed runs of `runs.py`, each alone and on two ranks, or compares them with a recording; bit for bit.

    python tests/fixed_runs/record.py --root ../before --out before.json    # another checkout's package, these runs
    python tests/fixed_runs/record.py --against before.json                 # exit code 1 where a run differs

Numbers are those of one machine: both recordings are made on it. `make fixed-runs BASE=<commit>` does both.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
WORLD_SIZE = 2
LIMIT_S = 600.0
"""of the two ranks"""
VARIABLES = {'OMP_NUM_THREADS': '1', 'MKL_NUM_THREADS': '1', 'HF_HUB_OFFLINE': '1', 'TOKENIZERS_PARALLELISM': 'false'}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        '--root', type=Path, default=HERE.parents[1], help='checkout whose package is used; default: this one'
    )
    parser.add_argument('--out', type=Path, help='write the recording to this JSON file')
    parser.add_argument('--against', type=Path, help='compare with this recording')
    parser.add_argument('--only', default='*', help="runs whose name matches, such as 'ppo*' or 'ranks/*'")
    parser.add_argument(
        '--rank-folder', type=Path, help=argparse.SUPPRESS
    )  # this process is a rank; where it leaves its record
    args = parser.parse_args()
    root = args.root.resolve()
    if not (root / 'chatgpt' / '__init__.py').is_file():
        parser.error(f'--root {args.root} has no package chatgpt; give the root of a checkout')
    if args.out is None and args.against is None and args.rank_folder is None:
        parser.error('give --out FILE to record, --against FILE to compare, or both')
    before = read(parser, args.against) if args.against is not None else None
    os.environ.update(VARIABLES)
    sys.path[:0] = [str(root), str(HERE), str(HERE.parent)]
    import chatgpt

    if Path(str(chatgpt.__file__)).resolve().parents[1] != root:
        parser.error(f'chatgpt comes from {chatgpt.__file__}, not from --root {root}')
    if args.rank_folder is not None:
        record_as_rank(args.rank_folder, args.only)
        return 0
    start = time.monotonic()
    machine, records = record(root, args.only)
    print(f'{len(records)} runs recorded in {time.monotonic() - start:.0f} s', flush=True)
    if not records:
        parser.error(f'--only {args.only} matches no run')
    if args.out is not None:
        args.out.write_text(json.dumps({'machine': machine, 'runs': records}, indent=1) + '\n')
    return 0 if before is None else compare(before, machine, records, args.only)


def read(parser: argparse.ArgumentParser, path: Path) -> dict[str, Any]:
    try:
        recording = json.loads(path.read_text())
        return {'machine': recording['machine'], 'runs': recording['runs']}
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f'--against {path} is no recording: {error}')


def record(root: Path, only: str) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Of every run: alone in this process, then all on two ranks, which are two processes for all of them."""
    import runs
    import torch

    torch.set_num_threads(1)
    machine = {'torch': torch.__version__, 'vectors': torch.backends.cpu.get_cpu_capability(), 'processor': processor()}
    records = {name: runs.record_run(name) for name in chosen('', only)}
    if chosen('ranks/', only):
        with tempfile.TemporaryDirectory() as folder:
            run_ranks(root, Path(folder), only)
            for rank in range(WORLD_SIZE):
                found = json.loads((Path(folder) / f'rank-{rank}.json').read_text())
                records |= {f'ranks/{name}@{rank}': found[name] for name in found}
    return machine, records


def chosen(prefix: str, only: str) -> list[str]:
    import runs

    return [name for name in runs.RUNS if fnmatch(f'{prefix}{name}', only)]


def processor() -> str:
    names = [line.split(':', 1)[1].strip() for line in _cpuinfo() if line.startswith('model name')]
    return names[0] if names else 'unknown'


def _cpuinfo() -> list[str]:
    path = Path('/proc/cpuinfo')
    return path.read_text().splitlines() if path.is_file() else []


def run_ranks(root: Path, folder: Path, only: str) -> None:
    """This script as each rank, with torchrun's variables; the failure of one ends the other."""
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        port = probe.getsockname()[1]
    command = [sys.executable, str(HERE / 'record.py'), f'--root={root}', f'--rank-folder={folder}', f'--only={only}']
    sizes = dict.fromkeys(('WORLD_SIZE', 'LOCAL_WORLD_SIZE'), str(WORLD_SIZE))
    sizes |= {'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(port)}
    ranks = [
        subprocess.Popen(
            command, env={**os.environ, **sizes, 'RANK': str(rank), 'LOCAL_RANK': str(rank)}, stdout=subprocess.DEVNULL
        )
        for rank in range(WORLD_SIZE)
    ]
    end = time.monotonic() + LIMIT_S
    try:
        while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
            if time.monotonic() > end:
                raise TimeoutError(f'the runs on {WORLD_SIZE} ranks did not end within {LIMIT_S:.0f} s')
            time.sleep(0.1)
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
            rank.wait()
    codes = [rank.returncode for rank in ranks]
    if any(codes):
        raise RuntimeError(f'the runs on {WORLD_SIZE} ranks ended with exit codes {codes}; what they said stands above')


def record_as_rank(folder: Path, only: str) -> None:
    import runs
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group('gloo')
    rank = dist.get_rank()
    records = {}
    for name in chosen('ranks/', only):
        own = folder / name
        own.mkdir(exist_ok=True)
        records[name] = runs.record_run(name, ranks=True, folder=own)
    (folder / f'rank-{rank}.json').write_text(json.dumps(records))
    dist.barrier()
    dist.destroy_process_group()


def compare(before: dict[str, Any], machine: dict[str, str], records: dict[str, dict[str, str]], only: str) -> int:
    """Print every run that differs; 0 when none does. What only this code measures is named, and is no difference."""
    import runs

    for name, value in machine.items():
        if before['machine'].get(name) != value:
            print(
                f'recorded with {name} {before["machine"].get(name)!r}, this is {value!r}: numbers of two machines are '
                'not comparable'
            )
            return 1
    recorded = {name: r for name, r in before['runs'].items() if fnmatch(name.split('@')[0], only)}
    differing, added = 0, set[str]()
    for name in [*recorded, *(n for n in records if n not in recorded)]:
        if name not in recorded or name not in records:
            told = f'only in {"this code" if name in records else "the recording"}'
        else:
            new = records[name].keys() - recorded[name].keys()
            added |= {key.split()[-1] for key in new}
            now = {key: value for key, value in records[name].items() if key not in new}
            found = runs.first_difference(recorded[name], now)
            if found is None:
                continue
            count = sum(recorded[name][k] != now.get(k) for k in recorded[name])
            told = f'{count} of {len(recorded[name])} entries, first {found}'
        differing += 1
        print(f'{name} differs: {told}')
    if added:
        print(f'only in this code: {", ".join(sorted(added))}')
    same = f'all {len(records)} runs are the same to the bit'
    print(f'{differing} of {len(records)} runs differ' if differing else same)
    return 1 if differing else 0


if __name__ == '__main__':
    sys.exit(main())
