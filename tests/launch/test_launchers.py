"""The launchers on real processes: a run under torchrun and Ray, its resume after kills, and errors of a cluster."""

from __future__ import annotations

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
from pathlib import Path
from typing import Any

import pytest
from launcher_runs import ROOT, Nodes, command, launch, metrics_of, on, parent, processes
from limits import until

from chatgpt.launch.ray_request import check_address
from chatgpt.testing.processes import free_port

pytestmark = pytest.mark.system

SCRIPT = ROOT / 'examples' / 'train_prompts.py'
QUICK = (
    '--strategy=ddp --num_episodes=1 --max_timesteps=8 --update_timesteps=1 --experience_batch_size=4 '
    '--train_batch_size=4 --max_epochs=1 --max_new_tokens=4 --checkpoint_interval=1 --lr=1e-3'
).split()


# ---------------------------------------------------------------------- the same run after failures


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """Folder of a run on two processes under torchrun without failures."""
    folder = tmp_path_factory.mktemp('undisturbed')
    process = command(
        '--num_workers=2', str(SCRIPT), *QUICK, '--pretrain', str(model_folder), '--save_path', str(folder)
    )
    output, _ = process.communicate()
    assert process.returncode == 0, output
    return folder


def check_same_run(folder: Path, undisturbed: Path) -> None:
    assert [line['step'] for line in metrics_of(folder)] == list(range(1, 9))
    assert metrics_of(folder) == metrics_of(undisturbed)
    ends = [(run / 'actor' / 'model.safetensors').read_bytes() for run in (folder, undisturbed)]
    assert ends[0] == ends[1]
    assert not processes(str(folder))


def test_a_run_on_ray_resumes_after_a_killed_worker(cluster, tmp_path, model_folder, undisturbed):
    """The worker of rank 0 is killed; its script, which holds the run's folder, must end too."""
    flags = [str(SCRIPT), *QUICK, '--pretrain', str(model_folder), '--save_path', str(tmp_path)]
    process = on(cluster, '--num_workers=2', *flags)
    try:
        until(lambda: len(metrics_of(tmp_path)) >= 2)
        (rank_0,) = processes(str(tmp_path), 'RANK=0')
        os.kill(parent(rank_0), signal.SIGKILL)
        until(lambda: not Path(f'/proc/{rank_0}').exists())
        output, _ = process.communicate()
    finally:
        process.kill()
    assert process.returncode == 0, output
    assert 'rank 0 on' in output and 'was lost: its worker or node is gone; restart 1 of 3' in output
    assert 'phase 8/8' in output and output.count('actor written to') == 1  # rank 0's output reaches the driver
    check_same_run(tmp_path, undisturbed)


def test_torchrun_on_two_nodes_resumes_after_a_killed_rank(tmp_path, model_folder, undisturbed):
    """Two agents, as on two nodes, each with its own address. Only that of rank 1 notices the kill directly."""
    flags = [str(SCRIPT), *QUICK, '--pretrain', str(model_folder), '--save_path', str(tmp_path)]
    meet = ['--num_workers=2', '--num_nodes=2', f'--rdzv_endpoint=127.0.0.2:{free_port()}', f'--run_id={tmp_path}']
    agents = [command(*meet, f'--local_addr=127.0.0.{node}', *flags) for node in (2, 3)]
    try:
        until(lambda: len(metrics_of(tmp_path)) >= 2)
        (rank_1,) = processes(str(tmp_path), 'RANK=1', 'LOCAL_RANK=0', 'LOCAL_WORLD_SIZE=1')
        os.kill(rank_1, signal.SIGKILL)
        outputs = [agent.communicate()[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    assert any('rank 1 was ended by SIGKILL; restart 1 of 3' in output for output in outputs)
    check_same_run(tmp_path, undisturbed)


def test_a_second_launch_of_the_name_resumes(tmp_path: Path, model_folder: Path):
    """The first launch is ended by SIGTERM, as by a batch system that requeues the job."""
    small = ['--max_timesteps=16', '--experience_batch_size=2', '--train_batch_size=2', '--max_new_tokens=2']
    flags = ['--run_id=job7', str(SCRIPT), *QUICK[1:], *small, f'--pretrain={model_folder}', f'--save_path={tmp_path}']
    first = command(*flags)
    try:
        until(lambda: len(metrics_of(tmp_path)) >= 1)
        first.send_signal(signal.SIGTERM)
        first.communicate()
    finally:
        first.kill()
    done = len(metrics_of(tmp_path))
    assert first.returncode == 128 + signal.SIGTERM and 1 <= done < 16
    second = command(*flags)
    output, _ = second.communicate()
    assert second.returncode == 0, output
    assert [line['step'] for line in metrics_of(tmp_path)] == list(range(1, 17))
    assert f'phase {done + 1}/16' in output and 'phase 1/16' not in output


# ---------------------------------------------------------------------- environment and end of a script


SHOW = """
import json, os, pathlib, sys, time
names = 'RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT OMP_NUM_THREADS HF_HUB_OFFLINE NOTE'.split()
found = {name: os.environ.get(name) for name in names}
found |= {'argv': sys.argv[1:], 'path': sys.path[0], 'name': __name__, 'raylet': os.popen(f'ps -o ppid= -p {os.getppid()}').read().strip()}
pathlib.Path(sys.argv[1], os.environ['RANK']).write_text(json.dumps(found))
print('said by', os.environ['RANK'])
time.sleep(0.2)
print('complained by', os.environ['RANK'], file=sys.stderr)
"""


def test_a_script_finds_what_torchrun_would_have_set(cluster, tmp_path, monkeypatch):
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')
    options = ['--num_workers=4', '--cpus_per_worker=0.5', '--env=NOTE=a=b c']
    code, output = launch(cluster, tmp_path, SHOW, *options, args=[str(tmp_path), '--flag=x y', '--', 'z'])
    assert (code, output) == (0, 'said by 0\ncomplained by 0\n')
    found = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(4)]
    for rank, one in enumerate(found):
        assert (one['RANK'], one['WORLD_SIZE'], one['OMP_NUM_THREADS']) == (str(rank), '4', '1')
        assert (one['HF_HUB_OFFLINE'], one['NOTE'], one['argv']) == (
            '1',
            'a=b c',
            [str(tmp_path), '--flag=x y', '--', 'z'],
        )
        assert (one['path'], one['name']) == (str(tmp_path), '__main__')
        assert (one['MASTER_ADDR'], one['MASTER_PORT']) == (found[0]['MASTER_ADDR'], found[0]['MASTER_PORT'])
    nodes = list(dict.fromkeys(one['raylet'] for one in found))
    assert len(nodes) >= 2  # a node has room for two
    places = [[one for one in found if one['raylet'] == node] for node in nodes]
    assert [one['RANK'] for place in places for one in place] == list('0123')  # ranks of a node follow each other
    for number, place in enumerate(places):
        assert [one['LOCAL_RANK'] for one in place] == [str(n) for n in range(len(place))]
        assert {(one['LOCAL_WORLD_SIZE'], one['GROUP_RANK']) for one in place} == {(str(len(place)), str(number))}
    assert not list(tmp_path.glob('.chatgpt*'))


FAIL = """
import os, pathlib, sys, time
with open(sys.argv[1], 'a') as file:
    file.write(f"{os.environ['RANK']} {os.environ['TORCHELASTIC_RESTART_COUNT']} {os.environ['TORCHELASTIC_RUN_ID']}\\n")
if os.environ['RANK'] == '1':
    while f"0 {os.environ['TORCHELASTIC_RESTART_COUNT']} " not in open(sys.argv[1]).read():
        time.sleep(0.02)
    sys.exit('it broke' if sys.argv[2] == '1' else int(sys.argv[2]))
time.sleep(1)
"""


def test_a_script_that_fails_is_started_again_as_often_as_allowed(cluster, tmp_path):
    code, output = launch(
        cluster, tmp_path, FAIL, '--num_workers=2', '--max_failures=1', args=[str(tmp_path / 'log'), '1']
    )
    assert code == 1
    lines = [line.split() for line in (tmp_path / 'log').read_text().splitlines()]
    assert sorted(line[:2] for line in lines) == [['0', '0'], ['0', '1'], ['1', '0'], ['1', '1']]
    assert len({line[2] for line in lines}) == 1  # the same launch
    assert output.count('ended with exit code 1, its last words:\nit broke\n; ') == 2
    assert '; restart 1 of 1' in output and '; giving up' in output


WAIT = """
import os, pathlib, signal, sys, time
def leave(number, frame):
    print('saving', flush=True)
    sys.exit(128 + number)
signal.signal(signal.SIGTERM, leave)
signal.signal(signal.SIGINT, leave)
pathlib.Path(sys.argv[1], f"{os.environ['TORCHELASTIC_RESTART_COUNT']}-{os.environ['RANK']}-{os.getpid()}").touch()
while not pathlib.Path(sys.argv[1], 'end').exists():
    time.sleep(0.05)
"""


def started(folder: Path, attempt: int, number: int) -> list[int] | None:
    """Returns the process ids of an attempt's ranks once all have started, else None."""
    files = sorted(folder.glob(f'{attempt}-*-*'), key=lambda f: int(f.name.split('-')[1]))
    return [int(f.name.split('-')[2]) for f in files] if len(files) == number else None


def test_a_busy_cluster_is_an_error_and_a_signal_reaches_the_script(cluster, tmp_path):
    (tmp_path / 'wait.py').write_text(WAIT)
    process = on(cluster, '--num_workers=3', str(tmp_path / 'wait.py'), str(tmp_path))
    try:
        until(lambda: started(tmp_path, 0, 3))
        error = fails(cluster, tmp_path, '--num_workers=2', '--wait_s=0.1')
        assert '2 workers with 1 CPU each fit the Ray cluster, but for 0.1 s others have used it (0 CPU, 0 GPU' in error
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate()
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM
    assert output.splitlines() == ['[launch] SIGTERM: passed on to all workers', 'saving']


def test_scripts_end_with_a_launcher_that_is_killed(cluster, tmp_path):
    (tmp_path / 'wait.py').write_text(WAIT)
    process = on(cluster, '--num_workers=2', str(tmp_path / 'wait.py'), str(tmp_path))
    try:
        pids = until(lambda: started(tmp_path, 0, 2))
    finally:
        process.kill()
        process.communicate()
    until(lambda: not any(Path(f'/proc/{pid}').exists() for pid in pids))


# ---------------------------------------------------------------------- one line for every mistake


def fails(cluster: Nodes, folder: Path, *options: str) -> str:
    """Returns the error line of a launch that must fail; notes of the launcher may precede it."""
    code, output = launch(cluster, folder, 'raise SystemExit(1)', *options)
    *remarks, error = output.splitlines()
    assert code == 2 and all(line.startswith('[launch] ') for line in remarks), output
    assert error.startswith('error: ')
    return error.removeprefix('error: ')


def test_a_request_that_no_node_can_hold_names_request_and_cluster(cluster, tmp_path):
    error = fails(cluster, tmp_path, '--num_workers=2', '--cpus_per_worker=2')
    assert error.startswith('2 workers with 2 CPU each do not fit the Ray cluster, which has room for 0 (node ')
    assert error.count(': 1 CPU, 0 GPU') == 3


def test_another_token_is_an_error_that_says_where_the_right_one_is(cluster, tmp_path):
    (tmp_path / 'token').write_text('b' * 40)
    variables = cluster.variables | {'RAY_AUTH_TOKEN_PATH': str(tmp_path / 'token')}
    process = command('--launcher=ray', f'--address={cluster.address}', str(SCRIPT), **variables)
    output, _ = process.communicate()
    assert process.returncode == 2
    assert output.count('\n') == 1
    assert output.startswith(f'error: the Ray cluster at {cluster.address} does not accept the token of this process')
    assert 'copy ~/.ray/auth_token of the head node' in output


def test_no_cluster(tmp_path):
    if importlib.util.find_spec('ray') is None:
        pytest.skip('needs ray: pip install -r requirements-ray.txt')
    (tmp_path / 'script.py').write_text('print("the script ran")\n')
    text = (
        'from ray._private import services\n'
        'from functools import cache\n'
        'services.find_gcs_addresses = cache(set)\n'  # ignores other clusters on this machine
        f'import runpy, sys; sys.argv = ["launch", "--launcher=ray", *sys.argv[1:], "{tmp_path}/script.py"]\n'
        'runpy.run_module("chatgpt.launch", run_name="__main__")\n'
    )
    folder = tempfile.mkdtemp(prefix='ray-', dir='/tmp')  # Ray's sockets need a short path
    env = {k: v for k, v in os.environ.items() if not k.startswith('RAY_')} | {
        'RAY_TMPDIR': folder,
        'PYTHONPATH': str(ROOT),
    }
    done = subprocess.run([sys.executable, '-c', text], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, 'the script ran\n'), done.stderr
    assert done.stderr == (
        '[launch] there is no Ray cluster: starting one on this machine, which ends with this run (--address HOST:PORT '
        'joins another)\n'
    )
    done = subprocess.run([sys.executable, '-c', text, '--address=auto'], env=env, capture_output=True, text=True)
    assert done.returncode == 2
    assert re.fullmatch(
        r'error: there is no Ray cluster: start one with ray start --head .*, or .* --address local\n', done.stderr
    )
    shutil.rmtree(folder, ignore_errors=True)


def test_a_wrong_address(tmp_path):
    with socket.create_server(('127.0.0.1', 0)) as closed:
        address = f'127.0.0.1:{closed.getsockname()[1]}'
    with pytest.raises(
        ValueError, match=rf'no Ray cluster answers at {address} \(Connection refused\); look up the address with'
    ):
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


def test_a_node_that_does_not_see_the_same_files(cluster, tmp_path):
    """The second node has another file system at the path of the run's folder."""
    own = ['unshare', '--mount', 'sh', '-c', f'mount -t tmpfs none {tmp_path} && exec "$@"', 'sh']
    if subprocess.run([*own, 'true'], capture_output=True).returncode:
        pytest.skip('needs unshare --mount, with the right to mount')
    (tmp_path.parent / 'script.py').write_text('')
    start = [sys.executable, '-m', 'ray.scripts.scripts', 'start', f'--address={cluster.address}', '--num-cpus=1']
    start += ['--block', f'--object-store-memory={80 * 2**20}']
    quiet: dict[str, Any] = dict.fromkeys(('stdout', 'stderr'), subprocess.DEVNULL)
    node = subprocess.Popen([*own, *start], env=os.environ | cluster.variables, start_new_session=True, **quiet)
    try:
        error = 'do not fit'
        while 'do not fit' in error:  # until the node has joined
            process = on(cluster, '--num_workers=4', str(tmp_path.parent / 'script.py'), f'--save_path={tmp_path}/run')
            error, _ = process.communicate()
    finally:
        os.killpg(node.pid, signal.SIGTERM)
        node.wait()
    assert re.match(rf'error: {tmp_path} is not shared: node .* does not have it as it is here', error)
    assert 'give --save_path there' in error
    assert not list(tmp_path.iterdir())


def test_a_node_that_dies_is_replaced(cluster, tmp_path):
    """All three nodes are in use, so the launch has to wait for the new one."""
    (tmp_path / 'wait.py').write_text(WAIT)
    process = on(cluster, '--num_workers=3', str(tmp_path / 'wait.py'), str(tmp_path))
    try:
        pids = until(lambda: started(tmp_path, 0, 3))
        homes = {parent(parent(pid)): pid for pid in pids}
        pid = homes[cluster.replace_one_of(homes)]
        again = until(lambda: started(tmp_path, 1, 3))
        assert not Path(f'/proc/{pid}').exists()
        assert not set(again) & set(pids)
        (tmp_path / 'end').touch()
        output, _ = process.communicate()
    finally:
        process.kill()
    assert process.returncode == 0, output
    assert f'rank {pids.index(pid)} on' in output and 'its worker or node is gone; restart 1 of 3' in output
