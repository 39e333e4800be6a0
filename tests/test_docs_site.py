"""`make docs`: the site builds without a warning (a dead link is one) and requests no other host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.system
def test_the_site_builds_and_requests_no_other_host(tmp_path):
    for module in ('sphinx', 'myst_parser', 'furo'):
        pytest.importorskip(module, reason='needs requirements-docs.txt')
    command = re.search(r'-m sphinx (-b html -W [^\n]*?) build/docs$', (ROOT / 'Makefile').read_text(), re.MULTILINE)
    assert command is not None
    words = [*command[1].split(), str(tmp_path), '-d', str(tmp_path / '.doctrees')]
    env = os.environ | {'PYTHONPATH': str(ROOT), 'HF_HUB_OFFLINE': '1', 'OMP_NUM_THREADS': '1'}
    sphinx = [sys.executable, '-m', 'sphinx', *words]
    done = subprocess.run(sphinx, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and 'WARNING' not in done.stderr, done.stderr
    pages = [p for p in tmp_path.rglob('*.html') if '_static' not in p.parts]
    assert len(pages) > 30 and tmp_path / 'docs' / 'api.html' in pages
    asked = {
        url for page in pages for url in re.findall(r'<(?:img|script)[^>]* src="(https?:[^"]+)"', page.read_text())
    }
    assert not asked
