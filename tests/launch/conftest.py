"""A Ray cluster for the tests of a module."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from collections.abc import Iterator

import pytest
from launcher_runs import Nodes


@pytest.fixture(scope='module')
def cluster() -> Iterator[Nodes]:
    if importlib.util.find_spec('ray') is None:
        pytest.skip('needs ray: pip install -r requirements-ray.txt')
    folder = tempfile.mkdtemp(prefix='ray-', dir='/tmp')  # Ray's sockets need a short path
    nodes = Nodes(folder)
    try:
        assert nodes.address
        yield nodes
    finally:
        nodes.process.communicate()
        shutil.rmtree(folder, ignore_errors=True)
