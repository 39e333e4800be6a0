"""--critic shared: the critic is a value head on the actor; with hydra, on the trunk that actor and reference share and
never move."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from example_script import QUICK, fails, metrics_of
from example_script import run as run_script
from safetensors.torch import load_file

from chatgpt.launch import demo_world
from chatgpt.nn.heads import load_head


def given(data: Path, out: Path, *flags: str) -> list[str]:
    few = '--experience_batch_size=2 --train_batch_size=2 --lr=1e-3'.split()
    return [*QUICK, *few, f'--pretrain={data}/base', f'--save_path={out}', *flags]


def run(monkeypatch: pytest.MonkeyPatch, data: Path, out: Path, *flags: str) -> list[dict[str, Any]]:
    run_script(monkeypatch, *given(data, out, *flags))
    return metrics_of(out)


def test_hydra_with_the_critic_on_the_same_trunk(monkeypatch, tmp_path, data):
    lines = run(monkeypatch, data, tmp_path, '--critic=shared', '--num_layers_unfrozen=1', '--need_optim_ckpt')
    assert len(lines) == 2
    assert all(line['ppo/value_loss'] > 0 for line in lines)
    # there is no second model
    assert 'ppo/critic_grad_norm' not in lines[0] and not (tmp_path / 'critic_optim.pt').exists()
    # the reference stays where the policy was
    assert abs(lines[0]['rollout/kl_mean']) < 1e-6 < abs(lines[1]['rollout/kl_mean'])
    start, end = (load_file(folder / 'model.safetensors') for folder in (data / 'base', tmp_path / 'actor'))
    changed = {name for name in start if not torch.equal(start[name], end[name])}
    assert changed
    top = f'h.{demo_world.demo_config().n_layer - 1}.'
    assert all(top in name or 'ln_f' in name for name in changed)  # the value loss moves no weight of the shared trunk
    head = load_head(tmp_path / 'actor')
    assert head is not None and any(float(p.detach().abs().max()) > 0 for p in head.parameters())


@pytest.mark.parametrize('flags', [[], ['--lora_rank=2']], ids=['all_weights', 'lora'])
def test_without_hydra(monkeypatch, tmp_path, data, flags):
    lines = run(monkeypatch, data, tmp_path, '--critic=shared', *flags)
    assert len(lines) == 2 and all(line['ppo/value_loss'] > 0 for line in lines)
    assert abs(lines[0]['rollout/kl_mean']) < 1e-6 < abs(lines[1]['rollout/kl_mean'])
    assert load_head(tmp_path / 'actor') is not None


def test_the_own_critic_is_the_default_and_leaves_no_head_in_the_actor(monkeypatch, tmp_path, data):
    lines = run(monkeypatch, data, tmp_path, '--num_layers_unfrozen=1', '--max_timesteps=1')
    assert 'ppo/critic_grad_norm' in lines[0] and load_head(tmp_path / 'actor') is None


@pytest.mark.parametrize(
    ('flags', 'sentence'),
    [
        ('--critic=shared --critic_lr=1e-3', "with critic='shared' leave it out"),
        (
            '--critic=shared --advantage_estimator=rloo --num_samples_per_prompt=2',
            "'rloo' takes no critic: leave one out",
        ),
        ('--critic=both', "'both' is none of: own, shared"),
    ],
)
def test_mistakes(monkeypatch, capsys, tmp_path, data, flags, sentence):
    assert sentence in fails(monkeypatch, capsys, *given(data, tmp_path / 'run', *flags.split()))
