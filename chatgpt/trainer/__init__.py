"""Trainers. Names are imported when first used, so that `chatgpt.trainer.strategies` stays light."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chatgpt.trainer.base import Trainer
    from chatgpt.trainer.config import PPOConfig, SFTConfig, SupervisedConfig
    from chatgpt.trainer.ilql import BetaEvaluation, ILQLConfig, ILQLTrainer, rewarded
    from chatgpt.trainer.kto import KTOConfig, KTOTrainer
    from chatgpt.trainer.learning import NonFiniteError
    from chatgpt.trainer.ppo import PPOTrainer
    from chatgpt.trainer.preference import DPOConfig, DPOTrainer, ORPOConfig, ORPOTrainer, SimPOConfig, SimPOTrainer
    from chatgpt.trainer.prompt_evaluation import PromptEvaluation
    from chatgpt.trainer.reward_model import RewardModelConfig, RewardModelTrainer
    from chatgpt.trainer.rft import RFTConfig, RFTTrainer
    from chatgpt.trainer.sft import SFTTrainer
    from chatgpt.trainer.supervised import SupervisedTrainer

_HOME = {
    'DPOConfig': 'preference',
    'DPOTrainer': 'preference',
    'ORPOConfig': 'preference',
    'ORPOTrainer': 'preference',
    'SimPOConfig': 'preference',
    'SimPOTrainer': 'preference',
    'KTOConfig': 'kto',
    'KTOTrainer': 'kto',
    'BetaEvaluation': 'ilql',
    'ILQLConfig': 'ilql',
    'ILQLTrainer': 'ilql',
    'rewarded': 'ilql',
    'PromptEvaluation': 'prompt_evaluation',
    'NonFiniteError': 'learning',
    'PPOConfig': 'config',
    'PPOTrainer': 'ppo',
    'RFTConfig': 'rft',
    'RFTTrainer': 'rft',
    'RewardModelConfig': 'reward_model',
    'RewardModelTrainer': 'reward_model',
    'SFTConfig': 'config',
    'SFTTrainer': 'sft',
    'SupervisedConfig': 'config',
    'SupervisedTrainer': 'supervised',
    'Trainer': 'base',
}

__all__ = [
    'PromptEvaluation',
    'rewarded',
    'ILQLTrainer',
    'ILQLConfig',
    'BetaEvaluation',
    'KTOTrainer',
    'KTOConfig',
    'SimPOTrainer',
    'SimPOConfig',
    'ORPOTrainer',
    'ORPOConfig',
    'DPOTrainer',
    'DPOConfig',
    'NonFiniteError',
    'PPOConfig',
    'PPOTrainer',
    'RFTConfig',
    'RFTTrainer',
    'RewardModelConfig',
    'RewardModelTrainer',
    'SFTConfig',
    'SFTTrainer',
    'SupervisedConfig',
    'SupervisedTrainer',
    'Trainer',
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f'chatgpt.trainer.{_HOME[name]}'), name)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
