"""Ray as a launcher: torchrun's environment on a cluster, the same run as under torchrun, and its continuation after kills."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import chatgpt
from chatgpt.dataset import embedded
from chatgpt.launch.ray import Rank, RayLaunch, check_address, check_node, run_on_ray
from chatgpt.launch.worker import Worker
from chatgpt.nn import GPTActor

pytestmark = pytest.mark.skipif(importlib.util.find_spec('ray') is None, reason='needs ray: pip install -r requirements-ray.txt')

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / 'examples' / 'train_prompts.py'
NODE = {'num_cpus': 1, 'object_store_memory': 80 * 2**20}
QUICK = [
    '--strategy=ddp', '--num_episodes=1', '--max_timesteps=8', '--update_timesteps=1', '--experience_batch_size=4', '--train_batch_size=4',
    '--max_epochs=1', '--max_new_tokens=4', '--checkpoint_interval=1', '--lr=1e-3',
]  # fmt: skip


@pytest.fixture(scope='module')
def cluster() -> Iterator[Any]:
    """Three nodes with one core each, on this machine, that ask for a token. Ray's sockets need a short path."""
    folder = tempfile.mkdtemp(prefix='ray-', dir='/tmp')
    Path(folder, 'token').write_text('a' * 40)
    before = dict(os.environ)
    os.environ |= {'RAY_TMPDIR': folder, 'RAY_AUTH_MODE': 'token', 'RAY_AUTH_TOKEN_PATH': f'{folder}/token', 'RAY_USAGE_STATS_ENABLED': '0'}
    os.environ['RAY_NUM_REDIS_GET_RETRIES'] = '5'
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={**NODE, 'include_dashboard': False})
    try:
        for _ in range(2):
            cluster.add_node(**NODE)
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


def launch(cluster: Any, folder: Path, text: str, *args: str, **options: Any) -> int:
    """`text` as a script, launched from this process; its exit code."""
    path = folder / 'script.py'
    path.write_text(text)
    return run_on_ray(RayLaunch(script=str(path), script_args=args, address=cluster.address, **options))


def command(*arguments: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, '-m', 'chatgpt.launch', *arguments], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=os.environ | {'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1'} | variables,
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


# ---------------------------------------------------------------------- what a script finds, and how it ends


SHOW = """
import json, os, pathlib, sys
names = 'RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT OMP_NUM_THREADS HF_HUB_OFFLINE NOTE'.split()
found = {name: os.environ.get(name) for name in names}
found |= {'argv': sys.argv[1:], 'path': sys.path[0], 'name': __name__, 'raylet': os.popen(f'ps -o ppid= -p {os.getppid()}').read().strip()}
pathlib.Path(sys.argv[1], os.environ['RANK']).write_text(json.dumps(found))
print('said by', os.environ['RANK'])
print('complained by', os.environ['RANK'], file=sys.stderr)
"""


def test_a_script_finds_what_torchrun_would_have_set(cluster, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')
    options = {'num_workers': 4, 'cpus_per_worker': 0.5, 'variables': {'NOTE': 'a=b c'}}
    assert launch(cluster, tmp_path, SHOW, str(tmp_path), '--flag=x y', '--', 'z', **options) == 0
    found = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(4)]
    for rank, one in enumerate(found):
        assert (one['RANK'], one['WORLD_SIZE'], one['OMP_NUM_THREADS']) == (str(rank), '4', os.environ.get('OMP_NUM_THREADS', '1'))
        assert (one['HF_HUB_OFFLINE'], one['NOTE'], one['argv']) == ('1', 'a=b c', [str(tmp_path), '--flag=x y', '--', 'z'])
        assert (one['path'], one['name']) == (str(tmp_path), '__main__')
        assert (one['MASTER_ADDR'], one['MASTER_PORT']) == (found[0]['MASTER_ADDR'], found[0]['MASTER_PORT'])
    nodes = list(dict.fromkeys(one['raylet'] for one in found))
    assert len(nodes) >= 2  # a node has room for two
    places = [[one for one in found if one['raylet'] == node] for node in nodes]
    assert [one['RANK'] for place in places for one in place] == list('0123')  # ranks of a node follow each other
    for number, place in enumerate(places):
        assert [one['LOCAL_RANK'] for one in place] == [str(n) for n in range(len(place))]
        assert {(one['LOCAL_WORLD_SIZE'], one['GROUP_RANK']) for one in place} == {(str(len(place)), str(number))}
    out, err = capfd.readouterr()
    assert (out, err) == ('said by 0\n', 'complained by 0\n')
    assert not list(tmp_path.glob('.chatgpt*'))


FAIL = """
import os, pathlib, sys, time
with open(sys.argv[1], 'a') as file:
    file.write(f"{os.environ['RANK']} {os.environ['TORCHELASTIC_RESTART_COUNT']} {os.environ['TORCHELASTIC_RUN_ID']}\\n")
if os.environ['RANK'] == '1':
    time.sleep(0.3)
    sys.exit('it broke' if sys.argv[2] == '1' else int(sys.argv[2]))
time.sleep(60 if sys.argv[2] == '1' else 0)
"""


def test_a_script_that_fails_is_started_again_as_often_as_allowed(cluster, tmp_path, capfd, monkeypatch):
    from chatgpt.launch import ray

    monkeypatch.setattr(ray, 'GRACE_S', 0.5)
    assert launch(cluster, tmp_path, FAIL, str(tmp_path / 'log'), '1', num_workers=2, max_failures=1) == 1
    lines = [line.split() for line in (tmp_path / 'log').read_text().splitlines()]
    assert sorted(line[:2] for line in lines) == [['0', '0'], ['0', '1'], ['1', '0'], ['1', '1']]
    assert len({line[2] for line in lines}) == 1  # the same launch
    err = capfd.readouterr().err
    assert err.count('ended with exit code 1, its last words:\nit broke\n; ') == 2
    assert '; restart 1 of 1' in err and '; giving up' in err


def test_a_script_that_is_called_wrongly_is_not_started_again(cluster, tmp_path, capfd):
    assert launch(cluster, tmp_path, FAIL, str(tmp_path / 'log'), '2', num_workers=2) == 2
    assert len((tmp_path / 'log').read_text().splitlines()) == 2
    assert 'restart' not in capfd.readouterr().err


WAIT = """
import os, pathlib, signal, sys, time
def leave(number, frame):
    print('saving', flush=True)
    sys.exit(128 + number)
signal.signal(signal.SIGTERM, leave)
pathlib.Path(sys.argv[1], f"{os.environ['TORCHELASTIC_RESTART_COUNT']}-{os.environ['RANK']}-{os.getpid()}").touch()
while not pathlib.Path(sys.argv[1], 'end').exists():
    time.sleep(0.05)
"""


def started(folder: Path, attempt: int, number: int) -> list[int] | None:
    """Process ids of an attempt's ranks, once all of them have said that they are there."""
    files = sorted(folder.glob(f'{attempt}-*-*'), key=lambda f: int(f.name.split('-')[1]))
    return [int(f.name.split('-')[2]) for f in files] if len(files) == number else None


def test_a_busy_cluster_is_an_error_and_a_signal_reaches_the_script(cluster, tmp_path, capfd):
    (tmp_path / 'wait.py').write_text(WAIT)
    process = command('--launcher=ray', f'--address={cluster.address}', '--num_workers=3', str(tmp_path / 'wait.py'), str(tmp_path))
    try:
        wait_for(lambda: started(tmp_path, 0, 3))
        with pytest.raises(ValueError, match=r'^2 workers with 1 CPU each fit the Ray cluster, but for 0.1 s others have used it \(0 CPU'):
            launch(cluster, tmp_path, SHOW, num_workers=2, wait_s=0.1)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 143
    assert output.splitlines() == ['[launch] SIGTERM: passed on to all workers', 'saving']


def test_scripts_end_with_a_launcher_that_is_killed(cluster, tmp_path):
    (tmp_path / 'wait.py').write_text(WAIT)
    process = command('--launcher=ray', f'--address={cluster.address}', '--num_workers=2', str(tmp_path / 'wait.py'), str(tmp_path))
    try:
        pids = wait_for(lambda: started(tmp_path, 0, 2))
    finally:
        process.kill()
        process.communicate()
    wait_for(lambda: not any(Path(f'/proc/{pid}').exists() for pid in pids), 20)


def test_a_node_that_dies_is_replaced(cluster, tmp_path):
    (tmp_path / 'wait.py').write_text(WAIT)
    process = command('--launcher=ray', f'--address={cluster.address}', '--num_workers=2', str(tmp_path / 'wait.py'), str(tmp_path))
    try:
        pids = wait_for(lambda: started(tmp_path, 0, 2))
        homes = {parent(parent(pid)): pid for pid in pids}
        node = next(n for n in cluster.worker_nodes if n.all_processes['raylet'][0].process.pid in homes)
        pid = homes[node.all_processes['raylet'][0].process.pid]
        cluster.remove_node(node, allow_graceful=False)
        again = wait_for(lambda: started(tmp_path, 1, 2))
        assert not Path(f'/proc/{pid}').exists()
        assert not set(again) & set(pids)
        (tmp_path / 'end').touch()
        output, _ = process.communicate(timeout=30)
    finally:
        process.kill()
        cluster.add_node(**NODE)
    assert process.returncode == 0, output
    assert f'rank {pids.index(pid)} on' in output and 'its worker or node is gone; restart 1 of 3' in output


# ---------------------------------------------------------------------- one line for every mistake


def fails(cluster: Any, folder: Path, **options: Any) -> str:
    with pytest.raises(ValueError) as error:
        launch(cluster, folder, 'raise SystemExit(1)', **options)
    return str(error.value)


def test_a_request_that_no_node_can_hold_names_request_and_cluster(cluster, tmp_path):
    error = fails(cluster, tmp_path, num_workers=2, cpus_per_worker=2)
    assert error.startswith('2 workers with 2 CPU each do not fit the Ray cluster, which has room for 0 (node ')
    assert error.count(': 1 CPU, 0 GPU') == 3
    assert '4 workers with 1 CPU each do not fit the Ray cluster, which has room for 3' in fails(cluster, tmp_path, num_workers=4)
    assert '1 worker with 1 CPU and 1 GPU each do not fit' in fails(cluster, tmp_path, gpus_per_worker=1)


def test_another_token_is_an_error_that_says_where_the_right_one_is(cluster, tmp_path):
    (tmp_path / 'token').write_text('b' * 40)
    process = command('--launcher=ray', f'--address={cluster.address}', str(SCRIPT), RAY_AUTH_TOKEN_PATH=str(tmp_path / 'token'))
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert output.count('\n') == 1
    assert output.startswith(f'error: the Ray cluster at {cluster.address} does not accept the token of this process')
    assert 'copy ~/.ray/auth_token of the head node' in output


def test_no_cluster(monkeypatch, tmp_path):
    import ray
    from ray._private import services

    ray.shutdown()
    monkeypatch.setattr(services, 'find_gcs_addresses', functools.cache(lambda: set()))  # whatever else runs on this machine
    monkeypatch.setenv('RAY_TMPDIR', str(tmp_path))
    monkeypatch.delenv('RAY_ADDRESS', raising=False)
    (tmp_path / 'script.py').touch()
    with pytest.raises(ValueError, match=r'there is no Ray cluster: start one with ray start --head .*, or .* --address local'):
        run_on_ray(RayLaunch(script=str(tmp_path / 'script.py')))


def test_a_wrong_address(tmp_path):
    with socket.create_server(('127.0.0.1', 0)) as closed:
        address = f'127.0.0.1:{closed.getsockname()[1]}'
    with pytest.raises(ValueError, match=rf'no Ray cluster answers at {address} \(Connection refused\); look up the address with'):
        check_address(address)
    with socket.create_server(('127.0.0.1', 0)) as server:
        other = threading.Thread(target=lambda: server.accept()[0].sendall(b'HTTP/1.1 400 Bad Request\r\n'))
        other.start()
        with pytest.raises(ValueError, match='what listens there is not Ray'):
            check_address(f'127.0.0.1:{server.getsockname()[1]}')
        other.join()
    with pytest.raises(ValueError, match='has to run on a node of the cluster.*ray job submit'):
        check_address('ray://10.0.0.1:10001')
    with pytest.raises(ValueError, match="address '10.0.0.1' is not host:port, such as 10.0.0.1:6379"):
        check_address('10.0.0.1')


def test_another_package_on_a_worker(cluster, tmp_path):
    (tmp_path / 'chatgpt').mkdir()
    (tmp_path / 'chatgpt' / '__init__.py').write_text("__version__ = '0.0.0'\n")
    elsewhere = {'PYTHONPATH': str(tmp_path)}
    assert f'has chatgpt 0.0.0, here is {chatgpt.__version__}; install the same' in fails(cluster, tmp_path, variables=elsewhere)
    (tmp_path / 'chatgpt' / '__init__.py').write_text('import nothing_of_that_name\n')
    assert "cannot import chatgpt: ModuleNotFoundError: No module named 'nothing_of_that_name'" in fails(
        cluster, tmp_path, variables=elsewhere
    )


def test_a_worker_without_the_package(monkeypatch, tmp_path):
    bare = tmp_path / 'python'
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # without site-packages
    bare.chmod(0o755)
    monkeypatch.setattr(sys, 'executable', str(bare))
    rank = Rank(None, {'NodeManagerAddress': '10.0.0.2'}, found=Worker().look('127.0.0.1', str(tmp_path), {}, {'PYTHONPATH': ''}))
    with pytest.raises(ValueError, match=r'^node 10.0.0.2 .*python has no package chatgpt, torch, transformers; install it there'):
        check_node(rank, 'x')


def test_a_node_that_does_not_see_the_same_files(cluster, tmp_path):
    """The second node has a file system of its own at the place of the run's folder."""
    own = ['unshare', '--mount', 'sh', '-c', f'mount -t tmpfs none {tmp_path} && exec "$@"', 'sh']
    if subprocess.run([*own, 'true'], capture_output=True).returncode:
        pytest.skip('needs unshare --mount, with the right to mount')
    (tmp_path.parent / 'script.py').write_text('')
    start = [sys.executable, '-m', 'ray.scripts.scripts', 'start', f'--address={cluster.address}', '--num-cpus=1', '--block']
    start += ['--resources={"apart": 1}', f'--object-store-memory={NODE["object_store_memory"]}']
    node = subprocess.Popen([*own, *start], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        launch_all = RayLaunch(
            script=str(tmp_path.parent / 'script.py'), num_workers=4, address=cluster.address, shared_path=str(tmp_path / 'run'), wait_s=20
        )
        error = ''

        def seen() -> bool:
            nonlocal error
            with pytest.raises(ValueError) as raised:
                run_on_ray(launch_all)
            error = str(raised.value)
            return 'do not fit' not in error

        wait_for(seen)
    finally:
        os.killpg(node.pid, signal.SIGTERM)
        node.wait(timeout=30)
    assert re.match(rf'{tmp_path} is not shared: node .* does not have it as it is here', error)
    assert 'give --save_path there' in error
    assert not list(tmp_path.iterdir())
