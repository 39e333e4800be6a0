"""Programs of TRL's classic era here and in TRL 0.11.4: the same numbers, and CPU seconds side by side.

    python compat/benchmarks/compat_trl.py numbers      # makes TRL's environment on first use; writes what the tests compare with
    python compat/benchmarks/compat_trl.py speed        # generate and step, A B A B, as in vs_peers.py

Both sides run the same file: `peers/compat_work.py` for the numbers, `peers/trl_classic.py` for the speed. Same weights,
prompts, responses and scores: rewards, values, advantages, returns, gradients, and every statistic that is a number.
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

from compat_ours import differences, run  # noqa: E402
from compat_page import arguments, speed, write  # noqa: E402
from compat_work import CASES, make_folder  # noqa: E402
from vs_peers import environment  # noqa: E402
from work import Case  # noqa: E402

GOLDEN = HERE.parent / 'tests' / 'trl_classic_numbers.json'
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


def main() -> None:
    args = arguments(__doc__).parse_args()
    work = args.work_dir.resolve()
    mine = [sys.executable, HERE / 'peers' / 'compat_speed.py']

    def timed() -> dict[str, Any]:
        return speed(
            SPEED, mine, [environment('trl_classic', work), CORE / 'peers' / 'trl_classic.py'], work, args.rounds
        )

    write(args.what, RESULTS, lambda: numbers(work), timed)


if __name__ == '__main__':
    main()
