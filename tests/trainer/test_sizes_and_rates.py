"""Batches, orders, schedules; warnings about sizes and learning rates that do not have the expected effect."""

from __future__ import annotations

import json
import math
import warnings
from typing import Any

import pytest
import torch
from ppo_on_ids import make, prompts
from tiny_runs import sft

from chatgpt.strategies import NaiveStrategy
from chatgpt.trainer.algorithms import ESTIMATORS
from chatgpt.trainer.config import PPOConfig
from chatgpt.trainer.metrics import BatchStats, Highest, Lowest, Mean
from chatgpt.trainer.schedule import LearningRate, lr_factor, permutation, seed_for, train_batches, uneven_steps
from chatgpt.trainer.settings import check_cut


@pytest.mark.parametrize(
    ('count', 'size', 'warning'),
    [
        (25, 8, 'the last step of each pass learns from 1 alone, and counts as much as one of 8'),
        (26, 8, 'learns from 2 alone'),
        (27, 8, None),
        (24, 8, None),
        (3, 2, None),
        (4, 64, 'train_batch_size=64 is more than the 4 records: no batch is ever full, and each pass is one step on'),
        (9, 1, None),
    ],
)
def test_steps_of_a_pass(count, size, warning):
    text = uneven_steps(count, 'records', size)
    assert text is None if warning is None else warning in (text or '')


@pytest.mark.parametrize(
    ('update', 'settings', 'warning'),
    [
        (1, {}, None),
        (1, {'train_batch_size': 64}, 'train_batch_size=64 is more than the 4 samples of a learning phase'),
        (50, {}, 'update_timesteps=50 is more than the 2 timesteps of this run'),
        (1, {'num_samples_per_prompt': 3, 'buffer_limit': 9}, 'learns from 1 alone'),
        (1, {'train_batch_size': 64, 'sample_replay_buffer': True}, None),
    ],
)
def test_an_online_run(update, settings, warning):
    """With two timesteps of four samples by default."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        trainer = make(**{'experience_batch_size': 4, 'train_batch_size': 4} | settings)
        trainer.fit(prompts(), num_episodes=1, max_timesteps=2, update_timesteps=update)
    texts = [str(w.message) for w in caught]
    assert len(texts) == (warning is not None) and all(str(warning) in text for text in texts)


@pytest.mark.parametrize(
    ('optimizer', 'rate', 'warning'),
    [
        (torch.optim.AdamW, 0.0, 'the learning rate of the actor is 0, so it learns nothing'),
        (torch.optim.SGD, 0.0, 'learns nothing'),
        (torch.optim.AdamW, 10.0, 'is 10, far from any in use: a step of AdamW moves a weight by about that much'),
        (torch.optim.Adam, 1e-11, 'is lost in rounding'),
        (torch.optim.AdamW, 1e-8, None),
        (torch.optim.SGD, 1.0, None),
    ],
)
def test_learning_rates(optimizer, rate, warning):
    text = LearningRate(optimizer([torch.zeros(1, requires_grad=True)], lr=rate), 'constant', 0).out_of_range('actor')
    assert text is None if warning is None else warning in (text or '')


def test_a_trainer_warns_of_its_rate():
    with pytest.warns(UserWarning, match='the learning rate of the actor is 0'):
        sft(lr=0.0)


def test_each_group_has_a_rate_in_range_or_none_learns():
    def text(*rates: float) -> str | None:
        groups = [{'params': [torch.zeros(1, requires_grad=True)], 'lr': rate} for rate in rates]
        return LearningRate(torch.optim.AdamW(groups), 'constant', 0).out_of_range('actor')

    assert text(1e-5, 6e-4) is text(0.0, 1e-4) is None
    assert 'is 1, far from any in use' in str(text(1e-5, 1.0)) and 'is 0, so' in str(text(0.0, 0.0))


@pytest.mark.parametrize('offline', [None, {}, {'log_interval': 10}])
def test_a_resume_of_a_finished_run_is_reported(tmp_path, capsys, offline):
    """A run that is longer now continues."""

    def fit(times: int, resume: bool = True) -> str:
        if offline is None:
            trainer: Any = make(run_dir=tmp_path)
        else:
            trainer = sft(max_steps=times, run_dir=tmp_path, **offline)
        assert not resume or trainer.load_checkpoint('auto')
        trainer.fit(prompts(), 1, times, 1) if offline is None else trainer.fit()
        return capsys.readouterr().out

    assert 'going on' not in fit(1, resume=False)
    again = fit(1)
    assert 'this run is finished' in again and 'going on' not in again
    raised = 'raise num_episodes or max_timesteps' if offline is None else 'raise max_epochs or max_steps'
    assert raised in again and json.loads((tmp_path / 'run.json').read_text())['status'] == 'ended'
    longer = fit(2)
    assert 'going on from' in longer and 'is finished' not in longer


def test_batch_stats_weigh_micro_batches_by_what_counts():
    stats = BatchStats()
    for v in (torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0])):
        found = {'mean': Mean(v.sum(), len(v)), 'sum': Mean(v.sum(), 0.0)}
        stats.add(found | {'ratio_max': Highest(v.max()), 'ratio_min': Lowest(v.min())})
    # 6 would be the mean of the two means
    assert stats.reduced(NaiveStrategy()) == {'mean': 4.0, 'sum': 16.0, 'ratio_max': 10.0, 'ratio_min': 1.0}


def test_orders_are_functions_of_their_key():
    assert permutation(10, 1, 2, 3) == permutation(10, 1, 2, 3)
    assert len({tuple(permutation(10, 0, phase, 0)) for phase in range(20)}) == 20
    assert len({seed_for(a, b) for a in range(30) for b in range(30)}) == 900
    batches = list(train_batches(10, 4, key=(1,)))
    assert [len(b) for b in batches] == [4, 4, 2]
    assert sorted(i for b in batches for i in b) == sorted(permutation(10, 1, 2, 3)) == list(range(10))


def test_schedules():
    cosine = 0.5 * (1 + math.cos(0.2 * math.pi))
    for schedule, step, expected in (
        ('constant', 9, 1.0),
        ('linear', 0, 1.0),
        ('linear', 5, 0.5),
        ('cosine', 5, 0.5),
        ('cosine', 2, cosine),
        ('linear', 12, 0.0),
    ):
        assert lr_factor(schedule, step, total_steps=10) == pytest.approx(expected)
    with pytest.raises(ValueError, match='needs the total number of steps'):
        lr_factor('linear', 3, total_steps=None)


def test_batch_sizes_that_cannot_be_split_name_one_that_can():
    with pytest.raises(ValueError, match=r'train_batch_size=6 cannot be split over 4 ranks; use a multiple.*as 4 or 8'):
        check_cut('train_batch_size', 6, 4)
    with pytest.raises(ValueError, match=r'experience_batch_size=2 cannot be split over 3 ranks; .* such as 3'):
        PPOConfig(experience_batch_size=2, train_batch_size=3).validate(3)
    PPOConfig(experience_batch_size=8, train_batch_size=4).validate(4)


def test_group_relative_estimators_are_not_whitened_unless_asked():
    alone = {'gae': True, 'a2c': True, 'reinforce++': True}
    grouped = {'grpo': False, 'dr_grpo': False, 'rloo': False, 'gdpo': True, 'reinforce++_baseline': True}
    assert ESTIMATORS.keys() >= alone.keys() | grouped.keys()
    for name, whitens in (alone | grouped).items():
        config = PPOConfig(advantage_estimator=name, num_samples_per_prompt=1 + (name in grouped), kl_coef=0.0)
        config.validate()
        assert config.whitens_advantages == whitens, name
    for name in grouped:
        with pytest.raises(ValueError, match='set num_samples_per_prompt to 2 or more'):
            PPOConfig(advantage_estimator=name, kl_coef=0.0).validate()
    rloo = {'advantage_estimator': 'rloo', 'num_samples_per_prompt': 2}
    assert not PPOConfig(**rloo).whitens_advantages
    assert PPOConfig(**rloo, whiten_advantages=True).whitens_advantages
