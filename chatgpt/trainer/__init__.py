"""Trainers. Names are imported on first use, so that importing `chatgpt.strategies` stays fast."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chatgpt import on_demand

if TYPE_CHECKING:
    from chatgpt.trainer.base import Trainer as Trainer
    from chatgpt.trainer.collect import Collector as Collector
    from chatgpt.trainer.config import PPOConfig as PPOConfig
    from chatgpt.trainer.objectives.config import CriticConfig as CriticConfig
    from chatgpt.trainer.objectives.config import DPOConfig as DPOConfig
    from chatgpt.trainer.objectives.config import ILQLConfig as ILQLConfig
    from chatgpt.trainer.objectives.config import KTOConfig as KTOConfig
    from chatgpt.trainer.objectives.config import ORPOConfig as ORPOConfig
    from chatgpt.trainer.objectives.config import RewardModelConfig as RewardModelConfig
    from chatgpt.trainer.objectives.config import SFTConfig as SFTConfig
    from chatgpt.trainer.objectives.config import SimPOConfig as SimPOConfig
    from chatgpt.trainer.objectives.config import SupervisedConfig as SupervisedConfig
    from chatgpt.trainer.objectives.critic import CriticTrainer as CriticTrainer
    from chatgpt.trainer.objectives.critic import returned as returned
    from chatgpt.trainer.objectives.ilql import BetaEvaluation as BetaEvaluation
    from chatgpt.trainer.objectives.ilql import ILQLTrainer as ILQLTrainer
    from chatgpt.trainer.objectives.ilql import rewarded as rewarded
    from chatgpt.trainer.objectives.kto import KTOTrainer as KTOTrainer
    from chatgpt.trainer.objectives.kto import LabelledAnswer as LabelledAnswer
    from chatgpt.trainer.objectives.pairs import DPOTrainer as DPOTrainer
    from chatgpt.trainer.objectives.pairs import ORPOTrainer as ORPOTrainer
    from chatgpt.trainer.objectives.pairs import SimPOTrainer as SimPOTrainer
    from chatgpt.trainer.objectives.reward_model import RewardModelTrainer as RewardModelTrainer
    from chatgpt.trainer.objectives.sft import SFTTrainer as SFTTrainer
    from chatgpt.trainer.offline import Method as Method
    from chatgpt.trainer.offline import Objective as Objective
    from chatgpt.trainer.offline import OfflineTrainer as OfflineTrainer
    from chatgpt.trainer.ppo import PPOTrainer as PPOTrainer
    from chatgpt.trainer.prompt_evaluation import PromptEvaluation as PromptEvaluation
    from chatgpt.trainer.rft import RFTConfig as RFTConfig
    from chatgpt.trainer.rft import RFTTrainer as RFTTrainer
    from chatgpt.trainer.saving import SaveError as SaveError
    from chatgpt.trainer.step import NonFiniteError as NonFiniteError

__getattr__, __dir__ = on_demand(__name__)
