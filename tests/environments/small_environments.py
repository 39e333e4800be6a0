"""Environments of these tests, many of them faulty. Worker processes import this file, so it imports no torch."""

from __future__ import annotations

import asyncio
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from chatgpt.environments import Environment

NEVER = threading.Event()


class Counter(Environment):
    """Counts its steps from a number given by the seed; a response that begins with 'do:' names a fault."""

    def reset(self, seed, **columns):
        self.at = 100 * seed
        how = columns.get('reset')
        if how == 'raises':
            raise KeyError('no such task')
        if how == 'hangs':
            NEVER.wait()
        return 17 if how == 'nonsense' else f'at {self.at}\n'

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
        if verb == 'nap':
            time.sleep(0.5)
            return answer
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
    """`Counter` with coroutines."""

    async def reset(self, seed, **columns):
        await asyncio.sleep(0)
        self.loop = asyncio.get_running_loop()
        return Counter.reset(self, seed, **columns)

    async def step(self, response):
        assert asyncio.get_running_loop() is self.loop
        if response == 'do:sleep':
            await asyncio.sleep(600)
        while response == 'do:cling' and not NEVER.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.02)
        return Counter.step(self, response)

    async def close(self):
        await asyncio.sleep(0)


class Closing(Counter):
    """Appends to a file when it is closed."""

    def reset(self, seed, **columns):
        self.file = Path(columns['file'])
        return 'go'

    def close(self):
        with self.file.open('a') as file:
            file.write('closed\n')


class Moody(Environment):
    """Returns observations by the clock, not by the seed."""

    def reset(self, seed, **columns):
        return 'same\n'

    def step(self, response):
        if response == 'do:die':
            os._exit(3)
        return f'{time.monotonic_ns()}\n', 1.0, False, False, {}


class Letters(Environment):
    """Three turns, with a reward for each 'e' and for a length near a number given by the seed."""

    num_steps = 0
    at = None
    """the step, counted over all episodes, at which `do` happens"""
    do = staticmethod(lambda: os.kill(os.getpid(), signal.SIGTERM))

    def reset(self, seed, **columns):
        self.random, self.turns = random.Random(seed), 0
        return f'{self.random.randint(2, 6)}:'

    def step(self, response):
        type(self).num_steps += 1
        if type(self).num_steps == type(self).at:
            type(self).do()
        self.turns += 1
        reward = response.count('e') - abs(len(response) - 3) / 4
        return f'<{self.number()}>', reward, self.turns == 3, False, {'success': reward > 0}

    def number(self):
        return self.random.randint(10, 99)


class Clocked(Letters):
    """Returns observations by the clock from its second turn on."""

    def number(self):
        return time.monotonic_ns() if self.turns == 2 else super().number()


class Fails(Environment):
    """Two turns with reward 1 and with the number of the episode, 1, 2, 3, 4, 1, 2, ...; the fault in `faults` for that
    number happens in the second turn, or in `reset`."""

    count = 0
    faults = {}

    def reset(self, seed, **columns):
        Fails.count += 1
        self.number, self.turns = (Fails.count - 1) % 4 + 1, 0
        if self.faults.get(self.number) == 'reset':
            raise RuntimeError('no board')
        return 'go:'

    def step(self, response):
        self.turns += 1
        if self.turns == 1:
            return '.', 1.0, False, False, {}
        fault = self.faults.get(self.number)
        if fault == 'error':
            raise RuntimeError('the board broke')
        if fault == 'timeout':
            NEVER.wait()
        return '.', math.nan if fault == 'invalid' else float(self.number), True, False, {}


class Interrupts(Environment):
    """Sends the trainer Ctrl-C twice, and never answers."""

    def reset(self, seed, **columns):
        return 'go:'

    def step(self, response):
        trainer = os.getpid() if 'torch' in sys.modules else os.getppid()
        for _ in range(2):
            os.kill(trainer, signal.SIGINT)
            time.sleep(1.0)  # two signals at once are one for Python
        NEVER.wait(20)
        return 'late', 0.0, True, False, {}
