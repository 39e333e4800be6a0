"""RFT: selection by hand, learning, resuming to the bit, ranks."""

from __future__ import annotations

import json
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from fake_trainer import experience
from tiny_runs import check_resume, close, offline, weights

from chatgpt.nn import GPTActor
from chatgpt.strategies import DDPStrategy, NaiveStrategy
from chatgpt.testing.fakes import char_tokenizer, tiny_config
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer import RFTConfig, RFTTrainer
from chatgpt.trainer.callbacks import Callback
from chatgpt.trainer.experience import RewardFunctionError
from chatgpt.trainer.rft import select
from chatgpt.types import Experience


def sample(group: int, ids: list[int]) -> Experience:
    return experience(0, [1], ids, group=group)


@pytest.mark.parametrize(
    ('scores', 'quantile', 'want'),
    [
        ([1, 2, 3, 4], 0.0, [0, 1, 2, 3]),
        ([1, 2, 3, 4], 0.3, [1, 2, 3]),
        ([1, 2, 3, 4], 0.5, [2, 3]),
        ([1, 2, 3, 4], 1.0, [3]),
        ([0, 0, 0, 0, 0, 0, 0, 1], 0.7, [7]),  # the quantile is 0 here, and failures are not kept
        ([0, 1, 1, 1], 0.7, [1, 2, 3]),
        ([0, 0, 0, 1, 2, 0, 0, 0], 0.5, [3, 4]),
        ([0, 0, 0, 1], 0.0, [0, 1, 2, 3]),
    ],
)
def test_kept_samples_of_a_group(scores, quantile, want):
    assert select([sample(0, [i]) for i in range(len(scores))], scores, quantile) == want


def test_groups_are_separate_without_duplicates_or_equal_scores():
    samples = [sample(group, [i]) for group, i in ((0, 1), (0, 1), (0, 2), (1, 3), (1, 4), (2, 5), (2, 6))]
    assert select(samples, [9.0, 9.0, 1.0, -5.0, -9.0, 3.0, 3.0], 0.9) == [0, 3]


def test_the_quantile_rises():
    config = RFTConfig(num_rounds=3, start_quantile=0.5, end_quantile=0.9)
    assert [config.quantile(i) for i in range(3)] == pytest.approx([0.5, 0.7, 0.9])
    assert RFTConfig(num_rounds=1).quantile(0) == 0.7


def vowels(prompts: list[str], responses: list[str]) -> list[float]:
    return [sum(c in 'aeiou' for c in r) / max(len(r), 1) for r in responses]


def make(strategy: Any = None, reward: Any = vowels, **settings: Any) -> Any:
    strategy = strategy or NaiveStrategy(seed=3)
    torch.manual_seed(3)
    given = {'num_rounds': 2, 'num_samples_per_prompt': 8, 'train_batch_size': 8, 'max_new_tokens': 8, 'lr': 1e-2}
    given['tokenizer'] = char_tokenizer()
    actor = GPTActor(config=tiny_config('gpt2', positions=32))
    return offline(RFTTrainer, strategy, actor, ['a', 'b', 'c', 'd'], reward, **given | settings)


def test_it_learns_and_a_resumed_run_has_the_same_bits(tmp_path):
    phases = check_resume(partial(make, num_rounds=6, max_epochs=2), tmp_path, 4).log.phases
    scores = [p['rft/score_mean'] for p in phases]
    assert len(scores) == 6 and scores[-1] > scores[0] + 0.2
    for p in phases:
        assert p['rft/kept_score_mean'] > p['rft/score_mean']
        assert 0 < p['rft/kept'] < 0.8 and p['sft/loss'] > 0


class Same:
    def __init__(self, score: float) -> None:
        self.given = score

    def score(self, samples: Any, strategy: Any) -> list[float]:
        return [self.given] * len(samples)


def test_a_stopped_run_is_not_recorded_as_ended(tmp_path):
    class Stop(Callback):
        def __init__(self, phase: int) -> None:
            self.phase = phase

        def on_phase_end(self, trainer: Any, step: int, metrics: Any) -> None:
            if step == self.phase:
                trainer.request_stop()

    for phase, status in ((1, 'stopped'), (5, 'ended')):
        folder = tmp_path / status
        make(num_rounds=3, run_dir=folder, callbacks=[Stop(phase)]).fit()
        assert json.loads((folder / 'run.json').read_text())['status'] == status


def test_equal_scores_are_not_learned():
    trainer = make(reward=Same(1.0))
    before = weights(trainer)
    with pytest.warns(UserWarning, match='RFT round 2: no prompt has responses of different scores'):
        trainer.fit()
    assert trainer.round == 2 and torch.equal(before, weights(trainer))


@pytest.mark.parametrize(
    ('settings', 'sentence'),
    [
        ({'num_samples_per_prompt': 1}, 'RFT keeps some and drops some'),
        ({'do_sample': False}, 'do_sample=False gives only one'),
        ({'max_steps': 3}, 'max_steps=3 does not end an RFT run'),
        ({'reward': None}, 'chooses by a reward, and got None'),
        ({'num_round': 3}, "unknown keyword 'num_round'; did you mean num_rounds"),
    ],
)
def test_mistakes(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        make(**settings)


def test_a_score_that_is_not_finite_is_refused():
    with pytest.raises(RewardFunctionError, match='nan for sample 0 .*; scores must be finite'):
        make(reward=Same(float('nan'))).fit()


class Rates(Callback):
    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_learn_batch_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        self.rates.append(trainer.optim.param_groups[0]['lr'])


class Seeds(Callback):
    def __init__(self) -> None:
        self.seeds: list[int] = []

    def on_learn_batch_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        self.seeds.append(torch.initial_seed())


def test_dropout_differs_in_each_step_of_all_rounds():
    own = Seeds()
    make(callbacks=[own]).fit()
    assert len(own.seeds) > 2 and len(set(own.seeds)) == len(own.seeds)


def test_a_decaying_learning_rate_ends_with_the_last_round():
    rates = Rates()
    # one of 2 responses is kept, so the rounds are about equally long
    settings = {'num_rounds': 4, 'num_samples_per_prompt': 2, 'train_batch_size': 1, 'lr_schedule': 'linear'}
    make(callbacks=[rates], **settings).fit()
    assert len(rates.rates) > 8
    assert rates.rates[0] == pytest.approx(1e-2)
    assert 0 < rates.rates[-1] <= 1e-2 / 4
    rises = [after - before for before, after in pairwise(rates.rates)]
    assert max(rises) < 0.15e-2  # one decay per round would end near 0 and rise by more


def run() -> tuple[list[dict[str, float]], torch.Tensor]:
    with DDPStrategy(seed=3, device='cpu') as strategy:
        trainer = make(strategy)
        trainer.fit()
        return trainer.log.phases, weights(trainer)


def test_the_number_of_ranks_has_no_effect():
    alone = make()
    alone.fit()
    for phases, found in run_distributed(run, 2):
        close(phases, alone.log.phases)
        assert torch.allclose(found, weights(alone), atol=3e-4)
