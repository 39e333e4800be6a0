"""Programs of TRL here and in TRL itself, 0.11.4 of its classic era and 1.12.0 of its second: the same numbers, and CPU
seconds side by side.

    python compat/benchmarks/compat_trl.py numbers      # makes TRL's environments on first use; writes what the tests compare with
    python compat/benchmarks/compat_trl.py speed        # whole updates of PPO, A B A B, as in vs_peers.py

Both sides run the same files: `peers/compat_work.py` and `peers/compat_recent_work.py` for the numbers. Same weights,
prompts, responses and scores: rewards, values, advantages, returns, gradients, and every statistic that is a number; of
DPO, SFT and reward models gradients and what is logged.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CORE = HERE.parents[1] / 'benchmarks'
sys.path[:0] = [str(HERE / 'peers'), str(CORE), str(CORE / 'peers')]

import compat_ours as classic  # noqa: E402
import compat_recent_ours as recent  # noqa: E402
from compat_page import Numbers, arguments, speed, write  # noqa: E402
from compat_recent_work import LEARNERS, PPO, make_folders  # noqa: E402
from compat_work import CASES, make_folder  # noqa: E402
from vs_peers import own_python  # noqa: E402
from work import Case  # noqa: E402

TESTS, RESULTS, PEERS = HERE.parent / 'tests', HERE / 'results', HERE / 'peers'
GOLDEN = {'trl_classic': TESTS / 'trl_classic_numbers.json', 'trl_ppo': TESTS / 'trl_recent_numbers.json'}


def theirs(name: str, work: Path, worker: str, *given: str) -> dict[str, Any]:
    """Run TRL in its environment and write its numbers for the tests; the numbers."""
    env = os.environ | {'OMP_NUM_THREADS': '1', 'HF_HUB_OFFLINE': '1', 'TRL_EXPERIMENTAL_SILENCE': '1'}
    subprocess.run([own_python(name, work), PEERS / worker, *given, GOLDEN[name]], check=True, env=env)
    return json.loads(GOLDEN[name].read_text())


def classic_numbers(work: Path) -> Numbers:
    with tempfile.TemporaryDirectory() as folder:
        policy, reference = (make_folder(f'{folder}/{n}', salt) for n, salt in (('policy', 0.0), ('reference', 0.37)))
        found = theirs('trl_classic', work, 'compat_numbers.py', policy, reference)['cases']
        return {name: classic.differences(classic.run(name, policy, reference), found[name]) for name in CASES}


def recent_numbers(work: Path) -> Numbers:
    with tempfile.TemporaryDirectory() as folder:
        folders = make_folders(folder)
        there, found = theirs('trl_ppo', work, 'compat_recent_numbers.py', folder), Numbers()
        for kind, cases, run in (('ppo', PPO, recent.ppo), ('learners', LEARNERS, recent.learner)):
            for name, case in cases.items():
                result = run(name, folders, f'{folder}/out')
                found[f'ppo, {name}' if kind == 'ppo' else name] = recent.differences(result, there[kind][name], case)
        return found


def main() -> None:
    args = arguments(__doc__)
    for name, mine, numbers, results in (
        ('trl_classic', 'compat_speed.py', classic_numbers, 'compat_trl.json'),
        ('trl_ppo', 'compat_recent_speed.py', recent_numbers, 'compat_trl_recent.json'),
    ):
        work: Path = args.work_dir
        cases = [Case(name, 'ppo', lengths, 'fp32', epochs) for lengths in ('fixed', 'eos') for epochs in (1, 4)]

        def timed(name: str = name, mine: str = mine, cases: Any = tuple(cases), work: Path = work) -> dict[str, Any]:
            peer = [own_python(name, work), CORE / 'peers' / f'{name}.py']
            return speed(cases, [sys.executable, PEERS / mine], peer, work, args.rounds)

        write(args.what, RESULTS / results, partial(numbers, work), timed)


if __name__ == '__main__':
    main()
