"""Reward-model training: the loss by hand, groups of ranked answers, labels, calibration, stopping, files, ranks."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import pytest
import torch
from phase_log import Log

from chatgpt.batching import collate
from chatgpt.data import TokenizedLabelled, TokenizedPreference
from chatgpt.functional import losses
from chatgpt.nn import RewardModel
from chatgpt.strategies import DDPStrategy, FSDPStrategy, NaiveStrategy
from chatgpt.testing.fakes import tiny_config
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer import RewardModelTrainer
from chatgpt.trainer.objectives import reward_model
from chatgpt.trainer.objectives.reward_model import is_success
from chatgpt.trainer.saving import save_pretrained
from chatgpt.types import Sequence


def preference(
    *responses: list[int], prompt: tuple[int, ...] = (3, 4), scores: tuple[float, ...] | None = None
) -> TokenizedPreference:
    tensors = [torch.tensor(r) for r in responses]
    masks = [torch.ones_like(t, dtype=torch.bool) for t in tensors]
    return TokenizedPreference(prompt_ids=torch.tensor(prompt), responses=tensors, response_masks=masks, scores=scores)


def labelled(ids: list[int], label: Any) -> TokenizedLabelled:
    response = torch.tensor(ids)
    return TokenizedLabelled(
        sequence=Sequence(
            prompt_ids=torch.tensor([3]),
            response_ids=response,
            response_mask=torch.ones_like(response, dtype=torch.bool),
        ),
        label=label,
    )


def make(
    data: list[Any],
    eval_data: list[Any] | None = None,
    *,
    strategy: Any = None,
    lr: float = 3e-3,
    more: Any = (),
    **kw: Any,
) -> Any:
    strategy = strategy or NaiveStrategy(seed=5)
    torch.manual_seed(5)
    from transformers import GPT2Model

    model = RewardModel(GPT2Model(tiny_config('gpt2', vocab_size=16, hidden=16, positions=32)))
    model, optim = strategy.prepare((model, torch.optim.AdamW(model.parameters(), lr=lr, eps=1e-4)))
    log = Log()
    settings = {'train_batch_size': 4, 'log_interval': 1} | kw
    trainer = RewardModelTrainer(strategy, model, optim, data, eval_data, callbacks=[log, *more], **settings)
    trainer.log = log
    return trainer


def score(trainer: Any, s: Sequence) -> float:
    """By plain transformers and the head, in float64: the state of the last token."""
    bare = trainer.strategy.unwrap(trainer.model)
    hidden = bare.model.eval()(torch.cat([s.prompt_ids, s.response_ids])[None]).last_hidden_state[0, -1].double()
    head = bare.value_head
    hidden = hidden.detach()
    bias = 0.0 if head.bias is None else float(head.bias[0])
    return float(hidden @ head.weight[0].detach().double()) + bias - float(bare.score_bias)


MIXED = [
    preference([5, 6, 2], [7, 2]),
    preference([5, 2], [6, 7, 8, 2], [9, 2], prompt=(8,)),
    preference([4, 2], [4, 2]),  # equal: no pair
    preference([9, 9, 2], [5, 2], [6, 2], scores=(2.0, 1.0, 1.0)),  # two are equal by their scores
]


def by_hand(
    trainer: Any, records: list[TokenizedPreference], *, margin: bool = False, center: float = 0.0
) -> tuple[float, float, float]:
    """Loss (mean over prompts with a pair), accuracy and margin, pair by pair."""
    losses, right, margins = [], [], []
    for r in records:
        of_prompt = []
        s = [score(trainer, x) for x in r.sequences()]
        for i, j in combinations(range(len(s)), 2):
            if r.responses[i].tolist() == r.responses[j].tolist() or (
                r.scores is not None and r.scores[i] == r.scores[j]
            ):
                continue
            gap = r.scores[i] - r.scores[j] if margin and r.scores is not None else 0.0
            of_prompt.append(math.log1p(math.exp(-(s[i] - s[j] - gap))) + center * (s[i] + s[j]) ** 2)
            right.append(s[i] > s[j])
            margins.append(s[i] - s[j])
        if of_prompt:
            losses.append(sum(of_prompt) / len(of_prompt))
    return sum(losses) / len(losses), sum(right) / len(right), sum(margins) / len(margins)


@pytest.mark.parametrize(
    'settings', [{}, {'loss_fn': 'log_exp'}, {'center_rewards_coefficient': 0.3}, {'max_tokens_per_batch': 12}]
)
def test_the_loss_by_hand(settings):
    trainer = make(MIXED, shuffle=False, calibrate=False, **settings)
    loss, accuracy, margin = by_hand(trainer, MIXED, center=settings.get('center_rewards_coefficient', 0.0))
    trainer.fit()
    seen = trainer.log.phases[0]
    assert seen['rm/loss'] == pytest.approx(loss, rel=1e-5)
    assert seen['rm/accuracy'] == pytest.approx(accuracy)
    assert seen['rm/margin'] == pytest.approx(margin, rel=1e-4)


@pytest.mark.parametrize(('loss_fn', 'times'), [('log_sig', 2.0), ('log_exp', 3.0)])
def test_each_form_of_the_loss_is_the_one_that_is_asked_for(monkeypatch, loss_fn, times):
    """Without a margin both are one function, so each is marked here by a factor of its own."""
    for name, factor in (('pairwise_log_sigmoid_loss', 2.0), ('pairwise_log_exp_loss', 3.0)):
        plain = getattr(losses, name)
        monkeypatch.setattr(reward_model, name, lambda *args, plain=plain, factor=factor: factor * plain(*args))
    trainer = make(MIXED, shuffle=False, calibrate=False, loss_fn=loss_fn)
    loss, _, _ = by_hand(trainer, MIXED)
    trainer.fit()
    assert trainer.log.phases[0]['rm/loss'] == pytest.approx(times * loss, rel=1e-5)


def test_margins_are_subtracted():
    data = [preference([5, 2], [6, 2], scores=(3.0, 1.0)), preference([7, 2], [8, 2], scores=(1.5, 1.0))]
    trainer = make(data, shuffle=False, calibrate=False, use_margins=True, train_batch_size=2)
    loss, _, _ = by_hand(trainer, data, margin=True)
    without, _, _ = by_hand(trainer, data)
    trainer.fit()
    assert trainer.log.phases[0]['rm/loss'] == pytest.approx(loss, rel=1e-5)
    assert abs(loss - without) > 0.1  # negative control: without margins it is another loss


def learnable(count: int = 48) -> list[TokenizedPreference]:
    """The better answer has a 5 in it."""
    return [preference([6 + i % 4, 5, 2], [6 + i % 4, 10 + i % 3, 2], prompt=(3 + i % 2,)) for i in range(count)]


def test_it_learns_and_says_so_on_eval_data():
    trainer = make(learnable(), learnable(8), max_epochs=4, lr=1e-2)
    trainer.fit()
    last = trainer.log.phases[-1]
    assert last['rm/val_accuracy'] == 1.0
    assert last['rm/val_margin'] > 1.0
    assert last['rm/val_loss'] < 0.3
    assert last['rm/lr'] < trainer.log.phases[0]['rm/lr'] * 0.1  # the cosine has come down


def test_calibration_puts_the_mean_of_reference_answers_at_zero():
    data = learnable()
    trainer = make(data, max_epochs=2, lr=1e-2)
    trainer.fit()
    scores = [score(trainer, r.sequences()[0]) for r in data]
    assert sum(scores) / len(scores) == pytest.approx(0.0, abs=1e-5)
    given = [data[0].sequences()[1], data[1].sequences()[1]]
    before = trainer.calibrate(given)
    assert before < -0.5  # the worse ones lie below
    assert sum(score(trainer, s) for s in given) == pytest.approx(0.0, abs=1e-5)


def test_calibration_reads_a_bounded_sample_by_seed_and_says_so(capsys):
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
    assert make(data, calibration_samples=512).calibrate() == all_scores  # a file below the bound is read as a whole


def test_labelled_text_by_hand_and_learnt():
    data = [labelled([6 + i % 4, 5 if i % 2 else 11, 2], 'positive' if i % 2 else 'negative') for i in range(32)]
    trainer = make(data, shuffle=False, calibrate=False, lr=1e-2, max_epochs=6)
    want = [math.log1p(math.exp(-score(trainer, r.sequence) * (1 if is_success(r.label) else -1))) for r in data[:4]]
    trainer.fit()
    assert trainer.log.phases[0]['rm/loss'] == pytest.approx(sum(want) / 4, rel=1e-5)
    assert trainer.log.phases[-1]['rm/accuracy'] == 1.0


@pytest.mark.parametrize(
    ('label', 'named', 'expected'),
    [
        (1, None, True),
        (0, None, False),
        (-1, None, False),
        (True, None, True),
        ('NEG', None, False),
        (1.0, None, True),
        ('joy', 'joy', True),
        ('anger', 'joy', False),
    ],
)
def test_labels(label, named, expected):
    assert is_success(label, named) is expected


def test_early_stopping_on_eval_data():
    wrong_way = [preference(r.responses[1].tolist(), r.responses[0].tolist(), prompt=(3,)) for r in learnable(8)]
    trainer = make(learnable(8), wrong_way, max_epochs=50, lr=1e-2, early_stopping_patience=2)
    trainer.fit()
    assert trainer.phase < 20


@pytest.mark.parametrize(
    ('data', 'settings', 'sentence'),
    [
        ([preference([5], [6]), labelled([5], 1)], {}, 'record 1 is a TokenizedLabelled among TokenizedPreferences'),
        (
            [labelled([5], 'blue')],
            {},
            "label 'blue' is neither a success nor a failure; say which one is with positive_label",
        ),
        ([preference([5], [6])], {'use_margins': True}, 'record 0 has no scores'),
        ([preference([5], [6])], {'loss_fn': 'mse'}, "loss_fn='mse'"),
        ([preference([5], [6])], {'use_margins': True, 'loss_fn': 'log_exp'}, 'the log-exp form has no margin'),
        ([preference([5], [6])], {'early_stopping_patience': 2}, 'early_stopping_patience needs eval_data'),
    ],
)
def test_mistakes(data, settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        make(data, **settings)


@pytest.mark.parametrize('family', ['gpt2', 'llama'])
def test_the_folder_loads_here_and_in_transformers(tmp_path, family):
    from transformers import AutoModel, AutoModelForSequenceClassification

    strategy = NaiveStrategy()
    config = tiny_config(family, vocab_size=16, positions=32)
    config.pad_token_id = 0
    model = RewardModel(AutoModel.from_config(config))
    model, optim = strategy.prepare((model, torch.optim.AdamW(model.parameters(), lr=1e-2)))
    trainer = RewardModelTrainer(strategy, model, optim, learnable(8), callbacks=[Log()], train_batch_size=4)
    trainer.fit()
    save_pretrained(strategy, model, tmp_path / 'rm')
    loaded = RewardModel.from_pretrained(tmp_path / 'rm')
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / 'rm').eval()
    batch = collate([s for record in learnable(3) for s in record.sequences()])
    with torch.no_grad():
        want = model.eval()(batch)
        assert torch.allclose(loaded.eval()(batch), want, atol=1e-6)
        ids = batch.input_ids.masked_fill(~batch.attention_mask, 0)
        plain = (
            theirs(input_ids=ids, attention_mask=batch.attention_mask.long()).logits[:, 0] - theirs.config.score_bias
        )
    assert torch.allclose(plain, want, atol=1e-5)
    assert abs(theirs.config.score_bias) > 1e-4


def run(kind: str) -> tuple[list[dict[str, float]], dict[str, torch.Tensor], float]:
    strategy = {'ddp': DDPStrategy, 'fsdp': FSDPStrategy}[kind](seed=5, device='cpu')
    with strategy:
        trainer = make([*MIXED, *learnable(6)], learnable(3), strategy=strategy, max_epochs=2, max_tokens_per_batch=16)
        trainer.fit()
        bare: Any = strategy.unwrap(trainer.model)
        weights = {n: t.clone() for n, t in strategy.broadcast_object(strategy.full_state_dict(trainer.model)).items()}
        return trainer.log.phases, weights, float(bare.score_bias)


def both() -> dict[str, Any]:
    return {kind: run(kind) for kind in ('ddp', 'fsdp')}


def test_the_number_of_ranks_does_not_enter():
    alone = make([*MIXED, *learnable(6)], learnable(3), max_epochs=2, max_tokens_per_batch=16)
    alone.fit()
    for results in run_distributed(both, 2, init_group=True):
        for phases, weights, bias in results.values():
            assert len(phases) == len(alone.log.phases)
            for got, want in zip(phases, alone.log.phases, strict=True):
                assert got.keys() == want.keys()
                assert all(got[k] == pytest.approx(want[k], rel=1e-4, abs=1e-5) for k in want), (got, want)
            ours = alone.strategy.full_state_dict(alone.model)
            assert all(torch.allclose(weights[n], ours[n], atol=2e-4) for n in ours)
            assert bias == pytest.approx(float(alone.strategy.unwrap(alone.model).score_bias), abs=1e-4)
