"""Which of torch's attention backends generate: a setting of torch's that a CPU has too, and does not use."""

from __future__ import annotations

import pytest
import torch

import chatgpt.rollout.hf
import chatgpt.rollout.local.run
from chatgpt.nn import Actor
from chatgpt.rollout import Call, HFEngine, LocalEngine, SamplingParams
from chatgpt.rollout.engine import changing_shapes
from chatgpt.testing import tiny_causal_lm
from chatgpt.types import Prompt

CUDA = torch.device('cuda', 0)


@pytest.mark.parametrize(
    ('engine', 'during'),
    [
        (LocalEngine(fixed_steps=False), [False] * 5),
        (LocalEngine(fixed_steps=True), [False, True, True, True, True]),  # few shapes: only the prefill is without
        (HFEngine(), [False] * 5),
    ],
)
def test_cudnn_is_left_out_where_shapes_change(engine, during, monkeypatch):
    for module in (chatgpt.rollout.hf, chatgpt.rollout.local.run):
        monkeypatch.setattr(module, 'changing_shapes', lambda device: changing_shapes(CUDA))
    model, seen = tiny_causal_lm('gpt2'), []
    engine.begin(Actor(model))
    model.transformer.register_forward_pre_hook(lambda *_: seen.append(torch.backends.cuda.cudnn_sdp_enabled()))
    engine.generate(
        Call.of([Prompt(ids=torch.tensor([4, 5, 6]))], SamplingParams(max_new_tokens=5), seed=1, indices=[0])
    )
    engine.end()
    assert seen == during
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_a_setting_of_the_users_own_stays():
    with changing_shapes(torch.device('cpu')):
        assert torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        with changing_shapes(CUDA):
            assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
