"""Good runs for `doctor.py`: the tasks of the other benchmarks with their settings, shortened, each in a run folder.

`GOOD` is the table: what each makes under a folder, from a seed. Left out: what the doctor says of them.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Files:
    """What runs on a real model read."""

    model: Path
    """stories260K"""
    stories: Path
    reviews: Path
    prompts: Path


def example(script: str, *flags: str) -> None:
    """A script of examples/, in a process of its own."""
    subprocess.run([sys.executable, str(ROOT / 'examples' / f'{script}.py'), *flags], check=True)


def demo(folder: Path, seed: int, files: Files) -> None:
    """The three stages of examples/demo.py, whole."""
    example('demo', '--out', str(folder), '--seed', str(seed))


def preference(folder: Path, seed: int, files: Files) -> None:
    """SFT, and four losses on its model, as preference.py has them."""
    import preference as task

    from chatgpt.launch import demo_world

    tokenizer = demo_world.demo_tokenizer()
    start = task.sft(seed, tokenizer, folder / 'sft')
    for name in ('dpo sigmoid', 'kto', 'orpo', 'simpo'):
        task.optimise(name, start, seed, tokenizer, folder / name.replace(' ', '_'))


def randomwalks(folder: Path, seed: int, files: Files) -> None:
    """PPO and GRPO from a model that knows the walks, and ILQL: 60 optimizer steps in place of 160, 120 of 200."""
    import randomwalks as task

    task.STEPS = 60
    for method in ('ppo', 'grpo'):
        task.run_online(method, 1000, seed, cache=folder, run_dir=folder / method)
    task.run_ilql(1000, seed, run_dir=folder / 'ilql', max_epochs=12)


def stories(folder: Path, seed: int, files: Files) -> None:
    """Words of joy on a real model, 30 phases in place of 40."""
    import stories as task

    task.SETTINGS['max_timesteps'] = 30
    task.run(str(files.model), str(files.prompts), 'naive', seed, folder / 'ppo')


def three_stages(folder: Path, seed: int, files: Files) -> None:
    """SFT for 60 steps in place of two epochs, the whole epoch of the reward model, PPO for 20 phases of 40."""
    from_seed = f'--seed={seed}'
    example(
        'train_sft', str(files.stories), '--pretrain', str(files.model), '--save_path', str(folder / 'sft'),
        '--max_steps=60', '--lr=1e-3', '--lr_schedule=cosine', '--train_batch_size=16', '--max_len=256',
        '--validation_percentage=5', '--log_interval=4', from_seed,
    )  # fmt: skip
    example(
        'train_reward_model', str(files.reviews), '--pretrain', str(folder / 'sft/actor'), '--save_path',
        str(folder / 'rm'), '--max_epochs=1', '--lr=1e-3', '--train_batch_size=32', '--max_len=128',
        '--validation_percentage=10', from_seed,
    )  # fmt: skip
    example(
        'train_prompts', str(files.prompts), '--pretrain', str(folder / 'sft/actor'), '--reward_model',
        str(folder / 'rm/reward_model'), '--save_path', str(folder / 'ppo'), '--experience_batch_size=64',
        '--train_batch_size=32', '--max_epochs=4', '--lr=3e-4', '--critic_lr=1e-3', '--kl_coef=0.05',
        '--max_new_tokens=48', '--max_prompt_tokens=64', 'training_iteration=20', from_seed,
    )  # fmt: skip


GOOD: dict[str, Callable[[Path, int, Files], Any]] = {
    'demo': demo,
    'preference': preference,
    'randomwalks': randomwalks,
    'stories': stories,
    'three_stages': three_stages,
}
