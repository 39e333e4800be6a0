"""The strategy that docs/strategies.md shows, in a file outside the package, passes the conformance suite."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from scripts_on_ranks import run_script

from chatgpt.testing.conformance import all_checks

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]


def shown_files() -> dict[str, str]:
    """The Python blocks of the page by the file name in their first line."""
    blocks = re.findall(r'```python\n(# (\S+\.py).*?)```', (ROOT / 'docs' / 'strategies.md').read_text(), re.DOTALL)
    return {name: code for code, name in blocks}


def test_it_passes_every_check(tmp_path):
    files = shown_files()
    assert len(files['my_strategy.py'].splitlines()) <= 40
    for name, code in files.items():
        (tmp_path / name).write_text(code)
    results = run_script(['check_my_strategy.py'], folder=tmp_path)
    assert [code for code, _ in results] == [0, 0], results
    assert str(dict.fromkeys(all_checks(), 'passed')) in results[0][1]
