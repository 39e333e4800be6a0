"""Human preferences on a real model: a reward model and DPO from pairs of responses, and PPO with that reward model;
--runs adds GRPO, and SFT on the chosen responses.

    python examples/real_model/preferences.py PAIRS.jsonl [--out outputs/preferences] [--pretrain NAME_OR_FOLDER]

PAIRS is a file of preferences in any form that `chatgpt-rlhf reward-model` reads. Pairs longer than --longest tokens
are dropped, and a fifth of the others is held out (for PPO, the prompts of at most 100 of them). Learning rates, epochs
of DPO and PPO and the KL coefficient are the defaults. Without --pretrain the model is converted from a wheel
(model.py). Prints a table and writes it to --out, with the folders and report.html of the runs. To judge responses
yourself:

    chatgpt-rlhf compare --model outputs/preferences/model --model outputs/preferences/dpo/actor \\
        --prompts outputs/preferences/prompts_held_out.jsonl --db judged.sqlite
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tasks import Task, online_methods, task_parser
from transformers import AutoTokenizer

from chatgpt.data import load_examples
from chatgpt.data.formats import prompt_turns
from chatgpt.launch.arguments import run_main

ONLINE = ['--num_episodes=1', '--max_timesteps=8', '--update_timesteps=1', '--eval_interval=4']
METHODS = online_methods(32)
RESPONSES = ['--max_new_tokens=48']


def rows_of(path: Path, tokenizer: Any, longest: int, most: int) -> list[dict[str, Any]]:
    """Returns rows of prompt, chosen and rejected as chats of at most `longest` tokens, in a fixed random order."""
    rows = []
    for example in load_examples(str(path), skip_bad_records=True):
        turns = [turn._asdict() for turn in prompt_turns(example.prompt)]
        answers = [text if isinstance(text, str) else text[-1].content for text in example.responses]
        chosen, rejected = ([{'role': 'assistant', 'content': answer.strip()}] for answer in answers[:2])
        if turns and turns[-1]['role'] == 'user' and chosen != rejected:
            rows.append({'prompt': turns, 'chosen': chosen, 'rejected': rejected})
    random.Random(0).shuffle(rows)
    chats = ([r['prompt'] + r[name] for name in ('chosen', 'rejected')] for r in rows)
    sizes = [max(len(tokenizer.apply_chat_template(c, return_dict=False)) for c in pair) for pair in chats]
    return [row for row, size in zip(rows, sizes, strict=True) if size <= longest][:most]


def main() -> None:
    parser = task_parser(__doc__, 'outputs/preferences')
    parser.add_argument('pairs', type=Path)
    parser.add_argument('--longest', type=int, default=192, help='maximum tokens of a conversation')
    parser.add_argument('--most', type=int, default=700, help='maximum number of pairs')
    names = ['sft', 'dpo', *METHODS]
    parser.add_argument('--runs', nargs='*', choices=names, default=['dpo', 'ppo'], help='runs after the reward model')
    args = parser.parse_args()
    task = Task('preferences', args)
    task.rows.append({'run': 'as it is'})
    rows = rows_of(args.pairs, AutoTokenizer.from_pretrained(task.start), args.longest, args.most)
    cut = len(rows) // 5
    print(f'{len(rows) - cut} pairs to learn from, {cut} held out')
    held_out, pairs = task.write('pairs_held_out.jsonl', rows[:cut]), task.write('pairs.jsonl', rows[cut:])
    words = ['--validation_file', held_out]
    reward = task.learn('reward_model', 'reward-model', pairs, *words, metric='rm/val_accuracy')
    asked = task.write('prompts_held_out.jsonl', [{'prompt': row['prompt']} for row in rows[:cut][:100]])
    prompts = task.write('prompts.jsonl', [{'prompt': row['prompt']} for row in rows[cut:]])
    scored, models = ['--reward_model', reward, *RESPONSES], {'as it is': task.start}
    for name in args.runs:
        if name == 'dpo':
            models[name] = task.learn(name, name, pairs, *words, metric='dpo/val_accuracy')
        elif name == 'sft':
            chats = task.write('chosen.jsonl', [{'messages': row['prompt'] + row['chosen']} for row in rows[cut:]])
            models[name] = task.learn(name, name, chats)
        else:
            method, own = METHODS[name]
            models[name] = task.learn(name, method, prompts, '--validation_file', asked, *scored, *ONLINE, *own)
    task.score_others(models, asked, *scored)
    task.score_samples({name: model for name, model in models.items() if name != 'dpo'}, asked, *scored)
    about = f'reward model, dpo: accuracy on {cut} held-out pairs; others: mean score by the reward model'
    task.finish(about, asked, models, *scored)


if __name__ == '__main__':
    run_main(main)
