"""One loop over every engine: greedy episodes are the same, each with limits and random numbers of its own turns."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from in_process_workers import InProcessWorkers

from chatgpt.environments import Environment, EnvironmentSettings
from chatgpt.nn import Actor
from chatgpt.rollout import Call, HFEngine, LocalEngine, RemoteEngine, SamplingParams, StopStrings
from chatgpt.rollout.episodes import EpisodeEngine
from chatgpt.testing import FAMILIES, byte_tokenizer, tiny_causal_lm
from chatgpt.types import Prompt, Sample

TOKENIZER = byte_tokenizer()


class Maze(Environment):
    """What it says depends on all that was said."""

    def reset(self, seed: int, **columns: Any) -> str:
        self.random, self.turns = random.Random(seed), 0
        return f'room {self.random.randint(10, 99)} '

    def step(self, response: str) -> Any:
        self.turns += 1
        self.random.seed(self.random.random() + len(response))
        door = 'left right up down'.split()[self.random.randint(0, 3)]
        return f' {door} ' * self.random.randint(0, 2), 1.0, self.turns == 4, False, {}


def play(
    engine: Any, family: str = 'gpt2', *, seed: int = 3, tokenizer: Any = TOKENIZER, stop: Any = None, **kw: Any
) -> list[Sample]:
    torch.manual_seed(0)
    actor = Actor(tiny_causal_lm(family, vocab_size=len(TOKENIZER), tie_word_embeddings=False))
    over = EpisodeEngine(engine, Maze, tokenizer, EnvironmentSettings(max_turn_tokens=6), stop_strings=stop)
    over.begin(actor)
    nothing = [Prompt(ids=torch.zeros(0, dtype=torch.int64)) for _ in range(5)]
    sampling = SamplingParams(**({'max_new_tokens': 50, 'eos_token_ids': tuple(range(2, 259, 5))} | kw), stop=stop)
    samples = over.generate(Call.of(nothing, sampling, seed=seed, indices=range(5)))
    over.end()
    over.close()
    return samples


def told(samples: list[Sample]) -> list[Any]:
    return [(s.prompt_ids.tolist(), s.response_ids.tolist(), s.episode.turns, s.episode.end) for s in samples]


@pytest.mark.parametrize('family', FAMILIES)
@pytest.mark.parametrize('engine', [HFEngine, lambda: HFEngine(max_batch_size=2)])
def test_greedy_episodes_are_the_same(family, engine):
    greedy = {'do_sample': False, 'min_new_tokens': 2}
    wanted, found = play(LocalEngine(), family, **greedy), play(engine(), family, **greedy)
    assert told(found) == told(wanted)
    assert {len(s.episode.turns) for s in wanted} > {1} or any(not s.response_mask.all() for s in wanted)
    for a, b in zip(wanted, found, strict=True):
        torch.testing.assert_close(a.logprobs, b.logprobs, atol=1e-4, rtol=0)
        assert torch.equal(a.response_mask, b.response_mask)


def test_remote_episodes_are_the_same():
    with RemoteEngine(InProcessWorkers()) as engine:
        assert told(play(engine)) == told(play(LocalEngine()))


def test_a_stop_string_ends_a_turn_and_its_environment_does_not_read_it():
    heard = []

    class Listening(Maze):
        def step(self, response: str) -> Any:
            heard.append(response)
            return super().step(response)

    stop = StopStrings(TOKENIZER, [chr(b) for b in range(97, 115)])
    for engine in (LocalEngine(), HFEngine()):
        heard.clear()
        over = EpisodeEngine(engine, Listening, TOKENIZER, EnvironmentSettings(max_turn_tokens=6), stop_strings=stop)
        over.begin(Actor(tiny_causal_lm('gpt2', vocab_size=len(TOKENIZER))))
        nothing = [Prompt(ids=torch.zeros(0, dtype=torch.int64)) for _ in range(5)]
        samples = over.generate(
            Call.of(nothing, SamplingParams(max_new_tokens=60, stop=stop), seed=1, indices=range(5))
        )
        over.end()
        over.close()
        ends = [
            TOKENIZER.decode(s.response_ids[t.start : t.stop], skip_special_tokens=True)
            for s in samples
            for t in s.episode.turns
        ]
        assert any(text[-1] in 'abcdefghijklmnopqr' for text in ends)
        assert sorted(heard) == sorted(stop.cut(text) for text in ends)


def test_turns_of_the_engine_around_generate_have_random_numbers_of_their_own():
    """A flat policy: with the same numbers in each turn it would say the same in each."""
    torch.manual_seed(0)
    model = tiny_causal_lm('gpt2', vocab_size=len(TOKENIZER))
    with torch.no_grad():
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.zero_()
    over = EpisodeEngine(HFEngine(), Maze, TOKENIZER, EnvironmentSettings(max_turn_tokens=5))
    over.begin(Actor(model))
    nothing = [Prompt(ids=torch.zeros(0, dtype=torch.int64))]
    ask = {'seed': 1, 'indices': [0]}
    (sample,) = over.generate(Call.of(nothing, SamplingParams(max_new_tokens=60), **ask))
    (again,) = over.generate(Call.of(nothing, SamplingParams(max_new_tokens=60), **ask))
    over.end()
    over.close()
    turns = [tuple(sample.response_ids[t.start : t.stop].tolist()) for t in sample.episode.turns]
    assert len(turns) == 4 == len(set(turns))
    assert told([sample]) == told([again])


def test_a_first_observation_without_room_for_a_turn_ends_its_episode_alone():
    samples = play(LocalEngine(), max_new_tokens=None, max_length=8)
    assert [(s.episode.end, s.episode.turns) for s in samples] == [('tokens', ())] * 5
    assert not any(s.response_mask.any() or s.ended for s in samples)
