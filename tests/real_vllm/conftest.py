"""Fixtures of the tests on vLLM on a CPU (`make test-vllm`, in a separate environment; elsewhere they are skipped)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from policies import OPTIONS

from chatgpt.testing import tiny_causal_lm

os.environ.setdefault('VLLM_LOGGING_LEVEL', 'ERROR')


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """Replaces the fixture of all tests, since vLLM keeps the process group that it made."""
    yield
    assert not [t.name for t in threading.enumerate() if t.name.startswith('chatgpt')]


@pytest.fixture(scope='session')
def llama() -> Callable[..., Any]:
    """Returns a function that makes a Llama of 160,000 parameters, with heads of width 32, the least for vLLM's
    kernels."""

    def made(tied: bool = True, seed: int = 0, **kw: Any) -> Any:
        return tiny_causal_lm('llama', seed, hidden=64, heads=2, tie_word_embeddings=tied, initializer_range=0.2, **kw)

    return made


@pytest.fixture(scope='session')
def engine_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Returns a function that gives the shared `VLLMEngine` of an architecture, or a new one of another class or
    options."""
    kept: dict[str, Any] = {}

    def of(model: Any, kind: Any = None, **options: Any) -> Any:
        from chatgpt.rollout import VLLMEngine

        key = str(model.config.to_dict())
        if kind is None and not options and key in kept:
            return kept[key]
        folder: Path = tmp_path_factory.mktemp('architecture')
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        engine = (kind or VLLMEngine)(folder, **(OPTIONS | options))
        if kind is None and not options:
            kept[key] = engine
        return engine

    return of
