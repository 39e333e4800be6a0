"""trlX's programs on this library: `trlx.train` and its config objects.

`SERVED` says where each name lives, `INSTEAD` what to write for those that are not served; docs/coming_from/trlx.md has
the same, name by name.
"""

from __future__ import annotations

import importlib
from typing import Any

_HERE = 'chatgpt_compat.trlx'
_CONFIGS = ('TRLConfig', 'ModelConfig', 'TokenizerConfig', 'OptimizerConfig', 'SchedulerConfig', 'TrainConfig')
_METHODS = ('PPOConfig', 'ILQLConfig', 'SFTConfig')
_DEFAULTS = (
    'default_ppo_config',
    'default_ilql_config',
    'default_sft_config',
    'default_nemo_20b_config',
    'default_nemo_2b_config',
    'default_nemo_1_3b_config',
)
_PIPELINES = ('BasePipeline', 'register_datapipeline')
_PLACES: dict[str, dict[str, tuple[str, ...]]] = {
    'config': {
        'data.configs': _CONFIGS,
        'data.default_configs': (*_CONFIGS, *_METHODS, *_DEFAULTS),
        'data.method_configs': ('MethodConfig', 'register_method', 'get_method', *_METHODS),
        'models.modeling_ppo': ('PPOConfig',),
        'models.modeling_ilql': ('ILQLConfig',),
        'trainer.accelerate_sft_trainer': ('SFTConfig',),
        'trainer.accelerate_rft_trainer': ('RFTConfig',),
        'trainer.nn.ppo_models': ('PPOConfig',),
        'trainer.nn.ilql_models': ('ILQLConfig',),
        'model.nn.ppo_models': ('PPOConfig',),
        'model.nn.ilql_models': ('ILQLConfig',),
    },
    'entry': {'': ('train',), 'trlx': ('train',)},
    'trainers': {
        'trainer': ('AccelerateRLTrainer', 'register_trainer'),
        'trainer.accelerate_base_trainer': ('AccelerateRLTrainer',),
        'trainer.accelerate_ppo_trainer': ('AcceleratePPOTrainer',),
        'trainer.accelerate_ilql_trainer': ('AccelerateILQLTrainer',),
        'trainer.accelerate_sft_trainer': ('AccelerateSFTTrainer',),
        'trainer.accelerate_rft_trainer': ('AccelerateRFTTrainer',),
    },
    'pipeline': {
        'pipeline': _PIPELINES,
        'pipeline.offline_pipeline': ('PromptPipeline', 'tokenize_dialogue'),
        'data.accelerate_base_datatypes': ('PromptElement', 'PromptBatch'),
        'utils.loading': ('get_pipeline',),
    },
    'utils': {
        'utils': ('set_seed', 'print_rank_0'),
        'logging': ('get_logger', 'set_verbosity', 'get_verbosity', 'enable_progress_bar', 'disable_progress_bar'),
        'utils.logging': (
            'get_logger',
            'set_verbosity',
            'get_verbosity',
            'enable_progress_bar',
            'disable_progress_bar',
        ),
    },
}
"""our module → place under `trlx` → names"""
_LEVELS = ('CRITICAL', 'ERROR', 'WARNING', 'INFO', 'DEBUG')

SERVED: dict[str, str] = {
    f'{place}.{name}'.lstrip('.'): f'{_HERE}.{module}:{name}'
    for module, places in _PLACES.items()
    for place, names in places.items()
    for name in names
} | {f'{place}.{level}': f'logging:{level}' for place in ('logging', 'utils.logging') for level in _LEVELS}
"""name under `trlx` → our module and attribute"""

_SAVED = 'transformers.AutoModelForCausalLM.from_pretrained(checkpoint_dir/.../hf_model), or trainer.model of a run'
_FIRST = 'trlx.train(prompts=..., reward_fn=..., config=...), which does without orchestrators'
_OWN_METHOD = 'a subclass of trlx.trainer.AccelerateRLTrainer, or an Objective (docs/extend/objective.md)'
INSTEAD: dict[str, str] = {
    'sweep': 'python -m chatgpt sweep SWEEP.yaml: search spaces on Optuna, without a Ray cluster',
    'ray_tune': 'python -m chatgpt sweep SWEEP.yaml: search spaces on Optuna, without a Ray cluster',
    'reference': 'make fixed-runs (CONTRIBUTING.md): metrics and weights of two commits, compared to the bit',
    'models.modeling_ppo.AutoModelForCausalLMWithHydraValueHead': _SAVED,
    'models.modeling_ppo.AutoModelForCausalLMWithValueHead': 'chatgpt_compat.trl.AutoModelForCausalLMWithValueHead, or '
    'chatgpt.nn.AutoActor(pretrained=..., value_head=True)',
    'models.modeling_ppo.AutoModelForSeq2SeqLMWithHydraValueHead': 'chatgpt_compat.trl.AutoModelForSeq2SeqLMWithValue'
    'Head, or chatgpt.nn.AutoActor(pretrained=..., value_head=True)',
    'models.modeling_ppo.AdaptiveKLController': 'chatgpt.functional.ppo.AdaptiveKLController',
    'models.modeling_ppo.FixedKLController': 'chatgpt.functional.ppo.FixedKLController',
    'models.modeling_ilql.AutoModelForCausalLMWithILQLHeads': 'chatgpt.nn.ILQLModel.from_pretrained(FOLDER)',
    'models.modeling_ilql.AutoModelForSeq2SeqLMWithILQLHeads': 'chatgpt.nn.ILQLModel.from_pretrained(FOLDER)',
    'models.modeling_base.PreTrainedModelWrapper': 'chatgpt.nn.Actor(model), which takes any transformers causal LM',
    'models': 'chatgpt.nn: Actor, Critic, ILQLModel',
    'models.modeling_nemo_ppo': 'strategies fsdp and colossalai_gemini (docs/strategies.md): NeMo is not served',
    'models.modeling_nemo_ilql': 'strategies fsdp and ddp (docs/strategies.md): NeMo is not served',
    'models.modeling_nemo_sft': 'strategies fsdp and colossalai_gemini (docs/strategies.md): NeMo is not served',
    'trainer.nemo_ppo_trainer': 'AcceleratePPOTrainer under torchrun; NeMo is not served',
    'trainer.nemo_ilql_trainer': 'AccelerateILQLTrainer under torchrun; NeMo is not served',
    'trainer.nemo_sft_trainer': 'AccelerateSFTTrainer under torchrun; NeMo is not served',
    'orchestrator': _FIRST,
    'model': _FIRST,
    'utils.loading.get_orchestrator': _FIRST,
    'utils.loading.get_model': _FIRST,
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
"""name under `trlx` that is not served → what to write"""


def __getattr__(name: str) -> Any:
    if name in SERVED:
        module, _, attribute = SERVED[name].partition(':')
        return getattr(importlib.import_module(module), attribute)
    if name in INSTEAD:
        raise ImportError(
            f'trlx.{name} is not served; instead: {INSTEAD[name]}'
        )  # of an AttributeError `from` would hide the text
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
