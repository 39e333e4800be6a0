"""python -m chatgpt.launch: flags and the script's config file, and the marks by which a restarted launch resumes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from limits import until

from chatgpt.launch import __main__ as command
from chatgpt.launch import ray, relaunch, torchrun
from chatgpt.launch.ray_request import RayLaunch, environment
from chatgpt.launch.torchrun import TorchrunLaunch
from chatgpt.strategies import NaiveStrategy
from chatgpt.testing.processes import environment as variables_set

SCRIPT = str(Path(__file__))


@pytest.fixture
def launched(monkeypatch):
    """Returns the launch that a command line describes, without starting it."""
    found = []
    monkeypatch.setattr(ray, 'run_on_ray', lambda launch: found.append(launch) or 0)
    monkeypatch.setattr(torchrun, 'run_on_torchrun', lambda launch: sys.exit(found.append(launch)))

    def launch(*argv: str):
        try:
            command.main(argv)
        except SystemExit as stop:
            assert stop.code is None
        return found.pop()

    return launch


def test_flags_before_the_script_are_the_launchers_and_those_after_it_the_scripts(launched):
    of_launcher = (
        '--launcher ray --num_workers 4 --cpus_per_worker=2 --gpus_per_worker=1 --max_failures=7 --address=a:1 '
        '--env A=1 --env=B=x=y'
    ).split()
    of_script = 'data.csv --num_workers 9 --save_path out a=b'.split()
    launch = launched(*of_launcher, SCRIPT, *of_script)
    given = {'num_workers': 4, 'cpus_per_worker': 2, 'gpus_per_worker': 1, 'max_failures': 7, 'address': 'a:1'}
    given |= {'script_args': of_script, 'variables': {'A': '1', 'B': 'x=y'}, 'shared_path': 'out'}
    assert launch == RayLaunch(script=SCRIPT, **given)
    assert str(launch) == '4 workers with 2 CPU and 1 GPU each'
    assert launched(SCRIPT, '--x') == TorchrunLaunch(script=SCRIPT, script_args=['--x'])


def test_a_config_file_says_number_and_resources_of_workers(launched, tmp_path):
    path = tmp_path / 'run.yaml'
    path.write_text(
        'General: {output_dir: logs}\nTraining: {num_training_workers: 2, resources_per_worker: {CPU: 3, GPU: 1}}\n'
    )
    launch = launched('--launcher=ray', SCRIPT, '--config_file', str(path))
    assert (launch.num_workers, launch.cpus_per_worker, launch.gpus_per_worker, launch.shared_path) == (2, 3, 1, 'logs')
    file = f'--config_file={path}'
    launch = launched(
        '--launcher=ray', SCRIPT, file, 'Training.num_training_workers=5', '--resources_per_worker={CPU: 4}'
    )
    # words override the file, flags override words
    assert (launch.num_workers, launch.cpus_per_worker, launch.gpus_per_worker) == (5, 4, 0)
    launch = launched(SCRIPT, f'--config_file={path}')
    assert (launch.num_workers, launch.cpus_per_worker) == (2, 3)


def test_peek_sees_what_the_script_will_see(tmp_path):
    path = tmp_path / 'run.json'
    path.write_text(json.dumps({'num_training_workers': 2, 'save_path': 'a', 'num_workers': 7, 'epochs': 1}))
    peek = command.peek
    assert peek(['--config_file', str(path)]) == {'num_training_workers': 2, 'save_path': 'a'}
    words = ['General.output_dir=b', 'lr=1', 'elsewhere.x=2']
    assert peek([f'--config_file={path}', *words]) == {'num_training_workers': 2, 'save_path': 'b'}
    assert peek(['output_dir=b', '--save_path', 'c']) == {'save_path': 'c'}


@pytest.mark.parametrize(
    ('argv', 'message'),
    [
        (['--launcher=ray', '--num_workers=2', SCRIPT, '--num_training_workers=3'], 'num_training_workers 3 differ'),
        (['--launcher=ray', '--rdzv_endpoint=a:1', SCRIPT], '--rdzv_endpoint is not for --launcher ray'),
        (['--launcher=ray', '--env=x', SCRIPT], "--env 'x' is not NAME=VALUE"),
        (['--launcher=ray', '--num_workers=0', SCRIPT], 'num_workers=0 must be at least 1'),
        (['--launcher=ray', '--cpus_per_worker=0', SCRIPT], 'cpus_per_worker=0 and gpus_per_worker=0: give at least'),
        (['--launcher=ray', SCRIPT, '--resources_per_worker={GPU: 0.5}'], 'gpus_per_worker=0.5: a rank has devices of'),
        (['--launcher=ray', '/no/script.py'], '/no/script.py: there is no such script'),
        (['--num_workers=3', '--num_nodes=2', SCRIPT], 'num_workers=3 cannot be split over num_nodes=2'),
        (['--num_workers=4', '--num_nodes=2', SCRIPT], 'give --rdzv_endpoint HOST:PORT of one of them, and --run_id'),
        (['--rdzv_endpoint=a:1', SCRIPT], 'rdzv_endpoint=a:1 is where the launch of a --run_id NAME meets: give both'),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else '',
)
def test_mistakes_of_a_launch(argv, message):
    with pytest.raises(ValueError, match=message):
        command.main(argv)


def test_the_torchrun_command():
    one = TorchrunLaunch(script=SCRIPT, script_args=['--a', 'b'], num_workers=2)
    words = '-m chatgpt.launch.torchrun --standalone --nproc_per_node=2 --max_restarts=3'.split()
    assert one.command()[1:] == [*words, SCRIPT, '--a', 'b']
    two = TorchrunLaunch(
        script=SCRIPT, num_workers=4, num_nodes=2, rdzv_endpoint='n0:29400', run_id='j', local_addr='n1', max_failures=0
    )
    words = '--rdzv_backend=c10d --rdzv_endpoint=n0:29400 --rdzv_id=j --nnodes=2 --local_addr=n1 --nproc_per_node=2'
    assert two.command()[3:] == [*words.split(), '--max_restarts=0', SCRIPT]
    for given, used in (('a:1', 'a:1'), (None, 'localhost:0')):  # also on one node name and endpoint are passed on
        named = TorchrunLaunch(script=SCRIPT, num_workers=2, run_id='job7', rdzv_endpoint=given).command()
        assert named[3:6] == ['--rdzv_backend=c10d', f'--rdzv_endpoint={used}', '--rdzv_id=job7']
        assert named[6:] == ['--nnodes=1', '--nproc_per_node=2', '--max_restarts=3', SCRIPT]


def test_a_script_gets_the_packages_place_and_the_users_variables_but_not_all(monkeypatch):
    monkeypatch.delenv('OMP_NUM_THREADS', raising=False)
    monkeypatch.setenv('PYTHONPATH', '/mine')
    monkeypatch.setenv('HF_TOKEN', 't')
    monkeypatch.setenv('UNRELATED', 'u')
    found = environment(
        RayLaunch(script=SCRIPT, num_workers=2, cpus_per_worker=3, variables={'HF_HOME': '/h'}), 'name', 1
    )
    monkeypatch.setenv('OMP_NUM_THREADS', '5')
    assert environment(RayLaunch(script=SCRIPT, cpus_per_worker=3), 'name', 1)['OMP_NUM_THREADS'] == '5'
    monkeypatch.undo()
    assert (found['OMP_NUM_THREADS'], found['HF_TOKEN'], found['HF_HOME'], found['WORLD_SIZE']) == ('3', 't', '/h', '2')
    assert found['PYTHONPATH'].split(':')[-1] == '/mine'
    assert (found['TORCHELASTIC_RUN_ID'], found['TORCHELASTIC_RESTART_COUNT']) == ('name', '1')
    assert 'UNRELATED' not in found


# ---------------------------------------------------------------------- resuming after a restart


def test_only_the_launch_that_signed_a_folder_is_a_restart_there(tmp_path):
    with NaiveStrategy() as strategy:
        relaunch.sign(tmp_path, strategy)
        assert not list(tmp_path.iterdir())  # no launcher, no mark
        with variables_set(TORCHELASTIC_RUN_ID='one'):
            assert not relaunch.is_restart(tmp_path)
            relaunch.sign(tmp_path, strategy)
            assert relaunch.is_restart(tmp_path)
        with variables_set(TORCHELASTIC_RUN_ID='two'):
            assert not relaunch.is_restart(tmp_path)
        with variables_set(TORCHELASTIC_RUN_ID='none'):  # every static torchrun
            relaunch.sign(tmp_path, strategy)
            assert not relaunch.is_restart(tmp_path)
    assert not relaunch.is_restart(tmp_path)


class TwoHosts(NaiveStrategy):
    """Rank 0 of two; the other rank does not see its files."""

    world_size = 2

    @property
    def processes(self):
        return self

    def all_gather_object(self, obj):
        return [obj, (False, 'other')]


def test_a_folder_that_not_all_ranks_see(tmp_path):
    with pytest.raises(
        ValueError, match=rf'{tmp_path} is not shared: .* is not seen by rank 1 on other; give a --save_path on'
    ):
        relaunch.sign(tmp_path, TwoHosts())


# ---------------------------------------------------------------------- Slurm, with stand-ins for its commands


@pytest.mark.parametrize('name', ['torchrun', 'ray'])
def test_a_slurm_job_starts_the_launcher(tmp_path, name):
    """`srun` runs its command once, as on the first node; `python` records its arguments."""
    for command_name, text in {
        'srun': 'while [[ $1 == --* ]]; do shift; done; SLURMD_NODENAME=node-a exec "$@"',
        'scontrol': 'echo node-a; echo node-b',
        'hostname': 'echo 10.0.0.1 172.17.0.1',
        'python': f'printf "%s\\n" "$*" >> {tmp_path}/called',
    }.items():
        (tmp_path / command_name).write_text(f'#!/bin/bash\n{text}\n')
        (tmp_path / command_name).chmod(0o755)
    env = {'PATH': f'{tmp_path}:{os.environ["PATH"]}', 'PYTHON': 'python', 'SLURM_JOB_ID': '1234'}
    env |= {'SLURM_JOB_NUM_NODES': '2', 'SLURM_JOB_NODELIST': 'node-[a-b]'}
    job = Path(__file__).resolve().parents[2] / 'examples' / 'slurm' / f'{name}.sbatch'
    command_line = ['bash', str(job), 'p.csv', '--pretrain', 'a b']
    done = subprocess.run(command_line, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    calls = (tmp_path / 'called').read_text().splitlines()
    (launch,) = [line.split() for line in calls if line.startswith('-m chatgpt.launch')]
    args = command.parse_args(launch[2:])
    assert args.script == 'examples/train_prompts.py'
    assert args.script_args[-4:] == ['p.csv', '--pretrain', 'a', 'b']
    assert '--save_path outputs/1234' in ' '.join(args.script_args)
    if name == 'torchrun':
        assert (args.num_workers, args.num_nodes, args.rdzv_endpoint, args.run_id) == (16, 2, 'node-a:21234', '1234')
    else:
        assert (args.launcher, args.address, args.num_workers, args.gpus_per_worker) == ('ray', '10.0.0.1:21234', 16, 1)
        assert '-m ray.scripts.scripts start --block --head --node-ip-address=10.0.0.1 --port=21234' in calls
        assert not list((tmp_path / 'outputs').iterdir())  # the token is gone


# ---------------------------------------------------------------------- how torchrun ends


def under_torchrun(script: Path, *flags: str, args: Sequence[str] = ()) -> subprocess.Popen[str]:
    command = [sys.executable, '-m', 'chatgpt.launch', '--num_workers=2', *flags, str(script), *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.system
def test_a_signal_ends_it_without_a_traceback(tmp_path):
    script = tmp_path / 'waits.py'
    script.write_text(
        'import pathlib, signal, sys, time\nsignal.signal(signal.SIGINT, lambda *_: sys.exit(0))\n'
        f'pathlib.Path({str(tmp_path / "there")!r}).touch()\ntime.sleep(3600)\n'
    )
    process = under_torchrun(script)
    until((tmp_path / 'there').exists)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate()
    assert process.returncode == 130, output
    assert 'Traceback' not in output


@pytest.mark.system
def test_an_error_in_a_reward_function_is_retried_and_a_mistake_is_printed_once(tmp_path):
    script = tmp_path / 'unlucky.py'
    script.write_text(
        'import os, sys\nfrom chatgpt.trainer.experience.scorers import RewardFunctionError\nfrom '
        'chatgpt.launch.arguments import run_main\n\ndef main():\n    '
        'raise (ValueError if "wrong" in sys.argv else RewardFunctionError)("it broke")\n\nrun_main(main)\n'
    )
    process = under_torchrun(script, '--max_failures=1')
    output, _ = process.communicate()
    assert process.returncode == 1
    words = re.sub(r'rank \d', 'rank N', output)
    assert words == (
        'error: it broke\n[launch] rank N ended with exit code 1; restart 1 of 1\n'
        'error: it broke\n[launch] rank N ended with exit code 1; giving up\n'
    )
    process = under_torchrun(script, '--max_failures=1', args=['wrong'])
    output, _ = process.communicate()
    assert (process.returncode, output) == (2, 'error: it broke\n')
