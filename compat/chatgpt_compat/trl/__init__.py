"""TRL's names on this library: `PPOTrainer` of both eras, models with a value head, `core` and more.

    from chatgpt_compat.trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer

`python -m chatgpt_compat run` and `check` read `SERVED` and `INSTEAD`; docs/coming_from/trl.md lists what differs.
"""

from __future__ import annotations

from chatgpt_compat.tables import as_modules, at, lookup

_HERE = 'chatgpt_compat.trl'
_MODELS = (
    'AutoModelForCausalLMWithValueHead AutoModelForSeq2SeqLMWithValueHead PreTrainedModelWrapper create_reference_model'
)

__version__ = '0.11.4'
"""the last version with names of both eras"""

SERVED: dict[str, str] = {
    # of every version
    '__version__': f'{_HERE}:__version__',
    **at('. trainer trainer.ppo_config', f'{_HERE}.config', 'PPOConfig'),
    **at('. trainer trainer.ppo_trainer', f'{_HERE}.config', 'PPOTrainer'),
    **at('. models', f'{_HERE}.models', _MODELS),
    **at(
        'models.modeling_value_head',
        f'{_HERE}.models',
        'AutoModelForCausalLMWithValueHead AutoModelForSeq2SeqLMWithValueHead ValueHead',
    ),
    **at('models.modeling_base', f'{_HERE}.models', 'create_reference_model PreTrainedModelWrapper'),
    **at('trainer.ppo_trainer', f'{_HERE}.core', 'PPODecorators logprobs_from_logits'),
    **at('.', f'{_HERE}.core', 'set_seed'),
    **at(
        'core',
        f'{_HERE}.core',
        'LengthSampler respond_to_batch set_seed logprobs_from_logits entropy_from_logits masked_mean masked_var '
        'masked_whiten whiten clip_by_value top_k_top_p_filtering flatten_dict stack_dicts convert_to_scalar '
        'stats_to_np PPODecorators WANDB_PADDING',
    ),
    'import_utils.is_npu_available': 'transformers.utils:is_torch_npu_available',
    'import_utils.is_xpu_available': 'transformers.utils:is_torch_xpu_available',
    'import_utils.is_peft_available': 'transformers.utils:is_peft_available',
    **at('. environment environment.base_environment', f'{_HERE}.environment', 'TextEnvironment TextHistory'),
    **at('environment environment.base_environment', f'{_HERE}.environment', 'StringStoppingCriteria'),
    **dict.fromkeys(
        ('is_npu_available', 'trainer.utils.is_npu_available'), 'transformers.utils:is_torch_npu_available'
    ),
    **dict.fromkeys(
        ('is_xpu_available', 'trainer.utils.is_xpu_available'), 'transformers.utils:is_torch_xpu_available'
    ),
    'is_peft_available': 'transformers.utils:is_peft_available',
    **at(
        'trainer.ppo_trainer experimental.ppo.ppo_trainer trainer.ppov2_trainer',
        f'{_HERE}.ppo_train',
        'PolicyAndValueWrapper',
    ),
    # of 0.12 to 1.12
    **at('experimental.ppo experimental.ppo.ppo_config', f'{_HERE}.config', 'PPOConfig'),
    **dict.fromkeys(
        ('PPOv2Config', 'trainer.ppov2_config.PPOv2Config', 'trainer.ppov2_trainer.PPOv2Config'),
        f'{_HERE}.config:PPOConfig',
    ),
    **at('experimental.ppo experimental.ppo.ppo_trainer', f'{_HERE}.ppo_train', 'PPOTrainer'),
    **dict.fromkeys(('PPOv2Trainer', 'trainer.ppov2_trainer.PPOv2Trainer'), f'{_HERE}.ppo_train:PPOTrainer'),
    **at('. trainer trainer.rloo_config trainer.rloo_trainer', f'{_HERE}.rloo', 'RLOOConfig'),
    **at('. trainer trainer.rloo_trainer', f'{_HERE}.rloo', 'RLOOTrainer'),
    **at('. trainer trainer.dpo_config', f'{_HERE}.pairs', 'DPOConfig'),
    **at('. trainer trainer.dpo_trainer', f'{_HERE}.pairs', 'DPOTrainer'),
    **at('. trainer trainer.reward_config', f'{_HERE}.pairs', 'RewardConfig'),
    **at('. trainer trainer.reward_trainer', f'{_HERE}.pairs', 'RewardTrainer'),
    **at('. trainer trainer.sft_config', f'{_HERE}.sft', 'SFTConfig'),
    **at('. trainer trainer.sft_trainer', f'{_HERE}.sft', 'SFTTrainer'),
    **at('. trainer trainer.model_config', f'{_HERE}.scripts', 'ModelConfig'),
    **at('. utils scripts scripts.utils', f'{_HERE}.scripts', 'ScriptArguments DatasetMixtureConfig get_dataset'),
    **{
        f'{place}{name}': f'{_HERE}.scripts:{target}'
        for place in ('', 'commands.cli_utils.')
        for name, target in {
            'DPOScriptArguments': 'DPOScriptArguments',
            'DpoScriptArguments': 'DPOScriptArguments',
            'SFTScriptArguments': 'SFTScriptArguments',
            'SftScriptArguments': 'SFTScriptArguments',
            'RewardScriptArguments': 'ScriptArguments',
        }.items()
    },
    **at('. scripts scripts.utils commands.cli_utils', f'{_HERE}.scripts', 'TrlParser'),
    **at('. scripts commands.cli_utils', f'{_HERE}.scripts', 'init_zero_verbose'),
    **at('. trainer trainer.callbacks trainer.utils', f'{_HERE}.scripts', 'RichProgressCallback'),
    **at('. trainer trainer.utils', f'{_HERE}.scripts', 'get_peft_config get_quantization_config get_kbit_device_map'),
    **at('. models models.utils', f'{_HERE}.scripts', 'setup_chat_format'),
    **dict.fromkeys(
        ('trainer.utils.SIMPLE_CHAT_TEMPLATE', 'trainer.utils.SIMPLE_QUERY_CHAT_TEMPLATE'),
        f'{_HERE}.scripts:SIMPLE_CHAT_TEMPLATE',
    ),
    **at(
        '. data_utils',
        f'{_HERE}.scripts',
        'apply_chat_template maybe_apply_chat_template extract_prompt maybe_extract_prompt is_conversational '
        'unpair_preference_dataset maybe_unpair_preference_dataset',
    ),
}
"""name below `trl` → 'module:attribute'"""

_GRPO = "advantage_estimator='grpo' (docs/algorithms/grpo.md)"
INSTEAD: dict[str, str] = {
    'GRPOTrainer': f'chatgpt.trainer.PPOTrainer with {_GRPO}, and environment= for environment_factory',
    'GRPOConfig': f'chatgpt.trainer.PPOConfig with {_GRPO}, and off_policy= for vllm_importance_sampling_mode',
    'RLOOv2Trainer': 'RLOOTrainer',
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
    'LogCompletionsCallback': 'chatgpt.trainer.callbacks.SampleTable, or generate_completions()',
    'SyncRefModelCallback': 'nothing here moves the reference during a run',
    'WinRateCallback': 'chatgpt.trainer.callbacks.Evaluator with a function that compares',
    'BEMACallback': 'chatgpt.trainer.callbacks.EMA',
    'clone_chat_template': "set the tokenizer's chat_template and resize the model's embeddings",
    'pack_dataset': 'SFTConfig(packing=True)',
    **dict.fromkeys(('BestOfNSampler', 'extras.BestOfNSampler'), 'chatgpt.rollout.BestOfN'),
    'extras': 'nothing of trl.extras is served; chatgpt.rollout.BestOfN is its BestOfNSampler',
    'IterativeSFTTrainer': 'chatgpt.trainer.RFTTrainer: sample, keep the best, SFT on them',
    **dict.fromkeys(('DDPOTrainer', 'AlignPropTrainer'), 'nothing: diffusion models are not trained here'),
    'GPT2HeadWithValueModel': 'AutoModelForCausalLMWithValueHead, its name from 0.2 on',
}
"""name below `trl` that is not served: what to write instead"""

__getattr__ = lookup('trl', SERVED, INSTEAD)
as_modules('trl', SERVED, INSTEAD)


def __dir__() -> list[str]:
    return [*globals(), *(name for name in SERVED if '.' not in name)]
