"""The parts of one optimizer step: statistics over micro-batches, orders from keys, schedules, batch sizes over
ranks."""

from __future__ import annotations

import math

import pytest
import torch

from chatgpt.strategies import NaiveStrategy
from chatgpt.trainer.config import PPOConfig
from chatgpt.trainer.metrics import BatchStats, Highest, Lowest, Mean
from chatgpt.trainer.schedule import lr_factor, permutation, seed_for, train_batches
from chatgpt.trainer.settings import check_cut


def test_batch_stats_weigh_micro_batches_by_what_counts():
    stats = BatchStats()
    for values in ([1.0, 2.0, 3.0], [10.0]):
        v = torch.tensor(values)
        stats.add(
            {
                'mean': Mean(v.sum(), len(values)),
                'sum': Mean(v.sum(), 0.0),
                'ratio_max': Highest(v.max()),
                'ratio_min': Lowest(v.min()),
            }
        )
    reduced = stats.reduced(NaiveStrategy())
    assert reduced == {'mean': 4.0, 'sum': 16.0, 'ratio_max': 10.0, 'ratio_min': 1.0}
    assert reduced['mean'] != (2.0 + 10.0) / 2  # negative control: a mean of means


def test_orders_are_functions_of_their_key():
    assert permutation(10, 1, 2, 3) == permutation(10, 1, 2, 3)
    assert sorted(permutation(10, 1, 2, 3)) == list(range(10))
    assert len({tuple(permutation(10, 0, phase, 0)) for phase in range(20)}) == 20
    assert len({seed_for(a, b) for a in range(30) for b in range(30)}) == 900


def test_train_batches_cover_everything_once():
    batches = list(train_batches(10, 4, key=(1,)))
    assert [len(b) for b in batches] == [4, 4, 2]
    assert sorted(i for b in batches for i in b) == list(range(10))


@pytest.mark.parametrize(
    ('schedule', 'step', 'expected'),
    [
        ('constant', 9, 1.0),
        ('linear', 0, 1.0),
        ('linear', 5, 0.5),
        ('cosine', 5, 0.5),
        ('cosine', 2, 0.5 * (1 + math.cos(0.2 * math.pi))),
        ('linear', 12, 0.0),
    ],
)
def test_schedules(schedule, step, expected):
    assert lr_factor(schedule, step, total_steps=10) == pytest.approx(expected)


def test_a_decaying_schedule_needs_an_end():
    with pytest.raises(ValueError, match='needs the total number of steps'):
        lr_factor('linear', 3, total_steps=None)


def test_batch_sizes_that_cannot_be_cut_name_one_that_can():
    with pytest.raises(
        ValueError, match=r'train_batch_size=6 cannot be split over 4 ranks; use a multiple of 4, such as 4 or 8'
    ):
        check_cut('train_batch_size', 6, 4)
    with pytest.raises(
        ValueError, match=r'experience_batch_size=2 cannot be split over 3 ranks; use a multiple of 3, such as 3'
    ):
        PPOConfig(experience_batch_size=2, train_batch_size=3).validate(3)
    PPOConfig(experience_batch_size=8, train_batch_size=4).validate(4)


def test_group_relative_estimators_are_not_whitened_unless_asked():
    assert PPOConfig().whitens_advantages
    assert not PPOConfig(advantage_estimator='rloo', num_samples_per_prompt=2).whitens_advantages
    assert PPOConfig(advantage_estimator='rloo', num_samples_per_prompt=2, whiten_advantages=True).whitens_advantages
