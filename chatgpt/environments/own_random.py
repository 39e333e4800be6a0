"""Python's and NumPy's global random numbers as if they were an environment's own, for environments that draw from
them and would repeat nothing otherwise.

The global generators are swapped, one environment of a process at a time. Whoever draws from them in another thread
at that moment gets numbers of the environment; worker processes have generators of their own.
"""

from __future__ import annotations

import random
import threading
from types import TracebackType
from typing import Any

_WAIT_S = 5.0
_lock = threading.Lock()


class OwnRandom:
    """A context in which `random` and `numpy.random` go on from where this object left them.

    An environment that hangs inside must not stop the others, so after 5 seconds an environment is let in beside it,
    with what random numbers there are.

    >>> mine = OwnRandom(3)
    >>> with mine:
    ...     first = random.random()
    >>> with OwnRandom(3):
    ...     assert random.random() == first
    """

    def __init__(self, seed: int) -> None:
        """seed: at least 0, below 2**32."""
        import numpy as np  # not with this file, which every worker process imports

        self._state: tuple[Any, Any] = (random.Random(seed).getstate(), np.random.RandomState(seed).get_state())
        self._others: tuple[Any, Any] | None = None

    def __enter__(self) -> None:
        import numpy as np

        if _lock.acquire(timeout=_WAIT_S):
            self._others = (random.getstate(), np.random.get_state())
            random.setstate(self._state[0])
            np.random.set_state(self._state[1])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import numpy as np

        if self._others is not None:
            self._state = (random.getstate(), np.random.get_state())
            random.setstate(self._others[0])
            np.random.set_state(self._others[1])
            self._others = None
            _lock.release()
