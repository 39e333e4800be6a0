"""Compares the planned memory of runs on a real model with the measured peak of their processes.

    python benchmarks/plan_real.py MODEL DEMONSTRATIONS PROMPTS      # MODEL: examples/real_model/model.py
    python benchmarks/plan_real.py --page

The files are of `examples/real_model/additions.py --files FOLDER --digits 3`.

Each case is planned (`--plan`) and then run: two optimizer steps, or two phases, since optimizer states exist from the
first step on. The peak is the largest resident memory of the whole process (wait4).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness

UNITS = {'MiB': 2**20, 'GiB': 2**30}
ONLINE = ['--num_episodes=2', '--max_timesteps=1', '--update_timesteps=1', '--max_epochs=1', '--max_new_tokens=20']
ADAPTERS = ['--lora_rank=16']
CASES: dict[str, tuple[str, list[str]]] = {
    'SFT': ('sft', ['--max_steps=2']),
    'reward model': ('reward-model', ['--max_steps=2']),
    'PPO, four networks': ('ppo', ['--reward_model={rm}']),
    'PPO, LoRA, own critic': ('ppo', ['--reward_fn={reward}', *ADAPTERS]),
    'PPO, top 8 blocks, shared critic': (
        'ppo',
        ['--reward_fn={reward}', '--num_layers_unfrozen=8', '--critic=shared'],
    ),
    'PPO, roles on one trunk in 4 bits': (
        'ppo',
        ['--reward_fn={reward}', *ADAPTERS, '--shared_trunk', '--quantize=nf4'],
    ),
}
BATCHES = (4, 16)


def files(folder: Path, demonstrations: Path) -> dict[str, str]:
    """Writes preference pairs, of which the answers differ from the first token on, and a reward function. Returns the
    values of placeholders in commands."""
    rows = [json.loads(line)['messages'] for line in demonstrations.read_text().splitlines()]
    pairs = [
        {'prompt': question['content'], 'chosen': answer['content'], 'rejected': f'No, {answer["content"][:-3]}11.'}
        for question, answer in rows
    ]
    (folder / 'pairs.jsonl').write_text(''.join(json.dumps(pair) + '\n' for pair in pairs))
    (folder / 'reward.py').write_text('def score(responses):\n    return [float(len(r) % 7) for r in responses]\n')
    return {'reward': f'{folder / "reward.py"}:score', 'rm': str(folder / 'rm' / 'reward_model')}


def call(words: list[str]) -> tuple[str, int]:
    """Runs a command; returns its output and peak resident memory in bytes."""
    out, own = tempfile.TemporaryFile('w+'), harness.environment(OMP_NUM_THREADS='1', HF_HUB_OFFLINE='1')
    child = subprocess.Popen([sys.executable, '-m', 'chatgpt', *words], env=own, stdout=out, stderr=out)
    _, status, used = os.wait4(child.pid, 0)
    out.seek(0)
    output = out.read()
    if status and '--plan' not in words:
        raise SystemExit(f'{" ".join(words)}\n{output[-2000:]}')
    return output, used.ru_maxrss * 1024


def measure(case: str, batch: int, args: argparse.Namespace, folder: Path, places: dict[str, str]) -> dict[str, Any]:
    method, own = CASES[case]
    data = {'sft': args.demonstrations, 'reward-model': folder / 'pairs.jsonl'}.get(method, args.prompts)
    sizes = [f'--train_batch_size={batch}'] + ([f'--experience_batch_size={batch}', *ONLINE] if method == 'ppo' else [])
    place = folder / 'run'
    words = [method, str(data), '--pretrain', str(args.model), *sizes, *(word.format(**places) for word in own)]
    words += ['--save_path', str(place), '--checkpoint_minutes=0']
    output, _ = call([*words, '--plan'])
    found = re.search(r'needs ([\d.]+) (MiB|GiB) per device \(at its peak, (\w+)\)', output)
    if found is None:
        raise SystemExit(f'{case} was not planned:\n{output}')
    shutil.rmtree(place, ignore_errors=True)
    return {'planned': float(found[1]) * UNITS[found[2]], 'phase': found[3], 'peak': call(words)[1]}


def table(found: dict[str, Any]) -> str:
    rows = []
    for name, r in found.items():
        case, batch = name.rsplit(' x ', 1)
        planned, peak = (r[key] / harness.GIB for key in ('planned', 'peak'))
        rows.append([case, batch, f'{planned:.2f}', r['phase'], f'{peak:.2f}', f'{planned / peak - 1:+.1%}'])
    return harness.markdown('run | batch | planned GiB | at | peak GiB | plan is off by', rows)


def main() -> None:
    parser = harness.script_parser(__doc__, 'plan_real.md')
    parser.add_argument('model', nargs='?', type=Path)
    parser.add_argument('demonstrations', nargs='?', type=Path)
    parser.add_argument('prompts', nargs='?', type=Path)
    args = parser.parse_args()
    results = harness.Results('plan_real.json')
    if args.page:
        return harness.write_page('plan_real.md', plan=table(results))
    if args.prompts is None:
        parser.error('give a model, demonstrations and prompts')
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        places = files(folder, args.demonstrations)
        pairs = ['reward-model', str(folder / 'pairs.jsonl'), '--pretrain', str(args.model), '--max_steps=1']
        call([*pairs, '--save_path', str(folder / 'rm'), '--checkpoint_minutes=0'])
        for case in CASES:
            for batch in BATCHES:
                results.measure(f'{case} x {batch}', lambda c=case, b=batch: measure(c, b, args, folder, places))


if __name__ == '__main__':
    main()
