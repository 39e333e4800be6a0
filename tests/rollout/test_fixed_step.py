"""Decoding at fixed shapes: the tokens of the ordinary decode, whatever lives and dies, and graphs where there is a
GPU."""

from __future__ import annotations

import pytest
import torch
import transformers

from chatgpt.nn import Actor
from chatgpt.rollout import Call, LocalEngine, SamplingParams
from chatgpt.rollout.local.fixed_step import row_bucket, slot_bucket
from chatgpt.testing import FAMILIES, tiny_causal_lm
from chatgpt.types import Prompt

SETTINGS = {
    'greedy': {'do_sample': False, 'eos_token_ids': (2, 5)},
    'plain': {'temperature': 0.8},
    'ends': {'eos_token_ids': tuple(range(2, 20)), 'min_new_tokens': 3},
    'filtered': {'eos_token_ids': (7,), 'top_k': 9, 'top_p': 0.9},
}


def prompts_of(lengths=(3, 9, 5, 1, 7, 4, 12, 2), seed: int = 0) -> list[Prompt]:
    generator = torch.Generator().manual_seed(seed)
    return [Prompt(ids=torch.randint(3, 64, (n,), generator=generator)) for n in lengths]


def collect(engine, model, sampling, prompts=None, calls=1):
    prompts = prompts or prompts_of()
    engine.begin(Actor(model))
    out = []
    for call in range(calls):
        out += engine.generate(
            Call.of(prompts, sampling, seed=5, indices=[100 * call + i for i in range(len(prompts))])
        )
    engine.end()
    return out


def assert_same(one, other):
    for a, b in zip(one, other, strict=True):
        assert a.response_ids.tolist() == b.response_ids.tolist()
        assert (a.index, a.finish_reason) == (b.index, b.finish_reason)
        for field in ('logprobs', 'filtered_logprobs', 'edge_distances'):
            torch.testing.assert_close(getattr(a, field), getattr(b, field), atol=2e-5, rtol=0)


def test_buckets_by_hand():
    assert [row_bucket(n, 200) for n in (1, 2, 3, 5, 9, 17, 32, 33, 64, 65, 199)] == [
        1,
        2,
        4,
        8,
        16,
        32,
        32,
        64,
        64,
        96,
        200,
    ]
    assert [row_bucket(n, 5) for n in (1, 3, 5)] == [1, 4, 5]
    assert [slot_bucket(w, 600) for w in (1, 256, 257, 599)] == [256, 256, 512, 600]


@pytest.mark.parametrize('family', FAMILIES)
@pytest.mark.parametrize('settings', SETTINGS)
@pytest.mark.parametrize('max_batch_size', [256, 3])
def test_tokens_are_those_of_the_ordinary_decode(family, settings, max_batch_size):
    model = tiny_causal_lm(family, tie_word_embeddings=False)
    sampling = SamplingParams(max_new_tokens=11, **SETTINGS[settings])
    plain = collect(LocalEngine(fixed_steps=False, max_batch_size=max_batch_size), model, sampling)
    fixed = collect(LocalEngine(fixed_steps=True, max_batch_size=max_batch_size), model, sampling)
    assert_same(plain, fixed)
    if settings == 'ends':
        assert len({s.num_actions for s in fixed}) > 2


def test_another_call_of_the_phase_reuses_the_steps():
    model = tiny_causal_lm('gpt2')
    sampling = SamplingParams(max_new_tokens=9, eos_token_ids=tuple(range(2, 12)))
    engine = LocalEngine(fixed_steps=True)
    made = []
    original = engine.fixed
    engine.fixed = lambda *args, **kwargs: made.append(original(*args, **kwargs)) or made[-1]
    assert_same(
        collect(LocalEngine(fixed_steps=False), model, sampling, calls=3), collect(engine, model, sampling, calls=3)
    )
    assert len(made) == 3 and made[0] is made[1] is made[2]
    assert engine._fixed is None


def test_a_stop_function_is_asked():
    model = tiny_causal_lm('gpt2')
    sampling = SamplingParams(max_new_tokens=12, stop=lambda ids: len(ids) >= 2 and sum(ids[-2:]) % 5 == 0)
    assert_same(
        collect(LocalEngine(fixed_steps=False), model, sampling),
        collect(LocalEngine(fixed_steps=True), model, sampling),
    )


def test_what_is_not_known_is_refused():
    with pytest.raises(ValueError, match='fixed_steps'):
        LocalEngine(fixed_steps='sometimes')


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
    assert_same(collect(LocalEngine(fixed_steps=False), model, sampling), graphs)
