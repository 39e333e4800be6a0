"""Trackers by name, as `--log_with` takes them: `TRACKERS['mine'] = MyCallback` adds one, which command lines and
config files then know; `my_file.py:MyCallback` needs no line at all.

Each is a callback whose class is made without arguments; with arguments, give an object of it to `callbacks=`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from chatgpt.registry import Registry
from chatgpt.trainer.callbacks.base import Callback
from chatgpt.trainer.callbacks.mlflow import MLflow
from chatgpt.trainer.callbacks.tensorboard import TensorBoard
from chatgpt.trainer.callbacks.trackio import Trackio
from chatgpt.trainer.callbacks.wandb import WandB

NONE = 'none'
"""stands alone, for no tracker"""


class TrackerRegistry(Registry[type[Callback]]):
    """Whose entries are classes of callbacks."""

    def admit(self, name: str, found: Any) -> type[Callback]:
        if not (isinstance(found, type) and issubclass(found, Callback)):
            raise ValueError(f'{name!r} is no class derived from chatgpt.trainer.callbacks.Callback')
        return found


TRACKERS = TrackerRegistry(
    'log_with', type, {'tensorboard': TensorBoard, 'wandb': WandB, 'trackio': Trackio, 'mlflow': MLflow}
)


def tracker_names(words: Iterable[str]) -> list[str]:
    """The names in 'wandb,tensorboard', several such words, or 'none'; each once.

    Raises:
        ValueError: there is no such tracker; lists those that there are. Or 'none' stands beside another.
    """
    names = list(dict.fromkeys(name.strip() for word in words for name in word.split(',')))
    if NONE in names:
        if len(names) > 1:
            raise ValueError(f'log_with={",".join(names)}: none is no tracker beside others; leave one out')
        return []
    for name in names:
        TRACKERS.find(name)
    return names
