"""trlX's names on this library: `trlx.train` and its config objects.

`SERVED` has the place of each name, `INSTEAD` what to write for names that are not served;
docs/coming_from/trlx/names.md lists both.
"""

from __future__ import annotations

from chatgpt_compat.tables import as_modules, at, lookup

_HERE = 'chatgpt_compat.trlx'
_LOGGING = 'get_logger set_verbosity get_verbosity enable_progress_bar disable_progress_bar'

SERVED: dict[str, str] = {
    **at(
        'data.configs data.default_configs',
        f'{_HERE}.config',
        'TRLConfig ModelConfig TokenizerConfig OptimizerConfig SchedulerConfig TrainConfig',
    ),
    **at('data.default_configs data.method_configs', f'{_HERE}.config', 'PPOConfig ILQLConfig SFTConfig'),
    **at(
        'data.default_configs',
        f'{_HERE}.config',
        'default_ppo_config default_ilql_config default_sft_config default_nemo_20b_config default_nemo_2b_config '
        'default_nemo_1_3b_config',
    ),
    **at('data.method_configs', f'{_HERE}.config', 'MethodConfig register_method get_method'),
    **at('models.modeling_ppo trainer.nn.ppo_models model.nn.ppo_models', f'{_HERE}.config', 'PPOConfig'),
    **at('models.modeling_ilql trainer.nn.ilql_models model.nn.ilql_models', f'{_HERE}.config', 'ILQLConfig'),
    **at('trainer.accelerate_sft_trainer', f'{_HERE}.config', 'SFTConfig'),
    **at('trainer.accelerate_rft_trainer', f'{_HERE}.config', 'RFTConfig'),
    **at('. trlx', f'{_HERE}.entry', 'train'),
    **at('utils', f'{_HERE}.entry', 'set_seed print_rank_0'),
    **at('trainer trainer.accelerate_base_trainer', f'{_HERE}.trainers', 'AccelerateRLTrainer'),
    **at('trainer', f'{_HERE}.trainers', 'register_trainer'),
    **at('trainer.accelerate_ppo_trainer', f'{_HERE}.trainers', 'AcceleratePPOTrainer'),
    **at('trainer.accelerate_ilql_trainer', f'{_HERE}.trainers', 'AccelerateILQLTrainer'),
    **at('trainer.accelerate_sft_trainer', f'{_HERE}.trainers', 'AccelerateSFTTrainer'),
    **at('trainer.accelerate_rft_trainer', f'{_HERE}.rft', 'AccelerateRFTTrainer'),
    **at('pipeline', f'{_HERE}.pipeline', 'BasePipeline register_datapipeline'),
    **at('pipeline.offline_pipeline', f'{_HERE}.pipeline', 'PromptPipeline tokenize_dialogue'),
    **at('data.accelerate_base_datatypes', f'{_HERE}.pipeline', 'PromptElement PromptBatch'),
    **at('utils.loading', f'{_HERE}.pipeline', 'get_pipeline'),
    **at('logging utils.logging', 'logging', 'CRITICAL ERROR WARNING INFO DEBUG'),
    **at('logging utils.logging', 'transformers.utils.logging', _LOGGING),
}
"""name under `trlx` → 'module:attribute'"""

_SAVED = 'transformers.AutoModelForCausalLM.from_pretrained(checkpoint_dir/.../hf_model), or trainer.model of a run'
_FIRST = 'trlx.train(prompts=..., reward_fn=..., config=...), which does without orchestrators'
_OWN_METHOD = 'a subclass of trlx.trainer.AccelerateRLTrainer, or an Objective (docs/extend/objective.md)'
INSTEAD: dict[str, str] = {
    **dict.fromkeys(
        ('sweep', 'ray_tune'), 'python -m chatgpt sweep SWEEP.yaml: search spaces on Optuna, without a Ray cluster'
    ),
    'reference': 'make fixed-runs (CONTRIBUTING.md): metrics and weights of two commits, compared to the bit',
    'models.modeling_ppo.AutoModelForCausalLMWithHydraValueHead': _SAVED,
    'models.modeling_ppo.AutoModelForCausalLMWithValueHead': 'chatgpt.nn.AutoActor(pretrained=..., value_head=True)',
    'models.modeling_ppo.AutoModelForSeq2SeqLMWithHydraValueHead': 'chatgpt.nn.AutoActor(pretrained=..., '
    'value_head=True)',
    'models.modeling_ppo.AdaptiveKLController': 'chatgpt.functional.ppo.AdaptiveKLController',
    'models.modeling_ppo.FixedKLController': 'chatgpt.functional.ppo.FixedKLController',
    **{
        f'models.modeling_ilql.AutoModelFor{kind}LMWithILQLHeads': 'chatgpt.nn.ILQLModel.from_pretrained(FOLDER)'
        for kind in ('Causal', 'Seq2Seq')
    },
    'models.modeling_base.PreTrainedModelWrapper': 'chatgpt.nn.Actor(model), which takes any transformers causal LM',
    'models': 'chatgpt.nn: Actor, Critic, ILQLModel',
    'models.modeling_nemo_ppo': 'strategies fsdp and colossalai_gemini (docs/strategies.md): NeMo is not served',
    'models.modeling_nemo_ilql': 'strategies fsdp and ddp (docs/strategies.md): NeMo is not served',
    'models.modeling_nemo_sft': 'strategies fsdp and colossalai_gemini (docs/strategies.md): NeMo is not served',
    'trainer.nemo_ppo_trainer': 'AcceleratePPOTrainer under torchrun; NeMo is not served',
    'trainer.nemo_ilql_trainer': 'AccelerateILQLTrainer under torchrun; NeMo is not served',
    'trainer.nemo_sft_trainer': 'AccelerateSFTTrainer under torchrun; NeMo is not served',
    **dict.fromkeys(('orchestrator', 'model', 'utils.loading.get_orchestrator', 'utils.loading.get_model'), _FIRST),
    'utils.loading.get_trainer': 'trlx.train(config=...), which takes the trainer that config.train.trainer names',
    'pipeline.ppo_pipeline.PPOPipeline': 'trlx.pipeline.offline_pipeline.PromptPipeline',
    'pipeline.offline_pipeline.OfflinePipeline': 'trlx.train(samples=..., rewards=...)',
    'trainer.BaseRLTrainer': _OWN_METHOD,
    'model.BaseRLModel': _OWN_METHOD,
    'pipeline.ppo_pipeline.PPORolloutStorage': 'trainer.store, the experience of the latest phase',
    'pipeline.offline_pipeline.ILQLRolloutStorage': 'trainer.make_experience(samples, rewards)',
    'pipeline.offline_pipeline.DialogStore': 'trainer.make_experience(samples)',
    'pipeline.BaseRolloutStore': 'trainer.store, the experience of the latest phase',
    'data.ppo_types': 'chatgpt.types.Experience, one record per rollout, unpadded',
    'data.ilql_types': 'chatgpt.trainer.rewarded: records of tokens with rewards',
    'utils.modeling': 'chatgpt.functional: whiten, log-probs, losses, as functions of flat tensors',
}
"""name under `trlx` that is not served → what to write instead"""

__getattr__ = lookup('trlx', SERVED, INSTEAD)
as_modules('trlx', SERVED, INSTEAD)
