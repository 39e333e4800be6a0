"""Reward-model training: the loss by hand, groups of ranked answers, labels, calibration, stopping, files, ranks."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import pytest
import torch
from tiny_runs import SMALL, close, near, offline, preference, sequence
from transformers import AutoModel, AutoModelForSequenceClassification, GPT2Model

from chatgpt.batching import collate
from chatgpt.data import TokenizedLabelled, TokenizedPreference
from chatgpt.nn import RewardModel
from chatgpt.strategies import DDPStrategy, FSDPStrategy, NaiveStrategy
from chatgpt.testing.fakes import tiny_config
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer import RewardModelTrainer
from chatgpt.trainer.objectives.reward_model import is_success
from chatgpt.trainer.saving import save_pretrained
from chatgpt.types import Sequence


def labelled(ids: list[int], label: Any) -> TokenizedLabelled:
    return TokenizedLabelled(sequence=sequence([3], ids), label=label)


def make(data: list[Any], eval_data: list[Any] | None = None, *, strategy: Any = None, **settings: Any) -> Any:
    strategy = strategy or NaiveStrategy(seed=5)
    torch.manual_seed(5)
    model = RewardModel(GPT2Model(tiny_config('gpt2', **SMALL)))
    return offline(RewardModelTrainer, strategy, model, data, eval_data, **settings)


def score(trainer: Any, s: Sequence) -> float:
    """Returns the score by plain transformers and the head, in float64, from the state of the last token."""
    bare = trainer.strategy.unwrap(trainer.model)
    hidden = bare.model.eval()(torch.cat([s.prompt_ids, s.response_ids])[None]).last_hidden_state[0, -1].double()
    head = bare.value_head
    bias = 0.0 if head.bias is None else float(head.bias[0])
    return float(hidden.detach() @ head.weight[0].detach().double()) + bias - float(bare.score_bias)


MIXED = [
    preference([3, 4], [5, 6, 2], [7, 2]),
    preference([8], [5, 2], [6, 7, 8, 2], [9, 2]),
    preference([3, 4], [4, 2], [4, 2]),  # equal: no pair
    preference([3, 4], [9, 9, 2], [5, 2], [6, 2], scores=(2.0, 1.0, 1.0)),  # two are equal by their scores
]


def by_hand(
    trainer: Any, records: list[TokenizedPreference], *, margin: bool = False, center: float = 0.0
) -> tuple[float, float, float]:
    """Returns loss (mean over prompts with a pair), accuracy and margin, pair by pair."""
    losses, right, margins = [], [], []
    for r in records:
        of_prompt = []
        s = [score(trainer, x) for x in r.sequences()]
        for i, j in combinations(range(len(s)), 2):
            tied = r.scores is not None and r.scores[i] == r.scores[j]
            if tied or r.responses[i].tolist() == r.responses[j].tolist():
                continue
            gap = r.scores[i] - r.scores[j] if margin and r.scores is not None else 0.0
            of_prompt.append(math.log1p(math.exp(-(s[i] - s[j] - gap))) + center * (s[i] + s[j]) ** 2)
            right.append(s[i] > s[j])
            margins.append(s[i] - s[j])
        if of_prompt:
            losses.append(sum(of_prompt) / len(of_prompt))
    return sum(losses) / len(losses), sum(right) / len(right), sum(margins) / len(margins)


@pytest.mark.parametrize(
    'settings', [{}, {'loss_fn': 'log_exp'}, {'center_rewards_coefficient': 0.3, 'max_tokens_per_batch': 12}]
)
def test_the_loss_by_hand(settings):
    trainer = make(MIXED, shuffle=False, calibrate=False, **settings)
    loss, accuracy, margin = by_hand(trainer, MIXED, center=settings.get('center_rewards_coefficient', 0.0))
    trainer.fit()
    seen = trainer.log.phases[0]
    assert seen['rm/loss'] == pytest.approx(loss, rel=1e-5)
    assert seen['rm/accuracy'] == pytest.approx(accuracy)
    assert seen['rm/margin'] == pytest.approx(margin, rel=1e-4)


def test_margins_are_subtracted():
    data = [preference([3], [5, 2], [6, 2], scores=(3.0, 1.0)), preference([3], [7, 2], [8, 2], scores=(1.5, 1.0))]
    trainer = make(data, shuffle=False, calibrate=False, use_margins=True, train_batch_size=2)
    (loss, _, _), (without, _, _) = by_hand(trainer, data, margin=True), by_hand(trainer, data)
    trainer.fit()
    assert trainer.log.phases[0]['rm/loss'] == pytest.approx(loss, rel=1e-5)
    assert abs(loss - without) > 0.1  # negative control: without margins it is another loss


def learnable(count: int = 48) -> list[TokenizedPreference]:
    return [preference([3 + i % 2], [6 + i % 4, 5, 2], [6 + i % 4, 10 + i % 3, 2]) for i in range(count)]


def test_it_learns_and_its_calibration_puts_the_mean_of_reference_answers_at_zero():
    data = learnable()
    trainer = make(data, learnable(8), max_epochs=3, lr=1e-2)
    trainer.fit()
    last = trainer.log.phases[-1]
    assert last['rm/val_accuracy'] == 1.0 and last['rm/val_margin'] > 1.0 and last['rm/val_loss'] < 0.3
    assert last['rm/lr'] < trainer.log.phases[0]['rm/lr'] * 0.1  # the cosine has decayed
    scores = [score(trainer, r.sequences()[0]) for r in data]
    assert sum(scores) / len(scores) == pytest.approx(0.0, abs=1e-5)
    given = [data[0].sequences()[1], data[1].sequences()[1]]
    assert trainer.calibrate(given) < -0.5  # the worse ones lie below
    assert sum(score(trainer, s) for s in given) == pytest.approx(0.0, abs=1e-5)


def test_calibration_reads_a_limited_sample_by_seed_and_shows_progress(capsys):
    data = learnable(8)
    all_scores = make(data, calibration_samples=8).calibrate()
    trainer = make(data, calibration_samples=3)
    trainer.log.enabled = True
    best = [score(trainer, r.sequences()[0]) for r in data]
    some = trainer.calibrate()
    assert 'calibrate on 3 answers' in capsys.readouterr().out
    assert make(data, calibration_samples=3).calibrate() == some != all_scores
    assert all_scores == pytest.approx(sum(best) / 8, abs=1e-5)
    assert any(some == pytest.approx(sum(three) / 3, abs=1e-5) for three in combinations(best, 3))
    assert make(data, calibration_samples=512).calibrate() == all_scores  # fewer answers than the limit are all read


def test_labelled_text_by_hand_and_learnt():
    data = [labelled([6 + i % 4, 5 if i % 2 else 11, 2], 'positive' if i % 2 else 'negative') for i in range(32)]
    wrong = [labelled([6, 5, 2], 'negative')]  # so that learning stops early
    settings = {'shuffle': False, 'calibrate': False, 'lr': 1e-2, 'early_stopping_patience': 2, 'max_epochs': 50}
    trainer = make(data, wrong, **settings)
    want = [math.log1p(math.exp(-score(trainer, r.sequence) * (1 if is_success(r.label) else -1))) for r in data[:4]]
    trainer.fit()
    assert trainer.log.phases[0]['rm/loss'] == pytest.approx(sum(want) / 4, rel=1e-5)
    assert trainer.log.phases[-1]['rm/accuracy'] == 1.0
    assert trainer.phase < 40  # of 400


def test_scores_of_labelled_text_stay_logits_unless_they_have_a_reference():
    data = [labelled([6 + i % 4, 11 if i % 8 else 5, 2], i % 8 != 0) for i in range(32)]  # seven of eight are good
    for given, shifted in ({}, False), ({'reference_data': [sequence([3], [6, 2])]}, True):
        trainer = make(data, data, lr=1e-2, max_epochs=4, **given)
        trainer.fit()
        assert bool(trainer.model.score_bias) == shifted
    with pytest.raises(ValueError, match='calibrate: there is no sequence'):
        trainer.calibrate([])
    with pytest.raises(ValueError, match='evaluate: there are no records'):
        trainer.evaluate([])


def test_a_patience_that_cannot_stop_the_run_is_named():
    data = [labelled([6 + i % 4], i % 2) for i in range(16)]
    settings = {'early_stopping_patience': 2, 'max_epochs': 5, 'train_batch_size': 4, 'log_interval': 10}
    with pytest.warns(UserWarning, match='rm/val_loss is measured 2 times in this run, after each log_interval=10'):
        make(data, data, **settings).fit()


def test_labels():
    good, bad = (1, True, 1.0), (0, -1, 'NEG')
    assert all(is_success(label, None) for label in good) and not any(is_success(label, None) for label in bad)
    assert is_success('joy', 'joy') and not is_success('anger', 'joy')
    assert is_success(1.0, '1') and is_success(1, '1.0') and not is_success(0.0, '1')


PAIRS = [preference([3], [5], [6])]


@pytest.mark.parametrize(
    ('data', 'settings', 'sentence'),
    [
        ([*PAIRS, labelled([5], 1)], {}, 'record 1 is a TokenizedLabelled among TokenizedPreferences'),
        ([labelled([5], 'blue')], {}, "label 'blue' is neither a success nor a failure; say which.* positive_label"),
        ([labelled([5], 'joy')], {'positive_label': 'joi'}, "'joi' is the label of no record; there are 'joy'"),
        (PAIRS, {'positive_label': 'joy'}, "positive_label='joy' is of labelled text"),
        (PAIRS, {'use_margins': True}, 'record 0 has no scores'),
        ([labelled([5], 1)], {'loss_fn': 'log_exp'}, "loss_fn='log_exp' is of pairs of responses"),
        (PAIRS, {'loss_fn': 'mse'}, "loss_fn='mse'"),
        (PAIRS, {'use_margins': True, 'loss_fn': 'log_exp'}, 'the log-exp form has no margin'),
        (PAIRS, {'early_stopping_patience': 2}, 'early_stopping_patience needs eval_data'),
        (PAIRS, {'eval_data': PAIRS, 'early_stopping_patience': 2, 'max_epochs': 3}, 'give at least max_epochs=4'),
    ],
)
def test_mistakes(data, settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        make(data, **settings)


@pytest.mark.parametrize('family', ['gpt2', 'llama'])
def test_the_folder_loads_here_and_in_transformers(tmp_path, family):
    strategy = NaiveStrategy()
    config = tiny_config(family, vocab_size=16, positions=32)
    config.pad_token_id = 0
    trainer = offline(RewardModelTrainer, strategy, RewardModel(AutoModel.from_config(config)), learnable(8), lr=1e-2)
    trainer.fit()
    model = trainer.model
    save_pretrained(strategy, model, tmp_path / 'rm')
    loaded = RewardModel.from_pretrained(tmp_path / 'rm')
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / 'rm').eval()
    batch = collate([s for record in learnable(3) for s in record.sequences()])
    ids, mask = batch.input_ids.masked_fill(~batch.attention_mask, 0), batch.attention_mask.long()
    with torch.no_grad():
        want = model.eval()(batch)
        assert torch.allclose(loaded.eval()(batch), want, atol=1e-6)
        plain = theirs(input_ids=ids, attention_mask=mask).logits[:, 0] - theirs.config.score_bias
    assert torch.allclose(plain, want, atol=1e-5)
    assert abs(theirs.config.score_bias) > 1e-4


def runs(kinds: list[Any]) -> list[tuple[list[dict[str, float]], dict[str, torch.Tensor]]]:
    found = []
    for kind in kinds:
        with kind(seed=5, device='cpu') as strategy:
            trainer = make([*MIXED, *learnable(6)], learnable(3), strategy=strategy, max_tokens_per_batch=16)
            trainer.fit()
            weights = strategy.broadcast_object(strategy.full_state_dict(trainer.model))
            bias = strategy.unwrap(trainer.model).score_bias
            found.append((trainer.log.phases, {n: t.clone() for n, t in weights.items()} | {'bias': bias.clone()}))
    return found


def test_the_number_of_ranks_has_no_effect():
    ((want, weights),) = runs([NaiveStrategy])
    for results in run_distributed(runs, 2, [DDPStrategy, FSDPStrategy], init_group=True):
        for phases, found in results:
            close(phases, want)
            near({'reward': found}, {'reward': weights}, atol=2e-4)
