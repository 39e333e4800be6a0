"""Environments that do what no environment should. Worker processes import this file, so it imports no torch."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from chatgpt.environments import Environment

NEVER = threading.Event()


class Counter(Environment):
    """Counts its steps from a number that the seed decides; a response that begins with 'do:' names what to do."""

    opened: list[int] = []
    closed: list[int] = []

    def reset(self, seed, **columns):
        self.at = 100 * seed
        self.opened.append(self.at)
        if columns.get('reset') == 'raises':
            raise KeyError('no such task')
        if columns.get('reset') == 'hangs':
            NEVER.wait()
        if columns.get('reset') == 'nonsense':
            return 17
        return f'at {self.at}\n'

    def step(self, response):
        self.at += 1
        answer = f'at {self.at} {response}\n', 1.0, False, False, {}
        if not response.startswith('do:'):
            return answer
        verb = response[3:].strip()
        if verb == 'raise':
            raise ValueError('two\nlines')
        if verb == 'exit':
            sys.exit('enough')
        if verb == 'hang':
            NEVER.wait()
        if verb == 'spin':
            while True:
                pass
        if verb == 'die':
            os._exit(3)
        if verb == 'crash':
            os.kill(os.getpid(), 11)
        if verb == 'child':
            child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'])
            return f'{child.pid}', 0.0, False, False, {}
        return NONSENSE[verb]

    def close(self):
        self.closed.append(self.at)


NONSENSE = {
    'pair': ('at', 1.0),
    'number': ('at', 'much', False, False, {}),
    'nan': ('at', float('nan'), False, False, {}),
    'infinite': ('at', {'a': 1.0, 'b': float('inf')}, False, False, {}),
    'role': ([{'role': 'wizard', 'content': 'at'}], 1.0, False, False, {}),
    'content': ([{'role': 'user', 'content': 5}], 1.0, False, False, {}),
    'bytes': (b'at', 1.0, False, False, {}),
    'flag': ('at', 1.0, 'yes', False, {}),
    'info': ('at', 1.0, False, False, 'well'),
    'success': ('at', 1.0, False, False, {'success': 'very'}),
    'lambda': ([{'role': 'user', 'content': 'at', 'tool': lambda: 0}], 1.0, False, False, {}),
}


class Awaited(Counter):
    """The same as coroutines."""

    async def reset(self, seed, **columns):
        await asyncio.sleep(0)
        self.loop = asyncio.get_running_loop()
        return Counter.reset(self, seed, **columns)

    async def step(self, response):
        assert asyncio.get_running_loop() is self.loop
        if response == 'do:sleep':
            await asyncio.sleep(600)
        if response == 'do:cling':
            while not NEVER.is_set():
                try:
                    await asyncio.sleep(0.02)
                except asyncio.CancelledError:
                    pass
        return Counter.step(self, response)

    async def close(self):
        await asyncio.sleep(0)
        Counter.close(self)


class Closing(Counter):
    """Notes in a file that it was closed."""

    def reset(self, seed, **columns):
        self.file = Path(columns['file'])
        return 'go'

    def close(self):
        with self.file.open('a') as file:
            file.write('closed\n')


class Moody(Environment):
    """Answers by the clock and not by its seed."""

    def reset(self, seed, **columns):
        return 'same\n'

    def step(self, response):
        if response == 'do:die':
            os._exit(3)
        return f'{time.monotonic_ns()}\n', 1.0, False, False, {}
