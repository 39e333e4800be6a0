"""The engine that calls `model.generate`: greedy tokens, log-probs, and the settings that only it supports."""

from __future__ import annotations

import gc

import pytest
import torch
from engine_calls import assert_same, generated, prompts_of, slow_logits, tiny_of

from chatgpt.nn import Actor
from chatgpt.nn.nlpo import MaskedPolicy
from chatgpt.nn.trunk import base_model, cache_keyword
from chatgpt.rollout import Call, HFEngine, LocalEngine, SamplingParams, from_generation_kwargs
from chatgpt.testing import FAMILIES, tiny_causal_lm
from chatgpt.types import Prompt

GREEDY = SamplingParams(max_new_tokens=8, do_sample=False)


@pytest.mark.parametrize('family', FAMILIES)
def test_greedy_agrees_with_the_local_engine(family):
    model = tiny_causal_lm(family, tie_word_embeddings=False)  # random models with tied weights repeat one token
    free = generated(LocalEngine(), model, GREEDY)
    # tokens that first occur in the middle of a response
    responses = [s.response_ids[:5].tolist() for s in free]
    eos = tuple(sorted({ids[t] for ids in responses for t in (1, 2, 3, 4) if ids[t] not in ids[:t]}))[:2]
    assert eos
    sampling = SamplingParams(
        max_new_tokens=8, max_length=14, do_sample=False, eos_token_ids=eos, min_new_tokens=1, temperature=0.8, top_k=9
    )
    local = generated(LocalEngine(), model, sampling)
    for max_batch_size in (64, 2):
        hf = generated(HFEngine(max_batch_size=max_batch_size), model, sampling)
        for a, b in zip(local, hf, strict=True):
            assert a.response_ids.tolist() == b.response_ids.tolist() and a.finish_reason == b.finish_reason
            assert (a.index, a.group, a.prompt_text, a.temperature) == (b.index, b.group, b.prompt_text, b.temperature)
            torch.testing.assert_close(a.logprobs, b.logprobs, atol=1e-4, rtol=0)
            torch.testing.assert_close(a.filtered_logprobs, b.filtered_logprobs, atol=1e-4, rtol=0)
    assert 'eos' in {s.finish_reason for s in local}


def test_the_same_call_gives_the_same_samples_and_leaves_the_global_generator_alone():
    actor = Actor(tiny_causal_lm('gpt2', dropout=0.5)).train()
    sampling = SamplingParams(max_new_tokens=9, temperature=0.7, top_k=7, eos_token_ids=(2, 5))
    state = torch.get_rng_state()
    first, second, other = (generated(HFEngine(), actor, sampling, seed=s) for s in (1, 1, 2))
    assert [s.response_ids.tolist() for s in first] == [s.response_ids.tolist() for s in second]
    assert [s.response_ids.tolist() for s in first] != [s.response_ids.tolist() for s in other]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(m.training for m in actor.modules())
    assert_same(first, generated(LocalEngine(), actor, sampling, seed=1), tolerance=1e-4)
    assert all(bool((s.edge_distances < 1.0).all()) for s in first)


def test_defaults_of_the_model_stay_out():
    """Many checkpoints have default end tokens, top_k and penalties; only the caller's settings are used."""
    model = tiny_causal_lm('gpt2')
    free = generated(HFEngine(), model, GREEDY)
    model.generation_config.eos_token_id = int(free[0].response_ids[2])
    model.generation_config.repetition_penalty = 5.0
    kept = model.generation_config
    again = generated(HFEngine(), model, GREEDY)
    assert [s.response_ids.tolist() for s in again] == [s.response_ids.tolist() for s in free]
    assert model.generation_config is kept


def test_a_penalty_and_beams_go_through():
    model = tiny_causal_lm('gpt2')
    plain = generated(HFEngine(), model, from_generation_kwargs(max_new_tokens=8, do_sample=False))
    penalty = from_generation_kwargs(max_new_tokens=8, do_sample=False, repetition_penalty=50.0)
    for s in generated(HFEngine(), model, penalty):
        ids = torch.cat([s.prompt_ids, s.response_ids]).tolist()
        assert len(set(ids[len(s.prompt_ids) :])) == s.num_actions  # the penalty prevents repetition
    assert any(len(set(s.response_ids.tolist())) < s.num_actions for s in plain)
    beams = from_generation_kwargs(max_new_tokens=8, do_sample=False, num_beams=4)
    better = 0
    for s, p in zip(generated(HFEngine(), model, beams), plain, strict=True):
        want = torch.log_softmax(slow_logits(model, s), -1).gather(1, s.response_ids[:, None])[:, 0]
        torch.testing.assert_close(s.logprobs.double(), want, atol=1e-4, rtol=0)
        better += int(s.logprobs.sum() > p.logprobs.sum() + 1e-4)
    assert better > 0


def test_refusals():
    model = tiny_causal_lm('gpt2', positions=32)
    with pytest.raises(ValueError, match='prompt 0 has 9 tokens and max_length=9 leaves no room'):
        generated(HFEngine(), model, SamplingParams(max_length=9), prompts_of((9,)))
    with pytest.raises(ValueError, match="past the model's 32 positions"):
        generated(HFEngine(), model, SamplingParams(max_new_tokens=24), prompts_of((9,)))
    with pytest.raises(ValueError, match='begin'):
        HFEngine().generate(Call.of(prompts_of(), SamplingParams(max_new_tokens=2), seed=1, indices=range(5)))
    with pytest.raises(ValueError, match='max_batch_size=0'):
        HFEngine(max_batch_size=0)
    actor = Actor(model)
    with pytest.raises(ValueError, match="MaskedPolicy changes the model's logits.*use LocalEngine"):
        HFEngine().begin(MaskedPolicy(actor, actor, 0.9, 1.0))


def test_beams_may_take_tokens_outside_of_the_filter():
    sampling = SamplingParams(max_new_tokens=8, do_sample=False, top_k=1, extra={'num_beams': 4})
    found = generated(HFEngine(), tiny_causal_lm('gpt2'), sampling)
    assert all(sample.logprobs.isfinite().all() for sample in found)
    assert any(sample.filtered_logprobs.isinf().any() for sample in found)


def test_beams_with_a_stop_are_refused():
    sampling = SamplingParams(max_new_tokens=4, do_sample=False, stop=lambda ids: len(ids) > 2, extra={'num_beams': 2})
    with pytest.raises(ValueError, match='a beam cannot stop alone; leave num_beams out, or stop and stop_strings'):
        generated(HFEngine(), tiny_causal_lm('gpt2'), sampling)


@pytest.mark.parametrize('do_sample', [True, False])
def test_non_finite_logits_name_sample_and_position(do_sample):
    actor = Actor(tiny_causal_lm('gpt2'))
    with torch.no_grad():
        actor.model.transformer.wpe.weight[9] = torch.nan
    sampling = SamplingParams(max_new_tokens=6, do_sample=do_sample)
    with pytest.raises(FloatingPointError, match='sample 41 are not finite at response position 5'):
        generated(HFEngine(), actor, sampling, prompts_of((2, 5)), indices=[40, 41])
    with torch.no_grad():
        actor.model.transformer.h[0].ln_1.weight.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match='sample 40 are not finite at response position 0'):
        generated(HFEngine(), actor, sampling, prompts_of((2, 5)), indices=[40, 41])


def test_a_padding_token_outside_the_vocabulary_changes_no_token():
    model, sampling = tiny_causal_lm('gpt2'), SamplingParams(max_new_tokens=6, pad_token_id=64)
    assert model.config.vocab_size == 64
    assert_same(generated(HFEngine(), model, sampling), generated(LocalEngine(), model, sampling), tolerance=1e-4)


@pytest.mark.parametrize('max_batch_size', [64, 2])
def test_each_prompt_has_its_own_room_up_to_the_positions_of_the_model(max_batch_size):
    model, prompts = tiny_causal_lm('gpt2', positions=32), prompts_of((3, 30, 12, 31, 3))
    sampling = SamplingParams(max_length=32)
    samples = generated(HFEngine(max_batch_size=max_batch_size), model, sampling, prompts)
    assert [s.num_actions for s in samples] == [29, 2, 20, 1, 29]
    assert_same(samples, generated(LocalEngine(), model, sampling, prompts), tolerance=1e-4)


def test_logits_of_earlier_steps_are_not_kept():
    """When `generate` returns, no (rows, V) tensor of the 40 steps exists."""
    model = tiny_causal_lm('gpt2')
    generate, seen = model.generate, []

    def alive():
        # not isinstance(), which follows weak references and raises for dead ones
        return [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]

    def watched(*args, **kwargs):
        before = {id(o) for o in alive()}  # of other tests too
        output = generate(*args, **kwargs)
        shape = (len(output.sequences), model.config.vocab_size)
        seen.append(sum(o.shape == shape and id(o) not in before for o in alive()))
        return output

    model.generate = watched
    samples = generated(HFEngine(), model, SamplingParams(max_new_tokens=40, temperature=0.7, top_p=0.9))
    assert {s.num_actions for s in samples} == {40}
    assert seen[1:] == [0], 'after the check of the model'
    assert '_get_logits_processor' not in vars(model)


def test_a_model_that_padding_changes_is_given_prompts_of_one_length():
    own = {'lru_width': 32, 'attention_window_size': 16, 'block_types': ['recurrent', 'attention'], 'head_dim': 16}
    actor = Actor(tiny_of('RecurrentGemma', **own))
    prompts = [Prompt(ids=torch.arange(3, 3 + n)) for n in (6, 2, 4, 2, 6)]
    sampling = SamplingParams(max_new_tokens=5, temperature=0.8)
    engine = HFEngine()
    engine.begin(actor)
    samples = engine.generate(Call.of(prompts, sampling, seed=1, indices=range(5)))
    engine.end()
    assert [s.index for s in samples] == [0, 1, 2, 3, 4]
    for prompt, sample in zip(prompts, samples, strict=True):
        ids = torch.cat([prompt.ids, sample.response_ids])
        assert torch.equal(sample.prompt_ids, prompt.ids) and len(sample.response_ids) == 5
        with torch.no_grad():
            logits = actor.model(input_ids=ids[None]).logits[0, len(prompt.ids) - 1 : -1] / 0.8
        want = torch.log_softmax(logits.float(), -1).gather(1, sample.response_ids[:, None]).squeeze(1)
        assert torch.allclose(sample.logprobs, want, atol=1e-4)


def test_generation_that_is_not_the_forward_is_refused(monkeypatch):
    actor = Actor(tiny_causal_lm('llama')).eval()
    trunk, calls = type(base_model(actor.model)), []
    forward, name = trunk.forward, cache_keyword(base_model(actor.model))

    def wrong(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        if kwargs.get(name) is not None:
            calls.append(1)
            output.last_hidden_state = output.last_hidden_state * 1.5
        return output

    monkeypatch.setattr(trunk, 'forward', wrong)
    engine = HFEngine()
    with pytest.raises(ValueError, match='generates does not agree with its plain forward: logits differ by'):
        engine.begin(actor)
    assert calls
