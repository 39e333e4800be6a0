"""`chatgpt_compat` uses public names of `chatgpt` alone.

Public is what stands in `__all__` of a package (a folder), a package itself, and every name without an underscore of

- a module beside the packages (`types`, `batching`, `registry`, `names`, `hub`),
- the formulas, `chatgpt.functional`,
- a module from which the code on a page of docs/extend, or a script of examples/, imports.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

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
    """The names of `chatgpt` that a source imports and should not."""
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
def test_it_imports_public_names_alone(path):
    assert list(not_public(path.read_text())) == []


@pytest.mark.parametrize(
    'source',
    [
        'from chatgpt.nn.actor import Actor',
        'def f():\n    from chatgpt.nn import _Adapter',
        'from chatgpt.nn import write_folder',
        'import chatgpt.trainer.ppo',
    ],
)
def test_another_name_is_found(source):
    assert len(list(not_public(source))) == 1


@pytest.mark.parametrize(
    'source',
    [
        'from chatgpt.nn import Actor',
        'from chatgpt import nn',
        'from chatgpt.types import Sample',
        'from chatgpt.functional.ppo import kl_penalty',
        'from chatgpt.trainer.algorithms import Estimator',
    ],
)
def test_a_public_name_is_none(source):
    assert list(not_public(source)) == []
