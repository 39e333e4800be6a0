"""Best of n, and the stream of a single response."""

from __future__ import annotations

import math

import pytest
import torch
from engine_calls import BEYOND_KEYS_AND_VALUES, generated, tiny_of

from chatgpt.nn import Actor, GPTActor
from chatgpt.rollout import BestOfN, Call, HFEngine, LocalEngine, SamplingParams, kl_bound, stream_tokens
from chatgpt.testing.fakes import tiny_config
from chatgpt.types import Prompt

PROMPTS = [Prompt(ids=torch.tensor([3, 4])), Prompt(ids=torch.tensor([5]))]


@pytest.fixture(scope='module')
def actor() -> GPTActor:
    torch.manual_seed(0)
    return GPTActor(config=tiny_config('gpt2', vocab_size=24, positions=48)).eval()


@pytest.fixture
def engine(actor):
    engine = LocalEngine()
    engine.begin(actor)
    yield engine
    engine.end()


def score(samples):
    return [float(s.response_ids.sum()) for s in samples]


def test_the_best_are_found_and_in_order(engine):
    sampling = SamplingParams(max_new_tokens=6)
    found = BestOfN(engine, score, sample_size=5, n_candidates=2)(PROMPTS, sampling, seed=3, first_index=10)
    for number, candidates in enumerate(found):
        plain = engine.generate(
            Call.of([PROMPTS[number]] * 5, sampling, seed=3, indices=range(10 + 5 * number, 15 + 5 * number))
        )
        want = sorted((int(s.response_ids.sum()) for s in plain), reverse=True)[:2]
        assert [c.score for c in candidates] == want
        assert [int(c.sample.response_ids.sum()) for c in candidates] == want
        assert want[0] > min(int(s.response_ids.sum()) for s in plain)  # the scores differ


def test_the_bound_of_the_divergence():
    assert kl_bound(1) == 0.0
    assert kl_bound(4) == pytest.approx(math.log(4) - 0.75)
    # equals the divergence if all scores differ: density n u^(n-1) against 1
    n, steps = 4, 200_000
    u = (torch.arange(steps, dtype=torch.float64) + 0.5) / steps
    density = n * u ** (n - 1)
    assert float((density * density.log()).mean()) == pytest.approx(kl_bound(n), abs=1e-6)


@pytest.mark.parametrize(
    ('scores', 'settings', 'sampling', 'sentence'),
    [
        (score, {'n_candidates': 3}, {}, 'n_candidates=3 must lie between 1 and sample_size=2'),
        (score, {}, {'do_sample': False}, 'greedy decoding gives 2 times the same response'),
        (lambda samples: [1.0], {}, {}, 'all of which must be finite'),
        (lambda samples: [1.0, float('nan'), 1.0, 1.0], {}, {}, 'all of which must be finite'),
    ],
)
def test_mistakes(engine, scores, settings, sampling, sentence):
    with pytest.raises(ValueError, match=sentence):
        best = BestOfN(engine, scores, sample_size=2, **settings)
        best(PROMPTS, SamplingParams(max_new_tokens=2, **sampling), seed=0)


@pytest.mark.parametrize(
    'settings',
    [
        {},
        {'do_sample': False},
        {'temperature': 0.7, 'top_k': 5},
        {'top_p': 0.8},
        {'min_new_tokens': 6, 'eos_token_ids': tuple(range(12))},
        {'eos_token_ids': tuple(range(8))},
        {'stop': lambda ids: len(ids) > 3},
        {'stop': lambda ids: True, 'min_new_tokens': 5},
    ],
)
def test_a_stream_gives_the_engines_tokens(actor, engine, settings):
    sampling = SamplingParams(max_new_tokens=12, **settings)
    for index, prompt in enumerate(PROMPTS):
        want = engine.generate(Call.of([prompt], sampling, seed=5, indices=[index]))[0].response_ids.tolist()
        assert list(stream_tokens(actor, prompt.ids, sampling, seed=5, index=index)) == want


@pytest.mark.parametrize(
    ('ids', 'tokens', 'sentence'),
    [
        ([], 3, 'prompt 0 is empty'),
        ([3] * 40, 9, "past the model's 48 positions"),
        ([24], 3, 'outside the vocabulary of 24'),
    ],
)
def test_a_stream_that_cannot_be(actor, ids, tokens, sentence):
    with pytest.raises(ValueError, match=sentence):
        next(stream_tokens(actor, torch.tensor(ids, dtype=torch.int64), SamplingParams(max_new_tokens=tokens), seed=0))


def test_a_stream_has_no_dropout_and_leaves_it_as_it_was():
    torch.manual_seed(0)
    actor = GPTActor(config=tiny_config('gpt2', vocab_size=24, positions=48, dropout=0.5)).train()
    actor.model.transformer.h[0].eval()  # mixed flags, which must be restored
    modes = [m.training for m in actor.modules()]
    first, second = (
        list(stream_tokens(actor, PROMPTS[0].ids, SamplingParams(max_new_tokens=20), seed=1)) for _ in range(2)
    )
    assert first == second
    stream = stream_tokens(actor, PROMPTS[0].ids, SamplingParams(max_new_tokens=20), seed=1)
    next(stream)
    assert not actor.training
    stream.close()
    assert [m.training for m in actor.modules()] == modes
    assert len(set(modes)) == 2


@pytest.mark.parametrize('kind', BEYOND_KEYS_AND_VALUES)
def test_a_stream_of_a_model_that_keeps_more_than_keys_and_values_gives_the_tokens_of_transformers(kind):
    actor = Actor(tiny_of(kind, **BEYOND_KEYS_AND_VALUES[kind]))
    sampling = SamplingParams(max_new_tokens=8, temperature=1.2)
    for index, sample in enumerate(generated(HFEngine(), actor, sampling, PROMPTS)):
        stream = stream_tokens(actor, PROMPTS[index].ids, sampling, seed=5, index=index)
        assert list(stream) == sample.response_ids.tolist()


def test_a_stream_refuses_settings_that_only_transformers_knows(actor):
    sampling = SamplingParams(max_new_tokens=3, extra={'repetition_penalty': 1.2})
    with pytest.raises(ValueError, match='stream_tokens cannot do repetition_penalty; leave it out'):
        next(stream_tokens(actor, PROMPTS[0].ids, sampling, seed=0))


@pytest.mark.parametrize('do_sample', [True, False])
def test_a_stream_ends_with_an_error_at_a_token_whose_logits_are_not_finite(do_sample):
    torch.manual_seed(0)
    actor = GPTActor(config=tiny_config('gpt2', vocab_size=24, positions=48))
    with torch.no_grad():
        actor.model.transformer.wpe.weight[4] = torch.nan  # the fourth token is predicted from there
    sampling = SamplingParams(max_new_tokens=9, do_sample=do_sample)
    stream = stream_tokens(actor, PROMPTS[0].ids, sampling, seed=0, index=7)
    assert len([next(stream) for _ in range(3)]) == 3
    with pytest.raises(FloatingPointError, match='sample 7 are not finite at response position 3'):
        next(stream)
