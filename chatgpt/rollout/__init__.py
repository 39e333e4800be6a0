"""Rollout engines: the interface, the local engine, remote workers, `model.generate`, vLLM, and sampling."""

from typing import TYPE_CHECKING

from chatgpt import on_demand

if TYPE_CHECKING:
    from chatgpt.rollout.best_of_n import BestOfN, Candidate, kl_bound
    from chatgpt.rollout.call import Call
    from chatgpt.rollout.compare import Comparison, Difference, compare_samples
    from chatgpt.rollout.engine import Abilities, CheckedEngine, EngineAround, RolloutEngine
    from chatgpt.rollout.exact import ExactDraws
    from chatgpt.rollout.hf import HFEngine
    from chatgpt.rollout.local import LocalEngine
    from chatgpt.rollout.remote import RemoteEngine, RolloutWorkers
    from chatgpt.rollout.sampling import SamplingParams, from_generation_kwargs
    from chatgpt.rollout.shared import SharedEngine
    from chatgpt.rollout.stop import StopStrings
    from chatgpt.rollout.stream import stream_tokens
    from chatgpt.rollout.vllm import VLLMEngine
    from chatgpt.rollout.vllm_remote import VLLMRemoteEngine

__getattr__, __dir__ = on_demand(__name__)

__all__ = [
    'Abilities',
    'BestOfN',
    'Call',
    'Candidate',
    'CheckedEngine',
    'Comparison',
    'Difference',
    'EngineAround',
    'ExactDraws',
    'HFEngine',
    'LocalEngine',
    'RemoteEngine',
    'RolloutEngine',
    'RolloutWorkers',
    'SamplingParams',
    'SharedEngine',
    'StopStrings',
    'VLLMEngine',
    'VLLMRemoteEngine',
    'compare_samples',
    'from_generation_kwargs',
    'kl_bound',
    'stream_tokens',
]
