"""Two rewards have one description where they score alike, as far as can be seen without calling them."""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from chatgpt.data.rewards import Pattern
from chatgpt.trainer.experience.scorers import as_scorer, checksum, described

FILE = """
seen = []
class Reward:
    def __init__(self, scale=1.0):
        self.scale, self.calls = scale, 0
    def __call__(self, prompts, responses):
        self.calls += 1
        return [self.scale * {body} for text in responses]
def score(prompts, responses):
    seen.append(responses)
    return [{body} for text in responses]
def scaled(prompts, responses, k):
    return [k * {body} for text in responses]
def unused():
    return {unused}
"""


def reward_file(path: Path, body: str = 'len(text)', unused: int = 0) -> Any:
    path.parent.mkdir(exist_ok=True)
    path.write_text(FILE.format(body=body, unused=unused))
    spec = importlib.util.spec_from_file_location(f'{path.parent.name}_{path.stem}', path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where inspect looks for a class
    spec.loader.exec_module(module)
    return module


def told(reward: Any) -> Any:
    return described(as_scorer(reward))


@pytest.mark.parametrize(
    'reward',
    [
        lambda module: module.score,
        lambda module: module.Reward(),
        lambda module: functools.partial(module.scaled, k=1),
        lambda module: [(0.5, module.score), (1.0, module.Reward())],
    ],
)
def test_a_body_that_changes_is_seen_and_what_stands_beside_it_is_not(tmp_path, reward):
    first = told(reward(reward_file(tmp_path / 'a' / 'r.py')))
    assert told(reward(reward_file(tmp_path / 'b' / 'r.py', unused=1))) == first
    assert told(reward(reward_file(tmp_path / 'c' / 'r.py', body='-len(text)'))) != first


def test_arguments_and_attributes_are_seen(tmp_path):
    module = reward_file(tmp_path / 'a' / 'r.py')
    assert told(functools.partial(module.scaled, k=1)) != told(functools.partial(module.scaled, k=2))
    assert told(module.Reward(1.0)) == told(module.Reward(1.0)) != told(module.Reward(2.0))
    assert told(Pattern('a')) == told(Pattern('a')) != told(Pattern('b'))

    def closed(k: float) -> Any:
        return lambda prompts, responses: [k * len(r) for r in responses]

    assert told(closed(1.0)) == told(closed(1.0)) != told(closed(2.0))


def test_what_a_function_notes_while_it_runs_does_not_make_it_another(tmp_path):
    module = reward_file(tmp_path / 'a' / 'r.py')
    for reward in (module.score, module.Reward()):
        scorer = as_scorer(reward)
        before = described(scorer)
        scorer.fn(['a'], ['b'])
        assert described(scorer) == before
    assert module.seen and told(module.score) == described(as_scorer(module.score))


def test_a_function_whose_file_is_not_its_source(tmp_path, monkeypatch):
    """As code of a page that is executed under the page's name."""
    (tmp_path / 'page.md').write_text('a (bracket that\nnever ends\n')
    monkeypatch.chdir(tmp_path)
    names: dict = {'__name__': 'page'}
    exec(compile('score = lambda prompts, responses: [1.0]', 'page.md', 'exec'), names)
    assert checksum(names['score'])  # by its name
