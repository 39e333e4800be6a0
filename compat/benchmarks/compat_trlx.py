"""Programs of trlX 0.7 here and there: the same numbers, and CPU seconds side by side.

    python compat/benchmarks/compat_trlx.py numbers --source FOLDER     # writes what the tests compare with
    python compat/benchmarks/compat_trlx.py speed --source git+https://github.com/CarperAI/trlx

trlX is on no index: `--source` is a folder that holds its package `trlx`, or an address that git clones. Its environment
is made on first use, with the transformers, accelerate and peft of its own requirements.txt. It imports deepspeed, ray,
wandb and torchtyping, none of which a run on one process needs, so stand-ins take their places
(`peers/compat_trlx_peer.py`); everything else is trlX's own code, trainers included.

Numbers: same weights, prompts, given responses and scores: log-probs, values, rewards, advantages, returns, losses,
gradients. Speed: one program on both sides (`peers/compat_trlx_speed.py`), updates in turns, A B A B.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CORE = HERE.parents[1] / 'benchmarks'
sys.path[:0] = [str(HERE / 'peers'), str(CORE), str(CORE / 'peers')]

from compat_page import arguments, checkout, speed, write  # noqa: E402
from compat_trlx_ours import differences, is_padded, run  # noqa: E402
from compat_trlx_work import CASES  # noqa: E402
from vs_peers import ENVIRONMENTS, own_python  # noqa: E402
from work import Case  # noqa: E402

GOLDEN = HERE.parent / 'tests' / 'trlx_numbers.json'
RESULTS = HERE / 'results' / 'compat_trlx.json'
ENVIRONMENTS['trlx'] = ['transformers==4.32.0', 'accelerate==0.22.0', 'peft==0.5.0', 'numpy<2', 'rich==15.0.0']
SPEED = [Case('trlx', 'ppo', 'fixed', 'fp32', epochs) for epochs in (1, 4)]


def numbers(source: Path, work: Path) -> dict[str, dict[str, float]]:
    """Run trlX, write its numbers for the tests, and compare ours with them."""
    env = os.environ | {'OMP_NUM_THREADS': '1', 'HF_HUB_OFFLINE': '1'}
    worker = HERE / 'peers' / 'compat_trlx_peer.py'
    subprocess.run([own_python('trlx', work), worker, source, GOLDEN], check=True, env=env, cwd=work)
    theirs = json.loads(GOLDEN.read_text())['cases']
    return {name: differences(run(name), theirs[name], padded=is_padded(name)) for name in CASES}


def table(found: dict[str, dict[str, float]]) -> str:
    """The largest differences of each case as Markdown."""
    kinds = ('logprobs', 'values', 'rewards', 'advantages', 'returns', 'gradients')
    lines = ['| case | ' + ' | '.join([*kinds, 'losses']) + ' |', '|---' * (len(kinds) + 2) + '|']
    for name, row in found.items():
        losses = [value for key, value in row.items() if 'loss' in key]
        cells = [f'{row[k]:.0e}' if k in row else '' for k in kinds] + [f'{max(losses):.0e}' if losses else '']
        lines.append(f'| {name} | ' + ' | '.join(cells) + ' |')
    return '\n'.join(lines)


def main() -> None:
    args = arguments(__doc__, required=True, help='a folder with the package trlx, or git+https://...')
    work = args.work_dir
    source = checkout(args.source, work, 'trlx/__init__.py')
    worker = HERE / 'peers' / 'compat_trlx_speed.py'

    def timed() -> dict[str, Any]:
        peer = ['env', f'TRLX_SOURCE={source}', own_python('trlx', work), worker]
        return speed(SPEED, [sys.executable, worker], peer, work, args.rounds)

    write(args.what, RESULTS, lambda: numbers(source, work), timed, table)


if __name__ == '__main__':
    main()
