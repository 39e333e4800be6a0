"""`chatgpt`: RLHF on Hugging Face models. The algorithm is written once and the hardware is a plug.

Importing it loads nothing heavy: `chatgpt.nn`, `chatgpt.trainer` and the other packages are loaded when first asked
for.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = '0.1.0'

_PACKAGES = (
    'batching',
    'checkpoint',
    'dataset',
    'experience',
    'functional',
    'launch',
    'nn',
    'plan',
    'rewards',
    'rollout',
    'testing',
    'trainer',
    'types',
)

__all__ = ['__version__', 'train', *_PACKAGES]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f'chatgpt.{name}')
    if name == 'train':
        return importlib.import_module('chatgpt.quickstart').train
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


def __dir__() -> list[str]:
    return sorted(__all__)
