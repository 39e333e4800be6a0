"""Scripts on several ranks, with exit codes and output, for tests of the end of an interpreter."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from limits import HANG_S

from chatgpt.testing.processes import become_rank, end_all, free_port, own_variables, start_method, torchrun_environment


def run_source(text: str, world_size: int = 2, timeout_s: float = HANG_S) -> list[tuple[int, str]]:
    """Runs `text` as a script on every rank, in forked processes; returns each rank's exit code and output."""
    with tempfile.TemporaryDirectory(prefix='run-source-') as folder, start_method() as method:
        job, context = (own_variables(), world_size, free_port(), folder, text), multiprocessing.get_context(method)
        ranks = [context.Process(target=_source_child, args=(rank, *job)) for rank in range(world_size)]
        end = time.monotonic() + timeout_s
        try:
            for rank in ranks:
                rank.start()
            for rank in ranks:
                rank.join(timeout=max(end - time.monotonic(), 0.0))
            if any(rank.is_alive() for rank in ranks):
                raise TimeoutError(f'the script on {world_size} processes did not end within {timeout_s} s')
        finally:
            end_all(ranks)
        return [(rank.exitcode, (Path(folder) / str(number)).read_text()) for number, rank in enumerate(ranks)]


def run_script(
    arguments: Sequence[str], world_size: int = 2, folder: str | Path | None = None
) -> list[tuple[int, str]]:
    """Runs `python ARGUMENTS` on every rank in new interpreters; returns each rank's exit code and output."""
    port, children = free_port(), []
    paths = os.pathsep.join(path for path in (str(Path(__file__).parents[1]), os.environ.get('PYTHONPATH')) if path)
    for rank in range(world_size):
        variables = {**own_variables(), **torchrun_environment(rank, world_size, port), 'PYTHONPATH': paths}
        child = subprocess.Popen(
            [sys.executable, *arguments],
            env=variables,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        children.append(child)
    try:
        texts = [child.communicate()[0] for child in children]
    finally:
        for child in children:
            child.kill()
    return [(child.returncode, text) for child, text in zip(children, texts, strict=True)]


def _source_child(rank: int, variables: dict[str, str], world_size: int, port: int, folder: str, text: str) -> None:
    become_rank(rank, variables, world_size, port)
    with (Path(folder) / str(rank)).open('wb') as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    exec(compile(text, '<string>', 'exec'), {'__name__': '__main__'})
