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


def run_on_two(folder: Path, files: dict[str, str]) -> list[tuple[int, str]]:
    """Exit code and output of check_my_strategy.py on each of two processes."""
    for name, code in files.items():
        (folder / name).write_text(code)
    return run_script(['check_my_strategy.py'], folder=folder)


def test_it_passes_every_check(tmp_path):
    assert len(shown_files()['my_strategy.py'].splitlines()) <= 40
    results = run_on_two(tmp_path, shown_files())
    assert [code for code, _ in results] == [0, 0], results
    assert str(dict.fromkeys(all_checks(), 'passed')) in results[0][1]


def test_a_wrong_one_does_not(tmp_path):
    files = shown_files()
    right, wrong = 'self.all_reduce(gradient)', "self.all_reduce(gradient, 'mean')"
    assert right in files['my_strategy.py']
    files['my_strategy.py'] = files['my_strategy.py'].replace(right, wrong)
    files['check_my_strategy.py'] = files['check_my_strategy.py'].replace('seed=1)', "seed=1), checks=['equals_naive']")
    results = run_on_two(tmp_path, files)
    assert all(code != 0 for code, _ in results)
    assert all('equals_naive, rank 0: failed: against Naive: gradient norm of step 0' in text for _, text in results), (
        results
    )
