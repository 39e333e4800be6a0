"""Runs unchanged published programs under `chatgpt_compat run` with small data and sizes.

The files are not part of this repository. `CHATGPT_PROGRAMS` is a folder with them, as `FOLDER/NAME.py`; a wrong
SHA-256 is an error. docs/coming_from/programs.md lists their origins.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
import torch

from chatgpt.nn import GPTActor, OPTActor
from chatgpt.testing.fakes import char_tokenizer, tiny_config
from chatgpt_compat.check import check
from chatgpt_compat.runner import run

SHORT = ['--num_episodes=1', '--max_timesteps=2', '--update_timesteps=2', '--max_epochs=1', '--train_batch_size=4']
SHA256 = {
    'train_prompts': '211d12e6b4f87dc3904f76166b340337bf27b8bd4c7469aeabd4caa9e6b592ae',
    'train_dummy': '0365dd07206b200b7e907e2e7dcc6d48cab0772b0de8900b0636094c052955f2',
    'train_reward_model': '8a86ac5854591ab5451faf6d64c2db6c8dacc9a04c22f6bc683ae2b3c49f671d',
}
"""file in hpcaitech/ColossalAI at 9998d5ef6, applications/ChatGPT/examples (March 2023, Apache-2.0) → SHA-256"""


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Returns a function from a program's name to its path; the working directory has the models that it names."""
    folder = os.environ.get('CHATGPT_PROGRAMS')
    if not folder:
        pytest.skip('CHATGPT_PROGRAMS, the folder of the published programs, is not set')
    torch.manual_seed(0)
    sizes = {'gpt2': (GPTActor, 'gpt2'), 'facebook/opt-350m': (OPTActor, 'opt')}
    for name, (kind, family) in sizes.items():
        kind(config=tiny_config(family, positions=512)).save_pretrained(tmp_path / name, tokenizer=char_tokenizer())
    data = tmp_path / 'Dahoas' / 'rm-static'
    data.mkdir(parents=True)
    for split, count in (('train', 100), ('test', 20)):
        rows = [{'prompt': f'q {i}: ', 'chosen': f'good {i}', 'rejected': f'bad {i}'} for i in range(count)]
        (data / f'{split}.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    (tmp_path / 'prompts.csv').write_text('act,prompt\n' + ''.join(f'x,tell me {i}\n' for i in range(8)))
    monkeypatch.chdir(tmp_path)

    def path(name: str) -> str:
        file = Path(folder) / f'{name}.py'
        assert hashlib.sha256(file.read_bytes()).hexdigest() == SHA256[name], f'{file} was changed'
        return str(file)

    return path


@pytest.mark.parametrize(
    'name, arguments, leaves',
    [
        (
            'train_prompts',
            ['prompts.csv', '--pretrain=gpt2', *SHORT, '--experience_batch_size=4'],
            'actor_checkpoint_prompts.pt',
        ),
        ('train_dummy', ['--pretrain=gpt2', *SHORT], 'actor_checkpoint_dummy.pt'),
        (
            'train_reward_model',
            ['--model=opt', '--pretrain=facebook/opt-350m', '--batch_size=4', '--max_len=64', '--test=True'],
            'rm_ckpt.pt',
        ),
    ],
)
@pytest.mark.filterwarnings('ignore:valid_dataset is not read')
def test_the_three_examples_of_march(published, capsys, name, arguments, leaves):
    path = published(name)
    assert check([path]) == 0, capsys.readouterr().out
    code = run(path, arguments)
    assert code == 0, capsys.readouterr().err
    assert torch.load(leaves, weights_only=True)
