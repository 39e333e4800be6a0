"""`logprob_kernel` and `compile_blocks` as settings of a run: what does not go together, and that they reach the
models."""

from __future__ import annotations

import pytest

from chatgpt.launch import models
from chatgpt.launch.models import set_kernels
from chatgpt.launch.runs import PPORun, RewardRun, SFTRun
from chatgpt.nn import Actor, RewardModel, head_kernels
from chatgpt.testing import tiny_causal_lm


@pytest.mark.parametrize(
    ('kind', 'settings', 'told'),
    [
        (PPORun, {'logprob_kernel': 'fast'}, 'fast.*auto.*plain.*fused.*liger'),
        (SFTRun, {'logprob_kernel': 'liger'}, r'chatgpt-rlhf\[liger\]'),
        (RewardRun, {'logprob_kernel': 'fused'}, 'a reward model has none'),
        (PPORun, {'compile_blocks': True, 'reproducible': 'exact'}, 'promises bits'),
        (PPORun, {'compile_blocks': True, 'strategy': 'colossalai_gemini', 'precision': 'bf16'}, 'naive, ddp or fsdp'),
    ],
)
def test_what_does_not_go_together(kind, settings, told, monkeypatch):
    monkeypatch.setattr(head_kernels, 'find_spec', lambda name: None)
    with pytest.raises(ValueError, match=told):
        run = kind(**settings)
        run.validate()


def test_what_liger_cannot_do_for_ppo(monkeypatch):
    monkeypatch.setattr(head_kernels, 'find_spec', lambda name: True)
    monkeypatch.setenv('TRITON_INTERPRET', '1')
    with pytest.raises(ValueError, match=r'entropy_coef=0\.01: .* choose .fused'):
        PPORun(logprob_kernel='liger', entropy_coef=0.01).validate()
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
