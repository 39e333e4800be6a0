"""What a run has improved, in a line."""

from __future__ import annotations

import re
from collections.abc import Mapping

from chatgpt.report.series import Column, average, columns, number
from chatgpt.run_folder import RunFolder

IMPROVED: tuple[tuple[tuple[str, str], ...], ...] = (
    ((r'rollout/score_mean|rft/score_mean', 'score'), (r'eval/score_mean', 'eval score')),
    ((r'[^/]+/accuracy', 'accuracy'), (r'[^/]+/val_accuracy', 'eval accuracy')),
    ((r'[^/]+/loss', 'loss'), (r'[^/]+/val_loss', 'eval loss')),
)
"""what says how a run goes, by pattern of the metric's name: scores, else accuracies, else losses"""


def what_improved(run: RunFolder) -> str:
    """`score -1.44 → 2.31, eval score -1.2 → 2.2 in 40 phases, KL 3.2 nats per response`.

    Of training the means of the first and of the last tenth of the phases, for single phases scatter; of an evaluation,
    which has the same prompts each time, the first and the last.
    """
    found = columns([*run.metrics, *run.eval])
    last = max((at[-1] for at, _ in found.values()), default=0)
    if not last:
        return 'no learning phase was finished'
    kind = next((kind for kind in IMPROVED if any(_one(found, pattern) for pattern, _ in kind)), ())
    told = [f'{word} {_from_to(column, word)}' for pattern, word in kind if (column := _one(found, pattern))]
    text = f'{", ".join(told)} in ' if told else ''
    text += f'{last} {"phase" if last == 1 else "phases"}'
    kl = _ends(found['rollout/kl_mean'], last)[1] if 'rollout/kl_mean' in found else None
    return text if kl is None else f'{text}, KL {number(kl)} nats per response'


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
