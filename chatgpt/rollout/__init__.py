"""Rollout engines: the interface, the local engine, remote workers, `model.generate`, vLLM, and sampling."""

from typing import TYPE_CHECKING

from chatgpt import on_demand

if TYPE_CHECKING:
    from chatgpt.rollout.best_of_n import BestOfN as BestOfN
    from chatgpt.rollout.best_of_n import Candidate as Candidate
    from chatgpt.rollout.best_of_n import kl_bound as kl_bound
    from chatgpt.rollout.call import Call as Call
    from chatgpt.rollout.compare import Comparison as Comparison
    from chatgpt.rollout.compare import Difference as Difference
    from chatgpt.rollout.compare import compare_samples as compare_samples
    from chatgpt.rollout.engine import Abilities as Abilities
    from chatgpt.rollout.engine import CheckedEngine as CheckedEngine
    from chatgpt.rollout.engine import EngineAround as EngineAround
    from chatgpt.rollout.engine import RolloutEngine as RolloutEngine
    from chatgpt.rollout.engine import WeightsLost as WeightsLost
    from chatgpt.rollout.exact import ExactDraws as ExactDraws
    from chatgpt.rollout.hf import HFEngine as HFEngine
    from chatgpt.rollout.local import LocalEngine as LocalEngine
    from chatgpt.rollout.remote import RemoteEngine as RemoteEngine
    from chatgpt.rollout.remote import RolloutWorkers as RolloutWorkers
    from chatgpt.rollout.sampling import SamplingParams as SamplingParams
    from chatgpt.rollout.sampling import from_generation_kwargs as from_generation_kwargs
    from chatgpt.rollout.shared import NeighboursEngine as NeighboursEngine
    from chatgpt.rollout.shared import SharedEngine as SharedEngine
    from chatgpt.rollout.stop import StopStrings as StopStrings
    from chatgpt.rollout.stream import stream_tokens as stream_tokens
    from chatgpt.rollout.vllm import VLLMEngine as VLLMEngine
    from chatgpt.rollout.vllm_remote import VLLMRemoteEngine as VLLMRemoteEngine

__getattr__, __dir__ = on_demand(__name__)
