"""NLPO from the command, which makes its mask model."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from chatgpt.launch import recipes
from chatgpt.launch.config_file import parse_run
from chatgpt.launch.runs import PPORun


def test_a_run_of_three_phases(tmp_path, model_folder, monkeypatch):
    """The mask model is a copy of the actor's start, and takes over its weights every second phase."""
    trainers = []
    built = recipes.make_trainer
    monkeypatch.setattr(recipes, 'make_trainer', lambda *given: trainers.append(built(*given)) or trainers[-1])
    settings = {'nlpo_top_p': 0.9, 'nlpo_update_interval': 2, 'experience_batch_size': 4, 'train_batch_size': 4}
    settings |= {'max_new_tokens': 4, 'lr': 1e-3}
    (tmp_path / 'prompts.jsonl').write_text('{"prompt": "one day"}\n{"prompt": "a fox"}\n' * 4)
    (tmp_path / 'reward.py').write_text('def length(prompts, responses):\n    return [*map(len, responses)]\n')
    words = [f'--{name}={value}' for name, value in settings.items()]
    places = [f'--pretrain={model_folder}', f'--reward_fn={tmp_path}/reward.py:length', f'--save_path={tmp_path}/a']
    length = ['--num_episodes=1', '--max_timesteps=3', '--update_timesteps=1']
    argv = [str(tmp_path / 'prompts.jsonl'), *places, *words, *length]
    recipes.execute(parse_run(PPORun, description='', positional='prompt_path', argv=argv))
    trainer = trainers[-1]
    rows = [json.loads(line) for line in Path(tmp_path, 'a', 'metrics.jsonl').read_text().splitlines()]
    assert len(rows) == 3 and all(row['ppo/first_ratio_error'] < 1e-4 for row in rows)
    models = [m for m in trainer.models().values() if m is not trainer.critic]
    actor, mask = (torch.cat([p.detach().flatten() for p in m.parameters()]) for m in models)
    assert not any(p.requires_grad for p in trainer.policy.mask_model.parameters())
    assert 0 < float((actor - mask).abs().max()) < 1e-1  # one phase of learning apart
