"""PPO of encoder-decoders: the first ratio, learning, going on from a checkpoint, and two processes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from encoder_decoder_runs import exact_hash, m2m_losses, make, prompts, train
from phase_log import Log

from chatgpt.rollout import HFEngine
from chatgpt.testing import ENCODER_DECODERS
from chatgpt.testing.processes import run_distributed


def scores(log: Log) -> list[float]:
    return [phase['rollout/score_mean'] for phase in log.phases]


@pytest.mark.parametrize('roles', ['own', 'hydra', 'lora'])
@pytest.mark.parametrize('family', ENCODER_DECODERS)
def test_the_first_ratio_is_1_and_the_first_kl_0(family, roles):
    log = Log()
    trainer = make(family, roles=roles, more=[log])
    assert isinstance(trainer.engine, HFEngine)
    before = [p.detach().clone() for m in trainer.models().values() for p in m.parameters()]
    trainer.fit(prompts(), 1, 2, 1)
    assert log.phases[0]['ppo/first_ratio_error'] < 1e-5 and log.phases[1]['ppo/first_ratio_error'] < 1e-5
    assert abs(log.phases[0]['rollout/kl_mean']) < 1e-5 < log.phases[1]['rollout/kl_k3_mean']
    after = [p for m in trainer.models().values() for p in m.parameters()]
    changed = [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]
    assert any(changed) and (roles == 'own' or not all(changed))


@pytest.mark.parametrize(('family', 'roles'), [('t5', 'own'), ('flan-t5', 'hydra'), ('bart', 'own')])
def test_it_learns(family, roles):
    log = Log()
    make(family, roles=roles, lr=1e-2, more=[log]).fit(prompts(16), 1, 15, 1)
    assert sum(scores(log)[-3:]) / 3 > sum(scores(log)[:3]) / 3 + 0.4, scores(log)


@pytest.mark.parametrize(('family', 'roles'), [('t5', 'hydra'), ('bart', 'own')])
def test_a_run_goes_on_to_the_bit(family, roles, tmp_path: Path):
    whole = make(family, roles=roles)
    whole.fit(prompts(), 2, 2, 1)
    half = make(family, roles=roles, run_dir=tmp_path)
    half.fit(prompts(), 1, 2, 1)
    saved = half.save_checkpoint()
    rest = make(family, roles=roles)
    rest.load_checkpoint(saved)
    rest.fit(prompts(), 2, 2, 1)
    for name, module in whole.models().items():
        again = dict(rest.models()[name].named_parameters())
        assert all(torch.equal(p, again[n]) for n, p in module.named_parameters())


@pytest.fixture(scope='module')
def alone() -> dict[tuple[str, str], dict[str, Any]]:
    return {key: train('NaiveStrategy', {}, *key) for key in (('t5', 'own'), ('bart', 'hydra'), ('flan-t5', 'lora'))}


@pytest.mark.parametrize(
    ('kind', 'options', 'family', 'roles'),
    [
        ('DDPStrategy', {}, 't5', 'own'),
        ('DDPStrategy', {}, 'bart', 'hydra'),
        ('FSDPStrategy', {'meta_init': True}, 't5', 'own'),
        ('FSDPStrategy', {}, 'bart', 'hydra'),
        ('FSDPStrategy', {'meta_init': True}, 'flan-t5', 'lora'),
    ],
)
def test_two_processes_are_one(kind, options, family, roles, alone):
    one = alone[family, roles]
    first, second = run_distributed(train, 2, kind, options, family, roles)
    assert first['samples'] == second['samples'] == one['samples']
    for a, b in zip(one['metrics'], first['metrics'], strict=True):
        for name in ('ppo/policy_loss', 'ppo/value_loss', 'ppo/actor_grad_norm', 'rollout/kl_mean'):
            assert math.isclose(a[name], b[name], rel_tol=1e-3, abs_tol=1e-5), (name, a[name], b[name])
        assert b['ppo/first_ratio_error'] < 1e-5
    for model, weights in one['weights'].items():
        for name, weight in weights.items():
            assert (weight - first['weights'][model][name]).abs().max() < 1e-4, (model, name)


def test_sines_and_dropped_blocks_of_m2m_100_under_fsdp():
    first, second = run_distributed(m2m_losses, 2, 'FSDPStrategy', 'fp32')
    assert first == second and first[1] < first[0]
    in_bf16, _ = run_distributed(m2m_losses, 2, 'FSDPStrategy', 'bf16')
    assert in_bf16 == pytest.approx(first, rel=2e-3)


@pytest.mark.parametrize('kind', ['DDPStrategy', 'FSDPStrategy'])
def test_learning_from_texts_is_exact(kind):
    one = exact_hash('NaiveStrategy', 'bart')
    assert run_distributed(exact_hash, 2, kind, 'bart')[0] == one
