"""What scripts import of `trlx.utils` and `trlx.logging`."""

from __future__ import annotations

import logging
import math
import os
import random
import time
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


def significant(x: Any, ndigits: int = 2) -> Any:
    """`x` cut to `ndigits` digits after the first that is not 0."""
    value = x.item() if isinstance(x, torch.Tensor) else x
    if not isinstance(value, (int, float)) or value == 0 or not math.isfinite(value):
        return value
    return round(value, ndigits - math.floor(math.log10(abs(value))))


class Clock:
    """Seconds between ticks."""

    def __init__(self) -> None:
        self.start, self.total_time, self.total_samples = time.time(), 0.0, 0

    def tick(self, samples: int = 0) -> float:
        """Seconds since the last tick."""
        now = time.time()
        passed, self.start = now - self.start, now
        if samples:
            self.total_time += passed
            self.total_samples += samples
        return passed

    def get_stat(self, n_samp: int = 1000, reset: bool = False) -> float:
        """Mean seconds of `n_samp` samples."""
        seconds = self.total_time / self.total_samples * n_samp
        if reset:
            self.total_time, self.total_samples = 0.0, 0
        return seconds
