"""What scripts import of `trlx.utils` and `trlx.logging`."""

from __future__ import annotations

import logging
import os
import random
from typing import Any

import numpy as np
import torch

_NAME = 'trlx'


def get_logger(name: str | None = None) -> logging.Logger:
    return logging.getLogger(name or _NAME)


def set_verbosity(verbosity: int) -> None:
    logging.getLogger(_NAME).setLevel(verbosity)


def get_verbosity() -> int:
    return logging.getLogger(_NAME).getEffectiveLevel()


def disable_progress_bar() -> None:
    """Progress here is a line for each learning phase."""


enable_progress_bar = disable_progress_bar


def set_seed(seed: int) -> None:
    """Python's, numpy's and torch's generators, apart for each process. Training here draws from `train.seed` alone."""
    seed += int(os.environ.get('RANK', '0'))
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def print_rank_0(*message: Any) -> None:
    if os.environ.get('RANK', '0') == '0':
        print(*message)
