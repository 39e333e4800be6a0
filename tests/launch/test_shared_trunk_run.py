"""Runs on a shared or quantized trunk, from flags to the written model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from chatgpt.batching import collate
from chatgpt.launch.config_file import parse_run
from chatgpt.launch.recipes import execute
from chatgpt.launch.runs import PPORun, run_class
from chatgpt.nn import Actor, RewardModel
from chatgpt.nn.shared import SharedTrunk
from chatgpt.testing.tiny import tiny_sequences

PAIRS = [
    {'prompt': 'one day', 'chosen': ' a fox', 'rejected': ' a dog'},
    {'prompt': 'the', 'chosen': ' kind cat', 'rejected': ' bad cat'},
]
SMALL = ['--experience_batch_size=4', '--train_batch_size=4', '--max_new_tokens=5', '--num_episodes=1']


def run(method: str, data: Path, *flags: str) -> Path:
    cls = PPORun if method == 'ppo' else run_class(method)
    positional = 'prompt_path' if method == 'ppo' else 'dataset'
    made = parse_run(cls, description='', positional=positional, argv=[str(data), *flags])
    execute(made)
    return Path(made.save_path)


def lines(path: Path, rows: list[dict]) -> Path:
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return path


@pytest.fixture
def adapter(tmp_path, model_folder):
    """A reward model that was trained as an adapter."""
    pairs = lines(tmp_path / 'pairs.jsonl', PAIRS)
    flags = [f'--pretrain={model_folder}', f'--save_path={tmp_path}/rm', '--lora_rank=2', '--save_adapter']
    run('reward-model', pairs, *flags, '--max_epochs=1', '--train_batch_size=2', '--lr=0.01')
    return tmp_path / 'rm' / 'adapter'


def test_a_reward_models_adapter_gives_its_scores(adapter, model_folder):
    batch = collate(tiny_sequences(4))
    whole = RewardModel.from_pretrained(adapter.parent / 'reward_model')(batch)
    assert whole.std() > 0
    torch.testing.assert_close(RewardModel.from_pretrained(adapter)(batch), whole, rtol=1e-5, atol=1e-6)
    shared = SharedTrunk.from_pretrained(model_folder).reward_model(adapter=adapter)
    torch.testing.assert_close(shared(batch), whole, rtol=1e-5, atol=1e-6)


def test_ppo_on_one_quantized_trunk_and_its_resume(adapter, tmp_path, model_folder):
    prompts = lines(tmp_path / 'p.jsonl', [{'prompt': t} for t in ('one day', 'the', 'a cat', 'tom')])
    flags = [
        f'--pretrain={model_folder}',
        '--shared_trunk=true',
        '--quantize=nf4',
        '--lora_rank=2',
        '--optimizer=adamw8bit',
        f'--reward_model={adapter}',
        '--update_timesteps=1',
        '--checkpoint_interval=1',
        *SMALL,
    ]
    whole = run('ppo', prompts, *flags, '--max_timesteps=3', f'--save_path={tmp_path}/whole')
    batch = collate(tiny_sequences(3))
    assert torch.isfinite(Actor.from_pretrained(whole / 'actor')(batch).logprobs).all()
    stopped = run('ppo', prompts, *flags, '--max_timesteps=2', f'--save_path={tmp_path}/parts')
    run('ppo', prompts, *flags, '--max_timesteps=3', f'--save_path={stopped}', '--resume=auto')

    def numbers(folder):
        rows = [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]
        drop = ('perf/', 'lr', 'ppo/lr', 'ppo/critic_lr')
        return [{k: v for k, v in row.items() if not k.startswith(drop)} for row in rows]

    assert numbers(whole)[0] == numbers(stopped)[0] and len(numbers(stopped)) == 3


def test_dpo_on_a_quantized_base(tmp_path, model_folder):
    pairs = lines(tmp_path / 'pairs.jsonl', PAIRS)
    flags = [f'--pretrain={model_folder}', '--lora_rank=2', '--quantize=nf4', '--max_epochs=1', '--train_batch_size=2']
    folder = run('dpo', pairs, *flags, f'--save_path={tmp_path}/dpo')
    assert (folder / 'actor' / 'model.safetensors').is_file()


@pytest.mark.parametrize(
    ('flags', 'told'),
    [
        (['--quantize=nf4'], 'give lora_rank too'),
        (['--quantize=nf4', '--lora_rank=2'], 'give shared_trunk too'),
        (['--shared_trunk=true', '--lora_rank=2', '--critic=shared'], 'an adapter of its own'),
        (['--shared_trunk=true', '--lora_rank=2', '--strategy=fsdp'], 'use naive or ddp'),
        (['--shared_trunk=true', '--lora_rank=2', '--lora_train_bias=all'], 'biases'),
        (['--optimizer=adamw8bit', '--strategy=fsdp'], 'whole weights'),
    ],
)
def test_what_does_not_go_together(flags, told, tmp_path, model_folder, capsys):
    prompts = lines(tmp_path / 'p.jsonl', [{'prompt': 'the'}])
    with pytest.raises((ValueError, SystemExit)) as caught:
        run('ppo', prompts, f'--pretrain={model_folder}', '--reward_fn=len:len', *SMALL, *flags)
    assert told in str(caught.value) + capsys.readouterr().err


def test_a_whole_reward_model_is_no_adapter(adapter, tmp_path, model_folder, capsys):
    prompts = lines(tmp_path / 'p.jsonl', [{'prompt': 'the'}])
    with pytest.raises((ValueError, SystemExit)) as caught:
        run(
            'ppo',
            prompts,
            f'--pretrain={model_folder}',
            '--shared_trunk=true',
            '--lora_rank=2',
            f'--reward_model={adapter.parent}/reward_model',
            *SMALL,
        )
    assert 'is none; train one' in str(caught.value) + capsys.readouterr().err
