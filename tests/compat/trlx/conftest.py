"""`import trlx` means ours inside a test, and a tiny model stands in for hub names."""

from __future__ import annotations

import importlib
import json
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from chatgpt.compat.trlx import SERVED
from chatgpt.nn import GPTActor
from chatgpt.testing.fakes import char_tokenizer, tiny_config

PROGRAMS = Path(__file__).parent / 'programs'


def _modules() -> dict[str, ModuleType]:
    """The modules of the table, as the compatibility runner makes them."""
    modules: dict[str, ModuleType] = {'trlx': ModuleType('trlx')}
    modules['trlx'].__path__ = []  # type: ignore[attr-defined]
    for key, target in SERVED.items():
        *place, name = key.split('.')
        parent = modules['trlx']
        for i, part in enumerate(place):
            full = '.'.join(['trlx', *place[: i + 1]])
            if full not in modules:
                modules[full] = ModuleType(full)
                modules[full].__path__ = []  # type: ignore[attr-defined]
                setattr(parent, part, modules[full])
            parent = modules[full]
        module, _, attribute = target.partition(':')
        setattr(parent, name, getattr(importlib.import_module(module), attribute))
    return modules


@pytest.fixture
def trlx(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The package, importable by its name."""
    for name, module in _modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    yield sys.modules['trlx']


@pytest.fixture
def run(trlx: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Runs a program of the folder in an empty directory; its globals. A dict becomes JSON."""

    def run_program(name: str, *args: Any) -> dict[str, Any]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(str(PROGRAMS))
        texts = [json.dumps(arg) if isinstance(arg, dict) else str(arg) for arg in args]
        monkeypatch.setattr(sys, 'argv', [f'{name}.py', *texts])
        return runpy.run_path(str(PROGRAMS / f'{name}.py'), run_name='__main__')

    return run_program


@pytest.fixture(scope='session')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 of three small blocks with a tokenizer of characters."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp('model')
    GPTActor(config=tiny_config('gpt2', layers=3, positions=64)).save_pretrained(folder, tokenizer=char_tokenizer())
    return folder


@pytest.fixture(scope='session')
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier of two labels over the same characters."""
    from transformers import GPT2ForSequenceClassification

    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp('classifier')
    labels = {'id2label': {0: 'NEGATIVE', 1: 'POSITIVE'}, 'label2id': {'NEGATIVE': 0, 'POSITIVE': 1}, 'num_labels': 2}
    GPT2ForSequenceClassification(tiny_config('gpt2', **labels)).save_pretrained(folder)
    char_tokenizer().save_pretrained(folder)
    return folder
