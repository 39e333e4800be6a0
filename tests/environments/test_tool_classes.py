"""Classes with tools for TRL's `environment_factory`, compared with TRL's own tool loop."""

from __future__ import annotations

import asyncio
import json
import pickle
import random
import warnings
from pathlib import Path

import pytest
import torch
from chat_families import chat_tokenizer
from scripted_engine import NOTHING, ScriptedEngine, played, scripted
from tool_classes import QUESTION, SCRIPTS, Increment, Shop, call
from transformers.utils import get_json_schema

from chatgpt.environments import EnvironmentSettings, find_environment
from chatgpt.environments.tools import ToolFactory
from chatgpt.nn import Actor
from chatgpt.rollout.episodes import EpisodeEngine
from chatgpt.strategies import NaiveStrategy
from chatgpt.testing import tiny_causal_lm
from chatgpt.trainer import PPOTrainer
from chatgpt.types import Prompt

TRL = json.loads(Path(__file__).with_name('trl_tools.json').read_text())


def question(messages=QUESTION, **columns):
    return Prompt(ids=torch.tensor([1]), text='', messages=messages, columns=columns)


def episode(environment, turns, prompt=NOTHING, **given):
    tokenizer = chat_tokenizer('qwen2.5')
    given = {'prompts': [prompt], 'seed': 3, 'max_new_tokens': 5000} | given
    (sample,) = played(scripted(tokenizer, turns), environment, tokenizer, **given)
    return sample, tokenizer


@pytest.mark.parametrize('name', SCRIPTS)
def test_episodes_are_those_of_trls_tool_loop(name):
    columns, turns = SCRIPTS[name]
    theirs = TRL[name]
    seen = []

    def look(prompts, completions, environments, **columns):
        seen.extend(completions[0])
        return [0.5]

    sample, tokenizer = episode(ToolFactory(Shop, [look]), turns, question(**columns))
    # transformers' type of a bare `list` in a tool's schema: object in 5.17, array in 5.23 and in TRL's
    kind = get_json_schema(Shop.look)['function']['return']['type']
    assert tokenizer.decode(sample.prompt_ids) == theirs['prompt'].replace('"array"', f'"{kind}"')
    assert sample.response_ids.tolist() == theirs['completion_ids']
    assert sample.response_mask.tolist() == [bool(m) for m in theirs['mask']]
    assert sample.episode.end == 'terminated'
    assert sample.episode.turns[-1].rewards == {'Shop': theirs['reward'], 'look': 0.5}
    assert all(turn.rewards == {} for turn in sample.episode.turns[:-1])
    for ours, message in zip(seen, theirs['messages'], strict=True):
        if 'tool_calls' in message or ours['role'] == 'tool':
            assert {k: v for k, v in ours.items() if k not in ('tool_call_id', 'id')} == message
        else:  # TRL keeps less of a text that cannot be parsed as calls
            assert ours['role'] == 'assistant' and 'tool_calls' not in ours


class Seeded(Increment):
    def reset(self, seed, **kwargs):
        self.counter, self.target = 0, random.Random(seed).randint(1, 6)
        return f'Increment the counter by {self.target}.'


@pytest.mark.parametrize('environment', [Seeded, Increment])
def test_a_class_that_draws_its_task_draws_it_from_the_seed(environment):
    """The samples of a group then have the same task, also in another run; with the global generator they do not."""
    tokenizer = chat_tokenizer('qwen2.5')
    random.seed(7)
    turn = (tokenizer(call('increment', '{"step": 2}') + '<|im_end|>')['input_ids'], 'eos')
    end = (tokenizer('Done.<|im_end|>')['input_ids'], 'eos')

    def run():
        engine, groups = ScriptedEngine({i: [turn, end] for i in range(12)}), [i // 2 for i in range(12)]
        return played(engine, environment, tokenizer, prompts=[NOTHING] * 12, seed=3, groups=groups)

    samples = run()
    tasks = [tokenizer.decode(s.prompt_ids).partition('<|im_start|>user\n')[2] for s in samples]
    assert all(t.startswith('Increment the counter by ') for t in tasks) and len(set(tasks)) > 1
    rewards = [s.episode.turns[-1].rewards for s in samples]
    assert rewards == [{'reward': float('by 2.' in task)} for task in tasks]
    again = [s.prompt_ids.tolist() for s in run()] == [s.prompt_ids.tolist() for s in samples]
    assert (tasks[::2] == tasks[1::2], again) == (environment is Seeded,) * 2
    engine = EpisodeEngine(ScriptedEngine({}), environment, tokenizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        engine.openings([NOTHING] * 2, seed=3, groups=range(2))
    engine.close()
    warned = any('Increment begins in two ways with one seed' in str(w.message) for w in caught)
    assert warned == (environment is Increment)


class Paid:
    """A reward after every turn, and at the end."""

    def reset(self, seed, **columns):
        self.turns, self.seed = 0, seed

    def work(self) -> str:
        """Work."""
        return 'paid'

    def turn_reward(self):
        self.turns += 1
        return self.turns

    async def get_reward(self):
        return {'honest': 10.0}


@pytest.mark.parametrize(
    ('settings', 'sampling', 'end'), [({'max_turns': 2}, {}, 'turns'), ({}, {'max_new_tokens': 160}, 'tokens')]
)
def test_an_episode_that_is_cut_off_has_its_reward(settings, sampling, end):
    calls = []

    class Counted(Shop):
        def get_reward(self):
            calls.append(self)
            return super().get_reward()

    turns = [call('buy', '{"item": "a"}')] * 5
    sample, _ = episode(Counted, turns, question(), settings=EnvironmentSettings(**settings), **sampling)
    assert sample.episode.end == end and len(sample.episode.turns) == 2
    assert [t.rewards for t in sample.episode.turns] == [{}, {'reward': 2 + 0.04}], 'two things for 3 each, of 10'
    assert len(calls) == 1, 'once an episode'


def test_an_answer_that_runs_out_of_tokens_is_no_end():
    sample, _ = episode(Shop, ['I would rather not say so much about it'], question(), max_new_tokens=9)
    assert (sample.episode.end, sample.ended) == ('truncated', False)
    assert sample.episode.turns[0].rewards == {'reward': 0.1}


def test_objects_are_reused():
    Shop.made = 0
    factory = ToolFactory(Shop)

    def one():
        environment = factory()
        environment.reset(seed=1, budget=5)
        assert environment.step('no')[2]
        environment.close()
        return environment.environment

    assert one() is one() and Shop.made == 1
    both = [factory(), factory()]
    assert Shop.made == 2 and both[0].environment is not both[1].environment
    assert pickle.loads(pickle.dumps(factory)).tools == factory.tools

    class Broken(Shop):
        def get_reward(self):
            raise RuntimeError('no money')

    factory = ToolFactory(Broken)
    sample, _ = episode(factory, ['no'], question())
    assert (sample.episode.end, sample.episode.turns[-1].rewards) == ('error', {})
    assert 'no money' in sample.episode.message and not factory._free


class Queued:
    """Waits for its queue, which asyncio binds to the event loop of the first wait."""

    def __init__(self):
        self.queue = asyncio.Queue()

    def reset(self, **columns):
        return 'Take it.'

    async def take(self) -> str:
        """Take what comes next."""
        asyncio.get_running_loop().call_soon(self.queue.put_nowait, 'tea')
        return await self.queue.get()

    def get_reward(self):
        return 1.0


def test_an_object_that_is_used_again_keeps_its_event_loop():
    factory, function = ToolFactory(Queued), {'name': 'take', 'arguments': {}}
    message = {'role': 'assistant', 'content': '', 'tool_calls': [{'type': 'function', 'function': function}]}
    played, results = [], []
    for _ in range(2):
        played.append(factory())
        played[-1].reset(seed=1)
        results += played[-1].step(message)[0]
        played[-1].close()
    for environment in played:
        environment._loop.close()
    assert played[0].environment is played[1].environment
    assert [result['content'] for result in results] == ['tea', 'tea']


def test_trls_reward_functions_see_the_environment():
    def left(prompts, completions, environments, budget, **columns):
        assert prompts == [[{'role': 'user', 'content': 'Go shopping. You have 6.'}]] and budget == [6]
        return [float(environment.left) for environment in environments]

    async def nothing(**columns):
        return [None]

    sample, _ = episode(ToolFactory(Shop, [left, nothing]), [call('buy', '{"item": "a"}'), 'ok'], question(budget=6))
    assert sample.episode.turns[-1].rewards == {'Shop': 1.03, 'left': 3.0}


def test_a_reset_with_few_columns_and_an_image():
    class Few:
        def reset(self, target):
            self.target = target
            return [{'type': 'text', 'text': ' Go '}, {'type': 'text', 'text': 'on.'}]

        def look(self) -> list:
            """Look."""
            return [{'type': 'image', 'image': None}]

        def get_reward(self):
            return self.target

    sample, tokenizer = episode(Few, [call('look', '{}'), 'ok'], question(target=4))
    assert 'Go shopping. Go on.' in tokenizer.decode(sample.prompt_ids)
    assert "{'error': 'a result of type image cannot be shown'}" in tokenizer.decode(sample.response_ids)
    assert sample.episode.turns[-1].rewards == {'reward': 4.0}


def test_rewards_of_turns():
    two = [call('work', '{}'), call('work', '{}'), 'end']
    turned = type('Turned', (Paid,), {'get_reward': None})
    for cls, name, last in ((Paid, 'turn_reward', {'honest': 10.0}), (turned, 'reward', {})):
        sample, _ = episode(cls, two)
        assert [t.rewards for t in sample.episode.turns] == [{name: 1.0}, {name: 2.0}, {name: 3.0} | last]


def without(**methods):
    return type('Mine', (), {'reset': lambda self: None} | methods)


def undescribed(self, x: int) -> int:
    return x


def untyped(self, x):
    """Do.

    Args:
        x: a number
    """


@pytest.mark.parametrize(
    ('make', 'words'),
    [
        (without(do=undescribed), 'Mine.do is a tool.*docstring'),
        (without(do=untyped), 'Mine.do is a tool.*x'),
        (without(reset=None), 'Mine has no method reset'),
        (without(__init__=lambda self, url: None), r'making Mine\(\) raised TypeError.*url'),
    ],
)
def test_mistakes_are_named_before_any_work(make, words):
    with pytest.raises(ValueError, match=words):
        ToolFactory(make)
    if hasattr(make, 'do'):  # the others are not recognised as classes with tools
        with pytest.raises(ValueError, match=words):
            find_environment(make)


def test_a_trainer_takes_the_class():
    tokenizer = chat_tokenizer('qwen2.5')

    def ppo(environment, prompts=None, reward_model=None):
        torch.manual_seed(0)
        actor = Actor(tiny_causal_lm('gpt2', vocab_size=len(tokenizer), n_positions=2048, layers=1))
        strategy, settings = NaiveStrategy(seed=1), EnvironmentSettings(max_turns=2, max_turn_tokens=6)
        actor, optim = strategy.prepare((actor, torch.optim.SGD(actor.parameters(), lr=1e-3)))
        sizes = {'num_samples_per_prompt': 2, 'experience_batch_size': 2, 'train_batch_size': 2, 'max_new_tokens': 300}
        given = {'advantage_estimator': 'grpo', 'tokenizer': tokenizer, 'kl_coef': 0.0}
        given |= {'environment': environment, 'environment_settings': settings, **sizes}
        PPOTrainer(strategy, actor, None, reward_model, None, optim, **given).fit(prompts, 1, 1, 1)

    rows, seen = [{'prompt': QUESTION, 'budget': 4}, {'prompt': 'Buy tea.', 'budget': 5}], []

    class Budget(Shop):
        def reset(self, seed, budget, prompt, **columns):
            seen.append((budget, prompt, seed))
            return super().reset(budget)

    ppo(Budget, rows)
    # The two samples of a prompt have the same seed.
    assert len(seen) == 4 and len({seed for *_, seed in seen}) == 2
    rows = [(4, QUESTION), (5, [{'role': 'user', 'content': 'Buy tea.'}])]
    assert sorted((row[:2] for row in seen), key=str) == sorted(2 * rows, key=str)

    class Free:
        def reset(self, **columns):
            return 'Go.'

        def look(self) -> str:
            """Look."""
            return 'nothing'

    with pytest.raises(ValueError, match='Free has neither get_reward nor turn_reward'):
        ppo(Free)
    ppo(Free, reward_model=lambda prompts, responses, **columns: [float(len(r)) for r in responses])
