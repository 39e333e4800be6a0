"""RLHF with people in the loop: they compare responses, a reward model is trained on their judgements, PPO uses the
reward model, and they compare the new policy.

    python examples/human_loop.py prompts.jsonl --pretrain outputs/sft/actor --out outputs/loop
    python examples/human_loop.py --simulated

Each comparison opens a page (docs/compare.md) and waits for Ctrl-C; then the loop continues with the judgements. The
first compares two samples of the policy, each later one the policy before and after a round: its win rate measures the
round, and its judgements are data for the next. A restart with the same --out resumes. --simulated: a small model of
the embedded story world, and two simulated people that judge by the true value, with occasional errors.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from chatgpt.launch import demo_world
from chatgpt.launch.arguments import run_main
from chatgpt.launch.cli.command import run
from chatgpt.launch.cli.compare import parser as compare_parser
from chatgpt.launch.cli.compare import prepared
from chatgpt.monitor.compare import Store
from chatgpt.monitor.compare.statistics import lines, summarize

# Settings for a model of real size; `python -m chatgpt ppo --help` lists more flags.
REWARD_MODEL = ['--max_epochs=1']
PPO = ['--num_episodes=1', '--max_timesteps=50', '--update_timesteps=1', '--kl_coef=0.05']

NUM_PROMPTS = 300
SMALL_REWARD_MODEL = ['--lr=1e-3', '--lr_schedule=constant', '--max_epochs=4', '--train_batch_size=32']
SMALL_PPO = ['--lr=3e-4', '--critic_lr=1e-3', '--num_episodes=1', '--max_timesteps=25', '--update_timesteps=1']
SMALL_PPO += ['--experience_batch_size=64', '--train_batch_size=32', '--max_epochs=4', '--kl_coef=0.05']
WRONG_KEY = 0.1


def ask(words: list[str], simulated: bool) -> None:
    """Opens the page of `compare WORDS` until Ctrl-C, or simulates the answers."""
    if not simulated:
        run(['compare', *words])
        return
    with prepared(compare_parser().parse_args(words)) as store:
        answer_all(store)
        print('\n'.join(lines(summarize(store))), flush=True)


def answer_all(store: Store) -> None:
    """Simulates two people that judge everything by the true value of the story world."""
    for name in ('Ada', 'Bo'):
        person, rng = store.join(name), random.Random(name)
        while (pair := store.next_pair(person)) is not None:
            left, right = (demo_world.true_score(pair.prompt, text) for text in (pair.left, pair.right))
            choice = 'tie' if left == right else 'left' if left > right else 'right'
            wrong = rng.random() < WRONG_KEY
            store.judge(person, pair.id, rng.choice(('left', 'right')) if wrong else choice)


def preferences(databases: list[Path], out: Path) -> Path:
    """Writes all judgements so far to one file and returns its path."""
    rows: list[dict[str, Any]] = []
    for path in databases:
        with Store(path, create=False) as store:
            rows += store.preferences()[0]
    if not rows:
        raise ValueError(f'no preferences yet: judge some pairs of {databases[-1]}')
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(''.join(json.dumps(row, ensure_ascii=False) + '\n' for row in rows), encoding='utf-8')
    print(f'{out}: {len(rows)} preferences', flush=True)
    return out


def story_world(out: Path) -> tuple[str, str]:
    """Trains a policy on the language of the embedded world; returns its folder and a file of prompts."""
    prompts = out / 'prompts.jsonl'
    if not (out / 'sft' / 'actor' / 'config.json').is_file():
        run(['sft', '--save_path', str(out / 'sft'), '--resume=auto'])
    prompts.write_text(''.join(json.dumps(row) + '\n' for row in demo_world.demo_prompts(NUM_PROMPTS)))
    return str(prompts), str(out / 'sft' / 'actor')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('prompts', nargs='?', help='a file of prompts')
    parser.add_argument('--pretrain', help='initial policy: hub name or folder')
    parser.add_argument('--out', type=Path, default=Path('outputs/human_loop'))
    parser.add_argument('--rounds', type=int, default=1)
    parser.add_argument('--annotators_per_pair', type=int, default=2, metavar='K')
    parser.add_argument('--max_new_tokens', type=int, help='tokens of a response (default: 64, simulated: 32)')
    parser.add_argument('--simulated', action='store_true')
    args = parser.parse_args()
    if args.simulated == bool(args.prompts and args.pretrain):
        parser.error('give prompts and --pretrain, or --simulated')
    args.out.mkdir(parents=True, exist_ok=True)
    prompts, policy = story_world(args.out) if args.simulated else (args.prompts, args.pretrain)
    of_reward_model, of_ppo = (SMALL_REWARD_MODEL, SMALL_PPO) if args.simulated else (REWARD_MODEL, PPO)
    length = f'--max_new_tokens={args.max_new_tokens or (32 if args.simulated else 64)}'
    asked = ['--prompts', prompts, f'--annotators_per_pair={args.annotators_per_pair}', length]
    databases = [args.out / 'round-0.sqlite']
    ask(['--model', policy, '--db', str(databases[0]), *asked], args.simulated)
    for number in range(1, args.rounds + 1):
        folder = args.out / f'round-{number}'
        reward_model, actor = folder / 'reward_model', folder / 'ppo' / 'actor'
        if not (actor / 'config.json').is_file():
            judged = preferences(databases, folder / 'preferences.jsonl')
            words = ['--pretrain', policy, '--save_path', str(folder / 'reward_model_run'), '--resume=auto']
            run(['reward-model', str(judged), *words, '--model_path', str(reward_model), *of_reward_model])
            words = ['--pretrain', policy, '--reward_model', str(reward_model), '--save_path', str(folder / 'ppo')]
            run(['ppo', prompts, *words, '--resume=auto', length, *of_ppo])
        databases.append(args.out / f'round-{number}.sqlite')
        words = ['--model', policy, '--model', str(actor), '--reward_model', str(reward_model)]
        ask([*words, '--db', str(databases[-1]), *asked], args.simulated)
        policy = str(actor)
    print(f'the policy of the last round: {policy}')


if __name__ == '__main__':
    run_main(main)
