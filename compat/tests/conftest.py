"""Fixtures of the library's tests; processes that a test starts find both packages without an installation."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from chatgpt.nn import GPTActor
from chatgpt.testing.fakes import char_tokenizer, tiny_config
from chatgpt_compat.runner import run
from tests.conftest import model_folder, nothing_leaks, same_processor, with_16_bits

__all__ = ['model_folder', 'nothing_leaks', 'same_processor', 'with_16_bits']

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope='session', autouse=True)
def found_by_processes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        before = os.environ.get('PYTHONPATH')
        patch.setenv('PYTHONPATH', os.pathsep.join([str(ROOT), str(ROOT / 'compat'), *([before] if before else [])]))
        yield


@pytest.fixture(scope='module')
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of a tiny model, named as on the hub."""
    folder = tmp_path_factory.mktemp('hub') / 'gpt2'
    torch.manual_seed(0)
    GPTActor(config=tiny_config('gpt2', positions=512)).save_pretrained(folder, tokenizer=char_tokenizer())
    return folder


@pytest.fixture
def program(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> Any:
    """Returns a function that runs a program of the `programs` folder beside the test, in an empty folder, and returns
    its output."""
    monkeypatch.chdir(tmp_path)
    programs = request.path.parent / 'programs'

    def runs(name: str, *arguments: object) -> str:
        capsys.readouterr()
        code = run(str(programs / f'{name}.py'), [str(a) for a in arguments])
        out, err = capsys.readouterr()
        assert code == 0, err
        return str(out)

    return runs
