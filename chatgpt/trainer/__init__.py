"""Trainers. Names are imported when first used, so that `chatgpt.trainer.strategies` stays light."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chatgpt.trainer.base import Trainer
    from chatgpt.trainer.config import PPOConfig, SFTConfig, SupervisedConfig
    from chatgpt.trainer.objectives.ilql import BetaEvaluation, ILQLConfig, ILQLTrainer, rewarded
    from chatgpt.trainer.objectives.kto import KTOConfig, KTOTrainer, LabelledAnswer
    from chatgpt.trainer.objectives.pairs import (
        DPOConfig,
        DPOTrainer,
        ORPOConfig,
        ORPOTrainer,
        SimPOConfig,
        SimPOTrainer,
    )
    from chatgpt.trainer.objectives.reward_model import RewardModelConfig, RewardModelTrainer
    from chatgpt.trainer.objectives.sft import SFTTrainer
    from chatgpt.trainer.offline import Method, Objective, OfflineTrainer
    from chatgpt.trainer.ppo import PPOTrainer
    from chatgpt.trainer.prompt_evaluation import PromptEvaluation
    from chatgpt.trainer.rft import RFTConfig, RFTTrainer
    from chatgpt.trainer.step import NonFiniteError

_HOME = {
    'DPOConfig': 'objectives.pairs',
    'DPOTrainer': 'objectives.pairs',
    'ORPOConfig': 'objectives.pairs',
    'ORPOTrainer': 'objectives.pairs',
    'SimPOConfig': 'objectives.pairs',
    'SimPOTrainer': 'objectives.pairs',
    'KTOConfig': 'objectives.kto',
    'KTOTrainer': 'objectives.kto',
    'LabelledAnswer': 'objectives.kto',
    'BetaEvaluation': 'objectives.ilql',
    'ILQLConfig': 'objectives.ilql',
    'ILQLTrainer': 'objectives.ilql',
    'rewarded': 'objectives.ilql',
    'PromptEvaluation': 'prompt_evaluation',
    'NonFiniteError': 'step',
    'PPOConfig': 'config',
    'PPOTrainer': 'ppo',
    'RFTConfig': 'rft',
    'RFTTrainer': 'rft',
    'RewardModelConfig': 'objectives.reward_model',
    'RewardModelTrainer': 'objectives.reward_model',
    'SFTConfig': 'config',
    'SFTTrainer': 'objectives.sft',
    'SupervisedConfig': 'config',
    'Method': 'offline',
    'Objective': 'offline',
    'OfflineTrainer': 'offline',
    'Trainer': 'base',
}

__all__ = [
    'PromptEvaluation',
    'rewarded',
    'ILQLTrainer',
    'ILQLConfig',
    'BetaEvaluation',
    'KTOTrainer',
    'LabelledAnswer',
    'KTOConfig',
    'SimPOTrainer',
    'SimPOConfig',
    'ORPOTrainer',
    'ORPOConfig',
    'DPOTrainer',
    'DPOConfig',
    'Method',
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
    'Objective',
    'OfflineTrainer',
    'Trainer',
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f'chatgpt.trainer.{_HOME[name]}'), name)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
