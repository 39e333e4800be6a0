"""TRL's names on this library: `PPOTrainer` of both of its eras, models with a value head, `core`.

    from chatgpt.compat.trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer

`SERVED` and `INSTEAD` are what `python -m chatgpt.compat run` and `check` go by; docs/coming_from/trl.md says what is
the same and what is not.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HERE = 'chatgpt.compat.trl'

_CORE = (
    *('LengthSampler', 'respond_to_batch', 'set_seed', 'logprobs_from_logits', 'entropy_from_logits', 'masked_mean'),
    *('masked_var', 'masked_whiten', 'whiten', 'clip_by_value', 'top_k_top_p_filtering', 'flatten_dict'),
    *('stack_dicts', 'convert_to_scalar', 'stats_to_np', 'PPODecorators', 'WANDB_PADDING'),
)
_MODELS = (
    *('AutoModelForCausalLMWithValueHead', 'AutoModelForSeq2SeqLMWithValueHead', 'PreTrainedModelWrapper'),
    'create_reference_model',
)

SERVED: dict[str, str] = {
    'PPOConfig': f'{_HERE}.config:PPOConfig',
    'PPOv2Config': f'{_HERE}.config:PPOConfig',
    'trainer.PPOConfig': f'{_HERE}.config:PPOConfig',
    'trainer.ppo_config.PPOConfig': f'{_HERE}.config:PPOConfig',
    'DPOConfig': f'{_HERE}.dpo:DPOConfig',
    'DPOTrainer': f'{_HERE}.dpo:DPOTrainer',
    'SFTConfig': f'{_HERE}.sft:SFTConfig',
    'SFTTrainer': f'{_HERE}.sft:SFTTrainer',
    'RewardConfig': f'{_HERE}.reward:RewardConfig',
    'RewardTrainer': f'{_HERE}.reward:RewardTrainer',
    'PPOTrainer': f'{_HERE}.dispatch:PPOTrainer',
    'PPOv2Trainer': f'{_HERE}.ppo_train:PPOTrainer',
    'trainer.PPOTrainer': f'{_HERE}.dispatch:PPOTrainer',
    'trainer.ppo_trainer.PPOTrainer': f'{_HERE}.dispatch:PPOTrainer',
    **{name: f'{_HERE}.models:{name}' for name in _MODELS},
    **{f'models.{name}': f'{_HERE}.models:{name}' for name in _MODELS},
    'models.modeling_value_head.AutoModelForCausalLMWithValueHead': f'{_HERE}.models:AutoModelForCausalLMWithValueHead',
    'models.modeling_value_head.ValueHead': f'{_HERE}.models:ValueHead',
    'models.modeling_base.create_reference_model': f'{_HERE}.models:create_reference_model',
    'trainer.ppo_trainer.PPODecorators': f'{_HERE}.core:PPODecorators',
    'trainer.ppo_trainer.logprobs_from_logits': f'{_HERE}.core:logprobs_from_logits',
    'set_seed': f'{_HERE}.core:set_seed',
    **{f'core.{name}': f'{_HERE}.core:{name}' for name in _CORE},
    **{
        f'import_utils.{name}': f'{_HERE}.core:{name}'
        for name in ('is_npu_available', 'is_xpu_available', 'is_peft_available')
    },
}
"""name below `trl`: where it is, 'module:attribute'"""

INSTEAD: dict[str, str] = {
    'TextEnvironment': "generate turn by turn, and give step the tools' output with response_masks of 0",
    'environment.TextEnvironment': "generate turn by turn, and give step the tools' output with response_masks of 0",
    'TextHistory': "generate turn by turn, and give step the tools' output with response_masks of 0",
    'BestOfNSampler': 'chatgpt.rollout.BestOfN',
    'extras.BestOfNSampler': 'chatgpt.rollout.BestOfN',
    'IterativeSFTTrainer': 'chatgpt.trainer.RFTTrainer: sample, keep the best, SFT on them',
    'DDPOTrainer': 'nothing: diffusion models are not trained here',
    'AlignPropTrainer': 'nothing: diffusion models are not trained here',
    'GPT2HeadWithValueModel': 'AutoModelForCausalLMWithValueHead, its name from 0.2 on',
}
"""name below `trl` that is not served: what to write instead"""


def __getattr__(name: str) -> Any:
    if name in SERVED:
        module, _, attribute = SERVED[name].partition(':')
        return getattr(import_module(module), attribute)
    if name in INSTEAD:
        raise AttributeError(f'trl.{name} is not served: {INSTEAD[name]}')
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


def __dir__() -> list[str]:
    return [*globals(), *(name for name in SERVED if '.' not in name)]
