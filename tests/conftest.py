"""Fixtures of all tests: checks for leaks, and models for whole runs. `run_distributed` is in
`chatgpt.testing.processes`."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from limits import HANG_S

pytest.register_assert_rewrite('killed_runs', 'stream_runs', 'tiny_runs')

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a shell's background; child processes would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

_OURS = tuple('RANK WORLD_SIZE LOCAL_ MASTER_ OMP_ MKL_ CUDA_VISIBLE GROUP_ TORCHELASTIC PYTORCH_CUDA CHATGPT'.split())
"""prefixes of variables that the library could set; other packages set others at import"""


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_OURS)}


WITH_16_BITS, WITHOUT_16_BITS = 'avx512,bf16,fp16', 'avx2'


@pytest.fixture(scope='session', autouse=True)
def same_processor() -> Iterator[None]:
    """Sets the processor that the library detects (`chatgpt.strategies.machine`), here and in child processes: one with
    16-bit instructions, or the value of CHATGPT_PROCESSOR."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('CHATGPT_PROCESSOR', os.environ.get('CHATGPT_PROCESSOR') or WITH_16_BITS)
        yield


@pytest.fixture
def with_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets a CPU with 16-bit instructions."""
    monkeypatch.setenv('CHATGPT_PROCESSOR', WITH_16_BITS)


@pytest.fixture
def without_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets a CPU without 16-bit instructions."""
    monkeypatch.setenv('CHATGPT_PROCESSOR', WITHOUT_16_BITS)


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """Fails a test that leaves a process group, or an environment variable or thread of the library. Restores torch's
    number of threads, on which the bits of a sum depend."""
    import torch

    before, num_threads = _variables(), torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)
    after = _variables()
    for name in before.keys() | after.keys():
        if name in before:
            os.environ[name] = before[name]
        else:
            os.environ.pop(name, None)
    assert after == before, 'the test changed environment variables'
    threads = [t.name for t in threading.enumerate() if t.name.startswith('chatgpt')]
    assert not threads, f'the test left threads running: {threads}'
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail('the test left a process group')


@pytest.fixture(scope='module')
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the demo's untrained policy and its tokenizer."""
    from chatgpt.launch import demo_world
    from chatgpt.nn import GPTActor

    folder = tmp_path_factory.mktemp('model')
    GPTActor(config=demo_world.demo_config()).save_pretrained(folder, tokenizer=demo_world.demo_tokenizer())
    return folder


@pytest.fixture(scope='module')
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a tiny GPT-2 and a character tokenizer."""
    import torch

    from chatgpt.nn import GPTActor
    from chatgpt.testing.fakes import char_tokenizer, tiny_config

    folder = tmp_path_factory.mktemp('model')
    torch.manual_seed(0)
    GPTActor(config=tiny_config('gpt2', positions=48)).save_pretrained(folder, tokenizer=char_tokenizer())
    return folder


CHROMIUM_FLAGS = (
    '--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking '
    '--disable-component-update --disable-sync'
).split()


@pytest.fixture(scope='module')
def browser() -> Iterator[Any]:
    """Yields a headless Chromium under Playwright; a test closes its own pages and contexts."""
    found = shutil.which('chromium') or shutil.which('chromium-browser') or shutil.which('google-chrome')
    if found is None:
        pytest.skip('needs Chromium on the PATH')
    playwright = pytest.importorskip('playwright.sync_api', reason='needs the package playwright')
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=found, args=CHROMIUM_FLAGS, timeout=1000 * HANG_S)
        make = started.new_context

        def new_context(**options: Any) -> Any:
            context = make(**options)
            context.set_default_timeout(1000 * HANG_S)
            return context

        started.new_context = new_context
        yield started
        started.close()
