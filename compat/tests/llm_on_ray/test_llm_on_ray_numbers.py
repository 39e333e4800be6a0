"""Compares our reward loss with numbers of llm-on-ray's code, recorded by compat/benchmarks/compat_llm_on_ray.py."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
GOLDEN = json.loads((Path(__file__).parent / 'llm_on_ray_numbers.json').read_text())


@pytest.fixture(scope='module')
def script() -> Any:
    spec = importlib.util.spec_from_file_location(
        'compat_llm_on_ray', ROOT / 'compat' / 'benchmarks' / 'compat_llm_on_ray.py'
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tensors(name: str) -> dict[str, torch.Tensor]:
    return {k: torch.tensor(v) for k, v in GOLDEN[name]['inputs'].items()}


def test_equal_where_two_answers_differ_in_their_last_token(script):
    name = 'they differ in the last token'
    found = script.ours(tensors(name))
    assert found['loss'] == pytest.approx(GOLDEN[name]['theirs']['loss'], rel=1e-5)
    for ours, theirs in zip(found['gradient'], GOLDEN[name]['theirs']['gradient'], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_elsewhere_theirs_averages_over_the_tokens_that_differ(script):
    """Our loss scores a response, llm-on-ray's its tokens; the test computes both by a loop."""
    name = 'they differ in three tokens'
    x = tensors(name)

    def pair(b: int, t: int) -> float:
        return math.log(1 + math.exp(float(x['rejected_scores'][b, t, 0]) - float(x['chosen_scores'][b, t, 0])))

    theirs = sum(sum(pair(b, t) for t in (2, 3, 4)) / 3 for b in (0, 1)) / 2
    assert GOLDEN[name]['theirs']['loss'] == pytest.approx(theirs, rel=1e-5)
    assert script.ours(x)['loss'] == pytest.approx((pair(0, 4) + pair(1, 4)) / 2, rel=1e-5)
