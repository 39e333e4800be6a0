"""TRL's names on this library: `PPOTrainer` of both of its eras, models with a value head, `core`.

    from chatgpt_compat.trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer

`SERVED` and `INSTEAD` are what `python -m chatgpt_compat run` and `check` go by; docs/coming_from/trl.md says what is
the same and what is not.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HERE = 'chatgpt_compat.trl'

_CORE = (
    *('LengthSampler', 'respond_to_batch', 'set_seed', 'logprobs_from_logits', 'entropy_from_logits', 'masked_mean'),
    *('masked_var', 'masked_whiten', 'whiten', 'clip_by_value', 'top_k_top_p_filtering', 'flatten_dict'),
    *('stack_dicts', 'convert_to_scalar', 'stats_to_np', 'PPODecorators', 'WANDB_PADDING'),
)
_MODELS = (
    *('AutoModelForCausalLMWithValueHead', 'AutoModelForSeq2SeqLMWithValueHead', 'PreTrainedModelWrapper'),
    'create_reference_model',
)

_LATER = {
    'config:PPOConfig': 'experimental.ppo.PPOConfig experimental.ppo.ppo_config.PPOConfig '
    'trainer.ppov2_config.PPOv2Config trainer.ppov2_trainer.PPOv2Config',
    'ppo_train:PPOTrainer': 'PPOv2Trainer experimental.ppo.PPOTrainer experimental.ppo.ppo_trainer.PPOTrainer '
    'trainer.ppov2_trainer.PPOv2Trainer',
    'dpo:DPOConfig': 'DPOConfig trainer.DPOConfig trainer.dpo_config.DPOConfig',
    'dpo:DPOTrainer': 'DPOTrainer trainer.DPOTrainer trainer.dpo_trainer.DPOTrainer',
    'sft:SFTConfig': 'SFTConfig trainer.SFTConfig trainer.sft_config.SFTConfig',
    'sft:SFTTrainer': 'SFTTrainer trainer.SFTTrainer trainer.sft_trainer.SFTTrainer',
    'reward:RewardConfig': 'RewardConfig trainer.RewardConfig trainer.reward_config.RewardConfig',
    'reward:RewardTrainer': 'RewardTrainer trainer.RewardTrainer trainer.reward_trainer.RewardTrainer',
    'scripts:ModelConfig': 'ModelConfig trainer.ModelConfig trainer.model_config.ModelConfig',
    'scripts:ScriptArguments': 'ScriptArguments utils.ScriptArguments scripts.ScriptArguments '
    'scripts.utils.ScriptArguments DPOScriptArguments SFTScriptArguments commands.cli_utils.DPOScriptArguments '
    'commands.cli_utils.SFTScriptArguments',
    'scripts:TrlParser': 'TrlParser scripts.TrlParser scripts.utils.TrlParser commands.cli_utils.TrlParser',
    'scripts:init_zero_verbose': 'init_zero_verbose scripts.init_zero_verbose commands.cli_utils.init_zero_verbose',
    'chat:setup_chat_format': 'setup_chat_format models.setup_chat_format models.utils.setup_chat_format',
    'chat:SIMPLE_CHAT_TEMPLATE': 'trainer.utils.SIMPLE_CHAT_TEMPLATE trainer.utils.SIMPLE_QUERY_CHAT_TEMPLATE',
    **{
        f'scripts:{name}': f'{name} trainer.{name} trainer.utils.{name}'
        for name in ('get_peft_config', 'get_quantization_config', 'get_kbit_device_map')
    },
    **{
        f'chat:{name}': f'{name} data_utils.{name}'
        for name in (
            *('apply_chat_template', 'maybe_apply_chat_template', 'extract_prompt', 'maybe_extract_prompt'),
            *('is_conversational', 'unpair_preference_dataset', 'maybe_unpair_preference_dataset'),
        )
    },
}
"""of 0.12 to 1.12: 'module:attribute' → the names under which scripts import it"""

SERVED: dict[str, str] = {
    'PPOConfig': f'{_HERE}.config:PPOConfig',
    'PPOv2Config': f'{_HERE}.config:PPOConfig',
    'trainer.PPOConfig': f'{_HERE}.config:PPOConfig',
    'trainer.ppo_config.PPOConfig': f'{_HERE}.config:PPOConfig',
    'PPOTrainer': f'{_HERE}.dispatch:PPOTrainer',
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
    **{name: f'{_HERE}.{target}' for target, names in _LATER.items() for name in names.split()},
}
"""name below `trl`: where it is, 'module:attribute'"""

_TURNS = (
    'chatgpt.trainer.PPOTrainer with environment= (docs/environments.md); or generate turn by turn, and give step the '
    "tools' output with response_masks of 0"
)
INSTEAD: dict[str, str] = {
    'GRPOTrainer': "chatgpt.trainer.PPOTrainer with advantage_estimator='grpo' (docs/algorithms/grpo.md), and "
    'environment= for environment_factory',
    'GRPOConfig': "chatgpt.trainer.PPOConfig with advantage_estimator='grpo' (docs/algorithms/grpo.md)",
    'RLOOTrainer': "chatgpt.trainer.PPOTrainer with advantage_estimator='rloo' (docs/algorithms/rloo.md)",
    'RLOOConfig': "chatgpt.trainer.PPOConfig with advantage_estimator='rloo' (docs/algorithms/rloo.md)",
    'RLOOv2Trainer': "chatgpt.trainer.PPOTrainer with advantage_estimator='rloo' (docs/algorithms/rloo.md)",
    'KTOTrainer': 'chatgpt.trainer.KTOTrainer, or python -m chatgpt kto',
    'KTOConfig': 'chatgpt.trainer.KTOConfig, or python -m chatgpt kto',
    'ORPOTrainer': 'chatgpt.trainer.ORPOTrainer, or python -m chatgpt orpo',
    'ORPOConfig': 'chatgpt.trainer.ORPOConfig, whose weight is their beta',
    'CPOTrainer': "chatgpt.trainer.SimPOTrainer, which is its loss_type='simpo' without the term on chosen answers",
    'CPOConfig': 'chatgpt.trainer.SimPOConfig: beta, and gamma for simpo_gamma',
    'OnlineDPOTrainer': 'chatgpt.trainer.PPOTrainer, which learns from a reward of its own samples as well',
    'OnlineDPOConfig': 'chatgpt.trainer.PPOConfig, of a PPOTrainer that learns from a reward of its own samples',
    'disable_dropout_in_model': "a dropout of 0 in the model's config, such as resid_pdrop; PPO and DPO have none",
    'DataCollatorForCompletionOnlyLM': 'rows of prompt and completion, of which SFTTrainer counts the completion alone',
    'DataCollatorForChatML': 'rows of messages and SFTConfig(assistant_only_loss=True)',
    'RichProgressCallback': 'nothing: a progress bar is shown already (disable_tqdm=True hides it)',
    'LogCompletionsCallback': 'chatgpt.trainer.callbacks.SampleTable, or generate_completions()',
    'SyncRefModelCallback': 'nothing here moves the reference during a run',
    'WinRateCallback': 'chatgpt.trainer.callbacks.Evaluator with a function that compares',
    'BEMACallback': 'chatgpt.trainer.callbacks.EMA',
    'clone_chat_template': "set the tokenizer's chat_template and resize the model's embeddings",
    'get_dataset': 'datasets.load_dataset',
    'DatasetMixtureConfig': 'datasets.concatenate_datasets',
    'pack_dataset': 'SFTConfig(packing=True)',
    'TextEnvironment': _TURNS,
    'environment.TextEnvironment': _TURNS,
    'TextHistory': _TURNS,
    'BestOfNSampler': 'chatgpt.rollout.BestOfN',
    'extras.BestOfNSampler': 'chatgpt.rollout.BestOfN',
    'extras': 'nothing of trl.extras is served; chatgpt.rollout.BestOfN is its BestOfNSampler',
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
        raise ImportError(
            f'trl.{name} is not served: {INSTEAD[name]}'
        )  # of an AttributeError `from` would hide the text
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


def __dir__() -> list[str]:
    return [*globals(), *(name for name in SERVED if '.' not in name)]
