"""`logprob_kernel` and `compile_blocks` as settings of a run reach the models."""

from __future__ import annotations

import pytest

from chatgpt.launch import models
from chatgpt.launch.models import set_kernels
from chatgpt.launch.runs import PPORun, SFTRun
from chatgpt.nn import Actor, RewardModel, head_kernels
from chatgpt.testing import tiny_causal_lm


def test_liger_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(head_kernels, 'find_spec', lambda name: None)
    with pytest.raises(ValueError, match=r'chatgpt-rlhf\[liger\]'):
        SFTRun(logprob_kernel='liger').validate()


def test_temperatures_of_liger(monkeypatch):
    monkeypatch.setattr(head_kernels, 'find_spec', lambda name: True)
    monkeypatch.setenv('TRITON_INTERPRET', '1')
    with pytest.raises(ValueError, match=r'in 16 bits 0\.7, which is no power of two'):
        PPORun(logprob_kernel='liger', temperature=0.7, precision='bf16').validate()
    for settings in ({'temperature': 0.7}, {'temperature': 0.5, 'precision': 'bf16'}):
        PPORun(logprob_kernel='liger', **settings).validate()


def test_they_reach_actors_and_modules(monkeypatch):
    seen = []
    monkeypatch.setattr(models, 'compile_blocks', seen.append)
    actor, reward = Actor(tiny_causal_lm('gpt2')), RewardModel(tiny_causal_lm('gpt2').base_model)
    set_kernels(PPORun(), actor, reward, None, len)
    assert actor.logprob_kernel == 'auto' and not seen
    set_kernels(PPORun(logprob_kernel='fused', compile_blocks=True), actor, reward, None, len)
    assert actor.logprob_kernel == 'fused' and seen == [actor, reward]
