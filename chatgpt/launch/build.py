"""From a command line to tokenizer, prompts, reward and models of a PPO run.

Two halves: `build_ppo_inputs` reads everything that can be wrong without weights (files, columns, tokenizer against config,
reward functions), and `PPOInputs.build_models` then loads or makes the models, inside the strategy's init context.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chatgpt.launch.arguments import load_function

FAMILIES = {'gpt2': 'GPT', 'opt': 'OPT', 'bloom': 'BLOOM', 'llama': 'Llama', 'auto': 'Auto'}


@dataclass
class PPOInputs:
    """What a PPO run starts from."""

    tokenizer: Any
    prompts: Any
    reward_fn: Callable[..., Any] | None
    reward_tokenizer: Any
    model_config: Any
    args: argparse.Namespace

    def build_models(self) -> tuple[Any, Any, Any, Any]:
        """Actor, critic, reward (a model or a function) and initial model.

        The critic starts from the reward model where there is one (arXiv 2403.17031), else from the actor's weights with a new
        head. With LoRA the actor with its adapter off is the reference, and there is no initial model.
        """
        from chatgpt import nn

        a = self.args
        actor_class, critic_class = (getattr(nn, FAMILIES[a.model] + kind) for kind in ('Actor', 'Critic'))
        source = {'pretrained': a.pretrain} if a.pretrain else {'config': self.model_config}
        common = {'lora_rank': a.lora_rank, 'checkpoint': a.gradient_checkpointing, 'trust_remote_code': a.trust_remote_code}
        actor = actor_class(**source, **common)
        reward: Any = self.reward_fn
        if a.reward_model:
            reward = nn.RewardModel.from_pretrained(a.reward_model)
        if a.reward_model and self.reward_tokenizer is None and reward.value_head is not None:
            critic = nn.Critic.from_reward_model(reward, lora_rank=a.lora_rank)
        else:
            critic = critic_class(**source, **common)
        return actor, critic, reward, None if a.lora_rank else deepcopy(actor)


def build_ppo_inputs(args: argparse.Namespace) -> PPOInputs:
    """Read and check what can be without weights; see `PPOInputs`."""
    from chatgpt.dataset import embedded
    from chatgpt.dataset.checks import check_tokenizer
    from chatgpt.dataset.prompts import load_prompts
    from chatgpt.nn.loading import load_config, load_tokenizer

    if args.pretrain:
        config = load_config(args.pretrain, trust_remote_code=args.trust_remote_code)
        tokenizer = load_tokenizer(args.tokenizer or args.pretrain, trust_remote_code=args.trust_remote_code)
    else:
        config, tokenizer = embedded.demo_config(), embedded.demo_tokenizer()
    check_tokenizer(tokenizer, config)
    reward_fn = load_function(args.reward_fn) if args.reward_fn else None
    if args.prompt_path:
        prompts = load_prompts(
            args.prompt_path,
            tokenizer,
            column=args.prompt_column,
            max_prompt_tokens=args.max_prompt_tokens,
            skip_bad_records=args.skip_bad_records,
        )
    else:
        prompts = load_prompts(embedded.demo_prompts(200, seed=0), tokenizer)
        reward_fn = reward_fn or (None if args.reward_model else embedded_reward)
    _check_lengths(prompts, config, args.max_new_tokens)
    reward_tokenizer = _other_tokenizer(args, tokenizer) if args.reward_model else None
    return PPOInputs(tokenizer, prompts, reward_fn, reward_tokenizer, config, args)


def embedded_reward(prompts: list[str], responses: list[str]) -> list[float]:
    """The known truth of the embedded story world."""
    from chatgpt.dataset.embedded import true_score

    return [true_score(p, r) for p, r in zip(prompts, responses, strict=True)]


def _check_lengths(prompts: Any, config: Any, max_new_tokens: int) -> None:
    limit = getattr(config, 'max_position_embeddings', None) or getattr(config, 'n_positions', None)
    if limit is None:
        return
    for i in range(len(prompts)):
        length = len(prompts[i].ids)
        if length + max_new_tokens > limit:
            raise ValueError(
                f'prompt {i} has {length} tokens; with max_new_tokens={max_new_tokens} it passes the context of {limit}. Use '
                '--max_prompt_tokens to cut prompts, or fewer new tokens'
            )


def _other_tokenizer(args: argparse.Namespace, tokenizer: Any) -> Any:
    """The reward model's tokenizer when its folder has one that differs from the policy's."""
    from chatgpt.nn.loading import load_tokenizer

    if Path(args.reward_model).is_dir() and not Path(args.reward_model, 'tokenizer_config.json').is_file():
        return None
    other = load_tokenizer(args.reward_model, trust_remote_code=args.trust_remote_code)
    return None if other.get_vocab() == tokenizer.get_vocab() else other
