"""Sampling settings and the step from logits to tokens: validation, filters against loops in float64, distributions."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import GenerationConfig

from chatgpt.nn import Actor, AutoActor
from chatgpt.rollout import SamplingParams, from_generation_kwargs
from chatgpt.rollout.randomness import sample_keys, uniforms
from chatgpt.rollout.sampling import TokenSampler, sampling_for
from chatgpt.testing import byte_tokenizer, tiny_causal_lm


def logits_of(probs: list[float]) -> torch.Tensor:
    return torch.tensor([math.log(p) if p > 0 else -math.inf for p in probs])


def draws(sampling: SamplingParams, logits: torch.Tensor, num: int, seed: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Token counts (V,) and the edge distances of `num` draws from one row of logits."""
    u = uniforms(sample_keys(seed, torch.arange(num)), torch.tensor(0))[:, None]
    draw = TokenSampler(sampling, 'cpu')(logits.expand(num, -1), u)
    return torch.bincount(draw.token, minlength=len(logits)), draw.edge_distance


def chi_square(counts: torch.Tensor, probs: torch.Tensor) -> float:
    want = probs * counts.sum()
    kept = probs > 0
    assert int(counts[~kept].sum()) == 0
    return float(((counts[kept] - want[kept]) ** 2 / want[kept]).sum())


def test_drawn_tokens_follow_the_softmax_at_temperature():
    probs = [0.02, 0.4, 0.08, 0.25, 0.05, 0.2]
    counts, _ = draws(SamplingParams(max_new_tokens=1), logits_of(probs), 20_000)
    assert chi_square(counts, torch.tensor(probs)) < 25  # 5 degrees of freedom: 0.01 %
    cooler = torch.tensor([p ** (1 / 0.5) for p in probs])
    counts, _ = draws(SamplingParams(max_new_tokens=1, temperature=0.5), logits_of(probs), 20_000)
    assert chi_square(counts, cooler / cooler.sum()) < 25
    assert chi_square(counts, torch.tensor(probs)) > 1000  # negative control: without the temperature it would not fit


def slow_filter(logits: list[float], temperature: float, top_k: int, top_p: float, barred: set[int]) -> list[float]:
    """Filtered probabilities, in float64, token by token."""
    scaled = [-math.inf if t in barred else x / temperature for t, x in enumerate(logits)]
    order = sorted(range(len(scaled)), key=lambda t: (-scaled[t], t))
    if top_k:
        order = order[:top_k]
    weights = {t: math.exp(scaled[t]) for t in order}
    total = sum(weights.values())
    kept, mass = [], 0.0
    for t in order:
        if kept and mass >= top_p:
            break
        kept.append(t)
        mass += weights[t] / total
    total = sum(weights[t] for t in kept)
    return [weights[t] / total if t in kept else 0.0 for t in range(len(scaled))]


@pytest.mark.parametrize(
    ('temperature', 'top_k', 'top_p', 'barred'),
    [
        (1.0, 3, 1.0, set()),
        (0.7, 0, 0.8, set()),
        (1.5, 5, 0.6, set()),
        (1.0, 0, 0.01, set()),
        (0.9, 4, 0.9, {2, 5}),
        (1.0, 99, 1.0, {0}),
    ],
)
def test_filters_equal_a_slow_loop(temperature, top_k, top_p, barred):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(30, 12, generator=generator) * 2
    filters = {'temperature': temperature, 'top_k': top_k, 'top_p': top_p}
    sampling = SamplingParams(max_new_tokens=9, min_new_tokens=2, eos_token_ids=tuple(sorted(barred)), **filters)
    u = torch.rand(30, 1, generator=generator, dtype=torch.float64)
    mask = torch.arange(30) % 2 == 0 if barred else None  # every second row is too short to end
    draw = TokenSampler(sampling, 'cpu')(logits, u, mask)
    for row in range(30):
        values = logits[row].double().tolist()
        token = int(draw.token[row])
        here = barred if mask is not None and bool(mask[row]) else set()
        want = slow_filter(values, temperature, top_k, top_p, here)
        assert want[token] > 0
        assert float(draw.filtered_logprob[row]) == pytest.approx(math.log(want[token]), abs=1e-5)
        plain = slow_filter(values, temperature, 0, 1.0, set())
        assert float(draw.logprob[row]) == pytest.approx(math.log(plain[token]), abs=1e-5)
        # the token is the one whose cumulative interval holds u
        before = math.fsum(want[:token])
        assert before - 1e-6 <= float(u[row]) <= before + want[token] + 1e-6
    unequal = (draw.logprob - draw.filtered_logprob).abs() > 1e-4
    assert bool(unequal.any())


def test_greedy_takes_the_most_likely_token_that_is_not_barred():
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0], [0.0, 3.0, 2.0, 1.0]])
    sampling = SamplingParams(max_new_tokens=4, min_new_tokens=2, do_sample=False, eos_token_ids=(1,))
    draw = TokenSampler(sampling, 'cpu')(logits, None, torch.tensor([True, False]))
    assert draw.token.tolist() == [2, 1] and draw.edge_distance is None
    assert float(draw.logprob[0]) == pytest.approx(2 - math.log(sum(map(math.exp, (0, 3, 2, 1)))), abs=1e-6)
    assert float(draw.filtered_logprob[0]) == pytest.approx(2 - math.log(sum(map(math.exp, (0, 2, 1)))), abs=1e-6)


@pytest.mark.parametrize(
    ('filters', 'probs', 'near'),
    [
        ({'top_k': 2}, [0.5, 0.2500005, 0.2499995], True),  # rounding may swap tokens 1 and 2, whatever u is
        ({'top_k': 2}, [0.5, 0.3, 0.2], False),
        ({'top_p': 0.75}, [0.5, 0.25, 0.15, 0.1], True),  # exactly at a cumulative sum of 0.5 + 0.25
        ({'top_p': 0.65}, [0.5, 0.25, 0.15, 0.1], False),
    ],
)
def test_edge_distance_knows_the_threshold_of_a_filter(filters, probs, near):
    _, edges = draws(SamplingParams(max_new_tokens=1, **filters), logits_of(probs), 200)
    assert float(edges.max()) < 1e-5 if near else float(edges.max()) > 0.05


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        ({}, 'neither max_new_tokens nor max_length'),
        ({'max_new_tokens': 0}, 'max_new_tokens=0; give an integer of at least 1'),
        ({'max_new_tokens': 1.5}, 'max_new_tokens=1.5'),
        ({'max_new_tokens': 4, 'temperature': 0.0}, 'do_sample=False for greedy'),
        ({'max_new_tokens': 4, 'temperature': math.nan}, 'temperature=nan'),
        ({'max_new_tokens': 4, 'top_p': 0.0}, 'top_p=0.0'),
        ({'max_new_tokens': 4, 'top_p': 1.1}, 'top_p=1.1'),
        ({'max_new_tokens': 4, 'top_k': -1}, 'top_k=-1'),
        ({'max_new_tokens': 4, 'min_new_tokens': 5}, 'min_new_tokens=5 is above max_new_tokens=4'),
        ({'max_new_tokens': 4, 'eos_token_ids': 2}, 'eos_token_ids=2'),
        ({'max_new_tokens': 4, 'stop': '###'}, 'StopStrings'),
    ],
)
def test_values_without_sense_are_refused(settings, message):
    with pytest.raises(ValueError, match='sampling: ') as error:
        SamplingParams(**settings)
    assert message in str(error.value)


def test_room():
    assert SamplingParams(max_new_tokens=8).room(100) == 8
    assert SamplingParams(max_length=10).room(7) == 3
    assert SamplingParams(max_length=10, max_new_tokens=2).room(7) == 2
    assert SamplingParams(max_length=10).room(10) == 0


def test_generation_kwargs():
    same = {'max_length': 64, 'temperature': 0.8, 'top_k': 50, 'top_p': 0.9, 'pad_token_id': 3, 'min_new_tokens': 4}
    sampling = from_generation_kwargs(do_sample=True, eos_token_id=[1, 2], **same)
    assert sampling == SamplingParams(eos_token_ids=(1, 2), **same) and not sampling.extra
    assert from_generation_kwargs(max_new_tokens=3, eos_token_id=7).eos_token_ids == (7,)
    neutral = {'top_k': None, 'num_beams': 1, 'repetition_penalty': 1.0, 'use_cache': True, 'early_stopping': False}
    assert from_generation_kwargs(max_new_tokens=3, bos_token_id=1, **neutral) == SamplingParams(max_new_tokens=3)
    others = {'num_beams': 4, 'repetition_penalty': 1.2}  # which only transformers can do
    assert dict(from_generation_kwargs(max_new_tokens=3, **others).extra) == others
    sampling = from_generation_kwargs(byte_tokenizer(), max_new_tokens=3, stop_strings='xy')
    assert sampling.stop([ord('x'), ord('y')]) and not sampling.stop([ord('y'), ord('x')])


@pytest.mark.parametrize(
    ('name', 'value', 'told'),
    [
        ('temprature', 1, "'temprature' is unknown; did you mean .*temperature"),
        ('topk', 1, "'topk' is unknown; did you mean .*top_k"),
        ('num_return_sequences', 4, 'num_return_sequences=4'),
        ('stop_strings', ['x'], 'needs a tokenizer'),
    ],
)
def test_generation_kwargs_that_are_refused(name, value, told):
    with pytest.raises(ValueError, match=told):
        from_generation_kwargs(max_new_tokens=3, **{name: value})


def test_every_end_token_of_the_model_counts(tmp_path):
    """Chat models end a turn with tokens that the tokenizer's end token is not one of."""
    model = tiny_causal_lm('llama', vocab_size=300)
    tokenizer = byte_tokenizer()
    actor = Actor(model)
    asked = {'max_new_tokens': 4}
    assert tokenizer.eos_token_id == 258 and model.config.eos_token_id == 2
    assert sampling_for(actor, tokenizer, asked)[0].eos_token_ids == (258,), "2 is the family's default, a byte here"
    assert sampling_for(actor, None, asked)[0].eos_token_ids == (2,)
    model.generation_config.eos_token_id = [7, 258, 9, 1000]
    assert sampling_for(actor, tokenizer, asked)[0].eos_token_ids == (258, 7, 9), 'the model has no token 1000'
    assert sampling_for(actor, tokenizer, asked | {'eos_token_id': 5})[0].eos_token_ids == (5,), 'what is asked for'
    model.generation_config = GenerationConfig(eos_token_id=7)
    model.save_pretrained(tmp_path)
    assert sampling_for(AutoActor(tmp_path), tokenizer, asked)[0].eos_token_ids == (258, 7), 'a file names it'
