"""RFT: what is kept, by hand; that it learns; that a resume goes on to the bit; that ranks do not enter."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from phase_log import Log

from chatgpt.nn import GPTActor
from chatgpt.strategies import DDPStrategy, NaiveStrategy
from chatgpt.testing.fakes import char_tokenizer, tiny_config
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer import RFTConfig, RFTTrainer
from chatgpt.trainer.callbacks import ProgressBar, SaveCheckpoint
from chatgpt.trainer.experience import RewardFunctionError
from chatgpt.trainer.rft import select
from chatgpt.types import Sample


def sample(group: int, ids: list[int]) -> Sample:
    n = len(ids)
    return Sample(
        index=0,
        group=group,
        prompt_ids=torch.tensor([1]),
        response_ids=torch.tensor(ids),
        response_mask=torch.ones(n, dtype=torch.bool),
        logprobs=torch.zeros(n),
        filtered_logprobs=torch.zeros(n),
        edge_distances=torch.ones(n),
        finish_reason='eos',
    )


@pytest.mark.parametrize(
    ('quantile', 'want'), [(0.0, [0, 1, 2, 3]), (0.3, [1, 2, 3]), (0.5, [2, 3]), (0.7, [3]), (1.0, [3])]
)
def test_what_is_kept_of_a_group(quantile, want):
    scores = [1.0, 2.0, 3.0, 4.0]
    assert select([sample(0, [i]) for i in range(4)], scores, quantile) == want


def test_groups_are_apart_texts_come_once_and_equal_scores_teach_nothing():
    samples = [
        sample(0, [1]),
        sample(0, [1]),
        sample(0, [2]),
        sample(1, [3]),
        sample(1, [4]),
        sample(2, [5]),
        sample(2, [6]),
    ]
    assert select(samples, [9.0, 9.0, 1.0, -5.0, -9.0, 3.0, 3.0], 0.9) == [0, 3]


@pytest.mark.parametrize(
    ('scores', 'quantile', 'want'),
    [
        ([0, 0, 0, 0, 0, 0, 0, 1], 0.7, [7]),  # the quantile is 0 here, and a failure is no lesson
        ([0, 1, 1, 1], 0.7, [1, 2, 3]),
        ([0, 0, 0, 1, 2, 0, 0, 0], 0.5, [3, 4]),
        ([0, 0, 0, 1], 0.0, [0, 1, 2, 3]),
    ],
)
def test_the_worst_of_a_group_are_not_kept(scores, quantile, want):
    assert select([sample(0, [i]) for i in range(len(scores))], scores, quantile) == want


def test_the_quantile_rises():
    config = RFTConfig(num_rounds=3, start_quantile=0.5, end_quantile=0.9)
    assert [config.quantile(i) for i in range(3)] == pytest.approx([0.5, 0.7, 0.9])
    assert RFTConfig(num_rounds=1).quantile(0) == 0.7


def vowels(prompts: list[str], responses: list[str]) -> list[float]:
    return [sum(c in 'aeiou' for c in r) / max(len(r), 1) for r in responses]


def make(strategy: Any = None, more: Any = (), reward: Any = vowels, **kw: Any) -> Any:
    strategy = strategy or NaiveStrategy(seed=3)
    torch.manual_seed(3)
    actor = GPTActor(config=tiny_config('gpt2', positions=32))
    actor, optim = strategy.prepare((actor, torch.optim.AdamW(actor.parameters(), lr=1e-2, eps=1e-4)))
    log = Log()
    settings = {'num_rounds': 4, 'num_samples_per_prompt': 8, 'train_batch_size': 8, 'max_new_tokens': 8} | kw
    tokenizer, prompts = char_tokenizer(), ['a', 'b', 'c', 'd']
    trainer = RFTTrainer(
        strategy, actor, optim, prompts, reward, tokenizer=tokenizer, callbacks=[log, *more], **settings
    )
    trainer.log = log
    return trainer


def test_it_learns():
    trainer = make(num_rounds=6, max_epochs=2)
    trainer.fit()
    scores = [p['rft/score_mean'] for p in trainer.log.phases]
    assert len(scores) == 6
    assert scores[-1] > scores[0] + 0.2
    for p in trainer.log.phases:
        assert p['rft/kept_score_mean'] > p['rft/score_mean']
        assert 0 < p['rft/kept'] < 0.8
        assert p['sft/loss'] > 0


def test_a_resumed_run_has_the_same_bits(tmp_path):
    whole = make(run_dir=tmp_path, more=[SaveCheckpoint(interval=1, keep_last=9)])
    whole.fit()
    rest = make()
    assert rest.load_checkpoint(tmp_path / 'checkpoints' / 'step-00000002')
    rest.fit()
    assert rest.log.phases == whole.log.phases[2:]
    a, b = (t.strategy.unwrap(t.model).state_dict() for t in (rest, whole))
    assert all(torch.equal(a[n], b[n]) for n in b)


def test_a_reward_without_differences_teaches_nothing():
    trainer = make(num_rounds=2)
    trainer.scorer = type('Same', (), {'score': lambda self, samples, strategy: [1.0] * len(samples)})()
    before = [p.clone() for p in trainer.model.parameters()]
    with pytest.warns(UserWarning, match='RFT round 2: no prompt has responses of different scores'):
        trainer.fit()
    assert trainer.round == 2
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


@pytest.mark.parametrize(
    ('settings', 'sentence'),
    [
        ({'num_samples_per_prompt': 1}, 'RFT keeps some and drops some'),
        ({'end_quantile': 1.5}, r'end_quantile=1.5 must lie in \[0, 1\]'),
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
    trainer = make()
    trainer.scorer = type('Nan', (), {'score': lambda self, samples, strategy: [float('nan')] * len(samples)})()
    with pytest.raises(RewardFunctionError, match='nan for sample 0 .*; scores must be finite'):
        trainer.fit()


class Rates(ProgressBar):
    def __init__(self) -> None:
        super().__init__(enabled=False)
        self.rates: list[float] = []

    def on_learn_batch_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        self.rates.append(trainer.optim.param_groups[0]['lr'])


def test_a_decaying_learning_rate_ends_with_the_last_round():
    rates = Rates()
    # one of 2 responses is kept, so the rounds are about equally long
    make(more=[rates], num_samples_per_prompt=2, train_batch_size=1, lr_schedule='linear').fit()
    assert len(rates.rates) > 8
    assert rates.rates[0] == pytest.approx(1e-2)
    assert 0 < rates.rates[-1] <= 1e-2 / 4
    rises = [after - before for before, after in pairwise(rates.rates)]
    assert max(rises) < 0.15e-2  # no saw, which would end every round near 0 and jump back by more


def run() -> tuple[list[dict[str, float]], list[torch.Tensor]]:
    with DDPStrategy(seed=3, device='cpu') as strategy:
        trainer = make(strategy, num_rounds=2)
        trainer.fit()
        return trainer.log.phases, [p.detach().clone() for p in strategy.unwrap(trainer.model).parameters()]


def test_the_number_of_ranks_does_not_enter():
    alone = make(num_rounds=2)
    alone.fit()
    for phases, weights in run_distributed(run, 2):
        for got, want in zip(phases, alone.log.phases, strict=True):
            assert all(got[k] == pytest.approx(want[k], rel=1e-4, abs=1e-5) for k in want)
        assert all(torch.allclose(a, b, atol=3e-4) for a, b in zip(weights, alone.model.parameters(), strict=True))
