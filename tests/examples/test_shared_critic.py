"""--critic shared: the critic is a value head on the actor; with hydra, on the trunk that actor and reference share and
never move."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from chatgpt.launch import demo_world
from chatgpt.launch.arguments import run_main
from chatgpt.nn import GPTActor
from chatgpt.nn.heads import load_head

ROOT = Path(__file__).resolve().parents[2]
QUICK = [
    '--num_episodes=1',
    '--max_timesteps=2',
    '--update_timesteps=1',
    '--experience_batch_size=2',
    '--train_batch_size=2',
    '--max_epochs=1',
    '--max_new_tokens=4',
    '--lr=1e-3',
]


@pytest.fixture(scope='module')
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp('model')
    GPTActor(config=demo_world.demo_config()).save_pretrained(folder, tokenizer=demo_world.demo_tokenizer())
    return folder


def run(monkeypatch: pytest.MonkeyPatch, model: Path, out: Path, *flags: str) -> list[dict[str, Any]]:
    main = runpy.run_path(str(ROOT / 'examples' / 'train_prompts.py'))['main']
    monkeypatch.setattr(
        sys, 'argv', ['train_prompts.py', *QUICK, '--pretrain', str(model), '--save_path', str(out), *flags]
    )
    run_main(main)
    return [json.loads(line) for line in (out / 'metrics.jsonl').read_text().splitlines()]


def moved(model: Path, out: Path) -> set[str]:
    start, end = (load_file(folder / 'model.safetensors') for folder in (model, out / 'actor'))
    return {name for name in start if not torch.equal(start[name], end[name])}


def test_hydra_with_the_critic_on_the_same_trunk(monkeypatch, tmp_path, model):
    lines = run(monkeypatch, model, tmp_path, '--critic=shared', '--num_layers_unfrozen=1', '--need_optim_ckpt')
    assert len(lines) == 2
    assert all(line['ppo/value_loss'] > 0 for line in lines)
    assert (
        'ppo/critic_grad_norm' not in lines[0] and not (tmp_path / 'critic_optim.pt').exists()
    )  # there is no second model
    assert (
        abs(lines[0]['rollout/kl_mean']) < 1e-6 < abs(lines[1]['rollout/kl_mean'])
    )  # the reference stays where the policy was
    top = f'h.{demo_world.demo_config().n_layer - 1}.'
    changed = moved(model, tmp_path)
    assert changed
    assert all(top in name or 'ln_f' in name for name in changed)  # the value loss moves no weight of the shared trunk
    head = load_head(tmp_path / 'actor')
    assert head is not None and any(float(p.detach().abs().max()) > 0 for p in head.parameters())


@pytest.mark.parametrize('flags', [[], ['--lora_rank=2']], ids=['all_weights', 'lora'])
def test_without_hydra(monkeypatch, tmp_path, model, flags):
    lines = run(monkeypatch, model, tmp_path, '--critic=shared', *flags)
    assert len(lines) == 2 and all(line['ppo/value_loss'] > 0 for line in lines)
    assert abs(lines[0]['rollout/kl_mean']) < 1e-6 < abs(lines[1]['rollout/kl_mean'])
    assert load_head(tmp_path / 'actor') is not None


def test_the_own_critic_is_the_default_and_leaves_no_head_in_the_actor(monkeypatch, tmp_path, model):
    lines = run(monkeypatch, model, tmp_path, '--num_layers_unfrozen=1', '--max_timesteps=1')
    assert 'ppo/critic_grad_norm' in lines[0] and load_head(tmp_path / 'actor') is None


@pytest.mark.parametrize(
    ('flags', 'sentence'),
    [
        (['--critic=shared', '--critic_lr=1e-3'], "with critic='shared' leave it out"),
        (
            ['--critic=shared', '--advantage_estimator=rloo', '--num_samples_per_prompt=2'],
            "'rloo' takes no critic: leave one out",
        ),
        (['--critic=both'], "'both' is none of: own, shared"),
    ],
)
def test_mistakes(monkeypatch, capsys, tmp_path, model, flags, sentence):
    with pytest.raises(SystemExit):
        run(monkeypatch, model, tmp_path / 'run', *flags)
    assert sentence in capsys.readouterr().err
