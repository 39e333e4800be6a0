"""The part of vLLM 0.33 that this package uses, at its own paths and with its own signatures, for a CPU. It really
generates, knows only the weights loaded into it, refuses to work asleep, and cuts weights over as many ranks as it is
told, each a thread. Weights travel by gloo where vLLM's do by NCCL. What vLLM itself shows on a CPU is tested on it
(tests/real_vllm)."""

from vllm.entrypoints.llm import LLM
from vllm.sampling_params import SamplingParams

__version__ = '0.33.0'
__all__ = ['LLM', 'SamplingParams']
