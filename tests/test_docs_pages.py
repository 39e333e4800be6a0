"""The pages about pages: the contents name every page, troubleshooting quotes messages that exist, and anchors lead
somewhere."""

from __future__ import annotations

import ast
import errno
import os
import re
from functools import cache
from pathlib import Path

import pytest
from shell_commands import START

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / 'docs'
PAGES = [ROOT / 'README.md', ROOT / 'CONTRIBUTING.md', *sorted(DOCS.rglob('*.md'))]
TROUBLESHOOTING = DOCS / 'troubleshooting.md'

NOT_OURS = {
    'CUDA out of memory': "torch's",
    'Killed': "the shell's",
    os.strerror(errno.ENOSPC): "the system's",
    os.strerror(errno.EADDRINUSE): "the system's",
}
"""messages on the page that this library does not write"""


# ---------------------------------------------------------------------- contents


def test_the_contents_name_every_page_once_with_a_line_about_it():
    lines = re.findall(r'^- \[([^\]]+)\]\(([^)]+\.md)\): (.+)$', (DOCS / 'index.md').read_text(), re.MULTILINE)
    linked = [str((DOCS / link).resolve().relative_to(ROOT)) for _, link, _ in lines]
    assert len(linked) == len(set(linked))
    there = {str(p.relative_to(ROOT)) for p in PAGES} - {'docs/index.md'}
    assert set(linked) == there | {'CHANGELOG.md', 'examples/data/README.md'}
    assert all(len(about) > 5 for _, _, about in lines)


def slugs(page: Path) -> set[str]:
    """Anchors of the page's headings, as code hosts make them."""
    text = re.sub(r'^```.*?^```', '', page.read_text(), flags=re.DOTALL | re.MULTILINE)
    found: set[str] = set()
    for heading in re.findall(r'^#+ (.+)$', text, re.MULTILINE):
        words = re.sub(r'\[([^\]]+)\]\([^)]*\)', r'\1', heading).lower()
        slug = re.sub(r'[^\w\- ]', '', words).replace(' ', '-')
        found.add(next(s for s in (slug, *(f'{slug}-{n}' for n in range(1, 99))) if s not in found))
    return found


@pytest.mark.parametrize('page', PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_anchors_of_links_are_headings(page):
    wrong = []
    for path, anchor in re.findall(r'\]\((?!https?:)([^)#]*)#([^)]+)\)', page.read_text()):
        target = (page.parent / path).resolve() if path else page
        if target.is_file() and target.suffix == '.md' and anchor not in slugs(target):
            wrong.append(f'{path}#{anchor}')
    assert not wrong


def test_the_anchor_of_a_heading():
    assert {'8-use-it-and-measure-it', 'the-port-is-in-use'} <= slugs(DOCS / 'first_hour.md') | slugs(TROUBLESHOOTING)
    assert 'the-reward-models-accuracy-stays-near-05' in slugs(TROUBLESHOOTING)


# ---------------------------------------------------------------------- messages


@cache
def templates() -> list[tuple[str, list[str]]]:
    """Every string of the library by file, with … for what is filled in."""
    return [(str(path), strings(path.read_text())) for path in sorted((ROOT / 'chatgpt').rglob('*.py'))]


def strings(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            found.append(''.join(str(v.value) if isinstance(v, ast.Constant) else '…' for v in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


def occurs(message: str) -> bool:
    """One string of the library holds the message's fixed parts in their order; or one file does, where the message is
    made of several."""
    parts = [part for part in message.split('…') if part.strip(' .,:;()')]
    pattern = re.compile('.*'.join(re.escape(part.strip()) for part in parts), re.DOTALL)
    if any(pattern.search(string) for _, found in templates() for string in found):
        return True
    return any(all(any(part.strip() in string for string in found) for part in parts) for _, found in templates())


def quoted(page: Path) -> list[str]:
    """Indented lines that are no commands."""
    lines = re.findall(r'^    (\S.*)$', page.read_text(), re.MULTILINE)
    return [line for line in lines if not START.fullmatch(line)]


def test_messages_on_the_page_are_the_librarys_words():
    messages = quoted(TROUBLESHOOTING)
    assert len(messages) > 40
    assert [m for m in messages if m not in NOT_OURS and not occurs(m)] == []
    assert set(NOT_OURS) <= set(messages)


def test_a_message_that_does_not_exist_is_found():
    assert occurs('the tokenizer has no end token, so no response could end')
    assert not occurs('the tokenizer has no last token, so no response could end')
    assert not occurs('… cannot be split over … ranks; use a divisor of …')
    assert '…: no such file …' in strings("raise ValueError(f'{a}: no ' 'such file' f' {b!r}')")


def test_flags_on_the_pages_for_beginners_exist():
    from chatgpt.cli.command import SUBCOMMANDS
    from chatgpt.launch.methods import METHODS
    from chatgpt.launch.runs import run_class

    known = {f'--{name}' for method in METHODS for name in run_class(method).field_names()}
    for entry in SUBCOMMANDS.values():
        if entry.parser:
            known |= {text for action in entry.load(entry.parser)()._actions for text in action.option_strings}
    others = {'--standalone', '--nproc-per-node', '--no-deps', '--index-url', '--local-dir', '--validation_percentage'}
    for page in (TROUBLESHOOTING, DOCS / 'first_hour.md'):
        flags = set(re.findall(r'(?<![\w-])--[a-z][\w-]*', page.read_text()))
        assert len(flags) > 8 and flags - known - others == set(), page.name
