"""Holds the formulas against those of verl, OpenRLHF and TRL: the largest difference on the same random numbers.

    python benchmarks/formulas.py            # every peer; their environments are made first
    python benchmarks/formulas.py --page
    python benchmarks/formulas.py --python trl_now=FOLDER/bin/python verl=FOLDER/bin/python

What is compared is in `peers/peer_formulas.py`, which runs in the peer's environment, with this library on its path.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import harness
import vs_peers

LIMIT = 1e-6
ENVIRONMENTS = {'verl': ['verl==0.9.1'], 'openrlhf': ['openrlhf==0.11.2', '--no-deps', 'numpy']}


def measure(name: str, python: Path) -> dict[str, Any]:
    env = harness.environment(harness.ROOT, HF_HUB_OFFLINE='1', OMP_NUM_THREADS='1')
    script = harness.ROOT / 'benchmarks' / 'peers' / 'peer_formulas.py'
    done = subprocess.run([python, script, name], env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f'{name}: {done.stderr[-2000:]}')
    return json.loads(done.stdout.splitlines()[-1])


def table(found: dict[str, Any]) -> str:
    rows = []
    for name, of, far in found['rows']:
        rows.append([name, f'`{of}`', f'{far:.0e}' if far else '0', 'equal' if far <= LIMIT else 'differs'])
    return harness.markdown("formula | the peer's function | largest difference | within 1e-6", rows)


def main() -> None:
    parser = harness.script_parser(__doc__, 'formulas.md')
    parser.add_argument('--peers', nargs='*', choices=[*ENVIRONMENTS, 'trl_now'], default=[*ENVIRONMENTS, 'trl_now'])
    parser.add_argument('--python', nargs='*', default=[], metavar='PEER=PATH', help='Python of an environment')
    parser.add_argument('--folder', type=Path, default=harness.ROOT / 'outputs' / 'peers')
    args = parser.parse_args()
    given, results = dict(each.split('=', 1) for each in args.python), harness.Results('formulas.json')
    vs_peers.ENVIRONMENTS.update(ENVIRONMENTS)
    for name in args.peers:
        python = Path(given[name]) if name in given else None
        results.measure(
            name,
            lambda n=name, p=python: measure(n, p or vs_peers.own_python(n, args.folder)),
            lambda found: f'{sum(row[2] <= LIMIT for row in found["rows"])} of {len(found["rows"])}',
        )
    if args.page:
        harness.write_page('formulas.md', **{name: table(results[name]) for name in results})


if __name__ == '__main__':
    main()
