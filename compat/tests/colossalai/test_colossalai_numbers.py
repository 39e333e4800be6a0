"""Compares our formulas with numbers of ColossalAI's code, recorded by compat/benchmarks/compat_colossalai.py."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
GOLDEN = json.loads((Path(__file__).parent / 'colossalai_numbers.json').read_text())
INPUTS = {name: torch.tensor(value) for name, value in GOLDEN['inputs'].items()}


@pytest.fixture(scope='module')
def script() -> Any:
    spec = importlib.util.spec_from_file_location(
        'compat_colossalai', ROOT / 'compat' / 'benchmarks' / 'compat_colossalai.py'
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_same_formula_gives_the_same_numbers(script):
    ours = script.numbers(importlib.import_module(script.OURS), INPUTS)
    assert len(script.CASES) == 12 and set(ours) == set(GOLDEN['theirs'])
    for name in script.CASES:
        for part in ('value', 'gradient'):
            difference = script.error(ours[name][part], GOLDEN['theirs'][name][part])
            assert difference < 1e-5, f'{name}, {part}: {difference}'


def test_another_formula_would_be_noticed(script):
    """Negative control: a clip range of 0.1, and k3 of the other direction."""
    losses = importlib.import_module(script.OURS)

    class Narrow(losses.PolicyLoss):
        def __init__(self, clip_eps: float) -> None:
            super().__init__(clip_eps / 2)

    def turned(a: Any, b: Any, mask: Any = None) -> Any:
        return losses.compute_approx_kl(b, a, mask)

    wrong = SimpleNamespace(**vars(losses) | {'PolicyLoss': Narrow, 'compute_approx_kl': turned})
    ours = script.numbers(wrong, INPUTS)
    for name in ('PolicyLoss', 'compute_approx_kl'):
        assert script.error(ours[name]['value'], GOLDEN['theirs'][name]['value']) > 1e-3


def test_corrected_formulas(script):
    ours = script.numbers(importlib.import_module(script.OURS), INPUTS)
    x, total = {name: value.double() for name, value in INPUTS.items()}, 0.0
    for b, count in enumerate((5, 3, 1)):
        row = 0.0
        for t in range(count):
            value, old, target = (float(x[n][b, t]) for n in ('action_values', 'old_action_values', 'returns'))
            clipped = old + max(-0.4, min(0.4, value - old))
            row += max((value - target) ** 2, (clipped - target) ** 2)
        total += row / count
    assert ours['ValueLoss of actions']['value'] == pytest.approx(total / 3, rel=1e-5)
    padding = torch.tensor(GOLDEN['theirs']['ValueLoss of actions']['gradient'])[~INPUTS['mask']]
    assert (padding != 0).any()  # ColossalAI learns padding
    assert not torch.tensor(ours['ValueLoss of actions']['gradient'])[~INPUTS['mask']].any()
    far = (200.0 + math.log(1 + math.exp(-200)) + math.log(1 + math.exp(-1.0))) / 2
    for name in ('LogSigLoss far apart', 'LogExpLoss far apart'):
        assert GOLDEN['theirs'][name]['value'] == 'inf'
        assert ours[name]['value'] == pytest.approx(far, rel=1e-6)
        assert ours[name]['gradient'] == pytest.approx([-0.5, -0.5 / (1 + math.e)], rel=1e-5)
