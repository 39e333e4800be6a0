"""Sentiment on a real model: the reward is a classifier of movie reviews, and SmolLM2 learns to continue them
positively.

    python examples/real_model/sentiment.py REVIEWS.jsonl [--out outputs/sentiment] [--pretrain NAME_OR_FOLDER]

REVIEWS.jsonl has rows of `text` and `label` (1: positive). A reward model is trained on 1,500 of them; PPO and GRPO
start from the original model, with the first five words of other reviews as prompts; SFT continues them as positive
reviews do, and DPO learns from pairs that the model sampled and the reward model ordered. Learning rates, epochs and
the KL coefficient are the defaults. Prints a table and writes it to --out, with the folders and report.html of the
runs.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from tasks import Task, task_parser

from chatgpt.launch.arguments import run_main

NUM_REVIEWS, NUM_HELD_OUT, NUM_WORDS = 1500, 300, 5
NUM_POSITIVE, NUM_ASKED = 500, 300
"""reviews that SFT imitates, and prompts whose sampled responses make pairs"""
ONLINE = ['--num_episodes=1', '--update_timesteps=1', '--eval_interval=4']
UPPER = ['--num_layers_unfrozen=8']
METHODS = {
    'ppo': ('ppo', ['--experience_batch_size=64', '--critic=shared', *UPPER]),
    'grpo': ('grpo', ['--experience_batch_size=8', *UPPER]),
    'ppo_lora': ('ppo', ['--experience_batch_size=64', '--critic=shared', '--lora_rank=16']),
    'ppo_all': ('ppo', ['--experience_batch_size=64']),
}
"""64 responses per phase. Trained are the top eight of thirty layers, or adapters, or all weights of the policy and a
separate critic"""


def main() -> None:
    parser = task_parser(__doc__, 'outputs/sentiment')
    parser.add_argument('reviews', type=Path)
    names = ['sft', 'dpo', *METHODS]
    parser.add_argument('--runs', nargs='+', choices=names, default=list(METHODS), help='runs after the reward model')
    parser.add_argument('--phases', type=int, default=16, help='phases of 64 responses')
    parser.add_argument('--reward_model', help='folder of a reward model, instead of training one')
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.reviews.read_text().splitlines()]
    random.Random(0).shuffle(rows)
    texts = [(row['text'].split(), row['label']) for row in rows[NUM_REVIEWS + NUM_HELD_OUT :]]
    texts = [(words, label) for words, label in texts if len(words) >= 2 * NUM_WORDS]
    prompts = [{'prompt': ' '.join(words[:NUM_WORDS])} for words, _ in texts]
    task, plain = Task('sentiment', args), ['--apply_chat_template=false']
    reviews = task.write('reviews.jsonl', rows[:NUM_REVIEWS])
    other = task.write('other_reviews.jsonl', rows[NUM_REVIEWS : NUM_REVIEWS + NUM_HELD_OUT])
    held_out, data = task.write('held_out.jsonl', prompts[:100]), task.write('prompts.jsonl', prompts[100:])
    words = ['--validation_file', other, *plain]
    reward = args.reward_model or task.learn('reward_model', 'reward-model', reviews, *words, metric='rm/val_accuracy')
    scored = ['--reward_model', reward, '--max_new_tokens=24', f'--max_timesteps={args.phases}', *plain]
    judged = ['--reward_model', reward, '--max_new_tokens=24', '--no_apply_chat_template']
    models = {'as it is': task.start}
    for name in args.runs:
        if name == 'sft':
            praise = [words for words, label in texts[100:] if label == 1][:NUM_POSITIVE]
            parts = [(' '.join(words[:NUM_WORDS]), f' {" ".join(words[NUM_WORDS:])}') for words in praise]
            rows = [{'prompt': prompt, 'response': response} for prompt, response in parts]
            models[name] = task.learn(name, 'sft', task.write('positive.jsonl', rows), *plain)
        elif name == 'dpo':
            pairs = task.pairs('pairs', task.start, prompts[100 : 100 + NUM_ASKED], *judged)
            models[name] = task.learn(name, 'dpo', pairs, *plain)
        else:
            method, own = METHODS[name]
            models[name] = task.learn(name, method, data, '--validation_file', held_out, *scored, *ONLINE, *own)
    task.score_others(models, held_out, *judged)
    about = 'reward model: accuracy on held-out reviews; others: its mean score of held-out responses, greedily'
    task.finish(about, held_out, models, *judged)


if __name__ == '__main__':
    run_main(main)
