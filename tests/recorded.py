"""A row of a recording, for tests that write or read recorded sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chatgpt.monitor.run_folder.rollouts import PER_TOKEN


def recorded_row(phase: int, index: int, tokens: Sequence[str] = ('r', 'r'), **more: Any) -> dict[str, Any]:
    """Returns a row for `write_rollouts`, with groups of two. more: replaces or adds entries."""
    n = len(tokens)
    about = {'phase': phase, 'index': index, 'group': index // 2, 'version': 0, 'finish_reason': 'eos', 'columns': '{}'}
    texts = {'prompt': 'p', 'response': ''.join(tokens), 'prompt_tokens': ['p'], 'tokens': list(tokens)}
    numbers = {'score': float(index), 'shaped_score': 0.5, 'kl': 0.5, 'weighted_scores': []}
    ids = {'prompt_ids': [1], 'token_ids': [7] * n, 'mask': [True] * n}
    return about | texts | numbers | ids | dict.fromkeys((*PER_TOKEN, 'entropy'), [0.5] * n) | more
