"""Runs on a shared or quantized trunk, from flags to the written model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from chatgpt.batching import collate
from chatgpt.launch.config_file import parse_run
from chatgpt.launch.methods import METHODS
from chatgpt.launch.recipes import execute
from chatgpt.launch.runs import run_class
from chatgpt.nn import RewardModel
from chatgpt.nn.shared import SharedTrunk
from chatgpt.testing.tiny import tiny_sequences

PAIRS = [
    {'prompt': 'one day', 'chosen': ' a fox', 'rejected': ' a dog'},
    {'prompt': 'the', 'chosen': ' kind cat', 'rejected': ' bad cat'},
]
SMALL = ['--experience_batch_size=4', '--train_batch_size=4', '--max_new_tokens=5', '--num_episodes=1']


def run(method: str, data: Path, *flags: str) -> Path:
    positional, argv = METHODS.find(method).positional, [str(data), *flags]
    made = parse_run(run_class(method), description='', positional=positional, argv=argv, method=method)
    execute(made)
    return Path(made.save_path)


def lines(path: Path, rows: list[dict]) -> Path:
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return path


@pytest.fixture(scope='module')
def adapter(tmp_path_factory, model_folder):
    """Folder of a reward model that was trained as an adapter."""
    folder = tmp_path_factory.mktemp('adapter')
    pairs = lines(folder / 'pairs.jsonl', PAIRS)
    flags = [f'--pretrain={model_folder}', f'--save_path={folder}/rm', '--lora_rank=2', '--save_adapter']
    run('reward-model', pairs, *flags, '--max_epochs=1', '--train_batch_size=2', '--lr=0.01')
    return folder / 'rm' / 'adapter'


def test_a_reward_models_adapter_gives_its_scores(adapter, model_folder):
    batch = collate(tiny_sequences(4))
    whole = RewardModel.from_pretrained(adapter.parent / 'reward_model')(batch)
    assert whole.std() > 0
    torch.testing.assert_close(RewardModel.from_pretrained(adapter)(batch), whole, rtol=1e-5, atol=1e-6)
    shared = SharedTrunk.from_pretrained(model_folder).reward_model(adapter=adapter)
    torch.testing.assert_close(shared(batch), whole, rtol=1e-5, atol=1e-6)


PROMPTS = [{'prompt': t} for t in ('one day', 'the', 'a cat', 'tom')]
TEXTS = [{'prompt': 'one day', 'completion': ' a fox'}, {'prompt': 'the', 'completion': ' kind cat'}] * 2
LEARNT = (['--max_epochs=3', '--train_batch_size=2', '--log_interval=1'], 'adapter/adapter_model.safetensors')
COLLECTED = ([*SMALL, '--update_timesteps=1', '--max_timesteps=3'], 'actor/model.safetensors')
GROUPS = ['--experience_batch_size=2', '--num_samples_per_prompt=2']


def numbers(folder: Path) -> list[dict]:
    rows = [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(('perf/', 'time'))} for row in rows]


@pytest.mark.parametrize(
    ('method', 'rows', 'flags'),
    [
        ('ppo', PROMPTS, ['--optimizer=paged_adamw8bit', '--gradient_checkpointing=true', '--ema_decay=0.9']),
        ('grpo', PROMPTS, GROUPS),
        ('sft', TEXTS, ['--optimizer=adamw8bit']),
        ('dpo', PAIRS, []),
    ],
)
def test_a_killed_run_in_4_bits_ends_as_one_that_was_not(method, rows, flags, request, tmp_path, model_folder):
    """Resumes from the files after a kill in the last third: numbers and weights are equal to the bit."""
    online = rows is PROMPTS
    common, written = COLLECTED if online else LEARNT
    if method == 'ppo':
        flags = [*flags, f'--reward_model={request.getfixturevalue("adapter")}']
    elif online:
        (tmp_path / 'reward.py').write_text(
            'def vowels(prompts, responses):\n    return [r.count("a") for r in responses]\n'
        )
        flags = [*flags, f'--reward_fn={tmp_path}/reward.py:vowels']
    kept = '--quantize=nf4 --lora_rank=2 --save_adapter --checkpoint_interval=1 --keep_last=9 --lr=0.01'.split()
    kept += ['--shared_trunk=true'] if online else []
    common = [f'--pretrain={model_folder}', *kept, *common, *flags]
    data = lines(tmp_path / 'data.jsonl', rows)
    whole = run(method, data, *common, f'--save_path={tmp_path}/whole')
    assert any('critic' in name for name in numbers(whole)[-1]) == (method == 'ppo')
    checkpoints = sorted((whole / 'checkpoints').iterdir())
    assert len(checkpoints) >= 3
    again = tmp_path / 'again'
    shutil.copytree(checkpoints[-2], again / 'checkpoints' / checkpoints[-2].name)
    run(method, data, *common, f'--save_path={again}', '--resume=auto')
    assert numbers(whole)[-1] == numbers(again)[-1]
    for file in (written, *(['actor_ema/model.safetensors'] if '--ema_decay=0.9' in flags else [])):
        assert (whole / file).read_bytes() == (again / file).read_bytes(), file
    first, last = (load_file(f / 'adapter/adapter_model.safetensors') for f in (whole, again))
    assert any(v.abs().max() > 0 for k, v in first.items() if 'lora_B' in k), 'something was learnt'
    assert first.keys() == last.keys()


def test_a_reward_model_that_is_no_adapter_on_the_trunk(adapter, tmp_path, model_folder, capsys):
    other = tmp_path / 'other'
    shutil.copytree(model_folder, other)
    prompts = lines(tmp_path / 'p.jsonl', PROMPTS)
    for base, reward, message in (
        (other, adapter, f'is an adapter on {model_folder}; the trunk is {other}'),
        (model_folder, adapter.parent / 'reward_model', 'is none; train one'),
    ):
        flags = ['--shared_trunk=true', '--lora_rank=2', f'--reward_model={reward}', f'--pretrain={base}', *SMALL]
        with pytest.raises((ValueError, SystemExit)) as caught:
            run('ppo', prompts, *flags)
        assert message in str(caught.value) + capsys.readouterr().err
