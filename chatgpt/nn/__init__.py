"""Models: actor, critic and reward model over Hugging Face transformers, by family or from a given module."""

from chatgpt.nn.actor import Actor
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
from chatgpt.nn.heads import critic_head, mlp_head, reward_head
from chatgpt.nn.ilql import ILQLModel
from chatgpt.nn.loading import load_base_model, load_causal_lm, load_config, load_tokenizer
from chatgpt.nn.output import PolicyOutput
from chatgpt.nn.reward_model import RewardModel
from chatgpt.nn.sources import WeightsSource, initial_tensors

__all__ = [
    'GPTRM',
    'ILQLModel',
    'OPTRM',
    'Actor',
    'AutoActor',
    'AutoCritic',
    'AutoRM',
    'BLOOMActor',
    'BLOOMCritic',
    'BLOOMRM',
    'Critic',
    'DebertaCritic',
    'DebertaRM',
    'GPTActor',
    'GPTCritic',
    'LlamaActor',
    'LlamaCritic',
    'LlamaRM',
    'OPTActor',
    'OPTCritic',
    'PolicyOutput',
    'RewardModel',
    'WeightsSource',
    'critic_head',
    'initial_tensors',
    'load_base_model',
    'load_causal_lm',
    'load_config',
    'load_tokenizer',
    'mlp_head',
    'reward_head',
]
