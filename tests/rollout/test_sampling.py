"""Sampling settings; the step from logits to tokens against loops in float64; the hash of random numbers against plain
Python integers; the comparison of samples."""

from __future__ import annotations

import math

import pytest
import torch
from cuda_on_cpu import pretend_cuda
from engine_calls import generated
from transformers import GenerationConfig

from chatgpt.nn import Actor, AutoActor
from chatgpt.rollout import HFEngine, LocalEngine, SamplingParams, compare_samples, from_generation_kwargs
from chatgpt.rollout.randomness import (
    _GAMMA,
    COLUMNS,
    _mix,
    edge_distances,
    in_two_levels,
    inverse_cdf,
    sample_keys,
    uniforms,
)
from chatgpt.rollout.sampling import TokenSampler, sampling_for
from chatgpt.testing import byte_tokenizer, tiny_causal_lm
from chatgpt.types import Prompt, Sample


def slow_filter(logits: list[float], temperature: float, top_k: int, top_p: float, barred: set[int]) -> list[float]:
    """Computes filtered probabilities in float64, token by token."""
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
        # the token's cumulative interval contains u
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
        ({'top_k': 2}, [0.5, 0.2500005, 0.2499995], True),  # rounding may swap tokens 1 and 2 for any u
        ({'top_k': 2}, [0.5, 0.3, 0.2], False),
        ({'top_p': 0.75}, [0.5, 0.25, 0.15, 0.1], True),  # exactly at a cumulative sum of 0.5 + 0.25
        ({'top_p': 0.65}, [0.5, 0.25, 0.15, 0.1], False),
    ],
)
def test_edge_distance_knows_the_threshold_of_a_filter(filters, probs, near):
    u = uniforms(sample_keys(5, torch.arange(200)), torch.tensor(0))[:, None]
    draw = TokenSampler(SamplingParams(max_new_tokens=1, **filters), 'cpu')(
        torch.tensor(probs).log().expand(200, -1), u
    )
    edges = draw.edge_distance
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
    others = {'num_beams': 4, 'repetition_penalty': 1.2}  # supported by transformers only
    assert dict(from_generation_kwargs(max_new_tokens=3, **others).extra) == others
    sampling = from_generation_kwargs(byte_tokenizer(), max_new_tokens=3, stop_strings='xy')
    assert sampling.stop([ord('x'), ord('y')]) and not sampling.stop([ord('y'), ord('x')])


@pytest.mark.parametrize(
    ('name', 'value', 'message'),
    [
        ('temprature', 1, "'temprature' is unknown; did you mean .*temperature"),
        ('topk', 1, "'topk' is unknown; did you mean .*top_k"),
        ('num_return_sequences', 4, 'num_return_sequences=4'),
        ('stop_strings', ['x'], 'needs a tokenizer'),
    ],
)
def test_generation_kwargs_that_are_refused(name, value, message):
    with pytest.raises(ValueError, match=message):
        from_generation_kwargs(max_new_tokens=3, **{name: value})


def test_a_stop_and_stop_strings_are_not_taken_together():
    kwargs = {'max_new_tokens': 4, 'stop': lambda ids: True}
    assert sampling_for(Actor(tiny_causal_lm()), byte_tokenizer(), kwargs)[0].stop is kwargs['stop']
    with pytest.raises(ValueError, match='stop and stop_strings are both given; give one'):
        sampling_for(Actor(tiny_causal_lm()), byte_tokenizer(), kwargs | {'stop_strings': 'xy'})


def test_every_end_token_of_the_model_counts(tmp_path):
    """Chat models end a turn with other tokens than the tokenizer's end token."""
    model = tiny_causal_lm('llama', vocab_size=300)
    tokenizer = byte_tokenizer()
    actor = Actor(model)
    kwargs = {'max_new_tokens': 4}
    assert tokenizer.eos_token_id == 258 and model.config.eos_token_id == 2
    assert sampling_for(actor, tokenizer, kwargs)[0].eos_token_ids == (258,), "2 is the family's default, a byte here"
    assert sampling_for(actor, None, kwargs)[0].eos_token_ids == (2,)
    model.generation_config.eos_token_id = [7, 258, 9, 1000]
    assert sampling_for(actor, tokenizer, kwargs)[0].eos_token_ids == (258, 7, 9), 'the model has no token 1000'
    assert sampling_for(actor, tokenizer, kwargs | {'eos_token_id': 5})[0].eos_token_ids == (5,), 'what is asked for'
    assert sampling_for(actor, tokenizer, kwargs | {'eos_token_ids': (13,)})[0].eos_token_ids == (13,)
    model.generation_config = GenerationConfig(eos_token_id=7)
    model.save_pretrained(tmp_path)
    assert sampling_for(AutoActor(tmp_path), tokenizer, kwargs)[0].eos_token_ids == (258, 7), 'a file names it'


def test_several_end_tokens():
    for ids, ends in (((3, 7), [False, True, True, False]), ((7,), [False, False, True, False])):
        sampler = TokenSampler(SamplingParams(max_new_tokens=1, eos_token_ids=ids), 'cpu')
        assert sampler.is_end(torch.tensor([1, 3, 7, 8])).tolist() == ends


@pytest.mark.parametrize('engine', [LocalEngine, HFEngine])
def test_a_response_ends_with_any_of_them(engine):
    actor, tokenizer = Actor(tiny_causal_lm('llama', vocab_size=300)).eval(), byte_tokenizer()

    def response() -> Sample:
        sampling = sampling_for(actor, tokenizer, {'max_new_tokens': 12, 'do_sample': False})[0]
        return generated(engine(), actor, sampling, [Prompt(ids=torch.tensor([5, 6]))])[0]

    free = response().response_ids.tolist()
    assert len(free) == 12
    actor.model.generation_config.eos_token_id = [258, free[4]]
    ended = response()
    assert ended.response_ids.tolist() == free[: free.index(free[4]) + 1] and ended.finish_reason == 'eos'


# ---------------------------------------------------------------- uniforms and inverse cumulative distribution

MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15


def mix(x: int) -> int:
    """SplitMix64's finaliser on unsigned Python integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def uniform(seed: int, index: int, position: int) -> float:
    start = mix(((seed & MASK) + GAMMA) & MASK)
    key = mix(((start ^ index) + GAMMA) & MASK)
    return (mix(((key ^ position) + GAMMA) & MASK) >> 12) / 2**52


def test_finaliser_is_splitmix64s():
    # the first two outputs of SplitMix64 with seed 0, as published with the algorithm's reference implementation
    state = torch.tensor([0, _GAMMA]) + _GAMMA
    assert [int(x) & MASK for x in _mix(state)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


@pytest.mark.parametrize('seed', [0, 1, 42, -3, 2**63, 2**64 - 1])
def test_uniforms_equal_the_integer_reference(seed):
    indices = torch.tensor([0, 1, 2, 999, 2**40])
    positions = torch.tensor([0, 1, 2, 77, 100_000])
    got = uniforms(sample_keys(seed, indices)[:, None], positions)
    assert got.dtype == torch.float64
    want = [[uniform(seed, i, t) for t in positions.tolist()] for i in indices.tolist()]
    assert got.tolist() == want


def test_inverse_cdf_equals_a_slow_loop():
    generator = torch.Generator().manual_seed(0)
    probs = torch.softmax(torch.randn(40, 9, generator=generator) * 2, dim=-1)
    probs[:, 4] = 0
    probs = probs / probs.sum(-1, keepdim=True)
    u = torch.rand(40, 1, generator=generator, dtype=torch.float64)
    token, room = inverse_cdf(probs, u)
    edges = edge_distances(room, probs.gather(1, token))
    for row in range(40):
        total = math.fsum(probs[row].tolist())
        low = 0.0
        expected = 0
        while float(u[row]) * total >= low + float(probs[row, expected]):
            low += float(probs[row, expected])
            expected += 1
        assert int(token[row]) == expected
        p = float(probs[row, expected])
        want = min(float(u[row]) * total - low, low + p - float(u[row]) * total)
        assert float(edges[row]) == pytest.approx(want, abs=1e-6)
        assert abs(float(edges[row]) - (float(u[row]) * total - low + 0.01)) > 1e-3  # negative control: a shifted edge


@pytest.mark.parametrize('scale', [1.0, 0.99999, 1.00001])
def test_a_token_of_probability_zero_is_never_drawn(scale):
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.25, 0.5, 0.0, 0.0]]) * scale
    uniform = torch.tensor([[0.0], [2.0**-52], [0.5], [1 - 2.0**-52]], dtype=torch.float64)
    assert inverse_cdf(probs.expand(4, -1), uniform)[0].flatten().tolist() == [1, 1, 4, 4]


@pytest.mark.parametrize('size', [64, 70, 7])
def test_two_levels_draw_the_tokens_of_a_slow_loop(size):
    generator = torch.Generator().manual_seed(1)
    probs = torch.softmax(torch.randn(30, size, generator=generator) * 2, dim=-1)
    probs[:, : size // 3] = 0  # whole blocks without probability
    probs[::2, -3:] = 0
    uniform = torch.rand(30, 1, generator=generator, dtype=torch.float64)
    uniform[:2, 0] = torch.tensor([0.0, 1 - 2.0**-52], dtype=torch.float64)
    token, room = in_two_levels(probs, uniform, columns=8)
    for row in range(30):
        numbers = probs[row].tolist()
        target = float(uniform[row]) * math.fsum(numbers)
        ends = [math.fsum(numbers[: i + 1]) for i in range(size)]
        want = next(i for i, end in enumerate(ends) if end > target)
        assert int(token[row]) == want and numbers[want] > 0
        assert float(room[row]) == pytest.approx(ends[want] - target, abs=1e-12)
    one_level = inverse_cdf(probs, uniform)
    assert torch.equal(token, one_level[0]) and torch.allclose(room, one_level[1], rtol=0, atol=1e-12)


def test_two_levels_of_nan_give_a_token_within_the_row_and_a_room_of_nan():
    probs = torch.full((2, 20), 0.05)
    probs[1] = float('nan')
    token, room = in_two_levels(probs, torch.full((2, 1), 0.5, dtype=torch.float64), columns=8)
    assert 0 <= int(token.min()) <= int(token.max()) < 20 and room.isnan().tolist() == [[False], [True]]


def test_two_levels_never_draw_a_token_of_probability_zero_at_the_end_of_a_block():
    """The sum of the first block is rounded up above the end of its scan; the uniform number is between them."""
    probs = torch.zeros(1, 16)
    probs[0, 2], probs[0, 5], probs[0, 9] = 0.25, 0.25, 0.5
    real = torch.Tensor.sum

    def rounded(self, *args, **kwargs):
        return real(self, *args, **kwargs) + (torch.tensor([[2.0**-40, 0.0]]).double() if self.dim() == 3 else 0.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, 'sum', rounded)
        uniform = torch.tensor([[0.5 * (1 + 2.0**-44)]], dtype=torch.float64)
        token, room = in_two_levels(probs, uniform, columns=8)
    assert token.tolist() == [[5]] and abs(float(room)) < 2.0**-38


def test_an_accelerator_scans_in_two_levels_and_a_cpu_in_one(monkeypatch):
    probs = torch.softmax(torch.randn(3, COLUMNS + 40, generator=torch.Generator().manual_seed(2)), dim=-1)
    uniform = torch.tensor([[0.1], [0.5], [0.99]], dtype=torch.float64)
    cdf = probs.cumsum(-1, dtype=torch.float64)
    token, room = inverse_cdf(probs, uniform)
    want = torch.searchsorted(cdf, uniform * cdf[:, -1:], right=True)
    assert torch.equal(token, want) and torch.equal(room, cdf.gather(1, want) - uniform * cdf[:, -1:])
    with pretend_cuda() as cuda:
        scans = []
        real = torch.Tensor.cumsum
        monkeypatch.setattr(torch.Tensor, 'cumsum', lambda x, *a, **k: (scans.append(x.shape), real(x, *a, **k))[1])
        found = inverse_cdf(probs.to('cuda:0'), uniform.to('cuda:0'))[0]
        assert scans == [(3, 2), (3, COLUMNS)] and torch.equal(found.cpu(), want) and cuda.syncs.total() == 3


@pytest.mark.gpu
def test_cuda_gives_the_same_bits():
    if not torch.cuda.is_available():
        pytest.skip('needs a CUDA device')
    indices, positions = torch.arange(1000), torch.arange(200)
    cpu = uniforms(sample_keys(42, indices)[:, None], positions)
    cuda = uniforms(sample_keys(42, indices.cuda())[:, None], positions.cuda())
    assert torch.equal(cpu, cuda.cpu())


# ---------------------------------------------------------------------- comparison of samples


def sample(index: int, ids: list[int], edges: list[float] | None = None, prompt: tuple[int, ...] = (1,)) -> Sample:
    n = len(ids)
    return Sample(
        index=index,
        group=index,
        prompt_ids=torch.tensor(prompt),
        response_ids=torch.tensor(ids),
        response_mask=torch.ones(n, dtype=torch.bool),
        logprobs=torch.zeros(n),
        filtered_logprobs=torch.zeros(n),
        edge_distances=torch.tensor(edges if edges is not None else [0.1] * n),
        finish_reason='length',
    )


def test_samples_are_compared_up_to_a_difference_that_an_edge_explains():
    a = [sample(0, [5, 6]), sample(1, [7])]
    report = compare_samples(a, reversed(a))
    assert report.equal and report.explained and (report.num_samples, report.num_tokens) == (2, 3)
    report = compare_samples([sample(0, [5, 6, 7, 8], [0.1, 2e-6, 0.1, 0.1])], [sample(0, [5, 9, 1, 1])])
    assert not report.equal and report.explained and report.num_tokens == 1
    (difference,) = report.differences
    assert (difference.index, difference.position, difference.tokens) == (0, 1, (6, 9))
    assert difference.edge_distance == pytest.approx(2e-6)
    assert not compare_samples([sample(0, [5, 6], [0.1, 2e-6])], [sample(0, [5, 9])], tolerance=1e-6).explained


def test_a_difference_away_from_an_edge_or_of_length_is_not_explained():
    report = compare_samples([sample(3, [5, 6])], [sample(3, [5, 7])])
    assert not report.explained and 'sample 3, position 1: 6 or 7, not explained' in str(report)
    report = compare_samples([sample(0, [5, 6], [0.0, 0.0])], [sample(0, [5], [0.0])])
    assert report.differences[0].tokens == (6, None) and not report.explained


def test_other_samples_are_refused():
    with pytest.raises(ValueError, match=r'indices \[1\] are on one side only'):
        compare_samples([sample(0, [5])], [sample(0, [5]), sample(1, [5])])
    with pytest.raises(ValueError, match='sample 0 has two different prompts'):
        compare_samples([sample(0, [5])], [sample(0, [5], prompt=(2,))])
