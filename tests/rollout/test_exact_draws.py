"""`ExactDraws`: tokens do not depend on the batch, even if those of the engine alone do."""

from __future__ import annotations

import math

import pytest
import torch
from engine_calls import prompts_of

import chatgpt.rollout.local.run as local
from chatgpt.nn import Actor
from chatgpt.rollout import Call, HFEngine, LocalEngine, SamplingParams
from chatgpt.rollout.exact import ExactDraws, edge_bound
from chatgpt.rollout.randomness import uniforms
from chatgpt.rollout.sampling import TokenSampler
from chatgpt.testing import FAMILIES, tiny_causal_lm
from chatgpt.types import Prompt

NOISE = 5e-3


class Uneven(Actor):
    """An actor with an error in its logits that depends on the shape of the batch, like rounding, but is larger."""

    def head(self, hidden):
        logits = super().head(hidden)
        generator = torch.Generator().manual_seed(math.prod(hidden.shape[:-1]))
        # all rows have the same error, so it does not depend on their order
        return logits + NOISE * (2 * torch.rand(logits.shape[-1], generator=generator, dtype=torch.float32) - 1)


def responses(engine, actor, prompts, sampling, *, together: int, seed: int = 11) -> list[tuple[list[int], str]]:
    """Returns tokens and finish reasons, from calls with `together` prompts each."""
    engine.begin(actor)
    found = []
    for first in range(0, len(prompts), together):
        part = prompts[first : first + together]
        found += engine.generate(Call.of(part, sampling, seed=seed, indices=range(first, first + len(part))))
    engine.end()
    return [(s.response_ids.tolist(), s.finish_reason) for s in found]


def stop_at(*tokens: int):
    return lambda ids: ids[-1] in tokens and ids[-2:-1] != ids[-1:]


SETTINGS = {
    'filters': {'top_k': 20, 'top_p': 0.9, 'temperature': 0.7, 'max_length': 30, 'max_new_tokens': None},
    'stop': {'stop': stop_at(7, 8, 9), 'min_new_tokens': 3, 'eos_token_ids': (5,)},
    'greedy': {'do_sample': False, 'eos_token_ids': (4,)},
}


@pytest.mark.parametrize('name', SETTINGS)
def test_another_batch_changes_tokens_of_the_engine_alone_and_none_of_exact_draws(name):
    actor = Uneven(tiny_causal_lm('gpt2', tie_word_embeddings=False))
    sampling = SamplingParams(**{'max_new_tokens': 24, **SETTINGS[name]})
    prompts = prompts_of()
    alone = [responses(LocalEngine(), actor, prompts, sampling, together=n) for n in (8, 3)]
    assert name == 'greedy' or alone[0] != alone[1]  # the two best logits are seldom close enough
    engines = [ExactDraws(LocalEngine(max_batch_size=n)) for n in (256, 3, 256)]
    found = [responses(e, actor, prompts, sampling, together=n) for e, n in zip(engines, (8, 8, 1), strict=True)]
    assert found[0] == found[1] == found[2]
    assert all(len(ids) <= sampling.room(len(p.ids)) for (ids, _), p in zip(found[0], prompts, strict=True))
    if name != 'greedy':
        assert all(0 < e.changed < e.redrawn for e in engines)
    if name == 'stop':
        assert len({reason for _, reason in found[0]}) > 1


def test_tokens_are_those_of_a_slow_loop_over_one_sequence():
    actor = Uneven(tiny_causal_lm('gpt2', tie_word_embeddings=False))
    stop = stop_at(7, 8, 9, 10, 11, 12)
    sampling = SamplingParams(max_new_tokens=40, temperature=0.8, min_new_tokens=4, eos_token_ids=(3, 4), stop=stop)
    prompts = prompts_of()
    found = responses(ExactDraws(LocalEngine()), actor, prompts, sampling, together=8)
    sampler = TokenSampler(sampling, 'cpu')
    actor.eval()
    for index, (prompt, (ids, reason)) in enumerate(zip(prompts, found, strict=True)):
        sampled: list[int] = []
        while True:
            so_far = prompt.ids.tolist() + sampled
            width = next(w for w in (32, 64, 128) if w >= len(so_far))
            row = torch.tensor([so_far + [so_far[0]] * (width - len(so_far))])
            with torch.no_grad():
                hidden = actor.trunk(row, position_ids=torch.arange(width)[None])[0]
                block = (len(so_far) - 1) // 32
                logits = actor.head(hidden[32 * block : 32 * block + 32])[(len(so_far) - 1) % 32]
            key = local.sample_keys(11, torch.tensor([index]))
            uniform = uniforms(key, torch.tensor([len(sampled)]))[:, None]
            sampled.append(int(sampler(logits[None], uniform, torch.tensor([len(sampled) < 4])).token))
            if sampled[-1] in (3, 4) or (len(sampled) >= 4 and stop(sampled)) or len(sampled) == 40:
                break
        assert ids == sampled
        assert reason == ('eos' if sampled[-1] in (3, 4) else 'stop' if stop(sampled) else 'length')


@pytest.mark.parametrize('filters', [{}, {'top_k': 5}, {'top_p': 0.8}, {'top_k': 9, 'top_p': 0.6}])
def test_no_draw_beyond_the_bound_flips_and_some_within_do(filters):
    """Uses random distributions, errors of d in random directions, and many uniform numbers."""
    generator = torch.Generator().manual_seed(1)
    d, rows = 1e-2, 20000
    sampler = TokenSampler(SamplingParams(max_new_tokens=1, **filters), 'cpu')
    logits = 2 * torch.randn(rows, 12, generator=generator)
    # every log-prob moves by at most d: half of it in the logits, half through the normaliser
    moved = logits + d / 2 * torch.where(torch.rand(rows, 12, generator=generator) < 0.5, -1.0, 1.0)
    assert float((logits.log_softmax(-1) - moved.log_softmax(-1)).abs().max()) <= d * (1 + 1e-4)
    uniform = torch.rand(rows, 1, generator=generator, dtype=torch.float64)
    one, other = sampler(logits, uniform), sampler(moved, uniform)
    flipped = one.token != other.token
    assert flipped.sum() > 20
    assert float(one.edge_distance[flipped].max()) <= edge_bound(d, filtered=bool(filters))
    # the bound is not far from tight
    assert float(one.edge_distance[flipped].max()) > edge_bound(d, filtered=bool(filters)) / 8


def test_the_bound_by_hand():
    # two tokens of equal logits that move apart by d each: F = 1/2 becomes sigmoid(d)
    assert edge_bound(0.02) == pytest.approx(1 / (1 + math.exp(-0.02)) - 1 / (1 + math.exp(0.02)), rel=1e-12)
    assert edge_bound(1e-6) == pytest.approx(0.5e-6, rel=1e-6)
    assert edge_bound(1e-6, filtered=True) == pytest.approx(1e-6, rel=1e-5)


@pytest.mark.parametrize('family', FAMILIES)
def test_an_ordinary_model_seldom_needs_it_and_keeps_its_tokens(family):
    actor, prompts, engine = Actor(tiny_causal_lm(family)), prompts_of(), ExactDraws(LocalEngine())
    sampling = SamplingParams(max_new_tokens=20)
    found = [responses(e, actor, prompts, sampling, together=8) for e in (engine, LocalEngine())]
    assert found[0] == found[1]
    assert engine.redrawn <= 2 and engine.changed == 0


def test_in_16_bits():
    actor = Actor(tiny_causal_lm('llama')).to(torch.bfloat16)
    sampling, prompts = SamplingParams(max_new_tokens=30), prompts_of()
    engines = ExactDraws(LocalEngine()), ExactDraws(LocalEngine())
    found = [responses(e, actor, prompts, sampling, together=n) for e, n in zip(engines, (8, 1), strict=True)]
    assert found[0] == found[1]
    assert all(e.redrawn > 8 * 15 for e in engines)  # the bound is large, so nearly all draws are repeated


def test_a_bound_that_proves_too_small_is_an_error():
    class Wild(Actor):
        calls = 0

        def head(self, hidden):
            self.calls += 1
            return super().head(hidden) + (torch.arange(64) == 5) * (1e-2 if len(hidden) == 2 else 0.0)

    actor = Wild(tiny_causal_lm('gpt2'))
    engine = ExactDraws(LocalEngine())
    engine.begin(actor)
    sampling = SamplingParams(max_new_tokens=30)
    engine.generate(Call.of(prompts_of()[:4], sampling, seed=11, indices=range(4)))
    with pytest.raises(RuntimeError, match=r'draws were cleared with at most \d\.\de-0[56]'):
        engine.generate(Call.of(prompts_of()[:2], sampling, seed=11, indices=range(2)))


def test_what_cannot_be_computed_again_is_refused():
    with pytest.raises(ValueError, match=r"HFEngine computes elsewhere or otherwise; use engine='local'"):
        ExactDraws(HFEngine())

    class Peeking(Actor):
        def trunk(self, input_ids, **kwargs):
            return super().trunk(input_ids, **kwargs) + 1e-6 * input_ids.double().mean(1)[:, None, None]

    engine = ExactDraws(LocalEngine())
    with pytest.raises(ValueError, match='later tokens change the last bits of a forward'):
        engine.begin(Peeking(tiny_causal_lm('gpt2')))
    with pytest.raises(ValueError, match='call begin'):
        engine.generate(Call.of(prompts_of()[:1], SamplingParams(max_new_tokens=1), seed=0, indices=[0]))


def test_samples_go_on_at_an_offset_and_keep_what_belongs_to_them():
    actor = Uneven(tiny_causal_lm('gpt2', tie_word_embeddings=False))
    engine = ExactDraws(LocalEngine())
    engine.begin(actor)
    prompts, ask = prompts_of(), {'seed': 11, 'indices': range(8), 'groups': [0, 0, 1, 1, 2, 2, 3, 3]}
    for prompt in prompts:
        prompt.columns['answer'] = 'yes'
    whole = engine.generate(Call.of(prompts, SamplingParams(max_new_tokens=40), **ask))
    assert engine.changed > 0
    later = [Prompt(ids=torch.cat([p.ids, s.response_ids[:7]])) for p, s in zip(prompts, whole, strict=True)]
    rest = engine.generate(Call.of(later, SamplingParams(max_new_tokens=33), offsets=[7] * 8, **ask))
    assert [s.response_ids.tolist() for s in rest] == [s.response_ids[7:].tolist() for s in whole]
    for i, sample in enumerate(whole):
        assert (sample.index, sample.group, sample.columns) == (i, i // 2, {'answer': 'yes'})
        per_token = (sample.logprobs, sample.filtered_logprobs, sample.edge_distances, sample.response_mask)
        assert all(len(x) == 40 for x in per_token) and not sample.response_ids.is_inference()
        assert (sample.prompt_ids == prompts[i].ids).all()
