"""Helpers for tests of engines: prompts, calls, plain forwards, comparisons."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import transformers

from chatgpt.nn import Actor
from chatgpt.rollout import Call, SamplingParams
from chatgpt.types import Prompt, Sample

LENGTHS = (3, 9, 5, 1, 7, 4, 12, 2)

_LINEAR = {'linear_key_head_dim': 8, 'linear_value_head_dim': 8, 'linear_num_key_heads': 2, 'linear_num_value_heads': 2}
_EXPERTS = {'num_experts': 2, 'num_experts_per_tok': 1, 'moe_intermediate_size': 16, 'head_dim': 16}
_EXPERTS |= {'shared_expert_intermediate_size': 16}
BEYOND_KEYS_AND_VALUES: dict[str, dict[str, Any]] = {
    'Mamba': {'state_size': 4},
    'OpenAIGPT': {'n_embd': 32, 'n_layer': 2, 'n_head': 2, 'n_positions': 64},
    'Lfm2': {'layer_types': ['conv', 'full_attention']},
    'Qwen3Next': _LINEAR | _EXPERTS | {'layer_types': ['linear_attention', 'full_attention']},
}
"""settings for `tiny_of` of families that a cache of keys and values is not enough for"""


def prompts_of(lengths: tuple[int, ...] = LENGTHS) -> list[Prompt]:
    generator = torch.Generator().manual_seed(0)
    return [Prompt(ids=torch.randint(3, 64, (n,), generator=generator), text=str(n)) for n in lengths]


def generated(engine: Any, policy: Any, sampling: SamplingParams, prompts: Any = None, **call: Any) -> list[Sample]:
    """Runs a collect phase of an engine. policy: an actor or a transformers model. call: arguments of `Call.of`; the
    default seed is 5."""
    prompts = prompts_of() if prompts is None else prompts
    engine.begin(policy if hasattr(policy, 'trunk') else Actor(policy))
    try:
        return engine.generate(Call.of(prompts, sampling, **({'seed': 5, 'indices': range(len(prompts))} | call)))
    finally:
        engine.end()


def assert_same(found: list[Sample], wanted: list[Sample], tolerance: float = 2e-5) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert a.response_ids.tolist() == b.response_ids.tolist()
        assert (a.index, a.finish_reason) == (b.index, b.finish_reason)
        for name in ('logprobs', 'filtered_logprobs', 'edge_distances'):
            torch.testing.assert_close(getattr(a, name), getattr(b, name), atol=tolerance, rtol=0)


def slow_logits(model: Any, sample: Sample) -> torch.Tensor:
    """Returns (A, V) float64 logits that predict each action, from a plain forward of the whole sequence."""
    ids = torch.cat([sample.prompt_ids, sample.response_ids])
    with torch.no_grad():
        logits = model(ids[None]).logits[0].double()
    return logits[len(sample.prompt_ids) - 1 : -1]


def tiny_of(kind: str, **own: Any) -> Any:
    """Returns a random model of a family that is not in `chatgpt.testing`."""
    sizes = {'vocab_size': 64, 'hidden_size': 32, 'intermediate_size': 64, 'num_hidden_layers': 2, 'pad_token_id': 0}
    heads = {'num_attention_heads': 2, 'num_key_value_heads': 1, 'max_position_embeddings': 64}
    torch.manual_seed(0)
    config = getattr(transformers, f'{kind}Config')(**(sizes | heads | {'initializer_range': 0.1} | own))
    return transformers.AutoModelForCausalLM.from_config(config).eval()


class Turns:
    """Three turns of up to four tokens, with an observation of two tokens between them; see `converse`."""

    def __init__(self, count: int) -> None:
        self.turns: list[list[Any]] = [[] for _ in range(count)]

    def limit(self, i: int) -> int:
        return 4

    def ended(self, i: int, turn: Sample) -> None:
        self.turns[i].append(turn.response_ids.tolist())

    def next(self, i: int) -> torch.Tensor | None:
        return None if len(self.turns[i]) == 3 else torch.tensor([7, 8])


def generated_turns(engine: Any, policy: Any, prompts: list[Prompt], sampling: SamplingParams) -> list[list[Any]]:
    turns = Turns(len(prompts))
    engine.begin(policy)
    engine.converse(Call.of(prompts, sampling, seed=3, indices=range(len(prompts))), turns)
    engine.end()
    return turns.turns


@contextmanager
def counted_captures() -> Iterator[list[Any]]:
    """Context that returns the list of captured graphs."""
    made: list[Any] = []

    def capture(graph: Any, *args: Any, **kwargs: Any) -> Any:
        made.append(graph)
        return kept(graph, *args, **kwargs)

    kept = torch.cuda.graph
    with patch.object(torch.cuda, 'graph', capture):
        yield made
