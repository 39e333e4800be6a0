"""`make docs`: the site builds without a warning (a dead link is one), asks no other host and fits a phone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PHONE, DESKTOP = {'width': 390, 'height': 800}, {'width': 1400, 'height': 900}

pytestmark = pytest.mark.system


@pytest.fixture(scope='module')
def site(tmp_path_factory):
    pytest.importorskip('sphinx', reason='needs requirements-docs.txt')
    pytest.importorskip('myst_parser', reason='needs requirements-docs.txt')
    pytest.importorskip('furo', reason='needs requirements-docs.txt')
    folder = tmp_path_factory.mktemp('site')
    command = re.search(r'-m sphinx (-b html -W [^\n]*?) build/docs$', (ROOT / 'Makefile').read_text(), re.MULTILINE)
    assert command is not None
    words = [*command[1].split(), str(folder), '-d', str(folder / '.doctrees')]
    environment = os.environ | {'PYTHONPATH': str(ROOT), 'HF_HUB_OFFLINE': '1', 'OMP_NUM_THREADS': '1'}
    done = subprocess.run(
        [sys.executable, '-m', 'sphinx', *words], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0 and 'WARNING' not in done.stderr, done.stderr
    return folder


def pages_of(site: Path) -> list[Path]:
    """All but the front door, which leads on by itself."""
    return sorted(p for p in site.rglob('*.html') if '_static' not in p.parts and p != site / 'index.html')


def test_pages_in_a_browser(site, browser):
    """No other host is asked, nothing complains, and no page is wider than the screen: wide tables scroll by
    themselves."""
    context = browser.new_context()
    page = context.new_page()
    asked, said = [], []
    page.on('request', lambda request: asked.append(request.url))
    page.on('console', lambda message: said.append(message.text))
    page.on('pageerror', lambda error: said.append(str(error)))
    wide = []
    for path in pages_of(site):
        page.goto(path.as_uri())
        for size in (PHONE, DESKTOP):
            page.set_viewport_size(size)
            over = page.evaluate('document.documentElement.scrollWidth - document.documentElement.clientWidth')
            if over > 0:
                wide.append(f'{path.relative_to(site)}: {over} px too wide at {size["width"]}')
    context.close()
    assert not wide and not said, (wide, said)
    assert {url.partition(':')[0] for url in asked} <= {'file', 'data'}
