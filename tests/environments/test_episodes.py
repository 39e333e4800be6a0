"""Whole episodes: training uses the sampled ids, observations are not actions, greedy episodes are the same with every
engine, and limits and random numbers apply per turn."""

from __future__ import annotations

import random
import re

import pytest
import torch
from scripted_engine import NOTHING, played

from chatgpt.environments import Environment, EnvironmentSettings, seed_of
from chatgpt.nn import Actor
from chatgpt.rollout import HFEngine, LocalEngine, StopStrings
from chatgpt.testing import byte_tokenizer, tiny_causal_lm

TOKENIZER = byte_tokenizer()
ENDS = tuple(range(2, 259, 5))
FOUR = {'prompts': [NOTHING] * 4, 'groups': [0, 0, 1, 1], 'seed': 5, 'max_new_tokens': 40}


def policy(family='gpt2', **config):
    torch.manual_seed(0)
    return Actor(tiny_causal_lm(family, vocab_size=len(TOKENIZER), **config))


class Echo(Environment):
    """Returns a number, then each response, for three turns."""

    def reset(self, seed, **columns):
        self.responses = []
        return f'n{random.Random(seed).randint(0, 9)}:'

    def step(self, response):
        self.responses.append(response)
        done = len(self.responses) == 3
        return f'<{len(response)}>', len(response), done, False, {'success': done}


def episodes(max_turns=16, max_turn_tokens=4, **sampling):
    settings = EnvironmentSettings(max_turns=max_turns, max_turn_tokens=max_turn_tokens)
    given = FOUR | {'eos_token_ids': (TOKENIZER.eos_token_id,)} | sampling
    return played(LocalEngine(), Echo, TOKENIZER, actor=policy(n_positions=128), settings=settings, **given)


def test_a_transcript_is_turns_and_observations():
    for sample in episodes():
        turns = sample.episode.turns
        assert len(turns) == 3 and sample.episode.end == 'terminated' and sample.ended
        covered = torch.zeros(sample.num_actions, dtype=torch.bool)
        for turn in turns:
            covered[turn.start : turn.stop] = True
            assert 1 <= turn.stop - turn.start <= 4
        assert torch.equal(covered, sample.response_mask)
        between = [(a.stop, b.start) for a, b in zip(turns, turns[1:], strict=False)]
        for turn, (start, stop) in zip(turns, between, strict=False):
            text = TOKENIZER.decode(sample.response_ids[turn.start : turn.stop], skip_special_tokens=True)
            assert TOKENIZER.decode(sample.response_ids[start:stop]) == f'<{len(text)}>'
            assert turn.rewards == {'reward': float(len(text))}
        assert not sample.logprobs[~sample.response_mask].any()


@pytest.mark.parametrize(
    ('limits', 'end'),
    [({'max_turns': 2, 'max_turn_tokens': 3}, 'turns'), ({'max_turn_tokens': 3, 'max_new_tokens': 8}, 'tokens')],
)
def test_limits_end_an_episode(limits, end):
    for sample in episodes(**limits):
        assert sample.episode.end == end and not sample.ended
        assert sample.num_actions <= limits.get('max_new_tokens', 40)
        assert bool(sample.response_mask[-1]), 'the last observation is no part of it'


class Careless(Environment):
    """Returns invalid values of the right type in one of two groups."""

    kind = ''

    def reset(self, seed, **columns):
        self.bad = seed == seed_of(5, 1)
        return 'a \udc80' if self.bad and self.kind == 'half a character at reset' else 'n:'

    def step(self, response):
        wrong = {'messages after text': [{'role': 'user', 'content': 'go'}], 'half a character': 'a \udc80'}
        if self.bad and self.kind in wrong:
            return wrong[self.kind], 0.0, False, False, {}
        return 'x', 1e39 if self.bad and self.kind == 'no fp32' else 1.0, True, False, {}


@pytest.mark.parametrize(
    ('kind', 'message'),
    [
        ('messages after text', 'speaks in messages, which need'),
        ('half a character', 'half a character'),
        ('half a character at reset', 'half a character'),
        ('no fp32', r'reward=1e\+39 is not a finite number in fp32'),
    ],
)
def test_nonsense_of_the_right_type_ends_its_own_episode(monkeypatch, kind, message):
    monkeypatch.setattr(Careless, 'kind', kind)
    settings = EnvironmentSettings(max_turn_tokens=4, max_turns=3)
    given = FOUR | {'eos_token_ids': (TOKENIZER.eos_token_id,), 'settings': settings}
    samples = played(LocalEngine(), Careless, TOKENIZER, actor=policy(n_positions=128), **given)
    assert [s.episode.end for s in samples] == ['terminated'] * 2 + ['invalid'] * 2
    for sample in samples[2:]:
        assert sample.failed and re.search(message, sample.episode.message)


class Maze(Environment):
    """Observations depend on all responses so far."""

    responses = []

    def reset(self, seed, **columns):
        self.random, self.turns = random.Random(seed), 0
        return f'room {self.random.randint(10, 99)} '

    def step(self, response):
        self.responses.append(response)
        self.turns += 1
        self.random.seed(self.random.random() + len(response))
        door = 'left right up down'.split()[self.random.randint(0, 3)]
        return f' {door} ' * self.random.randint(0, 2), 1.0, self.turns == 4, False, {}


def five(engine, actor, **given):
    settings = EnvironmentSettings(max_turn_tokens=6)
    given = {'seed': 3, 'max_new_tokens': 50, 'eos_token_ids': ENDS} | given
    return played(engine, Maze, TOKENIZER, actor=actor, prompts=[NOTHING] * 5, settings=settings, **given)


def outcomes(samples):
    return [(s.prompt_ids.tolist(), s.response_ids.tolist(), s.episode.turns, s.episode.end) for s in samples]


@pytest.mark.parametrize(('family', 'batch'), [('gpt2', None), ('llama', 2), ('bloom', 2)])
def test_greedy_episodes_are_the_same(family, batch):
    greedy = {'do_sample': False, 'min_new_tokens': 2}
    actor = policy(family, tie_word_embeddings=False)
    engine = HFEngine(max_batch_size=batch) if batch else HFEngine()
    wanted, found = five(LocalEngine(), actor, **greedy), five(engine, actor, **greedy)
    assert outcomes(found) == outcomes(wanted)
    assert {len(s.episode.turns) for s in wanted} > {1} or any(not s.response_mask.all() for s in wanted)
    for a, b in zip(wanted, found, strict=True):
        torch.testing.assert_close(a.logprobs, b.logprobs, atol=1e-4, rtol=0)
        assert torch.equal(a.response_mask, b.response_mask)


def test_a_stop_string_ends_a_turn_and_its_environment_does_not_read_it(monkeypatch):
    stop = StopStrings(TOKENIZER, [chr(b) for b in range(97, 115)])
    for engine in (LocalEngine(), HFEngine()):
        monkeypatch.setattr(Maze, 'responses', [])
        samples = five(engine, policy(), stop=stop, seed=1, max_new_tokens=60, eos_token_ids=())
        turns = [s.response_ids[t.start : t.stop] for s in samples for t in s.episode.turns]
        ends = [TOKENIZER.decode(ids, skip_special_tokens=True) for ids in turns]
        assert any(text[-1] in 'abcdefghijklmnopqr' for text in ends)
        assert sorted(Maze.responses) == sorted(stop.cut(text) for text in ends)


def test_turns_of_the_engine_around_generate_have_random_numbers_of_their_own():
    """A uniform policy: with the same random numbers in each turn, all turns would be equal."""
    actor = policy()
    with torch.no_grad():
        actor.model.transformer.ln_f.weight.zero_()
        actor.model.transformer.ln_f.bias.zero_()
    settings = EnvironmentSettings(max_turn_tokens=5)
    (sample,) = played(HFEngine(), Maze, TOKENIZER, actor=actor, settings=settings, seed=1, max_new_tokens=60)
    turns = [tuple(sample.response_ids[t.start : t.stop].tolist()) for t in sample.episode.turns]
    assert len(turns) == 4 == len(set(turns))


def test_a_first_observation_that_leaves_no_tokens_for_a_turn_ends_only_its_episode():
    samples = five(LocalEngine(), policy(tie_word_embeddings=False), max_new_tokens=None, max_length=8)
    assert [(s.episode.end, s.episode.turns) for s in samples] == [('tokens', ())] * 5
    assert not any(s.response_mask.any() or s.ended for s in samples)
