"""Names of ColossalAI's `chatgpt` (2023, `applications/ChatGPT`) that this library does not have itself.

They are served under both layouts: `chatgpt.nn` (February 2023) and `chatgpt.models` (March 2023). Every other name of
`chatgpt` is the library's own.
"""

from __future__ import annotations

from chatgpt_compat.tables import at

_HERE, _CRITICS = 'chatgpt_compat.colossalai', 'chatgpt_compat.coati.models'
_FAMILIES = {'gpt': 'GPT', 'opt': 'OPT', 'bloom': 'BLOOM', 'llama': 'Llama'}

SERVED: dict[str, str] = {
    **at('nn models models.base nn.actor models.base.actor', f'{_HERE}.models', 'Actor'),
    **at('nn nn.critic models models.base models.base.critic', _CRITICS, 'Critic'),
    **at('nn models', _CRITICS, 'GPTCritic OPTCritic BLOOMCritic LlamaCritic'),
    **at('models models.base models.base.reward_model', 'chatgpt.nn', 'RewardModel'),
    **at('nn', f'{_HERE}.models', 'GPTActor OPTActor BLOOMActor LlamaActor'),
    **{
        key: target
        for family, name in _FAMILIES.items()
        for kind in ('Actor', 'Critic', 'RM')
        for key, target in at(
            f'models.{family} models.{family}.{family}_{kind.lower()} nn.{family}_{kind.lower()}',
            {'Actor': f'{_HERE}.models', 'Critic': _CRITICS}.get(kind, 'chatgpt.nn'),
            f'{name}{kind}',
        ).items()
    },
    **at('models.deberta models.deberta.deberta_critic', 'chatgpt.nn', 'DebertaCritic'),
    **at('models.deberta models.deberta.deberta_rm', 'chatgpt.nn', 'DebertaRM'),
    **{f'{place}.LM': f'{_HERE}.models:Actor' for place in ('models.base', 'models.base.lm')},
    **{
        f'models.{place}.{name}LM': f'{_HERE}.models:{name}Actor'
        for family, name in _FAMILIES.items()
        for place in (family, f'{family}.{family}_lm')
    },
    **at('nn nn.loss', f'{_HERE}.losses', 'PairWiseLoss'),
    **at(
        'nn models nn.loss models.loss',
        f'{_HERE}.losses',
        'PolicyLoss ValueLoss PPOPtxActorLoss GPTLMLoss LogSigLoss LogExpLoss',
    ),
    **at(
        'nn.utils models.utils',
        f'{_HERE}.losses',
        'compute_approx_kl compute_reward log_probs_from_logits masked_mean masked_normalize normalize',
    ),
    **at('nn.generation_utils models.generation_utils', f'{_HERE}.models', 'update_model_kwargs_fn'),
    **{
        f'{place}.generation_utils.{family}_prepare_inputs_fn': f'{_HERE}.models:prepare_inputs_fn'
        for place in ('nn', 'models')
        for family in ('gpt', 'opt', 'bloom')
    },
    **at('dataset dataset.reward_dataset', f'{_HERE}.data', 'RewardDataset RmStaticDataset HhRlhfDataset'),
    **at('dataset dataset.sft_dataset', f'{_HERE}.data', 'SFTDataset AlpacaDataset AlpacaDataCollator'),
    **at('dataset dataset.utils trainer.utils', f'{_HERE}.data', 'is_rank_0'),
    **at(
        'utils utils.tokenizer_utils',
        f'{_HERE}.models',
        'prepare_llama_tokenizer_and_embedding smart_tokenizer_and_embedding_resize',
    ),
    **at('trainer trainer.ppo', f'{_HERE}.trainers', 'PPOTrainer'),
    **at('trainer trainer.rm', f'{_HERE}.trainers', 'RewardModelTrainer'),
    **at('trainer trainer.sft', f'{_HERE}.trainers', 'SFTTrainer'),
    **at('trainer.callbacks trainer.callbacks.base', f'{_HERE}.trainers', 'Callback'),
    **at('trainer.callbacks trainer.callbacks.performance_evaluator', f'{_HERE}.trainers', 'PerformanceEvaluator'),
    **at('trainer.callbacks trainer.callbacks.save_checkpoint', f'{_HERE}.trainers', 'SaveCheckpoint'),
    **at('trainer.strategies.base', 'chatgpt.strategies', 'Strategy'),
    **at('trainer.strategies trainer.strategies.naive', f'{_HERE}.strategies', 'NaiveStrategy'),
    **at('trainer.strategies trainer.strategies.ddp', f'{_HERE}.strategies', 'DDPStrategy'),
    **at('trainer.strategies trainer.strategies.colossalai', f'{_HERE}.strategies', 'ColossalAIStrategy'),
}
"""a name under `chatgpt` → 'module:attribute'"""

INSTEAD: dict[str, str] = {
    'experience_maker': 'chatgpt.trainer.experience.ExperienceMaker, whose records are chatgpt.types.Experience: '
    'one sequence each, without padding (docs/design.md)',
    'replay_buffer': 'chatgpt.trainer.selection.ReplayBuffer: it holds records, not padded batches; '
    'chatgpt.batching.collate makes a batch of them',
    'models.lora': 'lora_rank= of any actor, critic or reward model; chatgpt.nn.lora for more',
    'nn.lora': 'lora_rank= of any actor, critic or reward model; chatgpt.nn.lora.convert_to_lora for more',
    'nn.utils.convert_to_lora': 'chatgpt.nn.lora.convert_to_lora',
    'models.utils.convert_to_lora': 'chatgpt.nn.lora.convert_to_lora',
    'models.generation': 'chatgpt.rollout.LocalEngine, or actor.generate',
    'nn.generation': 'chatgpt.rollout.LocalEngine, or actor.generate',
    'trainer.strategies.sampler': 'nothing: a trainer splits its batches over the ranks by itself',
    'trainer.base': 'chatgpt.trainer.Trainer (docs/extend/algorithm.md)',
}
"""a name or module that is not served -> what to write instead"""
