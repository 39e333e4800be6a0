"""The docs site: `make docs` writes the pages of this repository, as they stand, to build/docs.

The source folder is the repository's root, so that a relative link means the same here as where the repository is
browsed. What only a site needs is added while a page is read: the tree of contents, out of the links of index.md and of
a page that has a folder of its name beside it, and docstrings, under the headings of api.md. A link to a file that is
no page leads to `REPOSITORY`, and is plain text while there is none. Nothing is fetched, and no page asks another host
for anything.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

REPOSITORY = ''
"""where files that are no pages can be read, such as https://example.org/chatgpt/blob/main"""

project = 'chatgpt-rlhf'
root_doc = 'docs/index'
include_patterns = [
    'README.md',
    'CONTRIBUTING.md',
    'CHANGELOG.md',
    'docs/**',
    'examples/README.md',
    'examples/data/README.md',
]
exclude_patterns = ['.*', 'build', 'outputs', 'dist', '*.egg-info', '**/__pycache__']
source_suffix = {'.md': 'markdown'}
extensions = ['myst_parser', 'sphinx.ext.autodoc', 'sphinx.ext.napoleon']
highlight_language = 'text'
myst_heading_anchors = 6
smartquotes = False
nitpicky = True
nitpick_ignore_regex = [('py:.*', '.*')]  # names in signatures are no links; those on pages are of another kind

html_theme = 'furo'
html_title = 'chatgpt'
html_static_path = ['_static']
html_css_files = ['pages.css']
html_copy_source = False
html_show_sphinx = False
html_show_search_summary = False  # it fetches pages, which a browser refuses where the site is opened as files
html_theme_options = {'navigation_with_keys': True}
pygments_style = 'friendly'
pygments_dark_style = 'github-dark'

toc_object_entries_show_parents = 'hide'
autodoc_member_order = 'bysource'
autodoc_typehints = 'none'
python_maximum_signature_line_length = 100


def contents(text: str) -> str:
    """The tree of contents of index.md: a part per heading, the pages it links to in their order."""
    parts = []
    for section in text.split('\n## ')[1:]:
        links = re.findall(r'^- \[([^\]]+)\]\(([^)#:]+)\.md\)', section, re.MULTILINE)
        title = section.partition('\n')[0]
        entries = [f'{words} <{page}>' for words, page in links]
        parts.append('\n'.join(['```{toctree}', ':hidden:', f':caption: {title}', '', *entries, '```']))
    return '\n\n'.join(parts)


def contents_of_folder(page: str, text: str) -> str:
    """The tree of contents of a page with a folder of its name: the pages of the folder, in the order of its links."""
    folder = Path(page).name
    linked = dict.fromkeys(re.findall(rf'\]\(({folder}/[^)#:]+)\.md', text))
    return '\n'.join(['```{toctree}', ':hidden:', '', *linked, '```', ''])


def docstrings(text: str) -> str:
    """api.md with the docstrings of a package's `__all__`, or of one function, after the heading that names it."""

    def members(match: re.Match[str]) -> str:
        name = match[1]
        try:
            module = importlib.import_module(name)
            names = [f'{name}.{member}' for member in sorted(module.__all__)]
        except ModuleNotFoundError:
            names = [name]
        return f'{match[0]}\n\n```{{eval-rst}}\n{"".join(map(directive, names))}```\n'

    return re.sub(r'(?<=^## `)([\w.]+)`\n\n[^#]*', members, text, flags=re.MULTILINE)


def directive(name: str) -> str:
    owner, _, member = name.rpartition('.')
    found = getattr(importlib.import_module(owner), member)
    if not inspect.isclass(found):
        return f'.. auto{"function" if inspect.isroutine(found) else "data"}:: {name}\n\n'
    inherited = '   :inherited-members:\n' if dataclasses.is_dataclass(found) else ''  # settings of all trainers
    return f'.. autoclass:: {name}\n   :members:\n{inherited}\n'


def read_source(app: Any, page: str, source: list[str]) -> None:
    if page == root_doc:
        source[0] += '\n' + contents(source[0])
    elif page == 'docs/api':
        source[0] = docstrings(source[0])
    elif (ROOT / page).is_dir():
        source[0] += '\n' + contents_of_folder(page, source[0])


def plain_words(app: Any, what: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    """A docstring as reST: `code` in backticks is code, an indented example is a literal block, and all else is
    text."""
    lines[:] = '\n'.join(lines).split('\n')
    text = re.sub(r'(?<!`)`([^`]+)`(?!`)(?=(\w)?)', lambda m: f'``{m[1]}``' + '\\ ' * bool(m[2]), '\n'.join(lines))
    parts = re.split(r'(``.+?``(?:\\ )?)', text, flags=re.DOTALL)
    parts[::2] = [re.sub(r'([*|\\]|(?<=\w)_(?!\w))', r'\\\1', part) for part in parts[::2]]
    out: list[str] = []
    text_indent, example, after_blank = 0, False, False
    for line, escaped in zip(list(lines), ''.join(parts).split('\n'), strict=True):
        indent = len(line) - len(line.lstrip())
        if line.strip():
            deeper = indent > text_indent
            if after_blank and deeper and not example and out[-2:-1] != [' ' * text_indent + '::']:
                out += [' ' * text_indent + '::', '']
            example = deeper and (example or after_blank)
            text_indent = text_indent if example else indent
        after_blank = not line.strip()
        out.append(line if example else escaped)
    lines[:] = out


def short_signature(app: Any, what: str, name: str, found: Any, options: Any, signature: str | None, back: Any) -> Any:
    """Settings are listed below with what they mean: not all of them in one line."""
    return ('(**settings)', None) if dataclasses.is_dataclass(found) and len(dataclasses.fields(found)) > 8 else None


def language_of(code: str) -> str:
    """What to highlight an indented block as."""
    if re.match(r'(\$ )?(chatgpt-rlhf|python|torchrun|make|pip|ray|git) ', code):
        return 'console' if code.startswith('$') else 'bash'
    return 'python' if re.search(r'^(import|from|def|class|with|trainer\w* =|@)\b', code, re.MULTILINE) else 'text'


def highlighted(app: Any, tree: nodes.document) -> None:
    for node in tree.findall(nodes.literal_block):
        if node.get('language') in (None, 'none', 'default', highlight_language):
            node['language'] = language_of(node.astext())


def links_to_files(app: Any, tree: nodes.document) -> None:
    """What leads to a file or folder that is no page."""
    page = Path(app.env.doc2path(app.env.docname))
    for node in [*tree.findall(addnodes.download_reference), *tree.findall(addnodes.pending_xref)]:
        target = page.parent / node['reftarget'].partition('#')[0]
        if target.is_dir() if isinstance(node, addnodes.pending_xref) else target.exists():
            words = node.children
            if REPOSITORY:
                words = [nodes.reference('', '', *words, refuri=f'{REPOSITORY}/{target.resolve().relative_to(ROOT)}')]
            node.replace_self(words)


def front_door(app: Any, error: Exception | None) -> None:
    """The folder's own index.html leads to the contents."""
    if error is None and app.builder.name == 'html':
        Path(app.outdir, 'index.html').write_text(
            '<!doctype html><meta charset="utf-8"><title>chatgpt</title>'
            '<meta http-equiv="refresh" content="0; url=docs/index.html"><a href="docs/index.html">Contents</a>\n'
        )


def setup(app: Any) -> None:
    app.connect('source-read', read_source)
    app.connect('autodoc-process-docstring', plain_words, priority=400)  # before napoleon reads Args: and Raises:
    app.connect('autodoc-process-signature', short_signature)
    app.connect('doctree-read', highlighted)
    app.connect('doctree-read', links_to_files)
    app.connect('build-finished', front_door)
