"""Classes with tools in the form of TRL's documentation of `environment_factory`, and possible turns of a model."""

from __future__ import annotations

import asyncio
import random


class Increment:
    """Draws its task in `reset` from the global generator."""

    def reset(self, **kwargs) -> str | None:
        self.counter = 0
        self.target = random.randint(1, 6)
        return f'Increment the counter by {self.target}.'

    def get_reward(self) -> float:
        return float(self.counter == self.target)

    def increment(self, step: int) -> int:
        """
        Increment the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        self.counter += step
        return self.counter


class Shop:
    """Tools of every kind: functions and coroutine functions, with defaults, that raise, that return unusual types."""

    made = 0

    def __init__(self):
        type(self).made += 1
        self.asked = 0

    def reset(self, budget=10, **columns) -> str | None:
        self.left, self.bought = budget, []
        return None if budget == 0 else f' You have {budget}.'

    def get_reward(self) -> float:
        self.asked += 1
        return float(len(self.bought)) + self.left / 100

    def buy(self, item: str, price: int = 3) -> str:
        """Buy one thing.

        Args:
            item: what to buy
            price: what it costs

        Returns:
            what is left
        """
        if price > self.left:
            raise ValueError(f'{item} is too dear')
        self.left -= price
        self.bought.append(item)
        return f'{self.left} left'

    async def look(self, shelf: int) -> list:
        """See what lies there.

        Args:
            shelf: number of the shelf

        Returns:
            the things
        """
        await asyncio.sleep(0.001 * (3 - shelf))
        if shelf > 2:
            raise KeyError(shelf)
        return {'shelf': shelf, 'things': ['tea', 'jam'][:shelf]}

    def leave(self) -> None:
        """Go away."""

    def _secret(self):
        raise AssertionError('no tool')


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


# name: (columns of the data row, the model's turns without the end token)
SCRIPTS: dict[str, tuple[dict, tuple[str, ...]]] = {
    'buys and answers': ({}, (call('buy', '{"item": "tea", "price": 4}'), 'Done.')),
    'text beside a call': ({}, ('I look.\n' + call('look', '{"shelf": 2}'), call('buy', '{"item": "jam"}'), 'ok')),
    'no call at all': ({'budget': 7}, ('Nothing, thanks.',)),
    'no observation at reset': ({'budget': 0}, (call('leave', '{}'), 'bye')),
    'two calls in a turn': ({}, (call('buy', '{"item": "a"}') + '\n' + call('buy', '{"item": "b"}'), 'ok')),
    'coroutines come last': (
        {},
        ('\n'.join([call('look', '{"shelf": 1}'), call('look', '{"shelf": 2}'), call('buy', '{"item": "a"}')]), 'ok'),
    ),
    'unknown tool': ({}, (call('steal', '{"item": "tea"}'), 'sorry')),
    'a tool that raises': ({}, (call('buy', '{"item": "gold", "price": 99}'), 'sorry')),
    'a coroutine that raises': ({}, (call('look', '{"shelf": 9}'), 'sorry')),
    'wrong argument': ({}, (call('buy', '{"thing": "tea"}'), 'sorry')),
    'missing argument': ({}, (call('look', '{}'), 'sorry')),
    'hidden method': ({}, (call('_secret', '{}'), 'sorry')),
    'reserved method': ({}, (call('get_reward', '{}'), 'sorry')),
    'no JSON': ({}, ('<tool_call>\n{"name": "buy"\n</tool_call>',)),
    'no name': ({}, ('<tool_call>\n{"arguments": {"item": "tea"}}\n</tool_call>',)),
    'not closed': ({}, ('<tool_call>\n{"name": "buy", "arguments": {"item": "tea"}}',)),
    'thinking': ({}, ('<think>\nTea?\n</think>\n\n' + call('buy', '{"item": "tea"}'), 'ok')),
    'no arguments': ({}, ('<tool_call>\n{"name": "leave"}\n</tool_call>', 'bye')),
}
QUESTION = [{'role': 'user', 'content': 'Go shopping.'}]
