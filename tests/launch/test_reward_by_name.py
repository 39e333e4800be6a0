"""`--reward_fn module:name` where the name is a function, a coroutine function or a class; and names that cannot be a
reward."""

from __future__ import annotations

import pytest

from chatgpt.data.rewards import NumberAtEnd
from chatgpt.launch.arguments import load_function

FILE = """
class Starts:
    letter = 'a'

    def __call__(self, prompts, responses):
        return [float(r.startswith(self.letter)) for r in responses]

class Needs:
    def __init__(self, target):
        self.target = target

    def __call__(self, prompts, responses):
        return [self.target] * len(responses)

class Breaks:
    def __init__(self):
        raise OSError('no such service')

    __call__ = None

class Holds:
    pass
"""


def test_a_class_is_made():
    reward = load_function('chatgpt.data.rewards:NumberAtEnd')
    assert reward == NumberAtEnd()
    assert reward([''] * 2, ['it is 7', '8'], answer=['7', '7']) == [1.0, 0.0]


@pytest.mark.parametrize(
    ('name', 'message'),
    [
        ('Needs', r"Needs is a class with arguments of its own \(missing a required argument: 'target'\)"),
        ('Breaks', r'making Breaks\(\) raised OSError: no such service'),
        ('Holds', 'Holds is a class whose objects cannot be called'),
    ],
)
def test_a_class_that_cannot_be_made_is_one_line(tmp_path, name, message):
    (tmp_path / 'kinds.py').write_text(FILE)
    assert load_function(f'{tmp_path}/kinds.py:Starts')([''], ['abc']) == [1.0]
    with pytest.raises(ValueError, match=f'kinds.py:{name}.: {message}.*name a function or object of your own file'):
        load_function(f'{tmp_path}/kinds.py:{name}')


def test_an_exit_while_importing_is_an_error(tmp_path):
    (tmp_path / 'leaves.py').write_text('import sys\nsys.exit(0)\n')
    with pytest.raises(ValueError, match=r'importing it raised SystemExit: 0$'):
        load_function(f'{tmp_path}/leaves.py:score')
