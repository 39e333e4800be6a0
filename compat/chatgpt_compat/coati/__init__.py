"""ColossalAI's `coati` (`applications/Chat`, March 2023 to 0.3), the later name of its `chatgpt`.

Unchanged names are those of `chatgpt_compat.colossalai`. This package has the changed ones: trainers with loaders in
`fit`, `GeminiStrategy` and `LowLevelZeroStrategy`, data sets of JSON files.
"""

from __future__ import annotations

from chatgpt_compat import colossalai
from chatgpt_compat.tables import as_modules, at, lookup

_HERE = 'chatgpt_compat.coati'

SERVED: dict[str, str] = {
    **{name: target for name, target in colossalai.SERVED.items() if name.partition('.')[0] != 'nn'},
    **at('trainer trainer.ppo', f'{_HERE}.trainers', 'PPOTrainer'),
    **at('trainer trainer.sft', f'{_HERE}.trainers', 'SFTTrainer'),
    **at('trainer trainer.rm', f'{_HERE}.trainers', 'RewardModelTrainer'),
    **at('trainer.strategies trainer.strategies.base', 'chatgpt.strategies', 'Strategy'),
    **at(
        'trainer.strategies',
        f'{_HERE}.strategies',
        'NaiveStrategy DDPStrategy ColossalAIStrategy GeminiStrategy LowLevelZeroStrategy',
    ),
    **at('trainer.strategies.naive', f'{_HERE}.strategies', 'NaiveStrategy'),
    **at('trainer.strategies.ddp', f'{_HERE}.strategies', 'DDPStrategy'),
    **at(
        'trainer.strategies.colossalai',
        f'{_HERE}.strategies',
        'ColossalAIStrategy GeminiStrategy LowLevelZeroStrategy',
    ),
    **at('dataset dataset.sft_dataset', f'{_HERE}.data', 'SupervisedDataset DataCollatorForSupervisedDataset'),
    **at('dataset dataset.prompt_dataset', f'{_HERE}.data', 'PromptDataset'),
    **at('models.generation', f'{_HERE}.models', 'generate'),
    **at('models models.lora', f'{_HERE}.models', 'convert_to_lora_module'),
    **at('models.lora', f'{_HERE}.models', 'LORA_MANAGER'),
    **at('models.base', f'{_HERE}.models', 'get_base_model'),
    **at('models models.base models.base.critic', f'{_HERE}.models', 'Critic'),
    **at('models models.loss', f'{_HERE}.models', 'ValueLoss'),
    **at('models.chatglm models.chatglm.chatglm_actor', f'{_HERE}.models', 'ChatGLMActor'),
    **at('models.chatglm.chatglm_tokenizer', f'{_HERE}.models', 'ChatGLMTokenizer'),
    **at('models.roberta', f'{_HERE}.models', 'RoBERTaActor RoBERTaCritic RoBERTaRM'),
    **at('quant', f'{_HERE}.models', 'llama_load_quant low_resource_init'),
    **at('kernels', f'{_HERE}.models', 'convert_to_xformer_model'),
}
"""a name under `coati` → 'module:attribute'"""

INSTEAD: dict[str, str] = {
    **{
        name: sentence
        for name, sentence in colossalai.INSTEAD.items()
        if name.partition('.')[0] != 'nn' and name not in SERVED and name not in ('models.lora', 'models.generation')
    },
    'experience_buffer': colossalai.INSTEAD['replay_buffer'],
    'models.lora': 'lora_rank= of any actor, critic or reward model; chatgpt.nn.lora for more',
    'models.utils.calc_action_log_probs': 'chatgpt.functional.logprobs, on flat tensors',
    'ray': 'chatgpt-rlhf ppo --engine ray (docs/workers.md): workers on Ray that generate, in a run of this library',
    'dataset.conversation': 'transformers: the chat template of a tokenizer',
}
"""a name or module that is not served → what to write instead"""

__getattr__ = lookup('coati', SERVED, INSTEAD)
as_modules('coati', SERVED, INSTEAD)
