"""Every script of examples/ under torchrun with two processes and every strategy; a few in the ordinary suite, all of
them marked slow."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from example_script import metrics_of, torchrun

from chatgpt.launch import demo_world
from chatgpt.strategies.registry import STRATEGIES

pytestmark = pytest.mark.system

PARALLEL = [s for s in STRATEGIES if s != 'naive']
QUICK = '--num_episodes=1 --update_timesteps=1 --max_new_tokens=3'
SCRIPTS = {
    'train_sft': '{data}/sft.jsonl --train_batch_size=4 --max_steps=2 --log_interval=1',
    'train_reward_model': '{data}/pairs.jsonl --train_batch_size=4 --max_steps=2 --log_interval=1 --max_len=48',
    'train_preference': '{data}/pairs.jsonl --max_steps=2 --log_interval=1',
    'train_prompts': '{data}/prompts.jsonl --reward_model={data}/rm --max_timesteps=2 --experience_batch_size=2 '
    f'--train_batch_size=2 --max_epochs=1 {QUICK}',
    'train_dummy': f'--max_timesteps=1 --prompt_tokens=4 {QUICK}',
    'inference': '--input={data}/prompts.jsonl --output={out}/answers.jsonl --max_new_tokens=3',
}


def check(script: str, strategy: str, data: Path, out: Path) -> None:
    """Runs a script; it must succeed and write its documented files."""
    if strategy.startswith('colossalai') and importlib.util.find_spec('colossalai') is None:
        pytest.skip('colossalai is not installed: pip install -r requirements-colossalai.txt')
    flags = [f'--strategy={strategy}', *SCRIPTS[script].format(data=data, out=out).split()]
    if strategy.startswith('colossalai_gemini'):
        flags.append('--precision=bf16')
    if script != 'train_dummy':
        flags.append(f'--pretrain={data / "base"}')
    if script not in ('train_dummy', 'inference'):
        flags.append(f'--save_path={out}')
    done = torchrun(script, *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    if script == 'inference':
        rows = [json.loads(line) for line in (out / 'answers.jsonl').read_text().splitlines()]
        assert [row['prompt'] for row in rows] == [row['prompt'] for row in demo_world.demo_prompts(8)]
    elif script == 'train_dummy':
        assert done.stdout.count('8 samples in ') == 1
        assert 'on 2 process(es)' in done.stdout
    else:
        from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

        assert len(metrics_of(out)) == 2
        kind = AutoModelForSequenceClassification if script == 'train_reward_model' else AutoModelForCausalLM
        assert kind.from_pretrained(out / ('reward_model' if script == 'train_reward_model' else 'actor'))


@pytest.mark.parametrize(
    ('script', 'strategy'),
    [('train_prompts', 'colossalai_zero2'), *((name, 'fsdp') for name in SCRIPTS if name != 'train_prompts')],
)
def test_some(script, strategy, data, tmp_path):
    check(script, strategy, data, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize('strategy', PARALLEL)
@pytest.mark.parametrize('script', SCRIPTS)
def test_all(script, strategy, data, tmp_path):
    check(script, strategy, data, tmp_path)
