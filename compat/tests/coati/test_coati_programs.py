"""Programs in the style of ColossalAI's `coati` under `chatgpt_compat run`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from chatgpt.testing.fakes import char_tokenizer
from chatgpt_compat.check import check
from chatgpt_compat.runner import run

PROGRAMS = Path(__file__).parent / 'programs'


def rows(path: Path) -> Path:
    found = [{'instruction': f'say {i}', 'input': 'x' * (i % 2), 'output': f'out {i}'} for i in range(8)]
    path.write_text(json.dumps(found))
    return path


@pytest.mark.parametrize('path', sorted(PROGRAMS.glob('*.py')), ids=lambda p: p.stem)
def test_check_is_green(path, capsys):
    assert check([str(path)]) == 0, capsys.readouterr().out


@pytest.mark.filterwarnings('ignore:.*weights are kept in 32 bits')
@pytest.mark.parametrize('lora_rank', [0, 2])
def test_ppo_with_loaders(program, gpt2, tmp_path, lora_rank):
    texts = rows(tmp_path / 'rows.json')
    out = program('july_prompts', texts, texts, '--pretrain', gpt2, '--lora_rank', lora_rank)
    # 2 episodes of 2 batches of 2 prompts, learned 3 times in train batches of 2: 2 x 3 x 2 steps
    prompt = char_tokenizer()('say 0')['input_ids']
    assert out.splitlines()[-1] == f'phases 2 updates 12 prompts {prompt}'
    before = AutoModelForCausalLM.from_pretrained(gpt2).state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / 'actor').state_dict()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert {p.name for p in (tmp_path / 'saved' / 'episode_1').iterdir()} == {
        *('actor.pt', 'critic.pt', 'actor-optim-rank-0.pt', 'critic-optim-rank-0.pt'),
    }
    assert (tmp_path / 'optim_0.pt').exists()


def test_sft_and_reward_model_with_loaders(program, gpt2, tmp_path):
    out = program('july_supervised', gpt2, rows(tmp_path / 'rows.json')).splitlines()
    # 8 rows in batches of 2, a step every 2 batches, 2 epochs; 6 pairs in batches of 2, 2 epochs
    assert [line for line in out if 'updates' in line] == ['sft updates 4', 'rm updates 6']
    assert 'generated 1' in out
    assert (tmp_path / 'sft' / 'config.json').exists() and (tmp_path / 'rm.pt').exists()


@pytest.mark.parametrize(
    'line, said',
    [
        ('from coati.ray.detached_trainer_ppo import DetachedPPOTrainer', 'workers on Ray'),
        ('from coati.experience_maker import NaiveExperienceMaker', 'chatgpt.trainer.experience'),
        ('from coati.models.chatglm import ChatGLMActor\nChatGLMActor()', 'ChatGLMActor is not served'),
    ],
)
def test_unsupported_names_are_errors(tmp_path, capsys, line, said):
    (tmp_path / 'script.py').write_text(f'{line}\n')
    assert run(str(tmp_path / 'script.py'), []) == 1
    assert said in capsys.readouterr().err
