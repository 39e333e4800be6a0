"""Fixtures for every test: nothing may leak, and a model for whole runs. `run_distributed` is in
`chatgpt.testing.processes`."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite('killed_runs', 'layout_runs')

_OURS = (
    'RANK',
    'WORLD_SIZE',
    'LOCAL_',
    'MASTER_',
    'OMP_',
    'MKL_',
    'CUDA_VISIBLE',
    'GROUP_',
    'TORCHELASTIC',
    'PYTORCH_CUDA',
    'CHATGPT',
)
"""beginnings of the variables that our code could set; third parties set others while they are imported"""


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_OURS)}


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """Fails a test that leaves a process group, one of our environment variables or one of our threads behind."""
    before = _variables()
    yield
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
    """The demo's policy, untrained, with its tokenizer."""
    from chatgpt.dataset import embedded
    from chatgpt.nn import GPTActor

    folder = tmp_path_factory.mktemp('model')
    GPTActor(config=embedded.demo_config()).save_pretrained(folder, tokenizer=embedded.demo_tokenizer())
    return folder
