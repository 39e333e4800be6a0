"""TRL's names on this library: `PPOTrainer` of both of its eras, models with a value head, `core`.

    from chatgpt.compat.trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer

`SERVED` and `INSTEAD` are what `python -m chatgpt.compat run` and `check` go by; docs/coming_from/trl.md says what is
the same and what is not.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HERE = 'chatgpt.compat.trl'

SERVED: dict[str, str] = {
    'PPOConfig': f'{_HERE}.config:PPOConfig',
    'PPOv2Config': f'{_HERE}.config:PPOConfig',
    'trainer.PPOConfig': f'{_HERE}.config:PPOConfig',
    'trainer.ppo_config.PPOConfig': f'{_HERE}.config:PPOConfig',
    'DPOConfig': f'{_HERE}.dpo:DPOConfig',
    'trainer.DPOConfig': f'{_HERE}.dpo:DPOConfig',
    'trainer.dpo_config.DPOConfig': f'{_HERE}.dpo:DPOConfig',
    'DPOTrainer': f'{_HERE}.dpo:DPOTrainer',
    'trainer.DPOTrainer': f'{_HERE}.dpo:DPOTrainer',
    'trainer.dpo_trainer.DPOTrainer': f'{_HERE}.dpo:DPOTrainer',
    'SFTConfig': f'{_HERE}.sft:SFTConfig',
    'trainer.SFTConfig': f'{_HERE}.sft:SFTConfig',
    'trainer.sft_config.SFTConfig': f'{_HERE}.sft:SFTConfig',
    'SFTTrainer': f'{_HERE}.sft:SFTTrainer',
    'trainer.SFTTrainer': f'{_HERE}.sft:SFTTrainer',
    'trainer.sft_trainer.SFTTrainer': f'{_HERE}.sft:SFTTrainer',
    'RewardConfig': f'{_HERE}.reward:RewardConfig',
    'trainer.RewardConfig': f'{_HERE}.reward:RewardConfig',
    'trainer.reward_config.RewardConfig': f'{_HERE}.reward:RewardConfig',
    'RewardTrainer': f'{_HERE}.reward:RewardTrainer',
    'trainer.RewardTrainer': f'{_HERE}.reward:RewardTrainer',
    'trainer.reward_trainer.RewardTrainer': f'{_HERE}.reward:RewardTrainer',
    'experimental.ppo.PPOConfig': f'{_HERE}.config:PPOConfig',
    'experimental.ppo.ppo_config.PPOConfig': f'{_HERE}.config:PPOConfig',
    'trainer.ppov2_config.PPOv2Config': f'{_HERE}.config:PPOConfig',
    'trainer.ppov2_trainer.PPOv2Config': f'{_HERE}.config:PPOConfig',
    'PPOv2Trainer': f'{_HERE}.ppo_train:PPOTrainer',
    'experimental.ppo.PPOTrainer': f'{_HERE}.ppo_train:PPOTrainer',
    'experimental.ppo.ppo_trainer.PPOTrainer': f'{_HERE}.ppo_train:PPOTrainer',
    'trainer.ppov2_trainer.PPOv2Trainer': f'{_HERE}.ppo_train:PPOTrainer',
    'ModelConfig': f'{_HERE}.scripts:ModelConfig',
    'trainer.ModelConfig': f'{_HERE}.scripts:ModelConfig',
    'trainer.model_config.ModelConfig': f'{_HERE}.scripts:ModelConfig',
    'ScriptArguments': f'{_HERE}.scripts:ScriptArguments',
    'utils.ScriptArguments': f'{_HERE}.scripts:ScriptArguments',
    'scripts.ScriptArguments': f'{_HERE}.scripts:ScriptArguments',
    'scripts.utils.ScriptArguments': f'{_HERE}.scripts:ScriptArguments',
    'commands.cli_utils.DPOScriptArguments': f'{_HERE}.scripts:ScriptArguments',
    'commands.cli_utils.SFTScriptArguments': f'{_HERE}.scripts:ScriptArguments',
    'DPOScriptArguments': f'{_HERE}.scripts:ScriptArguments',
    'SFTScriptArguments': f'{_HERE}.scripts:ScriptArguments',
    'TrlParser': f'{_HERE}.scripts:TrlParser',
    'scripts.TrlParser': f'{_HERE}.scripts:TrlParser',
    'scripts.utils.TrlParser': f'{_HERE}.scripts:TrlParser',
    'commands.cli_utils.TrlParser': f'{_HERE}.scripts:TrlParser',
    'get_peft_config': f'{_HERE}.scripts:get_peft_config',
    'trainer.get_peft_config': f'{_HERE}.scripts:get_peft_config',
    'trainer.utils.get_peft_config': f'{_HERE}.scripts:get_peft_config',
    'get_quantization_config': f'{_HERE}.scripts:get_quantization_config',
    'trainer.get_quantization_config': f'{_HERE}.scripts:get_quantization_config',
    'trainer.utils.get_quantization_config': f'{_HERE}.scripts:get_quantization_config',
    'get_kbit_device_map': f'{_HERE}.scripts:get_kbit_device_map',
    'trainer.get_kbit_device_map': f'{_HERE}.scripts:get_kbit_device_map',
    'trainer.utils.get_kbit_device_map': f'{_HERE}.scripts:get_kbit_device_map',
    'init_zero_verbose': f'{_HERE}.scripts:init_zero_verbose',
    'commands.cli_utils.init_zero_verbose': f'{_HERE}.scripts:init_zero_verbose',
    'scripts.init_zero_verbose': f'{_HERE}.scripts:init_zero_verbose',
    'setup_chat_format': f'{_HERE}.chat:setup_chat_format',
    'models.setup_chat_format': f'{_HERE}.chat:setup_chat_format',
    'apply_chat_template': f'{_HERE}.chat:apply_chat_template',
    'data_utils.apply_chat_template': f'{_HERE}.chat:apply_chat_template',
    'maybe_apply_chat_template': f'{_HERE}.chat:maybe_apply_chat_template',
    'data_utils.maybe_apply_chat_template': f'{_HERE}.chat:maybe_apply_chat_template',
    'extract_prompt': f'{_HERE}.chat:extract_prompt',
    'data_utils.extract_prompt': f'{_HERE}.chat:extract_prompt',
    'maybe_extract_prompt': f'{_HERE}.chat:maybe_extract_prompt',
    'data_utils.maybe_extract_prompt': f'{_HERE}.chat:maybe_extract_prompt',
    'is_conversational': f'{_HERE}.chat:is_conversational',
    'data_utils.is_conversational': f'{_HERE}.chat:is_conversational',
    'unpair_preference_dataset': f'{_HERE}.chat:unpair_preference_dataset',
    'data_utils.unpair_preference_dataset': f'{_HERE}.chat:unpair_preference_dataset',
    'maybe_unpair_preference_dataset': f'{_HERE}.chat:maybe_unpair_preference_dataset',
    'data_utils.maybe_unpair_preference_dataset': f'{_HERE}.chat:maybe_unpair_preference_dataset',
    'trainer.utils.SIMPLE_CHAT_TEMPLATE': f'{_HERE}.chat:SIMPLE_CHAT_TEMPLATE',
    'trainer.utils.SIMPLE_QUERY_CHAT_TEMPLATE': f'{_HERE}.chat:SIMPLE_CHAT_TEMPLATE',
}
"""name below `trl`: where it is, 'module:attribute'"""

INSTEAD: dict[str, str] = {
    'GRPOTrainer': "chatgpt.trainer.PPOTrainer with advantage_estimator='grpo' (docs/algorithms/grpo.md)",
    'GRPOConfig': "chatgpt.trainer.PPOConfig with advantage_estimator='grpo' (docs/algorithms/grpo.md)",
    'RLOOTrainer': "chatgpt.trainer.PPOTrainer with advantage_estimator='rloo' (docs/algorithms/rloo.md)",
    'RLOOConfig': "chatgpt.trainer.PPOConfig with advantage_estimator='rloo' (docs/algorithms/rloo.md)",
    'RLOOv2Trainer': "chatgpt.trainer.PPOTrainer with advantage_estimator='rloo' (docs/algorithms/rloo.md)",
    'KTOTrainer': 'chatgpt.trainer.KTOTrainer, or examples/train_preference.py --method kto',
    'KTOConfig': 'chatgpt.trainer.KTOConfig, or examples/train_preference.py --method kto',
    'ORPOTrainer': 'chatgpt.trainer.ORPOTrainer, or examples/train_preference.py --method orpo',
    'ORPOConfig': 'chatgpt.trainer.ORPOConfig, whose weight is their beta',
    'CPOTrainer': "chatgpt.trainer.SimPOTrainer, which is its loss_type='simpo' without the term on chosen answers",
    'CPOConfig': 'chatgpt.trainer.SimPOConfig: beta, and gamma for simpo_gamma',
    'OnlineDPOTrainer': 'chatgpt.trainer.PPOTrainer, which learns from a reward of its own samples as well',
    'IterativeSFTTrainer': 'chatgpt.trainer.RFTTrainer, which learns from the best of its own samples',
    'DataCollatorForCompletionOnlyLM': 'rows of prompt and completion, of which SFTTrainer counts the completion alone',
    'DataCollatorForChatML': 'rows of messages and SFTConfig(assistant_only_loss=True)',
    'BestOfNSampler': 'chatgpt.rollout.best_of_n',
    'RichProgressCallback': 'nothing: a progress bar is shown already (disable_tqdm=True hides it)',
    'LogCompletionsCallback': 'chatgpt.trainer.callbacks.SampleTable, or generate_completions()',
    'SyncRefModelCallback': 'nothing here moves the reference during a run',
    'WinRateCallback': 'chatgpt.trainer.callbacks.Evaluator with a function that compares',
    'BEMACallback': 'chatgpt.trainer.callbacks.EMA',
    'clone_chat_template': "set the tokenizer's chat_template and resize the model's embeddings",
    'get_dataset': 'datasets.load_dataset',
    'DatasetMixtureConfig': 'datasets.concatenate_datasets',
    'pack_dataset': 'SFTConfig(packing=True)',
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
