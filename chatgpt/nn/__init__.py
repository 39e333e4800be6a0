"""Models: actor, critic and reward model over Hugging Face transformers, by family or from a given module."""

from typing import TYPE_CHECKING

from chatgpt import on_demand

if TYPE_CHECKING:
    from chatgpt.nn.actor import Actor, PolicyOutput
    from chatgpt.nn.critic import Critic
    from chatgpt.nn.families import (
        BLOOMRM,
        GPTRM,
        OPTRM,
        AutoActor,
        AutoCritic,
        AutoRM,
        BLOOMActor,
        BLOOMCritic,
        DebertaCritic,
        DebertaRM,
        GPTActor,
        GPTCritic,
        LlamaActor,
        LlamaCritic,
        LlamaRM,
        OPTActor,
        OPTCritic,
    )
    from chatgpt.nn.heads import CategoricalHead, critic_head, mlp_head, reward_head
    from chatgpt.nn.hydra import freeze_below
    from chatgpt.nn.ilql import ILQLModel
    from chatgpt.nn.layouts import start_token
    from chatgpt.nn.loading import (
        LOAD_OPTIONS,
        add_lora,
        load_base_model,
        load_causal_lm,
        load_config,
        load_tokenizer,
    )
    from chatgpt.nn.lora import has_lora
    from chatgpt.nn.peft_format import adapter_base, export_peft, import_peft
    from chatgpt.nn.reward_model import RewardModel
    from chatgpt.nn.trunk import dropout_off, hidden_size, is_encoder_decoder, position_limit
    from chatgpt.nn.weights import WeightsSource, initial_tensors

__getattr__, __dir__ = on_demand(__name__)

__all__ = [
    'BLOOMRM',
    'GPTRM',
    'LOAD_OPTIONS',
    'OPTRM',
    'Actor',
    'AutoActor',
    'AutoCritic',
    'AutoRM',
    'BLOOMActor',
    'BLOOMCritic',
    'CategoricalHead',
    'Critic',
    'DebertaCritic',
    'DebertaRM',
    'GPTActor',
    'GPTCritic',
    'ILQLModel',
    'LlamaActor',
    'LlamaCritic',
    'LlamaRM',
    'OPTActor',
    'OPTCritic',
    'PolicyOutput',
    'RewardModel',
    'WeightsSource',
    'adapter_base',
    'add_lora',
    'critic_head',
    'dropout_off',
    'export_peft',
    'freeze_below',
    'has_lora',
    'hidden_size',
    'import_peft',
    'initial_tensors',
    'is_encoder_decoder',
    'load_base_model',
    'load_causal_lm',
    'load_config',
    'load_tokenizer',
    'mlp_head',
    'position_limit',
    'reward_head',
    'start_token',
]
