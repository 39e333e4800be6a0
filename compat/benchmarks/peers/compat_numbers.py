"""Worker: the cases of `compat_work.py` with TRL 0.11.4, as JSON. Arguments: policy's folder, reference's, file."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
import transformers
import trl
from compat_work import CASES, run_case, summary
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer


def watch(trainer: Any) -> Any:
    """Keep what `compute_rewards` and `compute_advantages` give, of the tokens that count."""
    seen: dict[str, list[list[float]]] = {}
    rewards_of, advantages_of = trainer.compute_rewards, trainer.compute_advantages

    def rows(matrix: Any, mask: Any) -> list[list[float]]:
        return [row[kept.bool()].tolist() for row, kept in zip(matrix, mask, strict=True)]

    def compute_rewards(scores: Any, logprobs: Any, ref_logprobs: Any, masks: Any) -> Any:
        rewards, non_score, kls = rewards_of(scores, logprobs, ref_logprobs, masks)
        seen.update(rewards=rows(rewards, masks), non_score_rewards=rows(non_score, masks))
        return rewards, non_score, kls

    def compute_advantages(values: Any, rewards: Any, mask: Any) -> Any:
        values, advantages, returns = advantages_of(values, rewards, mask)
        seen.update(values=rows(values, mask), advantages=rows(advantages, mask), returns=rows(returns, mask))
        return values, advantages, returns

    update = trainer.running.update

    def update_moments(scores: Any) -> Any:
        # 0.11.4 itself keeps numbers there and asks them for `.to`, so that use_score_scaling fails in it.
        found = update(scores)
        trainer.running.mean, trainer.running.std = map(torch.as_tensor, (trainer.running.mean, trainer.running.std))
        return found

    trainer.running.update = update_moments
    trainer.compute_rewards, trainer.compute_advantages = compute_rewards, compute_advantages
    return lambda stats: seen


def main() -> None:
    policy, reference, out = sys.argv[1:]
    torch.set_num_threads(1)
    names = SimpleNamespace(
        AutoModelForCausalLMWithValueHead=AutoModelForCausalLMWithValueHead,
        PPOConfig=lambda **settings: PPOConfig(accelerator_kwargs={'cpu': True}, **settings),
        PPOTrainer=PPOTrainer,
    )
    cases = {}
    for name, case in CASES.items():
        result = run_case(names, watch, case, policy, reference)
        cases[name] = result | {'gradients': summary(result['gradients'])}
    versions = {'trl': trl.__version__, 'torch': torch.__version__, 'transformers': transformers.__version__}
    with open(out, 'w') as file:
        json.dump({'versions': versions, 'cases': cases}, file)
        file.write('\n')


if __name__ == '__main__':
    main()
