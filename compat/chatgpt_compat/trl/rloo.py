"""`RLOOConfig` and `RLOOTrainer` of TRL 0.11 to 0.21, which sample with their own loop (`train()`), on this library's
`PPOTrainer` without a critic."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, make_dataclass, replace
from typing import Any, ClassVar

import torch

from chatgpt.trainer import PPOConfig as OurConfig
from chatgpt.trainer.algorithms import ESTIMATORS, PolicyInputs, PolicyLoss
from chatgpt_compat.trl import arguments
from chatgpt_compat.trl.arguments import ARGUMENTS, Entry, SamplingArguments, each, refused, warned
from chatgpt_compat.trl.ppo_train import PPOTrainer, Sizes
from chatgpt_compat.trl.training import clipping


def sequence_loss(x: PolicyInputs, settings: Any) -> torch.Tensor:
    """Returns PPO's clipped loss of one ratio per sequence, exp(sum_t (logprobs - old_logprobs)), on each of its
    tokens, (N,); the mean over sequences is TRL's loss."""
    shift = torch.where(x.mask, x.logprobs - x.old_logprobs, 0.0)
    ratio = shift.new_zeros(x.num_sequences).index_add(0, x.rows, shift).exp()[x.rows]
    clipped = ratio.clamp(1 - settings.eps_clip, 1 + settings.eps_clip)
    return torch.maximum(-x.advantages * ratio, -x.advantages * clipped)


SEQUENCES = PolicyLoss(fn=sequence_loss, per_sequence=True, aggregation='sequence')
ESTIMATOR = replace(ESTIMATORS.find('rloo'), whiten=ESTIMATORS.find('gdpo').whiten)
"""leave-one-out; with normalize_advantage over responses, not tokens"""

_LATER = refused(
    'an argument of 0.22 and later, whose RLOOTrainer takes reward_funcs: chatgpt.trainer.PPOTrainer with '
    "advantage_estimator='rloo' (docs/algorithms/rloo.md)"
)
_LATER_NAMES = (
    'num_generations max_completion_length max_prompt_length beta num_iterations epsilon epsilon_high reward_weights '
    'normalize_advantages steps_per_generation generation_batch_size mask_truncated_completions use_vllm'
)
UNSUPPORTED: dict[str, Entry] = ARGUMENTS | {
    **each(_LATER, _LATER_NAMES),
    'normalize_reward': refused('scores are not standardised by batch here; the function of the reward may do it'),
    'whiten_rewards': warned('no version of this trainer in TRL reads it'),
    'local_rollout_forward_batch_size': warned('a matter of memory or speed, without influence on numbers'),
    'max_steps': warned('total_episodes, or num_train_epochs, says how long'),
}
"""unsupported argument -> reason"""


_SWITCHES = ('normalize_advantages', 'mask_truncated_completions', 'use_vllm')
_KINDS = ((name, bool | None if name in _SWITCHES else str | None) for name in _LATER_NAMES.split())
_Refused: Any = make_dataclass('_Refused', [(name, kind, None) for name, kind in _KINDS], kw_only=True)


@dataclass(kw_only=True)
class RLOOConfig(SamplingArguments, _Refused):
    """Arguments of `RLOOTrainer`, described in docs/coming_from/trl/train_arguments.md."""

    vf_coef: ClassVar[float] = 0.0
    """there are no values"""

    exp_name: str = 'rloo'
    learning_rate: float = 5e-5
    reward_model_path: str = 'EleutherAI/pythia-160m'
    sft_model_path: str = 'EleutherAI/pythia-160m'
    num_ppo_epochs: int = 4
    kl_coef: float = 0.05
    rloo_k: int = 2
    normalize_reward: bool = False
    reward_clip_range: float = 10.0
    normalize_advantage: bool = False
    token_level_kl: bool = False


class RLOOTrainer(PPOTrainer):
    """REINFORCE with leave-one-out baselines: `rloo_k` responses to each prompt, whose score and KL penalty are
    compared with the mean of the others', and a clipped ratio of whole responses.

    Args:
        config, tokenizer, policy, ref_policy, reward_model, train_dataset, data_collator, eval_dataset: in TRL's order,
            the first two also as `args` and `processing_class`; see `PPOTrainer`.

    Raises:
        ValueError: arguments that are not supported, or sizes that do not divide.
    """

    CONFIG = RLOOConfig
    UNSUPPORTED: ClassVar[Mapping[str, Entry]] = UNSUPPORTED

    def __init__(
        self,
        config: Any = None,
        tokenizer: Any = None,
        policy: Any = None,
        ref_policy: Any = None,
        reward_model: Any = None,
        train_dataset: Any = None,
        data_collator: Any = None,
        eval_dataset: Any = None,
        **more: Any,
    ) -> None:
        later = sorted({'model', 'reward_funcs'} & more.keys())
        if later:
            raise ValueError(f'RLOOTrainer: {later[0]} cannot be honoured here: {_LATER.note}')
        super().__init__(
            config=config,
            tokenizer=tokenizer,
            policy=policy,
            ref_policy=ref_policy,
            reward_model=reward_model,
            train_dataset=train_dataset,
            data_collator=data_collator,
            eval_dataset=eval_dataset,
            **more,
        )

    @property
    def model(self) -> Any:
        """The policy."""
        return self.policy_model

    def make_critic(self, value_model: Any, reward: Any, policy: Any) -> None:
        return None

    def sizes_for(self, num_prompts: int) -> Sizes:
        args, world_size = self.args, self.strategy.world_size
        mini = args.per_device_train_batch_size * args.gradient_accumulation_steps
        local = mini * args.num_mini_batches
        if args.rloo_k < 2 or local % args.rloo_k:
            raise ValueError(
                f'RLOOConfig: rloo_k={args.rloo_k} must be 2 or more, and divide the batch of {local} responses on '
                'each process'
            )
        episodes = args.total_episodes
        if episodes is None:
            episodes = int(args.num_train_epochs * num_prompts)
        if episodes < 1:
            raise ValueError(f'RLOOConfig: total_episodes={episodes} must be at least 1')
        batch = local * world_size
        return Sizes(batch, mini * world_size, math.ceil(episodes / batch))

    def settings_for(self, longest: int) -> OurConfig:
        args, sizes = self.args, self.sizes
        steps = args.num_mini_batches * args.num_ppo_epochs
        schedule = arguments.schedule(args, sizes.updates)
        return OurConfig(
            experience_batch_size=sizes.batch // args.rloo_k,
            num_samples_per_prompt=args.rloo_k,
            train_batch_size=sizes.mini_batch,
            max_tokens_per_batch=args.per_device_train_batch_size * longest,
            max_epochs=args.num_ppo_epochs,
            max_grad_norm=clipping(args),
            lr_schedule=schedule['lr_schedule'],
            warmup_steps=schedule['warmup_steps'] * steps,
            dataloader_pin_memory=args.dataloader_pin_memory,
            advantage_estimator=f'{__name__}:ESTIMATOR',
            whiten_advantages=args.normalize_advantage,
            policy_loss=f'{__name__}:SEQUENCES',
            kl_coef=args.kl_coef,
            eps_clip=args.cliprange,
            ratio_threshold=None,
        )
