"""Tests of the distribution: `chatgpt_compat` uses only public names of `chatgpt`, and the metadata agree.

Public names are those in `__all__` of a package (a folder), packages themselves, and names without an underscore of

- a module beside the packages (`types`, `batching`, `registry`, `names`, `hub`),
- the formulas, `chatgpt.functional`,
- a module from which the code on a page of docs/extend, or a script of examples/, imports.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from setuptools import find_packages

import chatgpt
from chatgpt.launch.cli import command
from chatgpt.launch.cli.completion import whole_parser

ROOT = Path(__file__).resolve().parents[2]
BESIDE = {f'chatgpt.{path.stem}' for path in (ROOT / 'chatgpt').glob('*.py') if not path.stem.startswith('_')}
SHOWN = [*(ROOT / 'docs' / 'extend').glob('*.md'), *(ROOT / 'examples').glob('*.py')]
DOCUMENTED = {
    module for path in SHOWN for module in re.findall(r'^ *from (chatgpt[\w.]*) import', path.read_text(), re.MULTILINE)
}


def is_package(module: str) -> bool:
    return (ROOT / module.replace('.', '/') / '__init__.py').is_file()


def is_public(module: str, name: str) -> bool:
    if any(part.startswith('_') for part in [*module.split('.'), name]):
        return False
    if is_package(module):
        return is_package(f'{module}.{name}') or name in getattr(importlib.import_module(module), '__all__', ())
    return module in BESIDE | DOCUMENTED or module.startswith('chatgpt.functional.')


def not_public(source: str) -> Iterator[str]:
    """Yields the names of `chatgpt` that a source imports and that are not public."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or '').partition('.')[0] == 'chatgpt':
            for alias in node.names:
                if not is_public(node.module or '', alias.name):
                    yield f'{node.module}.{alias.name}'
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.startswith('chatgpt.') and not is_package(a.name))


@pytest.mark.parametrize(
    'path', sorted((ROOT / 'compat' / 'chatgpt_compat').rglob('*.py')), ids=lambda p: f'{p.parent.name}-{p.stem}'
)
def test_only_public_names_are_imported(path):
    assert list(not_public(path.read_text())) == []


@pytest.mark.parametrize(
    ('source', 'count'),
    [
        ('from chatgpt.nn.actor import Actor', 1),
        ('def f():\n    from chatgpt.nn import _Adapter', 1),
        ('from chatgpt.nn import write_folder', 1),
        ('import chatgpt.trainer.ppo', 1),
        ('from chatgpt.nn import Actor\nfrom chatgpt import nn\nfrom chatgpt.types import Sample', 0),
        ('from chatgpt.functional.ppo import kl_penalty\nfrom chatgpt.trainer.algorithms import Estimator', 0),
    ],
)
def test_public_names(source, count):
    assert len(list(not_public(source))) == count


def test_the_metadata_agrees_with_the_librarys():
    project = tomllib.loads((ROOT / 'compat' / 'pyproject.toml').read_text())
    assert project['project']['version'] == chatgpt.__version__
    assert project['project']['dependencies'] == [f'chatgpt-rlhf=={chatgpt.__version__}']
    wanted = project['tool']['setuptools']['packages']['find']['include']
    folders = {p.parent.relative_to(ROOT / 'compat').as_posix() for p in (ROOT / 'compat/chatgpt_compat').rglob('*.py')}
    assert set(find_packages(str(ROOT / 'compat'), include=wanted)) == {folder.replace('/', '.') for folder in folders}
    entry = command.SUBCOMMANDS['compat']
    assert entry.distribution == project['project']['name']
    assert project['project']['entry-points'][command.ENTRY_POINTS] == {entry.module: entry.entry_points[0].value}


def test_the_command_has_its_word(monkeypatch, capsys):
    for words, code in ((('--help',), 0), (('runn',), 2)):
        monkeypatch.setattr(sys, 'argv', ['chatgpt-rlhf', 'compat', *words])
        with pytest.raises(SystemExit) as stop:
            sys.exit(command.main())
        assert int(stop.value.code or 0) == code
    out, err = capsys.readouterr()
    assert out.startswith('usage: ') and "invalid choice: 'runn' (choose from 'run', 'check'); did you mean run?" in err
    (words,) = [a for a in whole_parser()._actions if a.choices]
    (verbs,) = [a for a in words.choices['compat']._actions if a.choices]
    assert set(verbs.choices) == {'run', 'check'}
