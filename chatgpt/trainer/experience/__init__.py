"""Experience: scorers, score shaping, and the maker that turns samples into experience."""

from typing import TYPE_CHECKING

from chatgpt import on_demand

if TYPE_CHECKING:
    from chatgpt.trainer.experience.environment_scorer import EnvironmentScorer
    from chatgpt.trainer.experience.maker import ExperienceMaker, ExperienceSettings
    from chatgpt.trainer.experience.scorers import (
        FunctionScorer,
        PipelineScorer,
        RewardFunctionError,
        RewardModelScorer,
        RewardValueError,
        Scorer,
        WeightedScorer,
        as_scorer,
    )
    from chatgpt.trainer.experience.shaping import RunningMoments, ScoreShaper

__getattr__, __dir__ = on_demand(__name__)

__all__ = [
    'EnvironmentScorer',
    'ExperienceMaker',
    'ExperienceSettings',
    'FunctionScorer',
    'PipelineScorer',
    'RewardFunctionError',
    'RewardModelScorer',
    'RewardValueError',
    'RunningMoments',
    'ScoreShaper',
    'Scorer',
    'WeightedScorer',
    'as_scorer',
]
