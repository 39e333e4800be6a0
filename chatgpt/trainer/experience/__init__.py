"""Experience: scorers, score shaping, and the maker that turns samples into experience."""

from typing import TYPE_CHECKING

from chatgpt import on_demand

if TYPE_CHECKING:
    from chatgpt.trainer.experience.environment_scorer import EnvironmentScorer as EnvironmentScorer
    from chatgpt.trainer.experience.maker import ExperienceMaker as ExperienceMaker
    from chatgpt.trainer.experience.maker import ExperienceSettings as ExperienceSettings
    from chatgpt.trainer.experience.scorers import FunctionScorer as FunctionScorer
    from chatgpt.trainer.experience.scorers import PipelineScorer as PipelineScorer
    from chatgpt.trainer.experience.scorers import RewardFunctionError as RewardFunctionError
    from chatgpt.trainer.experience.scorers import RewardModelScorer as RewardModelScorer
    from chatgpt.trainer.experience.scorers import RewardValueError as RewardValueError
    from chatgpt.trainer.experience.scorers import Scorer as Scorer
    from chatgpt.trainer.experience.scorers import WeightedScorer as WeightedScorer
    from chatgpt.trainer.experience.scorers import as_scorer as as_scorer
    from chatgpt.trainer.experience.shaping import RunningMoments as RunningMoments
    from chatgpt.trainer.experience.shaping import ScoreShaper as ScoreShaper

__getattr__, __dir__ = on_demand(__name__)
