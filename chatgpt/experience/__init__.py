"""Experience: scorers, the maker that turns samples into experience, and the replay buffer."""

from chatgpt.experience.environment_scorer import EnvironmentScorer
from chatgpt.experience.maker import ExperienceMaker, ExperienceSettings
from chatgpt.experience.replay_buffer import ReplayBuffer
from chatgpt.experience.scorers import (
    FunctionScorer,
    PipelineScorer,
    RewardFunctionError,
    RewardModelScorer,
    RewardValueError,
    Scorer,
    WeightedScorer,
    as_scorer,
)
from chatgpt.experience.shaping import RunningMoments, ScoreShaper

__all__ = [
    'EnvironmentScorer',
    'ExperienceMaker',
    'ExperienceSettings',
    'FunctionScorer',
    'PipelineScorer',
    'ReplayBuffer',
    'RewardFunctionError',
    'RewardModelScorer',
    'RewardValueError',
    'RunningMoments',
    'ScoreShaper',
    'Scorer',
    'WeightedScorer',
    'as_scorer',
]
