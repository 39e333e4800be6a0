"""Memory of a process on a CPU apart from its tensors: resident memory after PPO of a minimal model.

    python benchmarks/process_memory.py

Runs two phases of PPO with four networks of 35,000 parameters through the command's recipe and prints resident
memory after the imports and at the end; `chatgpt.plan.setup.PROCESS_BYTES` is the last number, rounded.
"""

from __future__ import annotations

import resource
import tempfile
from copy import deepcopy

import torch
from harness import ppo_trainer, process_memory


def resident() -> float:
    """Returns the resident memory in MiB."""
    return process_memory()['VmRSS'] / 2**20


def main() -> None:
    print(f'torch {torch.__version__}: {resident():.0f} MiB')
    from transformers import AutoModelForCausalLM

    import chatgpt.launch.recipes  # noqa: F401
    from chatgpt.nn import Actor, Critic, RewardModel
    from chatgpt.strategies import NaiveStrategy
    from chatgpt.testing import byte_tokenizer, tiny_config

    print(f'transformers and chatgpt: {resident():.0f} MiB')
    tokenizer, config = byte_tokenizer(), tiny_config('llama')
    config.vocab_size = len(tokenizer)
    policy, values, scores = (AutoModelForCausalLM.from_config(config) for _ in range(3))
    with NaiveStrategy(device='cpu') as strategy, tempfile.TemporaryDirectory() as folder:
        actor, critic, reward = Actor(policy), Critic(values), RewardModel(scores)
        trainer = ppo_trainer(
            strategy, actor, critic, reward, deepcopy(actor), optimizer=strategy.make_optimizer, train_batch_size=4,
            experience_batch_size=4, tokenizer=tokenizer, run_dir=folder, max_new_tokens=8,
        )  # fmt: skip
        trainer.fit(['a', 'b', 'c', 'd'], num_episodes=1, max_timesteps=2, update_timesteps=1)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    print(f'after two phases of PPO: {resident():.0f} MiB, at most {peak:.0f} MiB')


if __name__ == '__main__':
    main()
