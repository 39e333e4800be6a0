from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class EngineArgs:
    model: str
    load_format: str = 'auto'
    enable_sleep_mode: bool = False
    skip_tokenizer_init: bool = False
    logprobs_mode: str = 'raw_logprobs'
    gpu_memory_utilization: float = 0.92
    seed: int = 0
    dtype: str = 'auto'
    enforce_eager: bool = False
    max_model_len: int | None = None
    tensor_parallel_size: int = 1
    distributed_executor_backend: str | None = None
    weight_transfer_config: Any = None
