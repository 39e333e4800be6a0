"""Runs under trackers by name: `mine`, with a second phase after a resume, and `theirs`, which fails.

    python tracker_runs.py FOLDER trackio mlflow ...

Runs in a separate interpreter, since these packages read their environment when they are imported. Prints the imported
tracker packages for each name.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path

from fake_trainer import FakeTrainer

from chatgpt.trainer.callbacks import TRACKERS, Callback

LOCAL = ('trackio', 'mlflow', 'tensorboard')
"""trackers that must not open a socket; wandb uses one for its own process on this machine"""
CONNECT = socket.socket.connect, socket.create_connection, socket.getaddrinfo


def refuse(*args: object, **kwargs: object) -> None:
    raise AssertionError(f'a connection was asked for: {args}')


def main(name: str, folder: Path) -> None:
    connect = [refuse] * 3 if name in LOCAL else CONNECT
    socket.socket.connect, socket.create_connection, socket.getaddrinfo = connect  # type: ignore[assignment]
    make: type[Callback] = TRACKERS.find(name)
    for run in ('mine', 'theirs', 'other_rank'):
        (folder / run).mkdir(parents=True)
    first, second = make(), make()
    FakeTrainer([first], folder / 'mine', lr=0.125).fit([{'ppo/loss': 0.5, 'rollout/score_mean': 1.0}])
    resumed = FakeTrainer([second], folder / 'mine', lr=0.125)
    resumed.callbacks.load_state_dict({f'{make.__name__}.0': first.state_dict()})
    resumed.phase = 1
    resumed.fit([{'ppo/loss': 0.25, 'rollout/score_mean': 2.0, 'eval/score_mean@beta=1': 1.0}])
    failing = FakeTrainer([make()], folder / 'theirs')
    failing.callbacks.on_fit_start(failing)
    failing.run_phase({'ppo/loss': 0.75})
    failing.callbacks.on_exception(failing, RuntimeError())
    FakeTrainer([make()], folder / 'other_rank', rank=1).fit([{'ppo/loss': 9.0}])
    print('after', name, *sorted({module.split('.')[0] for module in sys.modules} & set(TRACKERS)), flush=True)


if __name__ == '__main__':
    for name in sys.argv[2:]:
        main(name, Path(sys.argv[1], name))
