"""A task with checkable answers on a real chat model: SmolLM2-135M-Instruct learns to add.

    pip install gguf
    python examples/real_model/additions.py [--out outputs/real] [--pretrain NAME_OR_FOLDER] [--seed 0]

Sums of two numbers of two digits. SFT on 100 answers teaches the format, then PPO and GRPO, each from that model,
reward correct answers; --runs adds DPO and a reward model, from pairs of a right and a wrong answer that the SFT model
sampled. The final questions are in no training file. Prints its commands and a table, and writes the table to --out,
with the folders and report.html of the runs. Without --pretrain the model is converted from a wheel (model.py).
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

from tasks import Task, online_methods, task_parser

from chatgpt.launch.arguments import run_main

NUM_DEMONSTRATIONS, NUM_PROMPTS, NUM_HELD_OUT = 100, 2000, 200
NUM_ASKED = 400
"""questions whose sampled answers make pairs"""
RESPONSES = ['--max_new_tokens=12']
SFT = ['--train_batch_size=8', '--max_epochs=1']
ONLINE = ['--num_episodes=1', '--max_timesteps=8', '--update_timesteps=1']
ONLINE += ['--train_batch_size=8', '--max_epochs=1', '--kl_coef=0.02', '--eval_interval=4']
METHODS = online_methods(128)
"""8 phases of 128 responses; learning rates are the defaults"""


def right(prompts: list[str], responses: list[str], answer: list[int]) -> list[float]:
    """Returns 1 if the last number of a response is the answer, else 0."""
    found = [re.findall(r'\d+', response.replace(',', '')) for response in responses]
    return [float(bool(numbers) and int(numbers[-1]) == int(a)) for numbers, a in zip(found, answer, strict=True)]


def write_files(out: Path, seed: int, digits: int = 2) -> None:
    """Writes questions as chats: `demonstrations.jsonl` with answers, `prompts.jsonl`, and `held_out.jsonl` with pairs
    of numbers that are not in the others. With 3 digits an answer is a sentence and there are 200."""
    numbers = range(10 ** (digits - 1), 10**digits)
    pairs = [(a, b) for a in numbers for b in numbers]
    random.Random(seed).shuffle(pairs)
    demonstrations = NUM_DEMONSTRATIONS if digits == 2 else 2 * NUM_DEMONSTRATIONS
    cuts = {'demonstrations': demonstrations, 'prompts': NUM_PROMPTS, 'held_out': NUM_HELD_OUT}
    for name, count in cuts.items():
        own, pairs = pairs[:count], pairs[count:]
        with open(out / f'{name}.jsonl', 'w') as file:
            for a, b in own:
                question: dict[str, Any] = {'role': 'user', 'content': f'What is {a} + {b}?'}
                text = f'{a + b}' if digits == 2 else f'{a} + {b} = {a + b}.'
                answer = {'role': 'assistant', 'content': text}
                row = {'messages': [question, answer]} if name == 'demonstrations' else {'prompt': [question]}
                file.write(json.dumps(row if name == 'demonstrations' else row | {'answer': a + b}) + '\n')


def main() -> None:
    parser = task_parser(__doc__, 'outputs/real')
    parser.add_argument('--files', type=Path, metavar='FOLDER', help='only write the files of questions')
    parser.add_argument('--digits', type=int, choices=(2, 3), default=2, help='with --files: digits of each number')
    names = [*METHODS, 'dpo', 'reward_model']
    parser.add_argument('--runs', nargs='+', choices=names, default=['ppo', 'grpo'], help='runs after SFT')
    parser.add_argument('options', nargs='*', help='further options of PPO and GRPO, such as -- --max_grad_norm=inf')
    args = parser.parse_args()
    if args.files:
        args.files.mkdir(parents=True, exist_ok=True)
        write_files(args.files, args.seed, args.digits)
        print(f'written: {", ".join(str(path) for path in sorted(args.files.glob("*.jsonl")))}')
        return
    task = Task('additions', args)
    write_files(task.out, args.seed)
    held_out, reward = task.path('held_out.jsonl'), ['--reward_fn', f'{__file__}:right', *RESPONSES]
    task.rows.append({'run': 'as it is'})
    sft = task.learn('sft', 'sft', task.path('demonstrations.jsonl'), *SFT)
    models = {'as it is': task.start, 'sft': sft}
    for name in args.runs:
        if name in METHODS:
            method, own = METHODS[name]
            words = ['--validation_file', held_out, *reward, *ONLINE, *own, *args.options]
            models[name] = task.learn(name, method, task.path('prompts.jsonl'), *words, start=sft)
            continue
        asked = [json.loads(line) for line in Path(task.path('prompts.jsonl')).read_text().splitlines()]
        pairs = task.pairs('pairs', sft, asked[:NUM_ASKED], *reward)
        kept = task.pairs('pairs_held_out', sft, asked[NUM_ASKED : NUM_ASKED * 3 // 2], *reward)
        words = ['--validation_file', kept]
        if name == 'dpo':
            models[name] = task.learn(name, name, pairs, *words, start=sft)
        else:
            task.learn(name, 'reward-model', pairs, *words, start=sft, metric='rm/val_accuracy')
    task.score_others({'as it is': task.start, 'sft': sft}, held_out, *reward)
    task.score_others(models, held_out, *reward, start='sft')
    task.score_samples(models, held_out, *reward)
    about = f'share of {NUM_HELD_OUT} held-out additions that are right: greedily, and sampled at temperature 1'
    if 'reward_model' in args.runs:
        about += '; reward_model: share of held-out pairs in order'
    task.finish(about, held_out, models, *reward)


if __name__ == '__main__':
    run_main(main)
