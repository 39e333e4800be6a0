"""The conformance suite for any `Strategy`, of the library or of a third party.

Call `run_conformance(make_strategy)` in every process of a running group, or in a single process. Each check creates a
new strategy, trains a tiny policy, and compares with plain torch or with `NaiveStrategy`. A strategy must raise an
error for what it does not support; the check then reports 'refused' and does not fail.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from chatgpt.strategies.base import Strategy
from chatgpt.strategies.processes import finish_gloo_at_exit
from chatgpt.testing import conformance_saving, conformance_training
from chatgpt.testing.conformance_bench import BF16, FP32, Bench, Check, ConformanceError, Refused, Tolerance
from chatgpt.testing.tiny import TinyPolicy

__all__ = ['BF16', 'FP32', 'Bench', 'ConformanceError', 'Tolerance', 'all_checks', 'run_check', 'run_conformance']


def all_checks() -> dict[str, Check]:
    """Returns all checks by name, in the order in which they run."""
    return {**conformance_training.CHECKS, **conformance_saving.CHECKS}


def run_conformance(
    make_strategy: Callable[[], Strategy],
    *,
    tolerance: Tolerance = FP32,
    checks: Iterable[str] | None = None,
    folder: str | Path | None = None,
    make_model: Callable[[], nn.Module] = TinyPolicy,
    make_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
) -> dict[str, str]:
    """Runs all checks, or those in `checks`, on a strategy. Call it on every rank, inside a running process group.

    Returns {check: 'passed' or 'refused: <the strategy's message>'}. `folder` must be shared by all ranks; by default
    it is a temporary one.

    Raises:
        ConformanceError: on every rank, with each failed check and each rank's message.

    >>> from chatgpt.strategies import NaiveStrategy
    >>> run_conformance(lambda: NaiveStrategy(device='cpu'), checks=['frozen'])
    {'frozen': 'passed'}
    """
    table = all_checks()
    chosen = list(table) if checks is None else list(checks)
    unknown = [name for name in chosen if name not in table]
    if unknown:
        raise ValueError(f'unknown checks {", ".join(unknown)}; there are {", ".join(table)}')
    if dist.is_initialized() and dist.get_backend() == 'gloo':
        finish_gloo_at_exit()
    with make_strategy() as strategy, strategy.failure_guard():
        temporary = strategy.is_rank_0 and folder is None
        with tempfile.TemporaryDirectory(prefix='conformance-') if temporary else nullcontext() as own:
            root = Path(strategy.broadcast_object(str(folder or own)))
            results, failures = {}, []
            for name in chosen:
                made: dict[str, Any] = {
                    'make_strategy': make_strategy,
                    'make_model': make_model,
                    'make_optimizer': make_optimizer,
                }
                bench = Bench(folder=root / name, tolerance=tolerance, **made)
                strategy.run_on_rank0(functools.partial(bench.folder.mkdir, parents=True))
                outcomes = strategy.all_gather_object(run_check(table[name], bench))
                results[name] = outcomes[0]
                failures += [
                    f'{name}, rank {rank}: {text}' for rank, text in enumerate(outcomes) if text.startswith('failed')
                ]
            strategy.barrier()
    if failures:
        raise ConformanceError('\n'.join(failures))
    return results


def run_check(check: Check, bench: Bench) -> str:
    """Runs a check; returns 'passed', 'refused: ...' or 'failed: ...'."""
    try:
        check(bench)
    except Refused as refusal:
        return f'refused: {refusal}'
    except ConformanceError as error:
        return f'failed: {error}'
    return 'passed'
