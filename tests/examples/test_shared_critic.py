"""--critic shared: the critic is a value head on the actor; with hydra, on the trunk that actor and reference share and
never move."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from example_script import QUICK, metrics_of
from example_script import run as run_script
from safetensors.torch import load_file

from chatgpt.launch import demo_world
from chatgpt.nn.heads import load_head


def run(monkeypatch: pytest.MonkeyPatch, data: Path, out: Path, *flags: str) -> list[dict[str, Any]]:
    few = '--experience_batch_size=2 --train_batch_size=2 --lr=1e-3'.split()
    run_script(monkeypatch, *QUICK, *few, f'--pretrain={data}/base', f'--save_path={out}', *flags)
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


def test_without_hydra(monkeypatch, tmp_path, data):
    lines = run(monkeypatch, data, tmp_path, '--critic=shared', '--lora_rank=2')
    assert len(lines) == 2 and all(line['ppo/value_loss'] > 0 for line in lines)
    assert abs(lines[0]['rollout/kl_mean']) < 1e-6 < abs(lines[1]['rollout/kl_mean'])
    assert load_head(tmp_path / 'actor') is not None
