"""Every script of examples/ under torchrun with two processes and every strategy; one of them in the ordinary suite,
all of them slow."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from chatgpt.launch import demo_world
from chatgpt.nn import GPTRM, GPTActor
from chatgpt.strategies.registry import STRATEGIES
from chatgpt.testing.processes import free_port

pytestmark = pytest.mark.system

ROOT = Path(__file__).resolve().parents[2]
PARALLEL = [s for s in STRATEGIES if s != 'naive']
SCRIPTS = {
    'train_sft': ['{data}/sft.jsonl', '--train_batch_size=4', '--max_steps=2', '--log_interval=1'],
    'train_reward_model': [
        '{data}/pairs.jsonl',
        '--train_batch_size=4',
        '--max_steps=2',
        '--log_interval=1',
        '--max_len=48',
    ],
    'train_prompts': [
        '{data}/prompts.jsonl',
        '--reward_model={data}/rm',
        '--num_episodes=1',
        '--max_timesteps=2',
        '--update_timesteps=1',
        '--experience_batch_size=2',
        '--train_batch_size=2',
        '--max_epochs=1',
        '--max_new_tokens=3',
    ],
    'train_dummy': [
        '--num_episodes=1',
        '--max_timesteps=1',
        '--update_timesteps=1',
        '--prompt_tokens=4',
        '--max_new_tokens=3',
    ],
    'inference': ['--input={data}/prompts.jsonl', '--output={out}/answers.jsonl', '--max_new_tokens=3'],
}


@pytest.fixture(scope='module')
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp('data')
    for name, rows in (
        ('sft', [{'instruction': r['prompt'], 'output': r['response']} for r in demo_world.demo_corpus(8)]),
        ('pairs', demo_world.demo_preferences(8)),
        ('prompts', demo_world.demo_prompts(4)),
    ):
        (folder / f'{name}.jsonl').write_text('\n'.join(json.dumps(row) for row in rows) + '\n')
    GPTActor(config=demo_world.demo_config()).save_pretrained(folder / 'base', tokenizer=demo_world.demo_tokenizer())
    GPTRM(config=demo_world.demo_config()).save_pretrained(folder / 'rm', tokenizer=demo_world.demo_tokenizer())
    return folder


def torchrun(script: str, strategy: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        '-m',
        'torch.distributed.run',
        '--nproc-per-node=2',
        f'--master-port={free_port()}',
        str(ROOT / 'examples' / f'{script}.py'),
        f'--strategy={strategy}',
        *flags,
    ]
    env = os.environ | {'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1'}
    return subprocess.run(command, capture_output=True, text=True, env=env)


def check(script: str, strategy: str, data: Path, out: Path) -> None:
    """It ends well, and what it promises to leave behind is there."""
    if strategy.startswith('colossalai') and importlib.util.find_spec('colossalai') is None:
        pytest.skip('colossalai is not installed: pip install -r requirements-colossalai.txt')
    flags = [flag.format(data=data, out=out) for flag in SCRIPTS[script]]
    if strategy.startswith('colossalai_gemini'):
        flags.append('--precision=bf16')
    if script != 'train_dummy':
        flags.append(f'--pretrain={data / "base"}')
    if script not in ('train_dummy', 'inference'):
        flags.append(f'--save_path={out}')
    done = torchrun(script, strategy, *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    if script == 'inference':
        rows = [json.loads(line) for line in (out / 'answers.jsonl').read_text().splitlines()]
        assert [row['prompt'] for row in rows] == [row['prompt'] for row in demo_world.demo_prompts(4)]
    elif script == 'train_dummy':
        assert done.stdout.count('8 samples in ') == 1
        assert 'on 2 process(es)' in done.stdout
    else:
        from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

        assert len((out / 'metrics.jsonl').read_text().splitlines()) == 2
        kind = AutoModelForSequenceClassification if script == 'train_reward_model' else AutoModelForCausalLM
        assert kind.from_pretrained(out / ('reward_model' if script == 'train_reward_model' else 'actor'))


def test_ppo_under_colossalai(data, tmp_path):
    check('train_prompts', 'colossalai_zero2', data, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize('strategy', PARALLEL)
@pytest.mark.parametrize('script', SCRIPTS)
def test_all(script, strategy, data, tmp_path):
    check(script, strategy, data, tmp_path)


@pytest.mark.slow
def test_a_chat_is_one_process(data):
    done = torchrun('inference', 'ddp', f'--pretrain={data / "base"}')
    assert done.returncode != 0
    assert 'error: a chat is one process: start it with python, or give --input' in done.stderr
