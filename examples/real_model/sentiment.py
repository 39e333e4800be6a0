"""Sentiment on a real model: the reward is a classifier of movie reviews, and SmolLM2 learns to write good ones.

    python examples/real_model/sentiment.py REVIEWS.jsonl [--out outputs/sentiment] [--pretrain NAME_OR_FOLDER]

REVIEWS.jsonl has rows of `text` and `label` (1: positive). A reward model is trained on 1,500 of them. SFT on 300
others, whatever their label, teaches the model to go on after the first three words of a review. PPO and GRPO then
start from that model with the first words of further reviews as prompts; --runs dpo learns from pairs that it sampled
and the reward model ordered. Learning rates, epochs and the KL coefficient are the defaults. Prints a table and writes
it to --out, with the folders and report.html of the runs.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tasks import Task, online_methods, task_parser

from chatgpt.launch.arguments import run_main

NUM_REVIEWS, NUM_OTHERS, NUM_HELD_OUT, NUM_ASKED = 1500, 300, 200, 300
"""reviews of the reward model; reviews to measure it with, which are also those of SFT; held-out prompts; prompts whose
sampled responses make pairs"""
NUM_WORDS, LEAST_WORDS = 3, 10
"""words of a prompt, and of a review"""
RESPONSES, PLAIN = ['--max_new_tokens=12'], ['--apply_chat_template=false']
ONLINE = ['--num_episodes=1', '--update_timesteps=1', '--eval_interval=4']
METHODS = online_methods(64)


def split(rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Returns the first words of each review that is long enough as a prompt, and the others as the response."""
    long = [words for row in rows if len(words := row['text'].split()) >= LEAST_WORDS]
    return [{'prompt': ' '.join(w[:NUM_WORDS]), 'response': f' {" ".join(w[NUM_WORDS:])}'} for w in long]


def write_files(task: Task, reviews: Path) -> None:
    """Writes `reviews.jsonl` and `other_reviews.jsonl` for the reward model, `demonstrations.jsonl` for SFT, and
    `held_out.jsonl` and `prompts.jsonl`, in which no prompt is twice."""
    rows = [json.loads(line) for line in reviews.read_text().splitlines()]
    random.Random(0).shuffle(rows)
    cut = NUM_REVIEWS + NUM_OTHERS
    task.write('reviews.jsonl', rows[:NUM_REVIEWS])
    task.write('other_reviews.jsonl', rows[NUM_REVIEWS:cut])
    task.write('demonstrations.jsonl', split(rows[NUM_REVIEWS:cut]))
    prompts = [{'prompt': text} for text in dict.fromkeys(part['prompt'] for part in split(rows[cut:]))]
    task.write('held_out.jsonl', prompts[:NUM_HELD_OUT])
    task.write('prompts.jsonl', prompts[NUM_HELD_OUT:])


def main() -> None:
    parser = task_parser(__doc__, 'outputs/sentiment')
    parser.add_argument('reviews', type=Path)
    names = ['dpo', *METHODS]
    parser.add_argument('--runs', nargs='*', choices=names, default=['ppo', 'grpo'], help='runs after SFT')
    parser.add_argument('--phases', type=int, default=16, help='phases of 64 responses')
    parser.add_argument('--reward_model', help='folder of a reward model, instead of training one')
    args = parser.parse_args()
    task = Task('sentiment', args)
    write_files(task, args.reviews)
    task.rows.append({'run': 'as it is'})
    held_out, prompts = task.path('held_out.jsonl'), task.path('prompts.jsonl')
    reward = args.reward_model
    if not reward:
        words = [task.path('reviews.jsonl'), '--validation_file', task.path('other_reviews.jsonl'), *PLAIN]
        reward = task.learn('reward_model', 'reward-model', *words, metric='rm/val_accuracy')
    scored = ['--reward_model', reward, *RESPONSES]
    judged = [*scored, '--no_apply_chat_template']
    sft = task.learn('sft', 'sft', task.path('demonstrations.jsonl'), *PLAIN)
    models = {'as it is': task.start, 'sft': sft}
    for name in args.runs:
        if name == 'dpo':
            asked = [json.loads(line) for line in Path(prompts).read_text().splitlines()[:NUM_ASKED]]
            models[name] = task.learn(name, 'dpo', task.pairs('pairs', sft, asked, *judged), *PLAIN, start=sft)
        else:
            method, own = METHODS[name]
            words = ['--validation_file', held_out, *scored, *PLAIN, f'--max_timesteps={args.phases}', *ONLINE, *own]
            models[name] = task.learn(name, method, prompts, *words, start=sft)
    task.score_others({'as it is': task.start, 'sft': sft}, held_out, *judged)
    task.score_others(models, held_out, *judged, start='sft')
    task.score_samples(models, held_out, *judged)
    about = 'reward model: accuracy on held-out reviews; others: its mean score of held-out responses, greedily'
    task.finish(about, held_out, models, *judged)


if __name__ == '__main__':
    run_main(main)
