"""A trial that trains nothing: its loss after step n is (log10(lr) + 2)² + 1 / n, so lr = 0.01 is best, and one that
goes on after SIGTERM where it stopped."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

PROGRAM = """
import fcntl, json, math, os, signal, sys, time
given = json.loads(sys.argv[1])
folder, lr, number = given['folder'], given['parameters'].get('lr', 0.01), int(given['folder'][-4:])
stop, pause = [], given.get('pause', {})
signal.signal(signal.SIGTERM, lambda *_: stop.extend([True] * (not given.get('stubborn'))))
lock = open(folder + '/.lock', 'a')
fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
print('begins', given['again'], 'at', time.monotonic(), flush=True)
state = folder + '/state.json'
done = json.load(open(state)) if given['again'] and os.path.exists(state) else 0
with open(folder + '/metrics.jsonl', 'a' if done else 'w') as file:
    for step in range(done + 1, given.get('steps', 4) + 1):
        if number in given.get('crash', []) and step == 2:
            print('error: it broke at ' + format(lr, '.3g'), file=sys.stderr)
            sys.exit(1)
        if number in given.get('killed', []):
            os.kill(os.getpid(), signal.SIGKILL)
        value = (math.log10(lr) + 2) ** 2 + 1 / step
        value = None if [number, step] == given.get('lost') else value
        line = {'step': step, 'sft/loss': value, 'sft/accuracy': -(value or 0)}
        file.write(json.dumps(line) + chr(10))
        file.flush()
        waits_until = time.monotonic() + next((pause[k] for k in (f'{number}.{step}', str(step)) if k in pause), 0)
        while time.monotonic() < waits_until and not stop:
            time.sleep(0.01)
        if stop:
            json.dump(step, open(state, 'w'))
            sys.exit(143)
for step in given.get('evaluated', []):
    with open(folder + '/eval.jsonl', 'a') as file:
        file.write(json.dumps({'step': step, 'eval/score_mean': step / 10}) + chr(10))
print('ends at', time.monotonic())
"""


def loss_of(lr: float, step: int = 4) -> float:
    return (math.log10(lr) + 2) ** 2 + 1 / step


def table(folder: Path) -> list[dict[str, Any]]:
    """trials.csv without its seconds."""
    with open(folder / 'trials.csv', newline='') as file:
        return [{k: v for k, v in row.items() if k != 'seconds'} for row in csv.DictReader(file)]
