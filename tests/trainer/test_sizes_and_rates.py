"""Sizes and learning rates that do not come out as they are given are named when a run starts, once."""

from __future__ import annotations

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
from chatgpt.trainer.schedule import LearningRate, uneven_steps


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
