"""Environments of other systems: fakes with their signatures, and the packages themselves if installed."""

from __future__ import annotations

import pickle
import random
import string
import sys

import numpy as np
import pytest
import torch
from chat_families import chat_tokenizer
from scripted_engine import NOTHING, ScriptedEngine, played, scripted

from chatgpt.environments import Environment, find_environment
from chatgpt.environments.adapters import Adapter, GemEnvironment, GymEnvironment, SkyRLEnvironment
from chatgpt.environments.tools import ToolEnvironment
from chatgpt.rollout.stop import StopStrings
from chatgpt.types import Prompt


class GemGuess:
    """gem.core.Env: set_seed of the global generators, prefix and suffix in info."""

    def reset(self, seed=None):
        if seed is not None:
            random.seed(seed)
            np.random.seed(seed)
        self.number, self.turn = random.randint(0, 99), 0
        return 'Guess.', {'suffix': ' Enter your first guess.'}

    def step(self, action):
        self.turn += 1
        if action == str(self.number):
            return 'Right.', 1.0, True, False, {}
        return f'No {random.random()} {np.random.rand()}', -0.1, False, self.turn == 3, {'prefix': '> '}


class GymnasiumText:
    """gymnasium.Env over text spaces."""

    def reset(self, *, seed=None, options=None):
        self.word = f'word{seed % 7}'
        return f'Say {self.word}.', {'other': object()}

    def step(self, action):
        return 'Thanks.', np.float32(action == self.word), action == self.word, False, {'success': action == self.word}

    def close(self):
        self.closed = True


class SkyRLSum:
    """skyrl_gym.envs.base_text_env.BaseTextEnv."""

    def __init__(self, env_config=None, extras=None):
        self.answer, self.turns = extras['reward_spec']['ground_truth'], 0

    def init(self, prompt):
        return [{'role': 'system', 'content': 'Add.'}, *prompt], {}

    def step(self, action):
        self.turns += 1
        right = action == self.answer
        more = [] if right else [{'role': 'user', 'content': f'Not {action}.'}]
        return {'observations': more, 'reward': float(right), 'done': right or self.turns == 3, 'metadata': {}}

    def close(self):
        pass


WithTools = type('WithTools', (), {'reset': lambda self, **columns: None, 'get_reward': lambda self: 1.0})
Unfinished = type('Unfinished', (), {'reset': lambda self, seed, **columns: 'x'})
Ours = type('Ours', (Environment,), {'reset': lambda self, **columns: 'x', 'step': lambda self, response: None})
Seeded = type('Seeded', (Environment,), {'reset': lambda self, seed=None: 'x', 'step': Ours.step})


class WithStep:
    """A class with tools, one of them named step."""

    def reset(self, **columns):
        return 'Step on.'

    def step(self, action: str) -> str:
        """Act.

        Args:
            action: what to do
        """
        return action

    def get_reward(self):
        return 1.0


@pytest.mark.parametrize(
    ('made', 'wrapper'), [(GemGuess, GemEnvironment), (GymnasiumText, GymEnvironment), (SkyRLSum, SkyRLEnvironment)]
)
def test_a_class_is_recognised_by_its_methods(made, wrapper):
    factory = find_environment(made)
    assert isinstance(factory, Adapter) and factory.wrapper is wrapper and factory.name == made.__qualname__
    assert factory.messages == (made is SkyRLSum)
    assert pickle.loads(pickle.dumps(factory)).wrapper is wrapper
    assert find_environment(f'{__name__}:{made.__name__}').wrapper is wrapper
    for ours in (Ours, Seeded):
        assert find_environment(ours) is ours
    assert isinstance(find_environment(WithTools)(), ToolEnvironment)
    assert find_environment(WithStep) is WithStep, 'looks as ours does'
    assert find_environment(Unfinished) is Unfinished, 'whose error says that it has no step'
    assert isinstance(find_environment(f'tools:{__name__}:WithStep')(), ToolEnvironment)


def episode(factory, turns, prompt=NOTHING, family='chatml', end='<|im_end|>', seed=0):
    tokenizer = chat_tokenizer(family)
    (sample,) = played(
        scripted(tokenizer, turns, end), factory, tokenizer, prompts=[prompt], seed=seed, max_new_tokens=900
    )
    return sample, tokenizer


def test_gem():
    sample, tokenizer = episode(GemGuess, ['1', '2', '3'])
    text = tokenizer.decode(torch.cat([sample.prompt_ids, sample.response_ids]))
    assert text.startswith('Guess. Enter your first guess.') and text.count('> No 0.') == 2
    assert sample.episode.end == 'truncated' and [t.rewards['reward'] for t in sample.episode.turns] == [-0.1] * 3


def test_gymnasium():
    factory = find_environment(GymnasiumText)
    environment = factory()
    assert environment.reset(10) == 'Say word3.'
    assert environment.step('word3') == ('Thanks.', 1.0, True, False, {'success': True})
    environment.close()
    assert environment.environment.closed

    class Numbers(GymnasiumText):
        def reset(self, *, seed=None, options=None):
            return np.zeros(3), {}

    sample, _ = episode(Numbers, ['x'])
    assert sample.episode.end == 'error' and 'observes ndarray, and a model reads text' in sample.episode.message


def test_skyrl_gym():
    columns = {'reward_spec': {'ground_truth': '7'}, 'data_source': 'sums'}
    row = Prompt(ids=torch.tensor([1]), messages=[{'role': 'user', 'content': '3 + 4?'}], columns=columns)
    sample, tokenizer = episode(SkyRLSum, ['8', '7'], row)
    assert tokenizer.decode(torch.cat([sample.prompt_ids, sample.response_ids])) == (
        '<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n3 + 4?<|im_end|>\n<|im_start|>assistant\n'
        '8<|im_end|>\n<|im_start|>user\nNot 8.<|im_end|>\n<|im_start|>assistant\n7<|im_end|>'
    )
    assert [t.rewards for t in sample.episode.turns] == [{'reward': 0.0}, {'reward': 1.0}]
    assert sample.episode.end == 'terminated'

    class Rewrites(SkyRLSum):
        def step(self, action):
            return {**super().step(action), 'postprocessed_action': action[:1]}

    sample, _ = episode(Rewrites, ['8 or so'], row)
    assert sample.episode.end == 'error' and 'postprocessed_action' in sample.episode.message
    actions = []

    class Searches(SkyRLSum):
        def step(self, action):
            actions.append(action)
            return super().step('7')

    tokenizer = chat_tokenizer('chatml')
    turn = [(tokenizer('<search>tea</search>')['input_ids'], 'stop')]
    stop = StopStrings(tokenizer, '</search>')
    played(ScriptedEngine({0: turn}), Searches, tokenizer, prompts=[row], stop=stop, max_new_tokens=90)
    assert actions == ['<search>tea</search>']
    with pytest.raises(ValueError, match='cannot be called'):
        find_environment(3)


@pytest.mark.parametrize(
    ('name', 'package'), [('gem:game:X', 'gem-llm'), ('skyrl:x', 'skyrl-gym'), ('gymnasium:X-v0', 'gymnasium')]
)
def test_a_package_that_is_missing_is_named(name, package, monkeypatch):
    monkeypatch.setitem(sys.modules, {'gem': 'gem', 'skyrl': 'skyrl_gym'}.get(name.split(':')[0], 'gymnasium'), None)
    with pytest.raises(ValueError, match=f'one of {package}, which is not installed'):
        find_environment(name)


def test_gymnasium_itself():
    gymnasium = pytest.importorskip('gymnasium', reason='needs gymnasium')

    class Repeat(gymnasium.Env):
        observation_space = action_space = gymnasium.spaces.Text(20, charset=string.printable)

        def __init__(self, word=''):
            self.word = word

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return f'Say {self.word}{self.np_random.integers(100)}.', {}

        def step(self, action):
            return 'Again.', 1.0, True, False, {}

    gymnasium.register('Repeat-v0', Repeat)
    factory = find_environment('gymnasium:Repeat-v0', {'word': 'tea'})
    first, again, other = factory(), factory(), factory()
    observation = first.reset(5)
    assert observation.startswith('Say tea') and observation == again.reset(5) != other.reset(6)
    assert first.step('x')[:4] == ('Again.', 1.0, True, False)
    with pytest.raises(ValueError, match='gymnasium:CartPole-v1 has a space Box.*reads and writes text'):
        find_environment('gymnasium:CartPole-v1')
    assert find_environment(Repeat).wrapper is GymEnvironment
