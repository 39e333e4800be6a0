"""Recorded sequences as compact rows for the reader of a page (`assets/rollouts.js`), as many as fit."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

DIGITS = 4
"""significant digits of a number on a page"""
SHOWN = ('values', 'rewards', 'advantages', 'entropy')
"""per-token arrays by which the reader can colour tokens, beside `log_ratio`"""
KEPT = (
    *('phase', 'index', 'group', 'prompt', 'response', 'score', 'shaped_score', 'kl', 'finish_reason', 'version'),
    *('prompt_tokens', 'tokens', 'token_ids', 'mask', 'weighted_scores'),
)


def page_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Converts a row of `read_rollouts` for the reader: JSON values, numbers rounded to `DIGITS`, None if not finite.

    `log_ratio`, old_logprobs − ref_logprobs per token, replaces both, since the difference of rounded numbers would be
    mostly rounding error. `episode` (turns, end, message and success) is present for an environment, `last_turn` for a
    conversation. Other columns, such as the prompt's ids and returns, are dropped.
    """
    gap = [old - ref for old, ref in zip(row['old_logprobs'], row['ref_logprobs'], strict=True)]
    arrays = {'log_ratio': gap} | {name: row[name] for name in SHOWN}
    if row.get('episode') is not None:
        arrays['episode'] = json.loads(row['episode'])
    if row.get('last_turn'):
        arrays['last_turn'] = row['last_turn']
    return {name: _rounded(value) for name, value in ({k: row[k] for k in KEPT} | arrays).items()}


def rows_for_page(rows: Iterable[Mapping[str, Any]], budget_bytes: int) -> list[dict[str, Any]]:
    """Returns as many rows of `page_row` as fit into `budget_bytes` of compact JSON, ordered by phase and index.

    Whole groups are taken: the first group of every phase, then the second of every phase, and so on. Phases are taken
    in an order that halves the distance between them: last, first, middle, quarters.
    """
    phases: dict[int, dict[int, list[Mapping[str, Any]]]] = {}
    for row in rows:
        phases.setdefault(row['phase'], {}).setdefault(row['group'], []).append(row)
    turns = [(at, phase) for at in range(max(map(len, phases.values()), default=0)) for phase in _spread(phases)]
    chosen: list[dict[str, Any]] = []
    left = budget_bytes - 2  # brackets
    for at, phase in turns:
        groups = list(phases[phase].values())
        if at >= len(groups):
            continue
        made = [page_row(row) for row in groups[at]]
        size = sum(len(_compact(row)) + 1 for row in made)
        if size <= left:
            chosen += made
            left -= size
    return sorted(chosen, key=lambda row: (row['phase'], row['index']))


def phases_for_page(phases: SequenceOf[int], num: int = 12) -> list[int]:
    """Returns at most `num` of the recorded phases, at about equal distances, with the first and the last."""
    return sorted(_spread(phases)[:num])


def _spread(phases: Iterable[int]) -> list[int]:
    """Orders phases so that every prefix covers the run evenly: last, first, then the middle of the widest gap."""
    known = sorted(phases)
    order = list(dict.fromkeys(known[-1:] + known[:1]))
    gaps = [(0, len(known) - 1)]
    for low, high in gaps:  # the loop appends to the list
        if high - low > 1:
            middle = (low + high) // 2
            order.append(known[middle])
            gaps += [(low, middle), (middle, high)]
    return order


def _compact(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row, ensure_ascii=False, separators=(',', ':'), allow_nan=False).encode()


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f'{value:.{DIGITS}g}') if math.isfinite(value) else None
    if isinstance(value, (list, tuple)):
        return [_rounded(v) for v in value]
    if isinstance(value, dict):
        return {name: _rounded(v) for name, v in value.items()}
    return value
