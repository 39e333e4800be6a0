"""Whole episodes: what the policy sampled is what it learns from, and observations are no actions."""

from __future__ import annotations

import random
import re

import pytest
import torch

from chatgpt.environments import Environment, EnvironmentSettings, seed_of
from chatgpt.nn import Actor, Critic
from chatgpt.rollout import Call, HFEngine, LocalEngine, SamplingParams
from chatgpt.rollout.episodes import EpisodeEngine
from chatgpt.strategies import NaiveStrategy
from chatgpt.testing import byte_tokenizer, tiny_causal_lm
from chatgpt.trainer import PPOTrainer
from chatgpt.types import Prompt

NOTHING = Prompt(ids=torch.zeros(0, dtype=torch.int64))


class Echo(Environment):
    """Says a number, then what it heard, for three turns."""

    def reset(self, seed, **columns):
        self.told = []
        return f'n{random.Random(seed).randint(0, 9)}:'

    def step(self, response):
        self.told.append(response)
        done = len(self.told) == 3
        return f'<{len(response)}>', len(response), done, False, {'success': done}


def episodes(engine=None, settings=None, count=4, seed=5, **sampling):
    tokenizer = byte_tokenizer()
    engine = EpisodeEngine(engine or LocalEngine(), Echo, tokenizer, settings or EnvironmentSettings(max_turn_tokens=4))
    torch.manual_seed(0)
    engine.begin(Actor(tiny_causal_lm('gpt2', vocab_size=len(tokenizer), n_positions=128)))
    try:
        params = SamplingParams(**({'max_new_tokens': 40, 'eos_token_ids': (tokenizer.eos_token_id,)} | sampling))
        return engine.generate(Call.of([NOTHING] * count, params, seed=seed, indices=range(count), groups=[0, 0, 1, 1]))
    finally:
        engine.end()
        engine.close()


def test_a_transcript_is_turns_and_observations():
    tokenizer = byte_tokenizer()
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
            text = tokenizer.decode(sample.response_ids[turn.start : turn.stop], skip_special_tokens=True)
            assert tokenizer.decode(sample.response_ids[start:stop]) == f'<{len(text)}>'
            assert turn.rewards == {'reward': float(len(text))}
        assert not sample.logprobs[~sample.response_mask].any()


def test_the_seed_makes_a_groups_task():
    tasks = [tuple(s.prompt_ids.tolist()) for s in episodes()]
    assert tasks[0] == tasks[1] and tasks[2] == tasks[3]
    assert tasks[0] != tasks[2], 'of these two seeds'
    assert seed_of(5, 0) != seed_of(5, 1) != seed_of(6, 1)


def test_samples_do_not_depend_on_who_is_beside_them():
    together = episodes()
    engine = LocalEngine(max_batch_size=1)
    for a, b in zip(together, episodes(engine), strict=True):
        assert a.response_ids.tolist() == b.response_ids.tolist()
        torch.testing.assert_close(a.logprobs, b.logprobs)


@pytest.mark.parametrize(
    ('settings', 'sampling', 'end'),
    [
        (EnvironmentSettings(max_turns=2, max_turn_tokens=3), {}, 'turns'),
        (EnvironmentSettings(max_turn_tokens=3), {'max_new_tokens': 8}, 'tokens'),
    ],
)
def test_limits_end_an_episode(settings, sampling, end):
    for sample in episodes(settings=settings, **sampling):
        assert sample.episode.end == end and not sample.ended
        assert sample.num_actions <= sampling.get('max_new_tokens', 40)
        assert bool(sample.response_mask[-1]), 'the last observation is no part of it'


def test_the_hf_engine_goes_by_rounds():
    samples = episodes(HFEngine())
    assert all(len(s.episode.turns) == 3 for s in samples)


def test_ppo_learns_from_episodes():
    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    model = tiny_causal_lm('gpt2', vocab_size=len(tokenizer), n_positions=128)
    actor, critic = Actor(model), Critic(tiny_causal_lm('gpt2', vocab_size=len(tokenizer), n_positions=128))
    strategy = NaiveStrategy(seed=1)
    pairs = strategy.prepare(*((m, torch.optim.AdamW(m.parameters(), lr=1e-3)) for m in (actor, critic)))
    (actor, actor_optim), (critic, critic_optim) = pairs
    trainer = PPOTrainer(
        strategy,
        actor,
        critic,
        None,
        None,
        actor_optim,
        critic_optim,
        tokenizer=tokenizer,
        environment=Echo,
        environment_settings=EnvironmentSettings(max_turn_tokens=4),
        experience_batch_size=4,
        train_batch_size=4,
        kl_coef=0.0,
        max_new_tokens=40,
    )
    trainer.fit(max_timesteps=2, update_timesteps=1)
    for e in trainer.last_experiences:
        assert e.score == sum(sum(t.rewards.values()) for t in e.episode.turns)
        assert not e.advantages[~e.response_mask].any()


class Careless(Environment):
    """One of two groups is given nonsense that is of the right type."""

    kind = ''

    def reset(self, seed, **columns):
        self.bad = seed == seed_of(5, 1)
        return 'a \udc80' if self.bad and self.kind == 'half a character at reset' else 'n:'

    def step(self, response):
        if self.bad and self.kind == 'messages after text':
            return [{'role': 'user', 'content': 'go'}], 0.0, False, False, {}
        if self.bad and self.kind == 'half a character':
            return 'a \udc80', 0.0, False, False, {}
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
    tokenizer = byte_tokenizer()
    engine = EpisodeEngine(LocalEngine(), Careless, tokenizer, EnvironmentSettings(max_turn_tokens=4, max_turns=3))
    torch.manual_seed(0)
    engine.begin(Actor(tiny_causal_lm('gpt2', vocab_size=len(tokenizer), n_positions=128)))
    params = SamplingParams(max_new_tokens=40, eos_token_ids=(tokenizer.eos_token_id,))
    samples = engine.generate(Call.of([NOTHING] * 4, params, seed=5, indices=range(4), groups=[0, 0, 1, 1]))
    engine.end()
    engine.close()
    assert [s.episode.end for s in samples] == ['terminated'] * 2 + ['invalid'] * 2
    for sample in samples[2:]:
        assert sample.failed and re.search(message, sample.episode.message)
