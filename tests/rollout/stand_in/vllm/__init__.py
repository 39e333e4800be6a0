"""The part of vLLM that this package uses, at its own paths and with its own signatures
(tests/rollout/vllm_contract.json), for a CPU. It really generates, knows only the weights loaded into it, refuses to
work asleep, and cuts weights over as many ranks as it is told, each a thread. Weights travel by gloo where vLLM's do by
NCCL."""

from vllm.entrypoints.llm import LLM
from vllm.sampling_params import SamplingParams

__all__ = ['LLM', 'SamplingParams']
