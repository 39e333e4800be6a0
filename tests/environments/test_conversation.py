"""Turns with keys and values kept in the cache: the same episodes as with new prompts, each token computed once."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest
import torch
from scripted_engine import NOTHING, played
from transformers import AutoModelForCausalLM, MistralConfig

from chatgpt.batching import collate
from chatgpt.environments import Environment, EnvironmentSettings
from chatgpt.nn import Actor
from chatgpt.nn.lora import convert_to_lora
from chatgpt.nn.nlpo import MaskedPolicy
from chatgpt.rollout import Abilities, Call, EngineAround, LocalEngine, SamplingParams, StopStrings
from chatgpt.rollout.local.append import append, find_append_form
from chatgpt.rollout.local.conversation import Conversation
from chatgpt.rollout.local.slot_cache import SlotCache
from chatgpt.testing import FAMILIES, byte_tokenizer, tiny_causal_lm

TOKENIZER = byte_tokenizer()
OBSERVATIONS = ('', '!', 'the board now stands as it stood before', ' ok')
ROOM = 200
SEED = 0
"""gives episodes of 1, 3, 4 and 5 turns"""


class Game(Environment):
    """Observations of no, one and many tokens, over 1 to 5 turns; may pause in a step."""

    def reset(self, seed, pause=0.0, **columns):
        self.random, self.pause, self.turns = random.Random(seed), pause, 0
        self.last = self.random.randint(1, 5)
        return 'play ' * self.random.randint(1, 4)

    def step(self, response):
        if self.pause:
            time.sleep(random.random() * self.pause)
        self.turns += 1
        observation = OBSERVATIONS[(self.turns + len(response)) % len(OBSERVATIONS)]
        return observation, float(len(response)), self.turns == self.last, False, {}


class ByRounds(EngineAround):
    """An engine that does not play turns."""

    def __init__(self, engine):
        super().__init__(engine)
        self.abilities = Abilities(copies_weights=False, reproducible=True)


def policy(family='gpt2', **config):
    torch.manual_seed(0)
    return Actor(
        tiny_causal_lm(family, vocab_size=len(TOKENIZER), tie_word_embeddings=False, **({'positions': 256} | config))
    )


def play(engine, actor, *, count=9, pause=0.0, sampling=None, stop=None):
    # a third of the byte values end a turn, so turns differ in length
    ends = (TOKENIZER.eos_token_id, *range(2, len(TOKENIZER), 3))
    given = {'max_new_tokens': ROOM, 'eos_token_ids': ends, 'stop': stop} | (sampling or {})
    given |= {'seed': SEED, 'indices': range(10, 10 + count), 'groups': [i // 2 for i in range(count)]}
    prompts = [replace(NOTHING, columns={'pause': pause})] * count
    settings = EnvironmentSettings(max_turn_tokens=6)
    return played(engine, Game, TOKENIZER, actor=actor, prompts=prompts, settings=settings, **given)


def same(a, b, *, bits=False):
    assert len(a) == len(b)
    for one, other in zip(a, b, strict=True):
        assert one.index == other.index and one.group == other.group
        assert one.prompt_ids.tolist() == other.prompt_ids.tolist()
        assert one.response_ids.tolist() == other.response_ids.tolist()
        assert torch.equal(one.response_mask, other.response_mask)
        assert one.finish_reason == other.finish_reason
        assert (one.episode.turns, one.episode.end) == (other.episode.turns, other.episode.end)
        for name in ('logprobs', 'filtered_logprobs', 'edge_distances'):
            x, y = getattr(one, name), getattr(other, name)
            assert torch.equal(x, y) if bits else torch.allclose(x, y, atol=1e-4), name


@pytest.mark.parametrize('family', FAMILIES)
@pytest.mark.parametrize('engine', [{}, {'max_batch_size': 3, 'fixed_steps': True}])
def test_episodes_are_those_of_rounds(family, engine):
    actor = policy(family)
    samples = play(LocalEngine(**engine), actor)
    assert {len(s.episode.turns) for s in samples} >= {1, 5}
    lengths = {b.start - a.stop for s in samples for a, b in zip(s.episode.turns, s.episode.turns[1:], strict=False)}
    assert {0, 1} < lengths and max(lengths) > 20
    same(samples, play(ByRounds(LocalEngine(**engine)), actor))


@pytest.mark.parametrize(
    ('sampling', 'stop'),
    [
        ({'min_new_tokens': 3}, None),
        ({'min_new_tokens': 2, 'top_k': 9, 'temperature': 0.8}, ('e', 'th')),
        ({'do_sample': False}, None),
        ({'max_new_tokens': None, 'max_length': 60}, None),
    ],
)
def test_settings_hold_for_each_turn(sampling, stop):
    actor = policy()
    stop = StopStrings(TOKENIZER, stop) if stop else None
    engine = {'max_batch_size': 3}
    samples = play(LocalEngine(**engine), actor, sampling=sampling, stop=stop)
    same(samples, play(ByRounds(LocalEngine(**engine)), actor, sampling=sampling, stop=stop))
    lengths = [t.stop - t.start for s in samples for t in s.episode.turns]
    assert len(set(lengths)) > 1 or not sampling.get('do_sample', True)
    shortest = min(t.stop - t.start for s in samples for t in s.episode.turns if t.stop < s.num_actions)
    assert shortest >= sampling.get('min_new_tokens', 1)


@pytest.mark.parametrize('max_batch_size', [256, 2])
def test_the_duration_of_steps_does_not_change_episodes(max_batch_size):
    actor = policy('llama')
    engine = {'max_batch_size': max_batch_size, 'refill_fraction': 0.3}
    first = play(LocalEngine(**engine), actor, pause=0.02)
    same(first, play(LocalEngine(**engine), actor), bits=True)


@pytest.mark.parametrize('fixed_steps', [False, True])
def test_turns_beyond_the_attention_window(fixed_steps):
    """Log-probs equal those of the actor's forward, with the window in its mask."""
    torch.manual_seed(0)
    sizes = {'hidden_size': 32, 'intermediate_size': 32, 'num_hidden_layers': 2, 'max_position_embeddings': 256}
    heads = {'num_attention_heads': 2, 'num_key_value_heads': 1, 'sliding_window': 24, 'initializer_range': 0.1}
    actor = Actor(AutoModelForCausalLM.from_config(MistralConfig(vocab_size=len(TOKENIZER), **sizes, **heads)))
    samples = play(LocalEngine(max_batch_size=3, fixed_steps=fixed_steps), actor)
    assert sum(s.num_tokens > 24 for s in samples) > 3 and len({len(s.episode.turns) for s in samples}) > 1
    with torch.no_grad():
        for s in samples:
            plain = actor.eval()(collate([s])).logprobs[s.response_mask]
            assert torch.allclose(plain, s.logprobs[s.response_mask], atol=1e-4)


def test_every_token_is_computed_once(monkeypatch):
    actor, counts = policy(), {'cached': 0, 'rounds': 0}

    def counting(name):
        trunk = Actor.trunk

        def counted(self, input_ids, *args, **kwargs):
            counts[name] += input_ids.numel()
            return trunk(self, input_ids, *args, **kwargs)

        return counted

    # one sequence at a time, so that no padding is counted
    engine = LocalEngine(max_batch_size=3, max_prefill_tokens=1, fixed_steps=False)
    results = {}
    for name, used in (('cached', engine), ('rounds', ByRounds(engine))):
        play(used, actor, count=1)  # the checks of a new model
        with monkeypatch.context() as patched:
            patched.setattr(Actor, 'trunk', counting(name))
            results[name] = play(used, actor)
    same(results['cached'], results['rounds'])
    samples = results['cached']
    prompts = {s.group: len(s.prompt_ids) for s in samples}
    # the last token of an episode is not fed back; a group's prompt is computed once if its samples enter together
    once = sum(len(s.prompt_ids) + s.num_actions - 1 for s in samples)
    shared = sum(len(s.prompt_ids) for s in samples) - sum(prompts.values())
    assert once - shared <= counts['cached'] <= once
    assert counts['rounds'] > 1.5 * once


def test_rows_are_refilled_during_steps_of_environments(monkeypatch):
    entered, live = [], []
    enter, decode = Conversation.enter, Conversation.decode

    def entering(self, filled):
        before = len(self.row_sample)
        enter(self, filled)
        entered.append((before, len(self.parked)))

    def decoding(self):
        live.append(len(self.row_sample))
        decode(self)

    monkeypatch.setattr(Conversation, 'enter', entering)
    monkeypatch.setattr(Conversation, 'decode', decoding)
    play(LocalEngine(max_batch_size=3), policy(), count=12)
    assert max(live) == 3
    beside = [parked for before, parked in entered if before]
    assert len(beside) > 4 and max(beside) > 1, 'others enter beside live rows, while some think'
    rounds = 5 * 6 * 4  # most turns, tokens of a turn, and batches of three
    assert len(live) < rounds


def test_an_appended_mask_that_a_model_does_not_apply_is_detected(monkeypatch):
    actor = policy()
    expected = play(LocalEngine(), actor)
    wrong = SlotCache.get_mask_sizes

    def appends(cache):
        return cache is not None and cache._prefill_rows is None and isinstance(cache._of[0], torch.Tensor)

    def one_slot_short(self, query_length, layer_idx=0):
        sizes = wrong(self, query_length, layer_idx)
        return (sizes[0] - 1, 0) if appends(self) else sizes

    trunk = Actor.trunk

    def without_mask(self, input_ids, *args, attention_mask=None, cache=None, **kwargs):
        if appends(cache):
            attention_mask = torch.zeros_like(attention_mask)  # bidirectional attention
        return trunk(self, input_ids, *args, attention_mask=attention_mask, cache=cache, **kwargs)

    monkeypatch.setattr(SlotCache, 'get_mask_sizes', one_slot_short)
    monkeypatch.setattr(Actor, 'trunk', without_mask)
    engine = LocalEngine(max_batch_size=3)
    same(play(engine, actor), expected)
    assert engine._append_form == 'again'


@pytest.mark.parametrize('family', FAMILIES)
def test_appended_tokens_have_the_states_of_a_plain_forward(family):
    actor = policy(family)
    engine = LocalEngine()
    engine.begin(actor)
    with torch.inference_mode():
        form = find_append_form(actor, engine._mask_form)
        assert form == {'bloom': 'apart'}.get(family, 'together')
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(3, len(TOKENIZER), (3, 30), generator=generator)
        cache, stored, new = SlotCache(5, 30), [4, 9, 7], [6, 1, 11]
        cache.prefill(torch.arange(1, 4), None)
        positions = torch.arange(30)[None].expand(3, 30)
        actor.trunk(ids[:, :9], position_ids=positions[:, :9], cache=cache)
        parts = [row[s : s + n].tolist() for row, s, n in zip(ids, stored, new, strict=True)]
        states = append(actor, cache, form, engine._mask_form, 1, stored, parts)
        plain = actor.trunk(ids, position_ids=positions)
        for i, (s, n) in enumerate(zip(stored, new, strict=True)):
            torch.testing.assert_close(states[i], plain[i, s + n - 1], atol=1e-5, rtol=1e-4)
            assert not torch.allclose(states[i], plain[i, s + n - 2], atol=1e-2)
    engine.end()


def adapted() -> Actor:
    actor = policy()
    convert_to_lora(actor, 2)
    for name, parameter in actor.named_parameters():
        if 'lora_' in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return actor


def masked() -> MaskedPolicy:
    other = policy()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    return MaskedPolicy(policy(), other, 0.9, 1.0)


@pytest.mark.parametrize('kind', [adapted, masked])
def test_every_kind_of_policy_converses(kind):
    engine = {'max_batch_size': 3}
    same(play(LocalEngine(**engine), kind()), play(ByRounds(LocalEngine(**engine)), kind()))


def test_16_bits_repeat_themselves_and_have_their_own_log_probs():
    """Rounding in 16 bits may change a token, so log-probs are compared with a plain forward."""
    actor = policy('llama').bfloat16()
    samples = play(LocalEngine(max_batch_size=3), actor)
    same(samples, play(LocalEngine(max_batch_size=3), actor), bits=True)
    for s in samples:
        ids = torch.cat([s.prompt_ids, s.response_ids])[None]
        with torch.no_grad():
            states = actor.trunk(ids, position_ids=torch.arange(ids.shape[1])[None])
            plain = torch.log_softmax(actor.head(states)[0].float(), -1)
        wanted = plain[len(s.prompt_ids) - 1 : -1].gather(1, s.response_ids[:, None]).squeeze(1)
        torch.testing.assert_close(s.logprobs[s.response_mask], wanted[s.response_mask], atol=0.15, rtol=0)


def test_what_is_refused():
    engine = LocalEngine()
    with pytest.raises(ValueError, match='no actor'):
        engine.converse(Call.of([], SamplingParams(max_new_tokens=3), seed=0, indices=[]), None)
    with pytest.raises(ValueError, match='positions'):
        play(engine, policy(positions=64))
