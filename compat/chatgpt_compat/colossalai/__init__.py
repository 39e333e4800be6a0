"""ColossalAI's `chatgpt` (2023, `applications/ChatGPT`): what its scripts import that is not the library's own name.

Under both layouts that it had: `chatgpt.nn` (February 2023) and `chatgpt.models` (March 2023). Every other name of
`chatgpt` is the library's own, as it is.
"""

from __future__ import annotations

_HERE = 'chatgpt_compat.colossalai'


def _at(places: tuple[str, ...], module: str, names: str) -> dict[str, str]:
    """Names of a module of ours, at each of the places where the two layouts had them."""
    return {f'{place}.{name}': f'{module}:{name}' for place in places for name in names.split()}


SERVED: dict[str, str] = {
    **_at(('nn', 'models', 'models.base', 'nn.actor', 'models.base.actor'), f'{_HERE}.models', 'Actor'),
    **_at(('models', 'models.base', 'models.base.critic'), 'chatgpt.nn', 'Critic'),
    **_at(('models', 'models.base', 'models.base.reward_model'), 'chatgpt.nn', 'RewardModel'),
    **_at(('nn',), f'{_HERE}.models', 'GPTActor OPTActor BLOOMActor LlamaActor'),
    **_at(('models.gpt', 'models.gpt.gpt_actor', 'nn.gpt_actor'), f'{_HERE}.models', 'GPTActor'),
    **_at(('models.opt', 'models.opt.opt_actor', 'nn.opt_actor'), f'{_HERE}.models', 'OPTActor'),
    **_at(('models.bloom', 'models.bloom.bloom_actor', 'nn.bloom_actor'), f'{_HERE}.models', 'BLOOMActor'),
    **_at(('models.llama', 'models.llama.llama_actor'), f'{_HERE}.models', 'LlamaActor'),
    **_at(('models.gpt',), 'chatgpt.nn', 'GPTCritic GPTRM'),
    **_at(('models.opt',), 'chatgpt.nn', 'OPTCritic OPTRM'),
    **_at(('models.bloom',), 'chatgpt.nn', 'BLOOMCritic BLOOMRM'),
    **_at(('models.llama',), 'chatgpt.nn', 'LlamaCritic LlamaRM'),
    **_at(('models.deberta',), 'chatgpt.nn', 'DebertaCritic DebertaRM'),
    **_at(('nn.gpt_critic', 'models.gpt.gpt_critic'), 'chatgpt.nn', 'GPTCritic'),
    **_at(('nn.opt_critic', 'models.opt.opt_critic'), 'chatgpt.nn', 'OPTCritic'),
    **_at(('nn.bloom_critic', 'models.bloom.bloom_critic'), 'chatgpt.nn', 'BLOOMCritic'),
    **_at(('nn.gpt_rm', 'models.gpt.gpt_rm'), 'chatgpt.nn', 'GPTRM'),
    **_at(('nn.opt_rm', 'models.opt.opt_rm'), 'chatgpt.nn', 'OPTRM'),
    **_at(('nn.bloom_rm', 'models.bloom.bloom_rm'), 'chatgpt.nn', 'BLOOMRM'),
    'models.base.LM': f'{_HERE}.models:Actor',
    'models.gpt.GPTLM': f'{_HERE}.models:GPTActor',
    'models.opt.OPTLM': f'{_HERE}.models:OPTActor',
    'models.bloom.BLOOMLM': f'{_HERE}.models:BLOOMActor',
    'models.llama.LlamaLM': f'{_HERE}.models:LlamaActor',
    **_at(('nn', 'nn.loss'), f'{_HERE}.losses', 'PairWiseLoss'),
    **_at(
        ('nn', 'models', 'nn.loss', 'models.loss'),
        f'{_HERE}.losses',
        'PolicyLoss ValueLoss PPOPtxActorLoss GPTLMLoss LogSigLoss LogExpLoss',
    ),
    **_at(
        ('nn.utils', 'models.utils'),
        f'{_HERE}.losses',
        'compute_approx_kl compute_reward log_probs_from_logits masked_mean masked_normalize normalize',
    ),
    **_at(('nn.generation_utils', 'models.generation_utils'), f'{_HERE}.models', 'update_model_kwargs_fn'),
    **{
        f'{place}.generation_utils.{family}_prepare_inputs_fn': f'{_HERE}.models:prepare_inputs_fn'
        for place in ('nn', 'models')
        for family in ('gpt', 'opt', 'bloom')
    },
    **_at(('dataset', 'dataset.reward_dataset'), f'{_HERE}.data', 'RewardDataset RmStaticDataset HhRlhfDataset'),
    **_at(('dataset', 'dataset.sft_dataset'), f'{_HERE}.data', 'SFTDataset AlpacaDataset AlpacaDataCollator'),
    **_at(('dataset', 'dataset.utils', 'trainer.utils'), f'{_HERE}.data', 'is_rank_0'),
    **_at(('utils', 'utils.tokenizer_utils'), f'{_HERE}.models', 'prepare_llama_tokenizer_and_embedding'),
    **_at(('utils', 'utils.tokenizer_utils'), f'{_HERE}.models', 'smart_tokenizer_and_embedding_resize'),
    **_at(('trainer',), f'{_HERE}.trainers', 'PPOTrainer RewardModelTrainer SFTTrainer'),
    **_at(('trainer.ppo',), f'{_HERE}.trainers', 'PPOTrainer'),
    **_at(('trainer.rm',), f'{_HERE}.trainers', 'RewardModelTrainer'),
    **_at(('trainer.sft',), f'{_HERE}.trainers', 'SFTTrainer'),
    **_at(('trainer.callbacks',), f'{_HERE}.callbacks', 'Callback SaveCheckpoint PerformanceEvaluator'),
    **_at(('trainer.callbacks.base',), f'{_HERE}.callbacks', 'Callback'),
    **_at(('trainer.callbacks.save_checkpoint',), f'{_HERE}.callbacks', 'SaveCheckpoint'),
    **_at(('trainer.callbacks.performance_evaluator',), f'{_HERE}.callbacks', 'PerformanceEvaluator'),
    **_at(('trainer.strategies',), f'{_HERE}.strategies', 'NaiveStrategy DDPStrategy ColossalAIStrategy'),
    **_at(('trainer.strategies.naive',), f'{_HERE}.strategies', 'NaiveStrategy'),
    **_at(('trainer.strategies.ddp',), f'{_HERE}.strategies', 'DDPStrategy'),
    **_at(('trainer.strategies.colossalai',), f'{_HERE}.strategies', 'ColossalAIStrategy'),
}
"""a name under `chatgpt` -> 'our.module:attribute'"""

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
