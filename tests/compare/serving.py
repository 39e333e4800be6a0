"""A store with pairs, and a server of its pages on a free port."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from chatgpt.monitor.compare.app import compare_app
from chatgpt.monitor.compare.serving import Serving
from chatgpt.monitor.compare.store import Store


def filled(path: Path, answers: Sequence[tuple[str, str]], *, margins: Any = None, **settings: Any) -> Store:
    """Returns a store with these pairs of responses to `prompt 1`, `prompt 2`, ..."""
    store = Store(path)
    prompts = [f'prompt {number}' for number in range(1, len(answers) + 1)]
    store.begin([{'prompt': prompt} for prompt in prompts], prompts, **{'seed': 0, 'names': ['A', 'B']} | settings)
    for side, texts in zip('ab', zip(*answers, strict=True), strict=True):
        store.set_answers(side, texts)
    if margins is not None:
        store.set_margins(margins)
    return store


@contextmanager
def running(app: Any) -> Iterator[Serving]:
    serving = Serving(app, port=0)
    thread = threading.Thread(target=serving.run, daemon=True)
    thread.start()
    try:
        yield serving
    finally:
        serving.stop()
        thread.join()
        assert not thread.is_alive()


@contextmanager
def served(store: Store) -> Iterator[Serving]:
    with running(compare_app(store)) as serving:
        yield serving
    store.close()
