"""Ray as a launcher: torchrun's environment on a cluster, the same run as under torchrun, and its continuation after kills."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chatgpt.dataset import embedded
from chatgpt.launch.ray import RayLaunch, run_on_ray
from chatgpt.nn import GPTActor

pytestmark = pytest.mark.skipif(importlib.util.find_spec('ray') is None, reason='needs ray: pip install -r requirements-ray.txt')

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / 'examples' / 'train_prompts.py'
QUICK = [
    '--strategy=ddp', '--num_episodes=1', '--max_timesteps=8', '--update_timesteps=1', '--experience_batch_size=4', '--train_batch_size=4',
    '--max_epochs=1', '--max_new_tokens=4', '--checkpoint_interval=1', '--lr=1e-3',
]  # fmt: skip


@pytest.fixture(scope='module')
def cluster() -> Iterator[Any]:
    """Three nodes with one core each, on this machine. Ray's sockets need a short path."""
    folder = tempfile.mkdtemp(prefix='ray-', dir='/tmp')
    before = dict(os.environ)
    os.environ |= {'RAY_TMPDIR': folder, 'RAY_AUTH_MODE': 'disabled', 'RAY_USAGE_STATS_ENABLED': '0'}
    from ray.cluster_utils import Cluster

    options = {'num_cpus': 1, 'object_store_memory': 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={**options, 'include_dashboard': False})
    try:
        for _ in range(2):
            cluster.add_node(**options)
        yield cluster
    finally:
        cluster.shutdown()
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope='module')
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp('model')
    GPTActor(config=embedded.demo_config()).save_pretrained(folder, tokenizer=embedded.demo_tokenizer())
    return folder


def script(folder: Path, text: str) -> str:
    path = folder / 'script.py'
    path.write_text(text)
    return str(path)


def command(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, '-m', 'chatgpt.launch', *arguments], cwd=ROOT, env=os.environ | {'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1'},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def wait_for(condition, seconds: float = 60.0) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError('it did not happen in time')


def processes(*words: str) -> list[int]:
    """Processes whose command line and environment hold all of these words."""
    found = []
    for folder in Path('/proc').iterdir():
        try:
            text = (folder / 'cmdline').read_bytes() + b'\0' + (folder / 'environ').read_bytes()
        except (OSError, ValueError):
            continue
        if folder.name.isdigit() and all(w.encode() in text.split(b'\0') for w in words):
            found.append(int(folder.name))
    return found


def parent(pid: int) -> int:
    return int(Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[1])


def metrics_of(folder: Path) -> list[dict[str, float]]:
    lines = (folder / 'metrics.jsonl').read_text().splitlines() if (folder / 'metrics.jsonl').is_file() else []
    return [{k: v for k, v in json.loads(line).items() if 'perf/' not in k} for line in lines]


# ---------------------------------------------------------------------- the same run, whatever happens


def test_a_run_whose_workers_are_killed_ends_as_one_under_torchrun(cluster, tmp_path, model_folder):
    """Rank 1's script is killed after phase 2, and after the restart the worker of rank 0, which takes its script along."""
    common = [str(SCRIPT), *QUICK, '--pretrain', str(model_folder), '--save_path']
    ray = command('--launcher=ray', f'--address={cluster.address}', '--num_workers=2', '--max_failures=2', *common, str(tmp_path / 'ray'))
    torchrun = command('--num_workers=2', *common, str(tmp_path / 'torchrun'))
    try:
        wait_for(lambda: len(metrics_of(tmp_path / 'ray')) >= 2)
        (rank_1,) = processes(str(tmp_path / 'ray'), 'RANK=1', 'TORCHELASTIC_RESTART_COUNT=0')
        os.kill(rank_1, signal.SIGKILL)
        seen = len(metrics_of(tmp_path / 'ray'))
        (rank_0,) = wait_for(lambda: processes(str(tmp_path / 'ray'), 'RANK=0', 'TORCHELASTIC_RESTART_COUNT=1'))
        wait_for(lambda: len(metrics_of(tmp_path / 'ray')) >= seen + 1)
        os.kill(parent(rank_0), signal.SIGKILL)
        wait_for(lambda: not Path(f'/proc/{rank_0}').exists(), 5)
        output, _ = ray.communicate(timeout=100)
        plain, _ = torchrun.communicate(timeout=100)
    finally:
        for process in (ray, torchrun):
            process.kill()
    assert torchrun.returncode == 0, plain
    assert ray.returncode == 0, output
    assert 'rank 1 on' in output and 'was ended by SIGKILL; restart 1 of 2' in output
    assert 'was lost: its worker or node is gone; restart 2 of 2' in output
    assert 'phase 8/8' in output and output.count('actor written to') == 1  # what rank 0 says reaches the driver
    assert [line['step'] for line in metrics_of(tmp_path / 'ray')] == list(range(1, 9))
    assert metrics_of(tmp_path / 'ray') == metrics_of(tmp_path / 'torchrun')
    ends = [(tmp_path / name / 'actor' / 'model.safetensors').read_bytes() for name in ('ray', 'torchrun')]
    assert ends[0] == ends[1]
    assert not processes(str(tmp_path / 'ray'))
