"""A response that goes on where an earlier one stopped draws what one long response draws."""

from __future__ import annotations

import pytest
import torch

from chatgpt.nn import Actor
from chatgpt.rollout import Call, HFEngine, LocalEngine, SamplingParams
from chatgpt.testing import tiny_causal_lm
from chatgpt.types import Prompt


def test_the_second_half_draws_with_its_own_positions():
    engine = LocalEngine()
    engine.begin(Actor(tiny_causal_lm('gpt2')))
    prompts = [Prompt(ids=torch.tensor([5, 6, 7])), Prompt(ids=torch.tensor([9, 4]))]
    whole = engine.generate(Call.of(prompts, SamplingParams(max_new_tokens=12), seed=3, indices=[7, 2]))
    cuts = [4, 7]
    later = [Prompt(ids=torch.cat([p.ids, s.response_ids[:n]])) for p, s, n in zip(prompts, whole, cuts, strict=True)]
    ask = {'seed': 3, 'indices': [7, 2]}
    on = engine.generate(Call.of(later, SamplingParams(max_new_tokens=5), offsets=cuts, **ask))
    for sample, rest, n in zip(whole, on, cuts, strict=True):
        assert rest.response_ids.tolist() == sample.response_ids[n : n + 5].tolist()
    # without the offset the draws begin anew, so this could have failed
    anew = engine.generate(Call.of(later, SamplingParams(max_new_tokens=5), **ask))
    assert any(a.response_ids.tolist() != b.response_ids.tolist() for a, b in zip(anew, on, strict=True))


def test_generators_of_later_turns_are_others():
    engine = HFEngine()
    engine.begin(Actor(tiny_causal_lm('gpt2')))
    prompt, sampling = [Prompt(ids=torch.tensor([5, 6, 7]))], SamplingParams(max_new_tokens=16)

    def drawn(offset):
        (sample,) = engine.generate(Call.of(prompt, sampling, seed=3, indices=[7], offsets=[offset]))
        return sample.response_ids.tolist()

    assert drawn(0) != drawn(4) != drawn(5)
    assert drawn(4) == drawn(4)


def test_one_offset_per_prompt():
    engine = LocalEngine()
    engine.begin(Actor(tiny_causal_lm('gpt2')))
    with pytest.raises(ValueError, match='1 prompts but 2 offsets'):
        prompts = [Prompt(ids=torch.tensor([5]))]
        engine.generate(Call.of(prompts, SamplingParams(max_new_tokens=1), seed=0, indices=[0], offsets=[0, 1]))
