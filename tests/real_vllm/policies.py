"""Prompts, settings and updates of a policy, and the difference of log-probs from those of transformers."""

from __future__ import annotations

from typing import Any

import torch

from chatgpt.rollout import SamplingParams
from chatgpt.types import Prompt, Sample

OPTIONS = {'dtype': 'float32', 'enforce_eager': True, 'kv_cache_memory_bytes': 64 << 20, 'max_model_len': 128}
"""options of `vllm.LLM`"""
GREEDY = SamplingParams(max_new_tokens=8, do_sample=False)
WARM = SamplingParams(max_new_tokens=8, temperature=0.7)


def prompts(lengths: tuple[int, ...] = (3, 9, 5, 1, 7)) -> list[Prompt]:
    generator = torch.Generator().manual_seed(0)
    return [Prompt(ids=torch.randint(3, 64, (n,), generator=generator), text=str(n)) for n in lengths]


def off(samples: list[Sample], model: Any) -> float:
    """Returns the largest difference from the log-probs of transformers' forward, one sequence at a time."""
    return max(off_tokens(s, model, torch.ones_like(s.response_mask)) for s in samples)


@torch.no_grad()
def off_tokens(s: Sample, model: Any, mask: torch.Tensor) -> float:
    """Returns the largest difference over the tokens of one sample that `mask` has."""
    ids = torch.cat([s.prompt_ids, s.response_ids])
    logits = model(ids[None]).logits[0, len(s.prompt_ids) - 1 : -1].double() / s.temperature
    of_tokens = logits.log_softmax(-1).gather(1, s.response_ids[:, None])[:, 0]
    return float((s.logprobs - of_tokens)[mask].abs().max())


def update(model: Any, seed: int) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)))
