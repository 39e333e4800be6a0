"""Progress of a run: bars on a terminal, one line per learning phase anywhere else. Rank 0 only."""

from __future__ import annotations

import fnmatch
import sys
import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any, TypeVar

from chatgpt.monitor.report.series import KL
from chatgpt.monitor.report.text import duration
from chatgpt.trainer.callbacks.base import Callback, TrainerView, say
from chatgpt.types import Experience

T = TypeVar('T')

SHOWN: dict[str, str | tuple[str, ...]] = {
    'score': 'rollout/score_mean',
    'kl': KL,
    'length': 'rollout/response_len_mean',
    'policy': 'ppo/policy_loss',
    'ptx': 'ppo/ptx_loss',
    'value': 'ppo/value_loss',
    'loss': '*/loss',
    'accuracy': '*/accuracy',
    'margin': '*/margin',
    'val loss': '*/val_loss',
    'val accuracy': '*/val_accuracy',
    'tokens/s': ('perf/new_tokens_per_s', 'perf/learn_tokens_per_s'),
    'total_s': 'perf/total_s',
}
"""label → metric with * for the method's prefix, or several of which the first in a phase's metrics is shown"""

COLLECTING = '{desc} [{elapsed}]'
"""format of a bar with an unknown end"""


def _number(name: str, value: float) -> str:
    """Formats with four digits, or as a whole number; a KL with at most four decimals, below which it is rounding of
    fp32 sums."""
    if 1e4 <= abs(value) < 1e9:
        return f'{value:.0f}'
    return f'{round(value, 4) if name == KL else value:z.4g}'


class ProgressBar(Callback):
    """Shows a bar over the phases, with transient ones for collecting and learning; a line per phase if stderr is not a
    terminal. Both show the remaining time.

    Args:
        enabled: False shows nothing.
        bars: True or False forces bars or lines; None shows bars if stderr is a terminal.
        shown: replaces `SHOWN`.
    """

    def __init__(
        self,
        enabled: bool = True,
        *,
        bars: bool | None = None,
        shown: Mapping[str, str | tuple[str, ...]] | None = None,
    ) -> None:
        self.enabled = enabled
        self.bars = bars
        given = SHOWN if shown is None else shown
        self.shown = {label: (names,) if isinstance(names, str) else names for label, names in given.items()}
        self._use_bars = False
        self._phases: Any = None
        self._inner: Any = None
        self._began = 0.0, 0

    def on_fit_start(self, trainer: TrainerView) -> None:
        self._close()
        self._began = time.monotonic(), trainer.phase
        self._use_bars = sys.stderr.isatty() if self.bars is None else self.bars
        if self._showing(trainer):
            self._phases = self._bar('phases', total=trainer.num_phases, initial=trainer.phase, position=0, leave=True)

    def on_make_experience_start(self, trainer: TrainerView) -> None:
        if self._showing(trainer):
            self._start('collect', None, bar_format=COLLECTING)

    def on_make_experience_end(self, trainer: TrainerView, experiences: list[Experience]) -> None:
        self._stop()

    def on_learn_batch_start(self, trainer: TrainerView) -> None:
        if self._inner is None and self._showing(trainer):
            updates, phases = trainer.total_updates, trainer.num_phases
            self._start('learn', -(-updates // phases) if updates and phases else None)

    def on_learn_batch_end(self, trainer: TrainerView, metrics: dict[str, float]) -> None:
        if self._inner is not None:
            self._inner.update(1)

    def on_phase_end(self, trainer: TrainerView, step: int, metrics: dict[str, float]) -> None:
        self._stop()
        if not (self.enabled and trainer.strategy.is_rank_0):
            return
        numbers = {}
        for label, patterns in self.shown.items():
            names = [name for pattern in patterns for name in fnmatch.filter(metrics, pattern)]
            if names:
                numbers[label] = _number(names[0], metrics[names[0]])
        if self._phases is not None:
            self._phases.set_postfix(numbers, refresh=False)
            self._phases.update(step - self._phases.n)
            self._phases.refresh()
        elif not self._use_bars:
            of = f'/{trainer.num_phases}' if trainer.num_phases else ''
            words = [f'{label} {number}' for label, number in numbers.items()]
            if left := self._left(trainer, step):
                words.append(f'left {left}')
            say(f'phase {step}{of}  ' + '  '.join(words))
            sys.stdout.flush()

    def over(self, trainer: TrainerView, what: str, items: SequenceOf[T]) -> Iterator[T]:
        """Yields the items with a bar of their own; without bars, prints one line."""
        if self._showing(trainer):
            self._start(what, len(items))
        elif self.enabled and trainer.strategy.is_rank_0:
            say(what)
        for item in items:
            yield item
            if self._inner is not None:
                self._inner.update(1)
        self._stop()

    def on_fit_end(self, trainer: TrainerView) -> None:
        self._close()

    def on_exception(self, trainer: TrainerView, error: BaseException) -> None:
        self._close()

    def _showing(self, trainer: TrainerView) -> bool:
        return self.enabled and self._use_bars and trainer.strategy.is_rank_0

    def _left(self, trainer: TrainerView, step: int) -> str:
        """Returns the remaining time at the mean speed so far; '' if unknown or less than a second."""
        start, first = self._began
        if not trainer.num_phases or step <= first:
            return ''
        seconds = (time.monotonic() - start) / (step - first) * (trainer.num_phases - step)
        return duration(seconds) if seconds >= 1 else ''

    def _start(self, what: str, total: int | None, **look: Any) -> None:
        self._stop()
        self._inner = self._bar(what, total=total, position=1, leave=False, **look)

    def _stop(self) -> None:
        if self._inner is not None:
            self._inner.close()
            self._inner = None

    def _close(self) -> None:
        self._stop()
        if self._phases is not None:
            self._phases.close()
            self._phases = None

    @staticmethod
    def _bar(what: str, **options: Any) -> Any:
        from tqdm import tqdm

        return tqdm(desc=what, dynamic_ncols=True, file=sys.stderr, **options)
