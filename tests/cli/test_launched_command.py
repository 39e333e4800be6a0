"""A command as the script of every process, and an installed wheel without the repository."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from chatgpt.launch.__main__ import script_of

ROOT = Path(__file__).resolve().parents[2]


def test_a_command_runs_the_file_of_the_module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = str(ROOT / 'chatgpt' / '__main__.py')
    assert script_of('sft', ['data.jsonl']) == (module, ['sft', 'data.jsonl'])
    assert script_of('mine.py:method', []) == (module, ['mine.py:method'])
    assert script_of('mine.py', ['a']) == ('mine.py', ['a'])
    (tmp_path / 'sft').touch()  # a script of the user's own comes first
    assert script_of('sft', []) == ('sft', [])


@pytest.mark.system
def test_a_wheel_works_in_an_empty_folder(tmp_path):
    """Neither the repository nor its folder can be imported."""
    environment = {name: value for name, value in os.environ.items() if name != 'PYTHONPATH'}
    environment |= {'OMP_NUM_THREADS': '1', 'HF_HUB_OFFLINE': '1'}
    pip = [sys.executable, '-m', 'pip', '--quiet', '--disable-pip-version-check']

    def run(argv: list[str], cwd: Path, **more: str) -> str:
        done = subprocess.run(argv, cwd=cwd, env=environment | more, capture_output=True, text=True)
        assert done.returncode == 0, f'{argv}: {done.stderr}'
        return done.stdout

    tree = subprocess.run(
        ['git', 'ls-files', 'chatgpt', 'docs/doctor', '*.md', '*.py', '*.toml', 'LICENSE', 'MANIFEST.in'],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        check=True,
    ).stdout.split()
    for name in tree:  # a copy: building leaves a folder behind
        if name.startswith(('chatgpt/', 'docs/doctor/')) or '/' not in name:
            (tmp_path / 'source' / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / 'source' / name).write_bytes((ROOT / name).read_bytes())
    build = ['wheel', '.', '--no-deps', '--no-build-isolation', '--no-index', '--wheel-dir', str(tmp_path / 'wheels')]
    run([*pip, *build], tmp_path / 'source')
    (wheel,) = (tmp_path / 'wheels').glob('chatgpt_rlhf-*.whl')
    run([sys.executable, '-m', 'venv', '--without-pip', str(tmp_path / 'venv')], tmp_path)
    python = str(tmp_path / 'venv' / 'bin' / 'python')
    run([*pip[:3], '--python', python, 'install', '--no-deps', '--no-index', str(wheel)], tmp_path)
    (site,) = (tmp_path / 'venv' / 'lib').glob('python*/site-packages')
    (site / 'around.pth').write_text(sysconfig.get_paths()['purelib'])  # torch and the like

    empty = tmp_path / 'empty'
    empty.mkdir()

    def command(*words: str) -> str:
        return run([str(tmp_path / 'venv' / 'bin' / 'chatgpt-rlhf'), *words], empty)

    where = run([python, '-c', 'import chatgpt; print(chatgpt.__file__)'], empty)
    assert where.startswith(str(tmp_path / 'venv'))
    assert command('version').startswith('chatgpt-rlhf ')
    assert 'cd first && chatgpt-rlhf ppo --config_file ppo.yaml' in command('init', 'ppo', '--to', 'first')
    assert command('sft', '--max_steps', '3').endswith(
        'actor written to outputs/sft/actor; use it: python -m chatgpt generate outputs/sft/actor "your prompt"\n'
    )
    prompts, reward = 'first/prompts.jsonl', 'first/rewards.py:score'
    small = ['--num_episodes=1', '--max_timesteps=1', '--update_timesteps=1', '--max_new_tokens=8']
    of_run = ['--pretrain=outputs/sft/actor', f'--reward_fn={reward}', *small]
    assert command('ppo', prompts, *of_run).endswith('generate outputs/ppo/actor "your prompt"\n')
    assert json.loads((empty / 'outputs/ppo/metrics.jsonl').read_text().splitlines()[0])['step'] == 1
    assert command('generate', 'outputs/ppo/actor', 'one day a fox', '--max_new_tokens=3').startswith('> one day a fox')
    two = ['--num_workers', '2', 'sft', '--strategy', 'ddp', '--max_steps', '1', '--save_path=two']
    launched = command('launch', *two)
    assert launched.endswith('generate two/actor "your prompt"\n')
    assert command('report', 'outputs/ppo') == 'outputs/ppo/report.html\n'
    assert (empty / 'outputs/ppo/report.html').stat().st_size > 100_000  # with the scripts that it needs
    assert command('doctor', '--explain', 'kl-runs-away').startswith('kl-runs-away')
