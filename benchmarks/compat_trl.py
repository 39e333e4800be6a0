"""Programs of TRL's classic era here and in TRL 0.11.4: the same numbers, and CPU seconds side by side.

    python benchmarks/compat_trl.py numbers      # makes TRL's environment on first use; writes what the tests compare with
    python benchmarks/compat_trl.py speed        # generate and step, A B A B, as in vs_peers.py

Both sides run the same file: `peers/compat_work.py` for the numbers, `peers/trl_classic.py` for the speed. Same weights,
prompts, responses and scores: rewards, values, advantages, returns, gradients, and every statistic that is a number.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / 'peers')]

from compat_ours import differences, run  # noqa: E402
from compat_work import CASES, make_folder  # noqa: E402
from vs_peers import compare, environment, machine, save_model  # noqa: E402
from work import Case  # noqa: E402

GOLDEN = HERE.parent / 'tests' / 'compat' / 'trl_classic_numbers.json'
RESULTS = HERE / 'results' / 'compat_trl.json'
SPEED = [Case('trl_classic', 'ppo', lengths, 'fp32', epochs) for lengths in ('fixed', 'eos') for epochs in (1, 4)]


def numbers(work: Path) -> dict[str, dict[str, float]]:
    """Run TRL, write its numbers for the tests, and compare ours with them."""
    python = environment('trl_classic', work)
    with tempfile.TemporaryDirectory() as folder:
        policy, reference = (make_folder(f'{folder}/{n}', salt) for n, salt in (('policy', 0.0), ('reference', 0.37)))
        env = os.environ | {'OMP_NUM_THREADS': '1', 'HF_HUB_OFFLINE': '1'}
        worker = HERE / 'peers' / 'compat_numbers.py'
        subprocess.run([python, worker, policy, reference, GOLDEN], check=True, env=env)
        theirs = json.loads(GOLDEN.read_text())
        return {name: differences(run(name, policy, reference), theirs['cases'][name]) for name in CASES}


def table(found: dict[str, dict[str, float]]) -> str:
    """The differences as Markdown."""
    kinds = list(next(iter(found.values())))
    lines = ['| case | ' + ' | '.join(k.replace('_', ' ') for k in kinds) + ' |', '|---' * (len(kinds) + 1) + '|']
    lines += [f'| {name} | ' + ' | '.join(f'{row[k]:.0e}' for k in kinds) + ' |' for name, row in found.items()]
    return '\n'.join(lines)


def speed(work: Path, rounds: int) -> dict[str, Any]:
    """CPU seconds of one generate and one step, by case."""
    folders = {lengths: save_model(work, lengths) for lengths in ('fixed', 'eos')}
    peer = [environment('trl_classic', work), HERE / 'peers' / 'trl_classic.py']
    mine = [sys.executable, HERE / 'peers' / 'compat_speed.py']
    found = {}
    for case in SPEED:
        case = Case(**{**vars(case), 'model': folders[case.lengths]})
        result = compare(case, mine, peer, rounds=rounds, warmup=1, logs=work / 'logs')
        found[case.name] = {k: result[k] for k in ('ratio', 'ratio_wall', 'ratio_total', 'ours', 'theirs', 'about')}
        ours, theirs = result['ours']['cpu_s'], result['theirs']['cpu_s']
        print(
            f'{case.name}: {ours:.2f} s here, {theirs:.2f} s there, {result["ratio"]["median"]:.2f} times', flush=True
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('what', choices=('numbers', 'speed'))
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--work-dir', type=Path, default=Path('outputs/peers'), help='environments, models and logs')
    args = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if args.what == 'numbers':
        results['numbers'] = numbers(args.work_dir.resolve())
        print(table(results['numbers']))
    else:
        results['speed'] = speed(args.work_dir.resolve(), args.rounds) | {'machine': machine()}
    RESULTS.write_text(json.dumps(results, indent=1) + '\n')


if __name__ == '__main__':
    main()
