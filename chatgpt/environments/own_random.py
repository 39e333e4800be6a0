"""Python's and NumPy's global random numbers as if they were an environment's own, for environments that draw from
them and would repeat nothing otherwise.

The global generators are swapped, one environment of a process at a time. Whoever draws from them in another thread
at that moment gets numbers of the environment; worker processes have generators of their own.
"""

from __future__ import annotations

import random
import threading
import time
from types import TracebackType
from typing import Any

_WAIT_S = 5.0
_changed = threading.Condition()
_inside: OwnRandom | None = None
"""whose numbers the global generators give at the moment"""


class OwnRandom:
    """A context in which `random` and `numpy.random` go on from where this object left them.

    An environment that hangs inside must not stop the others: after 5 seconds another takes its place, and when it goes
    on after all, it leaves the generators alone.

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
        self._others: tuple[Any, Any] = ((), ())
        self._since = 0.0

    def __enter__(self) -> None:
        import numpy as np

        global _inside
        with _changed:
            while _inside is not None and (left := _inside._since + _WAIT_S - time.monotonic()) > 0:
                _changed.wait(left)
            hanging, _inside = _inside, self
            self._since = time.monotonic()
            self._others = (random.getstate(), np.random.get_state()) if hanging is None else hanging._others
            random.setstate(self._state[0])
            np.random.set_state(self._state[1])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import numpy as np

        global _inside
        with _changed:
            if _inside is not self:  # another has taken its place
                return
            self._state = (random.getstate(), np.random.get_state())
            random.setstate(self._others[0])
            np.random.set_state(self._others[1])
            _inside = None
            _changed.notify()
