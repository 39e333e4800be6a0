"""Trainers. Names are imported on first use, so that importing `chatgpt.strategies` stays fast."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chatgpt import on_demand

if TYPE_CHECKING:
    from chatgpt.trainer.base import Trainer
    from chatgpt.trainer.collect import Collector
    from chatgpt.trainer.config import PPOConfig
    from chatgpt.trainer.objectives.config import (
        CriticConfig,
        DPOConfig,
        ILQLConfig,
        KTOConfig,
        ORPOConfig,
        RewardModelConfig,
        SFTConfig,
        SimPOConfig,
        SupervisedConfig,
    )
    from chatgpt.trainer.objectives.critic import CriticTrainer, returned
    from chatgpt.trainer.objectives.ilql import BetaEvaluation, ILQLTrainer, rewarded
    from chatgpt.trainer.objectives.kto import KTOTrainer, LabelledAnswer
    from chatgpt.trainer.objectives.pairs import (
        DPOTrainer,
        ORPOTrainer,
        SimPOTrainer,
    )
    from chatgpt.trainer.objectives.reward_model import RewardModelTrainer
    from chatgpt.trainer.objectives.sft import SFTTrainer
    from chatgpt.trainer.offline import Method, Objective, OfflineTrainer
    from chatgpt.trainer.ppo import PPOTrainer
    from chatgpt.trainer.prompt_evaluation import PromptEvaluation
    from chatgpt.trainer.rft import RFTConfig, RFTTrainer
    from chatgpt.trainer.saving import SaveError
    from chatgpt.trainer.step import NonFiniteError

__getattr__, __dir__ = on_demand(__name__)

__all__ = [
    'Collector',
    'CriticConfig',
    'CriticTrainer',
    'returned',
    'SaveError',
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
