"""Batches, orders, schedules; sizes and learning rates that do not come out as they are given, named at the start."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import sft_runs
import torch
from ppo_on_ids import make, prompts

from chatgpt.nn import GPTActor
from chatgpt.strategies import NaiveStrategy
from chatgpt.testing.fakes import tiny_config
from chatgpt.trainer import SFTTrainer
from chatgpt.trainer.config import PPOConfig
from chatgpt.trainer.metrics import BatchStats, Highest, Lowest, Mean
from chatgpt.trainer.schedule import LearningRate, lr_factor, permutation, seed_for, train_batches, uneven_steps
from chatgpt.trainer.settings import check_cut


@pytest.mark.parametrize(
    ('count', 'size', 'said'),
    [
        (25, 8, 'the last step of each pass learns from 1 alone, and counts as much as one of 8'),
        (26, 8, 'learns from 2 alone'),
        (27, 8, None),
        (24, 8, None),
        (5, 4, 'learns from 1 alone'),
        (3, 2, None),
        (4, 64, 'train_batch_size=64 is more than the 4 records: no batch is ever full, and each pass is one step on'),
        (8, 8, None),
        (9, 1, None),
    ],
)
def test_steps_of_a_pass(count, size, said):
    text = uneven_steps(count, 'records', size)
    assert text is None if said is None else said in (text or '')


def warned(**settings: Any) -> list[str]:
    """By two phases of one timestep with four samples, but for the settings."""
    length = {'num_episodes': 1, 'max_timesteps': 2, 'update_timesteps': 1}
    length |= {name: settings.pop(name) for name in list(settings) if name in length}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        make(**{'experience_batch_size': 4, 'train_batch_size': 4} | settings).fit(prompts(), **length)
    return [str(w.message) for w in caught]


@pytest.mark.parametrize(
    ('settings', 'said'),
    [
        ({}, None),
        ({'train_batch_size': 64}, 'train_batch_size=64 is more than the 4 samples of a learning phase'),
        ({'update_timesteps': 50}, 'update_timesteps=50 is more than the 2 timesteps of this run'),
        ({'update_timesteps': 2}, None),
        ({'num_samples_per_prompt': 3, 'buffer_limit': 9}, 'learns from 1 alone'),
        ({'train_batch_size': 64, 'sample_replay_buffer': True}, None),
    ],
)
def test_an_online_run(settings, said):
    texts = warned(**settings)
    assert len(texts) == (said is not None) and all(str(said) in text for text in texts)


@pytest.mark.parametrize(
    ('optimizer', 'rate', 'said'),
    [
        (torch.optim.AdamW, 0.0, 'the learning rate of the actor is 0, so it learns nothing'),
        (torch.optim.SGD, 0.0, 'learns nothing'),
        (torch.optim.AdamW, 10.0, 'is 10, far from any in use: a step of AdamW moves a weight by about that much'),
        (torch.optim.Adam, 1e-11, 'is lost in rounding'),
        (torch.optim.AdamW, 1e-2, None),
        (torch.optim.AdamW, 1e-8, None),
        (torch.optim.SGD, 1.0, None),
    ],
)
def test_learning_rates(optimizer, rate, said):
    text = LearningRate(optimizer([torch.zeros(1, requires_grad=True)], lr=rate), 'constant', 0).out_of_range('actor')
    assert text is None if said is None else said in (text or '')


def test_a_trainer_says_its_rate():
    strategy = NaiveStrategy(device='cpu')
    actor: Any = GPTActor(config=tiny_config('gpt2', vocab_size=16, hidden=16, positions=32))
    pair = strategy.prepare((actor, torch.optim.AdamW(actor.parameters(), lr=0.0)))
    with pytest.warns(UserWarning, match='the learning rate of the actor is 0'):
        SFTTrainer(strategy, *pair, sft_runs.make(strategy).train_data)


@pytest.mark.parametrize('offline', [False, True])
def test_a_finished_run_that_is_resumed_says_so(tmp_path, capsys, offline):
    """And one that is longer now goes on."""

    def fit(times: int, resume: bool = True) -> str:
        common: dict[str, Any] = {'run_dir': tmp_path}
        trainer: Any = sft_runs.make(max_steps=times, **common) if offline else make(**common)
        assert not resume or trainer.load_checkpoint('auto')
        trainer.fit() if offline else trainer.fit(prompts(), 1, times, 1)
        return capsys.readouterr().out

    assert 'going on' not in fit(2, resume=False)
    again = fit(2)
    assert 'this run is finished' in again and 'going on' not in again
    assert ('raise max_epochs or max_steps' if offline else 'raise num_episodes or max_timesteps') in again
    longer = fit(3)
    assert 'going on from' in longer and 'is finished' not in longer


# ---------------------------------------------------------------------- batches, orders, schedules


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
