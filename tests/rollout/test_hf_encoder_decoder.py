"""The hf engine with encoder-decoders: its samples, log-probs and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from engine_calls import BEYOND_KEYS_AND_VALUES, tiny_of
from torch import Tensor

from chatgpt.batching import collate
from chatgpt.nn import Actor, ILQLModel
from chatgpt.rollout import Call, ExactDraws, HFEngine, LocalEngine, SamplingParams, stream_tokens
from chatgpt.rollout.randomness import sample_keys, uniforms
from chatgpt.rollout.registry import ENGINES, engine_for
from chatgpt.rollout.wire import check_policy
from chatgpt.testing import ENCODER_DECODERS, tiny_causal_lm
from chatgpt.types import Prompt, Sample

START = {'t5': 0, 'flan-t5': 0, 'bart': 2, 'marian': 0, 'switch_transformers': 0}
SIZES = {'vocab_size': 64, 'd_model': 32, 'd_kv': 8, 'd_ff': 48, 'num_layers': 2, 'num_heads': 4, 'num_experts': 2}

every = pytest.mark.parametrize('family', ENCODER_DECODERS)


def model(family: str) -> Any:
    if family == 'switch_transformers':
        depth = {'num_decoder_layers': 2, 'num_sparse_decoder_layers': 1}
        config = transformers.SwitchTransformersConfig(**SIZES, **depth, decoder_start_token_id=0)
        made: Any = transformers.SwitchTransformersForConditionalGeneration(config)
    else:
        made = tiny_causal_lm(family, positions=32)
    g = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=g))
    return made


def prompts() -> list[Prompt]:
    g = torch.Generator().manual_seed(1)
    return [Prompt(ids=torch.randint(3, 64, (length,), generator=g)) for length in (5, 3, 9, 1)]


def begun(actor: Actor, **options: Any) -> HFEngine:
    engine = HFEngine(**options)
    engine.begin(actor)
    return engine


def generated(engine: HFEngine, given: list[Prompt] | None = None, seed: int = 3, **sampling: Any) -> list[Sample]:
    given = prompts() if given is None else given
    limits = {'limits': sampling.pop('limits')} if 'limits' in sampling else {}
    call = Call.of(given, SamplingParams(**sampling), seed=seed, indices=range(len(given)), **limits)
    return engine.generate(call)


@torch.no_grad()
def by_hand(actor: Any, family: str, prompt: Tensor, index: int, seed: int, length: int, top_k: int = 0) -> Any:
    """Computes tokens and log-probs of one response without a cache."""
    ids, logprobs, filtered = [START[family]], [], []
    for position in range(length):
        out = actor.model(input_ids=prompt[None], decoder_input_ids=torch.tensor([ids]), output_hidden_states=True)
        table = actor.head(out.decoder_hidden_states[-1][0, -1]).log_softmax(-1)
        kept = table
        if top_k:
            kept = table.masked_fill(table < table.topk(top_k).values[-1], -torch.inf).log_softmax(-1)
        u = float(uniforms(sample_keys(seed, torch.tensor([index])), torch.tensor(position)))
        token = int((kept.exp().double().cumsum(0) <= u).sum())
        ids.append(token)
        logprobs.append(table[token])
        filtered.append(kept[token])
    return torch.tensor(ids[1:]), torch.stack(logprobs), torch.stack(filtered)


@pytest.mark.parametrize('family', [*ENCODER_DECODERS, 'switch_transformers'])
def test_draws_are_those_of_each_sequence_alone(family):
    actor = Actor(model(family))
    engine = begun(actor, max_batch_size=3)
    samples = generated(engine, max_new_tokens=6, top_k=5, pad_token_id=9)
    for sample, prompt, index in zip(samples, prompts(), range(4), strict=True):
        ids, logprobs, filtered = by_hand(actor, family, prompt.ids, index, 3, 6, 5)
        assert sample.response_ids.tolist() == ids.tolist() and sample.finish_reason == 'length'
        torch.testing.assert_close(sample.logprobs, logprobs, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(sample.filtered_logprobs, filtered, atol=1e-4, rtol=1e-4)
        assert bool((sample.edge_distances < 1).all())
    assert engine.abilities.reproducible
    engine.end()


@every
def test_log_probs_are_the_actors(family):
    actor = Actor(model(family))
    engine = begun(actor)
    ends = tuple(range(20, 36))
    filters = {'temperature': 0.7, 'top_p': 0.9, 'min_new_tokens': 2, 'eos_token_ids': ends}
    samples = generated(engine, prompts() * 4, seed=1, max_new_tokens=8, **filters)
    engine.end()
    got = actor(collate(samples), temperature=0.7).logprobs
    torch.testing.assert_close(torch.cat([s.logprobs for s in samples]), got.detach(), atol=1e-4, rtol=1e-4)
    assert {s.finish_reason for s in samples} == {'eos', 'length'}
    for sample in samples:
        last = [int(t) in ends for t in sample.response_ids]
        assert last[1:-1] == [False] * (len(last) - 2) and len(last) >= 2 and not last[0]
        assert sample.finish_reason == ('eos' if last[-1] else 'length') and (last[-1] or len(last) == 8)


@every
def test_greedy_is_transformers_own(family):
    made = model(family)
    greedy = {'max_new_tokens': 5, 'do_sample': False}
    for sample, prompt in zip(generated(begun(Actor(made)), **greedy), prompts(), strict=True):
        plain = {'eos_token_id': None, 'decoder_start_token_id': START[family], 'num_beams': 1}
        want = made.generate(prompt.ids[None], **greedy, **plain)
        assert sample.response_ids.tolist() == want[0, 1:].tolist()
        assert torch.equal(sample.edge_distances, torch.ones(5))


@every
def test_tokens_in_a_terminal_are_the_engines(family):
    actor = Actor(model(family))
    prompt = prompts()[0].ids
    streamed = list(stream_tokens(actor, prompt, SamplingParams(max_new_tokens=6), seed=3, index=4))
    assert streamed == by_hand(actor, family, prompt, 4, 3, 6)[0].tolist()


def test_extras_and_stops_and_own_limits():
    actor = Actor(model('bart'))
    engine = begun(actor)
    first = generated(engine, max_new_tokens=6)
    barred = int(first[0].response_ids[0])
    samples = generated(engine, max_new_tokens=6, extra={'suppress_tokens': [barred]})
    assert all(barred not in s.response_ids.tolist() for s in samples)
    got = actor(collate(samples)).logprobs.detach()  # suppressed tokens affect the filtered log-probs only
    torch.testing.assert_close(torch.cat([s.logprobs for s in samples]), got, atol=1e-4, rtol=1e-4)
    assert bool((torch.cat([s.filtered_logprobs for s in samples]) > got).all())
    stopped = generated(engine, max_new_tokens=6, stop=lambda ids: len(ids) == 2)
    assert [s.num_actions for s in stopped] == [2] * 4
    for limited, sample, n in zip(
        generated(engine, max_new_tokens=6, limits=[1, None, 3, 2]), first, (1, 6, 3, 2), strict=True
    ):
        assert limited.response_ids.tolist() == sample.response_ids[:n].tolist()
    beams = generated(engine, max_new_tokens=4, do_sample=False, extra={'num_beams': 2})
    assert not engine.abilities.reproducible  # until the next sampled call
    got = actor(collate(beams)).logprobs.detach()
    torch.testing.assert_close(torch.cat([s.logprobs for s in beams]), got, atol=1e-4, rtol=1e-4)
    generated(engine, max_new_tokens=6)
    assert engine.abilities.reproducible


@pytest.mark.parametrize('family', ['t5', 'bart'])
def test_ilql_draws_from_its_improved_policy(family):
    torch.manual_seed(0)
    ilql = ILQLModel(model(family)).eval()
    with torch.no_grad():
        for head in ilql.target_q_heads:
            head[-1].weight.mul_(20)
    with ilql.decoding(2.0):
        engine = begun(ilql)
        samples = generated(engine, max_new_tokens=4)
        for sample, prompt, index in zip(samples, prompts(), range(4), strict=True):
            ids, logprobs, _ = by_hand(ilql, family, prompt.ids, index, 3, 4)
            assert sample.response_ids.tolist() == ids.tolist()
            torch.testing.assert_close(sample.logprobs, logprobs, atol=1e-4, rtol=1e-4)
        with pytest.raises(ValueError, match='only sampling and greedy decoding see; leave out num_beams'):
            generated(engine, max_new_tokens=4, extra={'num_beams': 2})
        engine.end()
    plain = generated(begun(ilql), max_new_tokens=4)
    assert [s.response_ids.tolist() for s in plain] != [s.response_ids.tolist() for s in samples]


# --- choice of engine, and errors ------------------------------------------------------------------------------------


def test_the_engine_is_chosen_in_one_place():
    assert isinstance(engine_for(Actor(model('t5')), keep=False), HFEngine)
    assert isinstance(engine_for(Actor(tiny_causal_lm('gpt2')), keep=False), LocalEngine)
    assert ENGINES.find('auto').make('any') is None


@pytest.mark.parametrize('kind', BEYOND_KEYS_AND_VALUES)
def test_a_model_that_keeps_more_than_keys_and_values_gets_the_engine_of_transformers(kind):
    actor = Actor(tiny_of(kind, **BEYOND_KEYS_AND_VALUES[kind]))
    assert isinstance(engine_for(actor, keep=False), HFEngine)
    with pytest.raises(ValueError, match="use engine='hf'"):
        LocalEngine().begin(actor)


@pytest.mark.parametrize('kind', ['Mistral', 'Llama4Text'])
def test_a_model_with_windows_of_attention_gets_the_local_engine(kind):
    own = {'Llama4Text': {'head_dim': 16, 'intermediate_size_mlp': 64, 'num_local_experts': 2}}
    assert isinstance(engine_for(Actor(tiny_of(kind, **own.get(kind, {'sliding_window': 16})))), LocalEngine)


def test_engines_of_decoders_refuse_an_encoder_decoder():
    actor = Actor(model('t5'))
    with pytest.raises(ValueError, match="LocalEngine decodes causal language models, and T5.* use engine='hf'"):
        LocalEngine().begin(actor)
    for name in ('RemoteEngine', 'VLLMEngine'):
        with pytest.raises(ValueError, match=f'{name} decodes causal language models'):
            check_policy(actor, name)
    with pytest.raises(ValueError, match='which decodes no encoder-decoders'):
        ExactDraws(HFEngine())


def test_prompts_that_do_not_fit_a_side():
    engine = begun(Actor(model('bart')))
    long = [Prompt(ids=torch.arange(3, 33))]
    assert len(generated(engine, long, max_new_tokens=31)) == 1
    for given, tokens in ((long, 32), ([Prompt(ids=torch.arange(3, 36))], 2)):
        with pytest.raises(ValueError, match="past the model's 32 positions .* on one side"):
            generated(engine, given, max_new_tokens=tokens)
    engine = begun(Actor(model('t5')))
    assert len(generated(engine, long, max_new_tokens=40)) == 1
    later_turn = Call.of(prompts(), SamplingParams(max_new_tokens=2), seed=0, indices=range(4), offsets=[0, 3, 0, 0])
    with pytest.raises(ValueError, match='is an encoder-decoder, whose prompt cannot hold what it has written'):
        engine.generate(later_turn)


SIDE = {'layers': 1, 'ffn_dim': 16, 'attention_heads': 2}
SMALL = {f'{side}_{name}': n for side in ('encoder', 'decoder') for name, n in SIDE.items()}
SMALL |= {'d_model': 16, 'vocab_size': 64, 'max_position_embeddings': 64}


@pytest.mark.parametrize(('kind', 'served'), [('M2M100', False), ('Pegasus', True)])
def test_a_model_that_counts_positions_from_padding_is_refused(kind, served):
    """Generation and forward of M2M-100 differ only after a sampled padding token."""
    config = getattr(transformers, f'{kind}Config')(**SMALL, pad_token_id=1, decoder_start_token_id=2)
    torch.manual_seed(0)
    actor = Actor(transformers.AutoModelForSeq2SeqLM.from_config(config)).eval()
    if served:
        begun(actor).end()
        return
    with pytest.raises(ValueError, match=r'M2M100.* generates does not agree .* after a drawn padding token \(1\)'):
        begun(actor)


def test_block_sparse_attention_is_refused():
    config = transformers.BigBirdPegasusConfig(**SMALL, decoder_start_token_id=2, attention_type='block_sparse')
    with pytest.raises(ValueError, match="set attention_type to 'original_full' in config.json"):
        Actor(transformers.AutoModelForSeq2SeqLM.from_config(config))


def test_min_p_cuts_what_the_temperature_has_sharpened():
    made = model('bart')
    engine = begun(Actor(made))
    prompt, temperature = prompts()[0].ids, 0.7
    filters = {'temperature': temperature, 'extra': {'min_p': 0.2}}
    samples = generated(engine, [Prompt(ids=prompt)] * 200, seed=0, max_new_tokens=1, **filters)
    with torch.no_grad():
        table = made(input_ids=prompt[None], decoder_input_ids=torch.tensor([[2]])).logits[0, -1]
    plain = (table / temperature).log_softmax(-1)
    kept = plain.exp() >= 0.2 * plain.exp().max()
    wrong = table.softmax(-1) >= 0.2 * table.softmax(-1).max()
    assert 1 < kept.sum() < wrong.sum()  # otherwise the test could not fail
    filtered = plain.masked_fill(~kept, -torch.inf).log_softmax(-1)
    for sample in samples:
        token = int(sample.response_ids[0])
        assert kept[token]
        torch.testing.assert_close(sample.logprobs[0], plain[token], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(sample.filtered_logprobs[0], filtered[token], atol=1e-4, rtol=1e-4)
