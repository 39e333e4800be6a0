"""A task whose answers can be checked, on a real chat model: SmolLM2-135M-Instruct learns to add.

    pip install gguf
    python examples/real_model/additions.py [--out outputs/real] [--pretrain NAME_OR_FOLDER] [--seed 0]

Three runs of the command, each of which is printed: SFT on 200 answers gives the form, then PPO and GRPO, each from
there, are paid for right answers. Questions that are asked at the end are in none of the training files. Prints a table
and leaves it in --out, with the folders and report.html of the runs. Without --pretrain the model is made from a wheel
(model.py).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from model import find_model

from chatgpt.launch.arguments import run_main
from chatgpt.launch.inputs import quiet_transformers
from chatgpt.monitor.run_folder import RunFolder
from chatgpt.trainer.callbacks import format_table

NUM_DEMONSTRATIONS, NUM_PROMPTS, NUM_HELD_OUT = 200, 2000, 200
RESPONSES = ['--max_new_tokens=20']
SFT = ['--train_batch_size=8', '--max_epochs=2']
ONLINE = ['--num_episodes=1', '--max_timesteps=8', '--update_timesteps=1', '--num_layers_unfrozen=8']
ONLINE += ['--train_batch_size=8', '--max_epochs=2', '--kl_coef=0.02']
METHODS = {
    'ppo': ['--critic=shared', '--experience_batch_size=64'],
    'grpo': ['--experience_batch_size=16', '--num_samples_per_prompt=4'],
}
"""64 responses a phase, 8 phases; the upper eight of thirty layers learn, and the others serve policy, critic and
reference at once. Learning rates are the defaults"""
COLUMNS = ['model', 'right', 'kl', 'length', 'minutes', 'cpu_minutes', 'peak_gib']


def right(prompts: list[str], responses: list[str], answer: list[int]) -> list[float]:
    """1 where the last number of a response is the answer, else 0."""
    found = [re.findall(r'\d+', response.replace(',', '')) for response in responses]
    return [float(bool(numbers) and int(numbers[-1]) == int(a)) for numbers, a in zip(found, answer, strict=True)]


def write_files(out: Path, seed: int) -> None:
    """Questions as chats: `demonstrations.jsonl` with answers to learn the form from, `prompts.jsonl`, and
    `held_out.jsonl`, with pairs of numbers that the others do not have."""
    pairs = [(a, b) for a in range(100, 1000) for b in range(100, 1000)]
    random.Random(seed).shuffle(pairs)
    cuts = {'demonstrations': NUM_DEMONSTRATIONS, 'prompts': NUM_PROMPTS, 'held_out': NUM_HELD_OUT}
    for name, count in cuts.items():
        own, pairs = pairs[:count], pairs[count:]
        with open(out / f'{name}.jsonl', 'w') as file:
            for a, b in own:
                question: dict[str, Any] = {'role': 'user', 'content': f'What is {a} + {b}?'}
                answer = {'role': 'assistant', 'content': f'{a} + {b} = {a + b}.'}
                row = {'messages': [question, answer]} if name == 'demonstrations' else {'prompt': [question]}
                file.write(json.dumps(row if name == 'demonstrations' else row | {'answer': a + b}) + '\n')


def run(*words: str) -> dict[str, float]:
    """One command in a process of its own; its minutes, CPU minutes and GiB at the peak."""
    print('\n$ chatgpt-rlhf', shlex.join(words), flush=True)
    begun = time.monotonic()
    child = os.posix_spawn(sys.executable, [sys.executable, '-m', 'chatgpt', *words], os.environ)
    try:
        _, status, used = os.wait4(child, 0)
    except KeyboardInterrupt:  # the child has it too, and saves
        os.waitpid(child, 0)
        raise
    if status:
        raise SystemExit(os.waitstatus_to_exitcode(status))
    cpu, peak = used.ru_utime + used.ru_stime, used.ru_maxrss / 2**20
    return {'minutes': (time.monotonic() - begun) / 60, 'cpu_minutes': cpu / 60, 'peak_gib': peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', type=Path, default=Path('outputs/real'))
    parser.add_argument('--pretrain', help='hub name or folder of a chat model, a wheel or a GGUF file')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--files', type=Path, metavar='FOLDER', help='only write the files of questions, and stop')
    args = parser.parse_args()
    if args.files:
        args.files.mkdir(parents=True, exist_ok=True)
        write_files(args.files, args.seed)
        print(f'written: {", ".join(str(path) for path in sorted(args.files.glob("*.jsonl")))}')
        return
    quiet_transformers()
    args.out.mkdir(parents=True, exist_ok=True)
    start = find_model(args.pretrain, args.out / 'model')
    write_files(args.out, args.seed)
    seed, held_out = f'--seed={args.seed}', str(args.out / 'held_out.jsonl')
    reward = ['--reward_fn', f'{__file__}:right']

    def folder(name: str) -> list[str]:
        return ['--save_path', str(args.out / name), seed, '--checkpoint_minutes=0']

    def answers(model: str, name: str, questions: str) -> list[dict[str, Any]]:
        output = args.out / f'answers_{name}.jsonl'
        run('evaluate', model, questions, *reward, *RESPONSES, '--output', str(output))
        return [json.loads(line) for line in output.read_text().splitlines()]

    before = answers(start, 'before', held_out)
    rows: list[dict[str, Any]] = [{'model': 'as it is', 'right': sum(a['score'] for a in before) / len(before)}]
    used = run('sft', str(args.out / 'demonstrations.jsonl'), '--pretrain', start, *folder('sft'), *SFT)
    rows.append({'model': 'sft', **used})
    curves: dict[str, Any] = {}
    for method, own in METHODS.items():
        words = [method, str(args.out / 'prompts.jsonl'), '--pretrain', str(args.out / 'sft' / 'actor'), *reward]
        words += ['--validation_file', held_out, '--eval_interval=4']
        used = run(*words, *folder(method), *RESPONSES, *ONLINE, *own)
        evaluated, phases = RunFolder(args.out / method).eval, RunFolder(args.out / method).metrics
        rows[1]['right'], last = evaluated[0]['eval/score_mean'], evaluated[-1]
        kl, length = phases[-1]['rollout/kl_mean'], last['eval/length_mean']
        rows.append({'model': f'sft, {method}', 'right': last['eval/score_mean'], 'kl': kl, 'length': length, **used})
        curves[method] = {'score': [(e['step'], e['eval/score_mean']) for e in evaluated]}
        curves[method]['kl'] = [(m['step'], m['rollout/kl_mean']) for m in phases]
    table = format_table([{k: f'{v:.3g}' if isinstance(v, float) else v for k, v in r.items()} for r in rows], COLUMNS)
    (args.out / 'table.txt').write_text(f'{table}\n')
    six = args.out / 'six.jsonl'
    lines = Path(held_out).read_text().splitlines()[:6]
    six.write_text('\n'.join(lines) + '\n')
    after = answers(str(args.out / 'ppo' / 'actor'), 'after', str(six))
    questions = [json.loads(line)['prompt'][0]['content'] for line in lines]
    samples = [(q, b['response'], a['response']) for q, b, a in zip(questions, before, after, strict=False)]
    found = {'seed': args.seed, 'rows': rows, 'curves': curves, 'samples': samples}
    (args.out / 'results.json').write_text(json.dumps(found, indent=1))
    for question, first, last_answer in samples:
        print(f'\n{question}\n  before: {first!r}\n  after:  {last_answer!r}')
    print(f'\nshare of {NUM_HELD_OUT} held-out additions that are right, greedily\n\n{table}')


if __name__ == '__main__':
    run_main(main)
