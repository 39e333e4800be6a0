"""`make docs`: the site builds without a warning, its links lead somewhere, it asks no other host, and it can be read
on a phone."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).resolve().parents[1]
PHONE, DESKTOP = {'width': 390, 'height': 800}, {'width': 1400, 'height': 900}

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]


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


def test_every_page_is_in_the_site_and_in_its_navigation(site):
    names = {str(p.relative_to(ROOT).with_suffix('')) for p in (ROOT / 'docs').rglob('*.md')} | {
        'README',
        'CONTRIBUTING',
    }
    assert all((site / f'{name}.html').is_file() for name in names)
    text = (site / 'docs' / 'train.html').read_text()
    navigation = text[text.index('sidebar-tree') : text.index('sidebar-tree') + 40_000]
    assert {'The first hour', 'Troubleshooting', 'GRPO and Dr. GRPO'} <= set(re.findall(r'>([^<]+)</a>', navigation))
    assert 'url=docs/index.html' in (site / 'index.html').read_text()


def test_links_lead_to_files_and_anchors(site):
    anchors = {page: set(re.findall(r'\bid="([^"]+)"', page.read_text())) for page in pages_of(site)}
    wrong, seen = [], 0
    for page in anchors:
        for kind, link in re.findall(r'<(?:a|img|link|script)\b[^>]*?\s(href|src)="([^"]*)"', page.read_text()):
            path, _, anchor = unquote(html.unescape(link)).partition('#')
            path = path.partition('?')[0]
            if path.startswith(('http:', 'https:', 'mailto:', 'data:')):
                assert kind == 'href', f'{page.name} loads {link}'
                continue
            target = (page.parent / path).resolve() if path else page
            seen += 1
            if not target.exists() or anchor and target in anchors and anchor not in anchors[target]:
                wrong.append(f'{page.relative_to(site)}: {link}')
    assert seen > 3000 and not wrong, wrong[:20]


def test_the_api_page_has_every_public_name(site):
    import chatgpt.nn
    import chatgpt.trainer
    import chatgpt.trainer.strategies

    there = set(re.findall(r'id="(chatgpt[\w.]*)"', (site / 'docs' / 'api.html').read_text()))
    for module in (chatgpt.trainer, chatgpt.nn, chatgpt.trainer.strategies):
        assert {f'{module.__name__}.{name}' for name in module.__all__} <= there
    assert {'chatgpt.train', 'chatgpt.trainer.PPOConfig.kl_coef', 'chatgpt.trainer.PPOTrainer.fit'} <= there


@pytest.mark.parametrize('scheme', ['light', 'dark'])
def test_pages_in_a_browser(site, browser, scheme):
    """No other host is asked, nothing complains, and no page is wider than the screen: wide tables scroll by
    themselves."""
    context = browser.new_context(color_scheme=scheme)
    page = context.new_page()
    asked, said = [], []
    page.on('request', lambda request: asked.append(request.url))
    page.on('console', lambda message: said.append(message.text))
    page.on('pageerror', lambda error: said.append(str(error)))
    wide = []
    for path in pages_of(site) if scheme == 'light' else [site / 'docs' / 'metrics.html']:
        page.goto(path.as_uri())
        for size in (PHONE, DESKTOP):
            page.set_viewport_size(size)
            over = page.evaluate('document.documentElement.scrollWidth - document.documentElement.clientWidth')
            if over > 0:
                wide.append(f'{path.relative_to(site)}: {over} px too wide at {size["width"]}')
    colour = page.evaluate('getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]')
    context.close()
    assert not wide and not said, (wide, said)
    assert {url.partition(':')[0] for url in asked} <= {'file', 'data'}
    assert (int(colour) > 128) == (scheme == 'light')


def test_the_search_works_from_files(site, browser):
    page = browser.new_page()
    page.goto((site / 'docs' / 'index.html').as_uri())
    page.fill('.sidebar-search', 'whitening')
    page.press('.sidebar-search', 'Enter')
    page.wait_for_selector('ul.search li:has-text("PPO")', timeout=20_000)  # results come one after another
    page.close()
