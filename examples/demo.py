"""The demo: the three stages of RLHF from scratch and offline: SFT, a reward model from preferences, and PPO.

    python examples/demo.py [--out outputs/demo] [--seed 0]

The task is `chatgpt.launch.demo_world`. It defines the true value of a response, which the policy never sees: PPO uses
the reward model trained on pairs, and only the final win rate uses the true value. Three settings prevent reward
hacking ("it felt proud . it felt proud . it felt proud ."): pairs as close as two responses of one policy, a large KL
coefficient towards the SFT model, and a penalty for repetition. docs/results/demo.md shows a run without them.

Writes to --out: sft/, reward_model/ and ppo/ (Hugging Face folders), sft_run/, reward_model_run/ and ppo_run/ (metrics
and report.html of each stage), and before_after.txt, the table that it prints at the end.
"""

from __future__ import annotations

import argparse
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch.optim import AdamW

from chatgpt.data import load_demonstrations, load_preferences
from chatgpt.launch import demo_world
from chatgpt.launch.arguments import run_main
from chatgpt.launch.inputs import quiet_transformers
from chatgpt.nn import AutoActor, AutoRM, Critic
from chatgpt.strategies import NaiveStrategy
from chatgpt.trainer import PPOTrainer, RewardModelTrainer, SFTTrainer
from chatgpt.trainer.callbacks import format_table
from chatgpt.trainer.metrics import repetition

NUM_SHOWN, NUM_COMPARED = 6, 200
PREFERENCES: dict[str, Any] = {
    'pairs': demo_world.demo_close_preferences,
    'num_pairs': 6600,
    'lr': 1e-3,
    'train_batch_size': 64,
    'max_epochs': 2,
}
PPO: dict[str, Any] = {
    'repetition_cost': 35.0,
    'lr': 1.5e-3,
    'lr_schedule': 'linear',
    'num_phases': 28,
    'experience_batch_size': 128,
    'train_batch_size': 64,
    'max_epochs': 3,
    'kl_coef': 0.55,
}


def run_sft(strategy: Any, tokenizer: Any, out: Path) -> Any:
    actor = AutoActor(config=demo_world.demo_config())
    actor, optim = strategy.prepare((actor, AdamW(actor.parameters(), lr=2e-3)))
    train, validation = load_demonstrations(demo_world.demo_corpus(2200, seed=0), tokenizer, validation_percentage=9)
    trainer = SFTTrainer(
        strategy,
        actor,
        optim,
        train,
        validation,
        train_batch_size=32,
        max_epochs=3,
        log_interval=20,
        tokenizer=tokenizer,
        run_dir=out / 'sft_run',
    )
    trainer.fit()
    trainer.save_pretrained(out / 'sft')
    return actor


def run_reward_model(strategy: Any, tokenizer: Any, out: Path, settings: dict[str, Any]) -> RewardModelTrainer:
    """Trains a reward model from the weights of the SFT model."""
    settings = dict(settings)
    pairs, lr = settings.pop('pairs')(settings.pop('num_pairs'), seed=0), settings.pop('lr')
    model = AutoRM(pretrained=out / 'sft')
    model, optim = strategy.prepare((model, AdamW(model.parameters(), lr=lr)))
    train, validation = load_preferences(pairs, tokenizer, validation_percentage=9)
    trainer = RewardModelTrainer(
        strategy,
        model,
        optim,
        train,
        validation,
        log_interval=20,
        tokenizer=tokenizer,
        run_dir=out / 'reward_model_run',
        **settings,
    )
    trainer.fit()
    trainer.save_pretrained(out / 'reward_model')
    return trainer


def repeated_shares(prompts: list[str], responses: list[str], **columns: Any) -> list[float]:
    """Returns the share of repeated sentences, a penalty, since the reward model is too small to detect repetition."""
    return [demo_world.repeated_share(response) for response in responses]


def run_ppo(strategy: Any, actor: Any, tokenizer: Any, out: Path, settings: dict[str, Any]) -> PPOTrainer:
    settings = dict(settings)
    lr, num_phases, cost = (settings.pop(name) for name in ('lr', 'num_phases', 'repetition_cost'))
    actor = deepcopy(actor)
    reward_model = AutoRM(pretrained=out / 'reward_model')
    critic = Critic.from_reward_model(reward_model)
    initial_model = deepcopy(actor)
    (actor, actor_optim), (critic, critic_optim), reward_model, initial_model = strategy.prepare(
        (actor, AdamW(actor.parameters(), lr=lr, eps=1e-5, weight_decay=0.0)),
        (critic, AdamW(critic.parameters(), lr=1e-3, eps=1e-5, weight_decay=0.0)),
        reward_model,
        initial_model,
    )
    trainer = PPOTrainer(
        strategy,
        actor,
        critic,
        [(1.0, reward_model), (-cost, repeated_shares)] if cost else reward_model,
        initial_model,
        actor_optim,
        critic_optim,
        tokenizer=tokenizer,
        run_dir=out / 'ppo_run',
        max_new_tokens=32,
        **settings,
    )
    trainer.fit(demo_world.demo_prompts(200, seed=0), num_episodes=1, max_timesteps=num_phases, update_timesteps=1)
    trainer.save_pretrained(out / 'ppo')
    return trainer


def answers(folder: Path, prompts: list[str], seed: int) -> list[str]:
    """Returns sampled responses of a saved model, loaded with transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(seed)
    responses = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors='pt')['input_ids']
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, max_new_tokens=32)
        responses.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    return responses


def train(out: Path, seed: int, preferences: dict[str, Any] = PREFERENCES, ppo: dict[str, Any] = PPO) -> float:
    """Runs the three stages; returns the reward model's accuracy on held-out pairs."""
    tokenizer = demo_world.demo_tokenizer()
    with NaiveStrategy(seed=seed) as strategy:
        print('1. SFT: a new GPT-2 of 0.2 million parameters learns to tell stories from 2,000 of them.', flush=True)
        actor = run_sft(strategy, tokenizer, out)
        print('\n2. Reward model: learns from 6,000 pairs which of two stories is preferred.', flush=True)
        trainer = run_reward_model(strategy, tokenizer, out, preferences)
        accuracy = trainer.evaluate(trainer.eval_data)['accuracy']
        print('\n3. PPO: the policy tells stories, and stories with a high score become more likely.')
        print('   Repetition and the KL to the SFT model are penalised.', flush=True)
        run_ppo(strategy, actor, tokenizer, out, ppo)
    return accuracy


def compare(out: Path, num_prompts: int = NUM_COMPARED) -> tuple[dict[str, float], list[dict[str, str]]]:
    """Compares SFT and PPO on new prompts; returns numbers and a table of the first stories."""
    tokenizer = demo_world.demo_tokenizer()
    prompts = [row['prompt'] for row in demo_world.demo_prompts(num_prompts, seed=1)]
    before, after = answers(out / 'sft', prompts, 0), answers(out / 'ppo', prompts, 0)
    values = [
        (demo_world.true_score(p, b), demo_world.true_score(p, a))
        for p, b, a in zip(prompts, before, after, strict=True)
    ]
    count = len(prompts)
    wins, ties = sum(a > b for b, a in values), sum(a == b for b, a in values)
    numbers: dict[str, float] = {'count': count, 'wins': wins, 'ties': ties, 'win_rate': (wins + ties / 2) / count}
    for name, texts, column in (('SFT', before, 0), ('PPO', after, 1)):
        found = repetition([tokenizer(text, return_tensors='pt')['input_ids'][0].long() for text in texts])
        numbers[f'{name} truth'] = sum(pair[column] for pair in values) / count
        numbers[f'{name} within'] = found['rollout/repetition_within']
        numbers[f'{name} across'] = found['rollout/repetition_across']
        numbers[f'{name} words'] = sum(len(text.split()) for text in texts) / count
    rows = []
    for i in range(NUM_SHOWN):
        rows += [
            {'': 'prompt', 'truth': '', 'text': prompts[i]},
            {'': 'SFT', 'truth': f'{values[i][0]:+z.2f}', 'text': before[i]},
            {'': 'PPO', 'truth': f'{values[i][1]:+z.2f}', 'text': after[i]},
            {'': '', 'truth': '', 'text': ''},
        ]
    return numbers, rows[:-1]


def report(out: Path, accuracy: float) -> None:
    """Prints the comparison of SFT and PPO and writes it to before_after.txt."""
    n, rows = compare(out)
    count = n['count']
    summary = [
        f'reward model: {accuracy:.1%} of eval pairs in the right order',
        f'true value on {count} new prompts: SFT {n["SFT truth"]:+z.2f}, PPO {n["PPO truth"]:+z.2f} (at best +1.00)',
        f'win rate of PPO over SFT by the truth: {n["win_rate"]:.1%} ({n["wins"]} wins, {n["ties"]} ties counted half, '
        f'of {count})',
        f'repeated runs of 4 words within a story: SFT {n["SFT within"]:.1%}, PPO {n["PPO within"]:.1%}',
        f'runs of 4 words that another of the {count} stories has too: SFT {n["SFT across"]:.1%}, PPO '
        f'{n["PPO across"]:.1%}',
    ]
    text = '\n'.join([format_table(rows, ['', 'truth', 'text'], width=110), '', *summary])
    (out / 'before_after.txt').write_text(text + '\n')
    print('\n4. Before and after: both models respond to the same new prompts; only this table uses the true value.\n')
    print(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', type=Path, default=Path('outputs/demo'))
    parser.add_argument('--seed', type=int, default=0)
    args = parser.parse_args()
    start = time.perf_counter()
    quiet_transformers()
    torch.set_num_threads(1)  # fastest for a model of this size
    report(args.out, train(args.out, args.seed))
    print(f'\nmodels: {args.out}/sft, reward_model, ppo; {time.perf_counter() - start:.0f} s')
    print(f'report: {args.out}/ppo_run/report.html')


if __name__ == '__main__':
    run_main(main)
