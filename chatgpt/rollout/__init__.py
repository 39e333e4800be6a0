"""Who generates: the engine protocol, the local engine, the engine around `model.generate`, sampling and its randomness."""

from chatgpt.rollout.compare import Comparison, Difference, compare_samples
from chatgpt.rollout.engine import RolloutEngine
from chatgpt.rollout.hf import HFEngine
from chatgpt.rollout.local import LocalEngine
from chatgpt.rollout.sampling import SamplingParams, from_generation_kwargs
from chatgpt.rollout.stop import StopStrings

__all__ = [
    'Comparison',
    'Difference',
    'HFEngine',
    'LocalEngine',
    'RolloutEngine',
    'SamplingParams',
    'StopStrings',
    'compare_samples',
    'from_generation_kwargs',
]
