"""The improvement of a run, in a line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

from chatgpt.monitor.report.series import Column, average, columns, nats, number
from chatgpt.monitor.run_folder import RunFolder

IMPROVED: tuple[tuple[tuple[str, str], ...], ...] = (
    ((r'rollout/score_mean|rft/score_mean', 'score'), (r'eval/score_mean', 'eval score')),
    ((r'[^/]+/accuracy', 'accuracy'), (r'[^/]+/val_accuracy', 'eval accuracy')),
    ((r'[^/]+/loss', 'loss'), (r'[^/]+/val_loss', 'eval loss')),
)
"""what says how a run goes, by pattern of the metric's name: scores, else accuracies, else losses"""

KL = 'rollout/kl_mean'


def what_improved(run: RunFolder) -> str:
    """`score -1.44 → 2.31, eval score -1.2 → 2.2 in 40 phases, KL 3.2 nats per response`.

    Of training the means of the first and of the last tenth of the phases, for single phases scatter; of an evaluation,
    which has the same prompts each time, the first and the last.
    """
    rows = [*run.metrics, *run.eval]
    found = columns({name: value for name, value in row.items() if _tells(name)} for row in rows)
    last = max((int(row['step']) for row in rows), default=0)
    if not last:
        return 'no learning phase was finished'
    kind = next((kind for kind in IMPROVED if any(_one(found, pattern) for pattern, _ in kind)), ())
    told = [f'{word} {_from_to(column, word)}' for pattern, word in kind if (column := _one(found, pattern))]
    text = f'{", ".join(told)} in ' if told else ''
    text += f'{last} {"phase" if last == 1 else "phases"}'
    kl = _ends(found[KL], last)[1] if KL in found else None
    return text if kl is None else f'{text}, KL {nats(kl)} nats per response'


@cache
def _tells(name: str) -> bool:
    return name in ('step', KL) or any(re.fullmatch(pattern, name) for kind in IMPROVED for pattern, _ in kind)


def _one(found: Mapping[str, Column], pattern: str) -> Column | None:
    for name, column in found.items():
        if re.fullmatch(pattern, name) and any(value is not None for value in column[1]):
            return column
    return None


def _from_to(column: Column, word: str) -> str:
    first, last = _ends(column, 1 if word.startswith('eval') else len(column[1]))
    return number(last) if len(column[1]) == 1 else f'{number(first)} → {number(last)}'


def _ends(column: Column, phases: int) -> tuple[float | None, float | None]:
    """Means of the first and of the last tenth."""
    values = [value for value in column[1] if value is not None]
    share = max(1, min(phases, len(values)) // 10)
    return average(values[:share]), average(values[-share:])
