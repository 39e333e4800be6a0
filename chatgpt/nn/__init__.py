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
from chatgpt.nn.output import PolicyOutput
from chatgpt.nn.reward_model import RewardModel

__all__ = [
    'GPTRM',
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
]
