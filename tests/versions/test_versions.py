"""The environments of make test-versions, its table, and libraries that stand in for CUDA's."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


@pytest.fixture(scope='module')
def script():
    return runpy.run_path(str(HERE / 'run.py'))


@pytest.fixture(scope='module')
def bounds():
    """package → its bounds in setup.py, those of the extras that the suite uses included."""
    pytest.importorskip('setuptools', reason='setup.py needs setuptools')
    setup = runpy.run_path(str(ROOT / 'setup.py'))
    extras = [
        r for name, extra in setup['EXTRAS_REQUIRE'].items() if name not in ('vllm', 'liger', 'dev') for r in extra
    ]
    required = map(Requirement, [*setup['INSTALL_REQUIRES'], *extras])
    own = {'mlflow': 'mlflow-skinny'}  # the part of it that is tested
    return {own.get(r.name, canonicalize_name(r.name)): r.specifier for r in required}


def test_lowest_is_the_lower_bound_of_everything(script, bounds):
    pins = script['pins']('lowest')
    lowest = {name: next(s.version for s in specifier if s.operator == '>=') for name, specifier in bounds.items()}
    assert {'torch', 'transformers', 'numpy', 'ray', 'mlflow-skinny'} <= set(lowest)
    # A bound of two numbers is the first release of them.
    wrong = {n: (pins[n], v) for n, v in lowest.items() if pins[n] != v and pins[n] != f'{v}.0'}
    assert not wrong


def test_newest_is_allowed(script, bounds):
    pins = script['pins']('newest')
    assert pins['torch'] > script['pins']('lowest')['torch']
    assert not {name: pins[name] for name, specifier in bounds.items() if not specifier.contains(pins[name])}
