"""Decoding at fixed shapes: the tokens of the ordinary decode, whatever lives and dies, and graphs where there is a
GPU."""

from __future__ import annotations

import pytest
import torch
import transformers
from engine_calls import assert_same, drawn, prompts_of

import chatgpt.rollout.hf
import chatgpt.rollout.local.run
from chatgpt.nn import Actor
from chatgpt.rollout import Call, HFEngine, LocalEngine, SamplingParams
from chatgpt.rollout.engine import changing_shapes
from chatgpt.rollout.local.fixed_step import row_bucket, slot_bucket
from chatgpt.testing import FAMILIES, tiny_causal_lm

SETTINGS = {
    'greedy': {'do_sample': False, 'eos_token_ids': (2, 5)},
    'plain': {'temperature': 0.8},
    'ends': {'eos_token_ids': tuple(range(2, 20)), 'min_new_tokens': 3},
    'filtered': {'eos_token_ids': (7,), 'top_k': 9, 'top_p': 0.9},
    'stop': {'stop': lambda ids: len(ids) >= 2 and sum(ids[-2:]) % 5 == 0},
}


def test_buckets_by_hand():
    found = [row_bucket(n, 200) for n in (1, 2, 3, 5, 9, 17, 32, 33, 64, 65, 199)]
    assert found == [1, 2, 4, 8, 16, 32, 32, 64, 64, 96, 200]
    assert [row_bucket(n, 5) for n in (1, 3, 5)] == [1, 4, 5]
    assert [slot_bucket(w, 600) for w in (1, 256, 257, 599)] == [256, 256, 512, 600]


@pytest.mark.parametrize(
    ('family', 'settings', 'max_batch_size'),
    [*((family, 'ends', 3) for family in FAMILIES), *(('gpt2', settings, 256) for settings in SETTINGS)],
)
def test_tokens_are_those_of_the_ordinary_decode(family, settings, max_batch_size):
    model = tiny_causal_lm(family, tie_word_embeddings=False)
    sampling = SamplingParams(max_new_tokens=11, **SETTINGS[settings])
    plain, fixed = (
        drawn(LocalEngine(fixed_steps=fixed, max_batch_size=max_batch_size), model, sampling) for fixed in (False, True)
    )
    assert_same(plain, fixed)
    if settings == 'ends':
        assert len({s.num_actions for s in fixed}) > 2


def test_another_call_of_the_phase_reuses_the_steps():
    actor = Actor(tiny_causal_lm('gpt2'))
    sampling = SamplingParams(max_new_tokens=9, eos_token_ids=tuple(range(2, 12)))
    engine, made = LocalEngine(fixed_steps=True), []
    engine.begin(actor)
    for indices in (range(8), range(100, 108), range(200, 208)):
        call = Call.of(prompts_of(), sampling, seed=5, indices=indices)
        plain = drawn(LocalEngine(fixed_steps=False), actor, sampling, indices=indices)
        assert_same(engine.generate(call), plain)
        made.append(engine._fixed)
    assert made[0] is made[1] is made[2] is not None
    engine.end()
    assert engine._fixed is None


@pytest.mark.gpu
@pytest.mark.parametrize('family', FAMILIES)
@pytest.mark.parametrize('settings', SETTINGS)
def test_graphs_draw_what_calls_draw(family, settings):
    model = tiny_causal_lm(family, tie_word_embeddings=False).cuda()
    sampling = SamplingParams(max_new_tokens=40, **SETTINGS[settings])
    engine = LocalEngine()
    engine.begin(Actor(model))
    graphs = engine.generate(Call.of(prompts_of(), sampling, seed=5, indices=range(8)))
    assert engine._fixed is not None
    host_mask = family == 'bloom' and int(transformers.__version__.split('.')[1]) < 23  # made from a number of the host
    assert bool(engine._fixed._graphs) != host_mask
    engine.end()
    assert_same(drawn(LocalEngine(fixed_steps=False), model, sampling), graphs)


# ---------------------------------------------------------------------- attention backends


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
    engine.generate(Call.of(prompts_of((3,)), SamplingParams(max_new_tokens=5), seed=1, indices=[0]))
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
