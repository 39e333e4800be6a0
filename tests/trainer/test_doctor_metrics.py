"""Metrics for the doctor, against slow loops; measuring them does not change a run."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import ppo_on_ids
import pytest
import torch
from fake_trainer import experience

from chatgpt.strategies import DDPStrategy, NaiveStrategy
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer.experience import RewardModelScorer
from chatgpt.trainer.experience.scorers import rescored
from chatgpt.trainer.metrics import bias_metrics, group_metrics, rank_metrics, repetition, rollout_metrics
from chatgpt.trainer.run_control import PhaseClock


def slow_repetition(responses: list[list[int]]) -> dict[str, float]:
    """Repetition from 4-grams as tuples, response by response."""
    within, sets = [], []
    for response in responses:
        runs = [tuple(response[i : i + 4]) for i in range(len(response) - 3)]
        if runs:
            within.append(sum(run in runs[:i] for i, run in enumerate(runs)) / len(runs))
            sets.append(set(runs))
    if not sets:
        return {}
    return {
        'rollout/repetition_within': sum(within) / len(within),
        'rollout/repetition_across': 1 - len(set().union(*sets)) / sum(map(len, sets)),
    }


@pytest.mark.parametrize('vocab', [2, 5, 100_000])
def test_repetition_is_that_of_a_slow_loop(vocab):
    rng = np.random.default_rng(vocab)
    responses = [rng.integers(0, vocab, int(n)).tolist() for n in rng.integers(1, 40, 30)]
    assert repetition([torch.tensor(r) for r in responses]) == pytest.approx(slow_repetition(responses))


def test_repetition_by_hand():
    def measured(*responses):
        found = repetition([torch.tensor(r) for r in responses])
        return (found['rollout/repetition_within'], found['rollout/repetition_across']) if found else None

    token_ids = [1, 2, 3, 4, 1, 2, 3, 4]  # 1234 2341 3412 4123 1234: one of five is a repetition
    assert measured(token_ids) == pytest.approx((0.2, 0.0))
    # 4 and 2 distinct ones, 5 together
    assert measured(token_ids, [9, 1, 2, 3, 4]) == pytest.approx((0.1, 1 - 5 / 6))
    # too short, and no 4-gram spans two responses
    assert measured([1, 1, 1], [1, 1, 1]) is measured([1, 2, 3]) is measured() is None


def test_the_bias_of_values_by_quarter_of_the_tokens_that_count():
    """Five tokens count of seven: in quarters 1, 1, 2, 3, 4. A response of one token is in the first, an empty one in
    none."""
    mask = torch.tensor([True, True, False, True, False, True, True])
    values = torch.where(mask, torch.tensor([1.0, 2.0, 0.0, 3.0, 0.0, 4.0, 5.0]), torch.nan)
    long = experience(0, [3], [4] * 7, response_mask=mask, values=values, returns=torch.ones(7))
    short = experience(1, [3], [4], values=torch.tensor([0.5]), returns=torch.tensor([2.0]))
    empty = experience(2, [3], [4], values=torch.tensor([9.0]), response_mask=torch.tensor([False]))
    biases = {1: (0.0 + 1.0 - 1.5) / 3, 2: 2.0, 3: 3.0, 4: 4.0}
    assert bias_metrics([long, short, empty]) == pytest.approx({f'ppo/value_bias_{k}': b for k, b in biases.items()})
    assert bias_metrics([short]) == {'ppo/value_bias_1': -1.5} and bias_metrics([empty]) == {}


def test_only_a_run_with_a_critic_has_the_bias_of_values():
    for estimator, number in (('gae', 4), ('reinforce++', 0)):
        _, phases = ppo_on_ids.run(1, advantage_estimator=estimator)
        assert sum(name.startswith('ppo/value_bias_') for name in phases[0]) == number


def test_the_median_deviation_of_scores():
    records = [experience(i, [3], [4, 5], score) for i, score in enumerate([1.0, 2.0, 4.0, 100.0, 3.0])]
    assert rollout_metrics(records, 0.1)['rollout/score_mad'] == 1.0  # around 3: 2, 1, 1, 97, 0
    halves = [experience(i, [3], [4, 5], score) for i, score in enumerate([0.0, 0.0, 1.0, 1.0])]
    assert rollout_metrics(halves, 0.1)['rollout/score_mad'] == 0.5  # around 0.5


def test_groups_with_equal_scores():
    records = [experience(i, [3], [4], score) for i, score in enumerate([1.0, 1.0, 1.0, 2.0, 5.0, 5.0, 7.0])]
    for record, group in zip(records, [0, 0, 1, 1, 2, 2, 3], strict=True):
        record.group = group
    assert group_metrics(records) == {'rollout/equal_groups_share': 2 / 3}  # a single response is no group
    assert group_metrics(records[:1]) == {}
    for record, parts in zip(records[:2], [((1.0, 0.0), (1.0, 1.0)), ((1.0, 1.0), (1.0, 0.0))], strict=True):
        record.weighted_scores = parts  # equal in their sum, not apart
    assert group_metrics(records[:2]) == {'rollout/equal_groups_share': 1.0}
    assert group_metrics(records[:2], apart=True) == {'rollout/equal_groups_share': 0.0}


class Scores(torch.nn.Module):
    """The sum of the action ids; optionally plus a multiple of the batch size, or with dropout."""

    def __init__(self, batch_effect: float = 0.0, dropout: float = 0.0) -> None:
        super().__init__()
        self.batch_effect, self.dropout, self.sizes = batch_effect, torch.nn.Dropout(dropout), []

    def forward(self, batch):
        self.sizes.append(batch.num_sequences)
        sums = torch.zeros(batch.num_sequences).index_add(0, batch.action_rows, batch.action_ids.float())
        return self.dropout(sums) + self.batch_effect * batch.num_sequences


@pytest.mark.parametrize(('batch_effect', 'error'), [(0.0, 0.0), (0.5, 0.5 * 6)])
def test_a_response_is_scored_again_alone(batch_effect, error):
    strategy, model = NaiveStrategy(seed=0, device='cpu'), Scores(batch_effect)
    scorer = RewardModelScorer(model)
    records = [experience(i, [3], [4 + i, 5], 0.0) for i in range(7)]
    for record, score in zip(records, scorer.score(records, strategy), strict=True):
        record.score = score
    assert rescored(scorer, records, strategy) == pytest.approx(error)
    assert model.sizes == [7, 1, 1, 1, 1]
    # random generators are not changed
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    assert rescored(RewardModelScorer(Scores(dropout=0.5)), records, strategy) > 0.0  # dropout is active
    assert torch.equal(torch.rand(3), expected)


def test_rescoring_is_rare(monkeypatch):
    import chatgpt.trainer.experience.scorers as module

    monkeypatch.setattr(module, 'RESCORE_EVERY', 2)
    trainer, phases = ppo_on_ids.run(3)
    assert ['rollout/rescore_error' in p for p in phases] == [True, False, True]
    for name in ('actor', 'critic'):  # maxima of norms as well as their means
        assert phases[0][f'ppo/{name}_grad_norm_max'] >= phases[0][f'ppo/{name}_grad_norm'] > 0.0
    assert trainer.collector.taken_s() == 0.0  # taken at the end of the phase


def test_a_scorer_that_is_no_reward_model_is_called_once():
    class Lengths:
        num_calls = 0

        def score(self, samples, strategy):
            self.num_calls += 1
            return [float(s.num_actions) for s in samples]

    trainer = ppo_on_ids.make()
    trainer.scorer = trainer.maker.scorer = Lengths()
    ppo_on_ids.fit(trainer, 1)
    assert trainer.scorer.num_calls == 1 and 'rollout/rescore_error' not in trainer.log.phases[0]


def test_time_outside_of_the_parts_of_a_phase(monkeypatch):
    now = iter([10.0, 12.0, 15.0, 18.0, 30.0, 31.0, 34.0])
    monkeypatch.setattr(
        'chatgpt.trainer.run_control.time', SimpleNamespace(perf_counter=lambda: next(now), process_time=lambda: 0.0)
    )
    clock = PhaseClock(torch.device('cpu'))
    with clock.measure('collect'):  # 10 to 12
        pass
    with clock.measure('learn'):  # 15 to 18
        pass
    first = clock.metrics()  # at 30
    assert (first['perf/total_s'], first['perf/other_s']) == (5.0, 15.0)
    clock.reset()
    now = iter([31.0, 34.0, 40.0])
    with clock.measure('learn'):  # 31 to 34; callbacks of the first phase ran from 30
        pass
    second = clock.metrics()  # at 40
    assert (second['perf/total_s'], second['perf/other_s']) == (3.0, 7.0)


def seconds_of_ranks() -> dict[str, float]:
    with DDPStrategy(seed=0) as strategy:
        return rank_metrics(strategy, [2.0, 7.0, 3.0][strategy.rank])


def test_the_slowest_rank_is_named():
    expected = {'perf/slowest_rank': 1.0, 'perf/slowest_rank_s': 7.0, 'perf/other_ranks_s': 2.5}
    assert run_distributed(seconds_of_ranks, 3) == [expected] * 3
    assert rank_metrics(NaiveStrategy(seed=0, device='cpu'), 2.0) == {}
