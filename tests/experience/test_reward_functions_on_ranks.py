"""A reward function on two processes: coroutines are awaited on rank 0, an exit ends no rank in silence."""

from __future__ import annotations

import asyncio
import sys

from experience_samples import sample

from chatgpt.strategies import DDPStrategy
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer.experience import FunctionScorer


async def lengths(prompts: list[str], responses: list[str]) -> list[float]:
    await asyncio.sleep(0.01)
    return [float(len(r)) for r in responses]


def leaves(prompts: list[str], responses: list[str]) -> list[float]:
    sys.exit(0)


def scored() -> tuple[list[float], str]:
    """This rank's scores by a coroutine function, and what an exit came to."""
    with DDPStrategy(device='cpu') as strategy:
        samples = [sample(i, response_text='x' * i) for i in (strategy.rank, strategy.rank + 2)]
        numbers = [float(s) for _ in range(2) for s in FunctionScorer(lengths).score(samples, strategy)]
        try:
            FunctionScorer(leaves).score(samples, strategy)
        except RuntimeError as error:
            return numbers, str(error)
        return numbers, 'nothing was raised'


def test_on_two_ranks():
    (first, error), (second, other_error) = run_distributed(scored, 2)
    assert first == [0.0, 2.0] * 2 and second == [1.0, 3.0] * 2
    assert 'reward function leaves raised SystemExit: 0, at ' in error and '.py:' in error
    assert error in other_error
