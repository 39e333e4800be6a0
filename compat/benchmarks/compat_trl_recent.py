"""Programs of TRL's second era here and in TRL 1.12.0: the same numbers, and CPU seconds side by side.

    python compat/benchmarks/compat_trl_recent.py numbers   # makes TRL's environment on first use; writes what the tests compare with
    python compat/benchmarks/compat_trl_recent.py speed     # whole updates of PPO, A B A B, as in vs_peers.py

Both sides run the same file for the numbers, `peers/compat_recent_work.py`. Same weights, prompts and responses: scores,
KL rewards, values, advantages, returns, gradients and what is logged; of DPO, SFT and reward models gradients and what is
logged.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CORE = HERE.parents[1] / 'benchmarks'
sys.path[:0] = [str(HERE / 'peers'), str(CORE), str(CORE / 'peers')]

from compat_page import arguments, speed, write  # noqa: E402
from compat_recent_ours import differences, learner, ppo  # noqa: E402
from compat_recent_work import LEARNERS, PPO, make_folders  # noqa: E402
from vs_peers import environment  # noqa: E402
from work import Case  # noqa: E402

GOLDEN = HERE.parent / 'tests' / 'trl_recent_numbers.json'
RESULTS = HERE / 'results' / 'compat_trl_recent.json'
SPEED = [Case('trl_ppo', 'ppo', lengths, 'fp32', epochs) for lengths in ('fixed', 'eos') for epochs in (1, 4)]


def numbers(work: Path) -> dict[str, dict[str, float]]:
    """Run TRL, write its numbers for the tests, and compare ours with them."""
    python = environment('trl_ppo', work)
    with tempfile.TemporaryDirectory() as folder:
        folders = make_folders(folder)
        env = os.environ | {'OMP_NUM_THREADS': '1', 'HF_HUB_OFFLINE': '1', 'TRL_EXPERIMENTAL_SILENCE': '1'}
        subprocess.run([python, HERE / 'peers' / 'compat_recent_numbers.py', folder, GOLDEN], check=True, env=env)
        theirs = json.loads(GOLDEN.read_text())
        found = {}
        for kind, cases, run in (('ppo', PPO, ppo), ('learners', LEARNERS, learner)):
            for name, case in cases.items():
                result = run(name, folders, f'{folder}/out')
                found[f'ppo, {name}' if kind == 'ppo' else name] = differences(result, theirs[kind][name], case)
    return found


def main() -> None:
    args = arguments(__doc__).parse_args()
    work = args.work_dir.resolve()
    mine = [sys.executable, HERE / 'peers' / 'compat_recent_speed.py']

    def timed() -> dict[str, Any]:
        return speed(SPEED, mine, [environment('trl_ppo', work), CORE / 'peers' / 'trl_ppo.py'], work, args.rounds)

    write(args.what, RESULTS, lambda: numbers(work), timed)


if __name__ == '__main__':
    main()
