"""DPO and its variants, ORPO, SimPO, KTO: losses by hand, references, learning, ranks, resuming."""

from __future__ import annotations

import math
from copy import deepcopy
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from tiny_runs import SMALL, check_resume, close, offline, preference, sequence

from chatgpt.data import TokenizedLabelled, TokenizedPreference
from chatgpt.nn import GPTActor
from chatgpt.strategies import DDPStrategy, FSDPStrategy, NaiveStrategy
from chatgpt.testing.fakes import tiny_config
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer import DPOTrainer, KTOTrainer, ORPOTrainer, RewardModelConfig, SimPOTrainer
from chatgpt.trainer.experience.reference import Reference
from chatgpt.trainer.objectives.kto import LabelledAnswer, answers_of
from chatgpt.trainer.objectives.pairs import Pair, pairs_of
from chatgpt.trainer.objectives.reward_model import PairwiseObjective
from chatgpt.types import Sequence


def data(count: int = 12) -> list[TokenizedPreference]:
    return [preference([3 + i % 4], [6 + i % 3, 5, 2], [6 + i % 3, 9 + i % 4, 7, 2]) for i in range(count)]


KINDS: dict[str, Any] = {'dpo': DPOTrainer, 'kto': KTOTrainer, 'orpo': ORPOTrainer, 'simpo': SimPOTrainer}


def make(
    kind: str, records: Any = None, eval_data: Any = None, *, strategy: Any = None, lora: int = 0, **settings: Any
) -> Any:
    moved, dropout = settings.pop('moved', False), settings.pop('dropout', 0.0)
    strategy = strategy or NaiveStrategy(seed=5, device='cpu')
    torch.manual_seed(5)
    actor = GPTActor(config=tiny_config('gpt2', **SMALL, dropout=dropout), lora_rank=lora)
    initial = deepcopy(actor)
    if moved:  # policy and reference differ from the first step on
        with torch.no_grad():
            for number, p in enumerate(actor.parameters()):
                if p.requires_grad:
                    torch.manual_seed(number)
                    p.add_(0.2 * torch.randn(p.shape))
    if kind in ('dpo', 'kto') and not lora:
        settings = {'initial_model': strategy.prepare(initial)} | settings
    records = data() if records is None else records
    trainer = offline(KINDS[kind], strategy, actor, records, eval_data, **settings)
    trainer.initial = initial
    return trainer


def logp(model: Any, s: Sequence) -> list[float]:
    """Returns log-probs of a response's tokens by plain transformers, in float64."""
    ids = torch.cat([s.prompt_ids, s.response_ids])
    with torch.no_grad():
        table = model.model.eval()(ids[None]).logits[0].double().log_softmax(-1)
    start = len(s.prompt_ids)
    return [float(table[start - 1 + t, token]) for t, token in enumerate(s.response_ids.tolist())]


def log_sigmoid(z: float) -> float:
    return -math.log1p(math.exp(-z)) if z > 0 else z - math.log1p(math.exp(z))


def dpo(kind: str, m: float, beta: float, eps: float) -> float:
    z = beta * m
    return {
        'sigmoid': -log_sigmoid(z),
        'ipo': (m - 1 / (2 * beta)) ** 2,
        'cdpo': -(1 - eps) * log_sigmoid(z) - eps * log_sigmoid(-z),
        'robust': (-(1 - eps) * log_sigmoid(z) + eps * log_sigmoid(-z)) / (1 - 2 * eps),
        'hinge': max(0.0, 1 - z),
    }[kind]


@pytest.mark.parametrize(
    ('loss_type', 'precompute'),
    [('sigmoid', True), ('sigmoid', False), ('ipo', True), ('cdpo', False), ('robust', True), ('hinge', False)],
)
def test_dpo_by_hand(loss_type, precompute):
    settings = {'loss_type': loss_type, 'precompute_ref_logprobs': precompute, 'beta': 0.3}
    if loss_type in ('cdpo', 'robust'):
        settings['label_smoothing'] = 0.2
    trainer = make('dpo', data(4), shuffle=False, max_tokens_per_batch=20, moved=True, **settings)
    policy, reference = trainer.strategy.unwrap(trainer.model), trainer.initial
    wants, right, margins = [], [], []
    for pair in pairs_of(data(4)):
        chosen, rejected = (sum(logp(policy, s)) - sum(logp(reference, s)) for s in (pair.chosen, pair.rejected))
        wants.append(dpo(loss_type, chosen - rejected, 0.3, 0.2))
        right.append(chosen > rejected)
        margins.append(0.3 * (chosen - rejected))
    trainer.fit()
    seen = trainer.log.phases[0]
    assert seen['dpo/loss'] == pytest.approx(sum(wants) / 4, rel=1e-4)
    assert seen['dpo/accuracy'] == sum(right) / 4
    assert seen['dpo/margin'] == pytest.approx(sum(margins) / 4, rel=1e-3, abs=1e-5)
    flipped = [dpo(loss_type, -m / 0.3, 0.3, 0.2) for m in margins]
    assert abs(sum(flipped) / 4 - sum(wants) / 4) > 1e-3  # negative control: chosen and rejected swapped


@pytest.mark.parametrize('kind', ['orpo', 'simpo'])
def test_orpo_and_simpo_by_hand(kind):
    trainer = make(kind, data(4), shuffle=False, moved=True)
    policy = trainer.strategy.unwrap(trainer.model)
    wants = []
    for pair in pairs_of(data(4)):
        chosen, rejected = (sum(x) / len(x) for x in (logp(policy, pair.chosen), logp(policy, pair.rejected)))
        if kind == 'orpo':
            odds = [x - math.log(1 - math.exp(x)) for x in (chosen, rejected)]
            wants.append(-chosen - 0.1 * log_sigmoid(odds[0] - odds[1]))
        else:
            wants.append(-log_sigmoid(2.0 * (chosen - rejected) - 1.0))
    trainer.fit()
    assert trainer.log.phases[0][f'{kind}/loss'] == pytest.approx(sum(wants) / 4, rel=1e-4)


@pytest.mark.parametrize('precompute', [True, False])
def test_kto_by_hand(precompute):
    records = [
        TokenizedLabelled(sequence=sequence([3 + i], [5 + i, 6, 2]), label=label)
        for i, label in enumerate([True, False, 'good', 0])
    ]
    settings = {'beta': 0.4, 'desirable_weight': 1.5, 'undesirable_weight': 0.5, 'precompute_ref_logprobs': precompute}
    trainer = make('kto', records, shuffle=False, moved=True, max_tokens_per_batch=9, **settings)
    policy, reference = trainer.strategy.unwrap(trainer.model), trainer.initial
    answers = [r.sequence for r in records]
    crossed = [sequence(answers[(i + 1) % 4].prompt_ids.tolist(), answers[i].response_ids.tolist()) for i in range(4)]
    z0 = max(0.0, sum(sum(logp(policy, s)) - sum(logp(reference, s)) for s in crossed) / 4)
    wants = []
    for s, good in zip(answers, [True, False, True, False], strict=True):
        z = 0.4 * (sum(logp(policy, s)) - sum(logp(reference, s)) - z0)
        wants.append(1.5 * (1 - 1 / (1 + math.exp(-z))) if good else 0.5 * (1 - 1 / (1 + math.exp(z))))
    trainer.fit()
    seen = trainer.log.phases[0]
    assert seen['kto/loss'] == pytest.approx(sum(wants) / 4, rel=1e-4)
    assert seen['kto/kl'] == pytest.approx(z0, rel=1e-3, abs=1e-6)


def test_kto_pairs_answers_with_prompts_that_fit_together():
    """A long prompt is cut on the left where it is paired with a long answer."""
    sequences = [sequence([4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], [5] * 4), sequence([3] * 3, [6] * 13)]
    records = [TokenizedLabelled(sequence=s, label=i == 0) for i, s in enumerate(sequences)]
    config = tiny_config('gpt2', **SMALL | {'positions': 16})
    strategy, actor, initial = NaiveStrategy(seed=5, device='cpu'), GPTActor(config=config), GPTActor(config=config)
    trainer = offline(KTOTrainer, strategy, actor, records, initial_model=strategy.prepare(initial))
    crossed = [sequence([3] * 3, [5] * 4), sequence([13, 14, 15], [6] * 13)]
    want = sum(sum(logp(actor, s)) - sum(logp(initial, s)) for s in crossed) / 2
    assert trainer.objective._reference_point(trainer.train_data) == pytest.approx(max(want, 0.0), rel=1e-3, abs=1e-5)
    trainer.fit()


def test_kto_labels_the_best_answers_good_and_counts_each_once():
    a, b = torch.tensor([5, 2]), torch.tensor([6, 2])

    def labels(responses: list[Any], scores: tuple[float, ...] | None) -> list[bool]:
        masks = [torch.ones(len(r), dtype=torch.bool) for r in responses]
        record = TokenizedPreference(
            prompt_ids=torch.tensor([3]), responses=responses, response_masks=masks, scores=scores
        )
        return [answer.is_desirable for answer in answers_of(record)]

    assert labels([a, b], None) == [True, False]
    assert labels([a, b, torch.tensor([7, 2])], (1.0, 1.0, 0.0)) == [True, True, False]
    assert labels([a, b, b], (1.0, 0.0, 0.0)) == [True, False]
    assert labels([a, a, b], (1.0, 0.5, 0.0)) == [True, False]
    assert labels([a, b], (1.0, 1.0)) == [] == labels([a, a], (1.0, 0.0))


def test_kto_rewards_are_means_over_the_batches_that_have_such_answers():
    records = [TokenizedLabelled(sequence=sequence([3 + i], [5 + i, 6, 2]), label=i > 0) for i in range(6)]
    settings = {'shuffle': False, 'moved': True, 'train_batch_size': 2, 'max_epochs': 1, 'lr': 1e-12}
    trainer, whole = make('kto', records, **settings), make('kto', records, **settings, log_interval=3)
    want = trainer.evaluate(records)
    whole.fit()
    seen = whole.log.phases[0]  # the bad answer is in the first of three batches
    assert want['reward_rejected'] != 0
    trainer.fit()  # each batch as a phase, also those without a bad answer
    rejected = [phase['kto/reward_rejected'] for phase in trainer.log.phases]
    assert rejected[0] != 0 and all(map(math.isnan, rejected[1:]))
    assert seen['kto/reward_rejected'] == pytest.approx(want['reward_rejected'], rel=1e-4)
    assert seen['kto/margin'] == pytest.approx(seen['kto/reward_chosen'] - seen['kto/reward_rejected'], rel=1e-4)


@pytest.mark.parametrize('kind', ['dpo', 'kto'])
def test_the_references_log_probs_do_not_stay_in_the_callers_records(kind):
    chosen, rejected = sequence([3], [5, 2]), sequence([3], [6, 2])
    if kind == 'kto':
        answers = [(chosen, True), (rejected, False)]
        records: list[Any] = [LabelledAnswer(sequence=s, is_desirable=good) for s, good in answers]
    else:
        records = [Pair(chosen=chosen, rejected=rejected, ref_chosen=-3.0)]  # half a pair is computed as well
    make(kind, records, moved=True).fit()
    if kind == 'kto':
        assert [r.ref_logp for r in records] == [None, None]
    else:
        assert (records[0].ref_chosen, records[0].ref_rejected) == (-3.0, None)
        assert make(kind, records).evaluate(records)['margin'] == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize(('kind', 'lora'), [('dpo', 0), ('kto', 2), ('orpo', 0), ('simpo', 2)])
def test_it_learns_and_improves_on_eval_data(kind, lora):
    trainer = make(kind, data(16), data(8), max_epochs=5, lr=2e-2, lora=lora)
    trainer.fit()
    first, last = trainer.log.phases[0], trainer.log.phases[-1]
    assert last[f'{kind}/loss'] < first[f'{kind}/loss']
    assert last[f'{kind}/val_margin'] > first[f'{kind}/margin'] + 0.02
    if kind != 'kto':
        assert last[f'{kind}/val_accuracy'] == 1.0


def test_the_reference_is_the_adapter_off_model():
    trainer = make('dpo', data(4), lora=2, moved=True, shuffle=False, dropout=0.3)
    bare = trainer.strategy.unwrap(trainer.model)
    bare.train()  # the policy has dropout, the reference none
    trainer.objective.prepare(trainer.train_data)
    assert bare.training
    with bare.adapter_disabled():
        want = [sum(logp(bare, p.chosen)) for p in trainer.train_data]
    assert [p.ref_chosen for p in trainer.train_data] == pytest.approx(want, abs=1e-4)
    assert [sum(logp(bare, p.chosen)) for p in trainer.train_data] != pytest.approx(want, abs=1e-2)


@pytest.mark.parametrize('kind', ['dpo', 'kto'])
def test_evaluation_of_other_records(kind):
    """Before and after `fit`, on unseen records, results equal those with a reference computed per batch."""
    seen = []
    for precompute in (True, False):
        trainer = make(kind, data(4), lr=2e-2, precompute_ref_logprobs=precompute)
        before = trainer.evaluate(data(3))
        trainer.fit()
        seen.append((before, trainer.evaluate(data(3))))
    assert seen[0][0] == pytest.approx(seen[1][0], rel=1e-4, abs=1e-5)
    assert seen[0][1] == pytest.approx(seen[1][1], rel=1e-4, abs=1e-5)
    assert abs(seen[0][1]['loss'] - seen[0][0]['loss']) > 1e-3


def test_an_evaluation_draws_no_dropout():
    trainer = make('kto', dropout=0.5, moved=True)
    trainer.model.train()
    assert trainer.evaluate(data(4)) == trainer.evaluate(data(4)) and trainer.model.training


def test_ranked_answers_are_all_pairs_here_and_for_the_reward_trainer():
    for record, expected in (
        # 6 and 7 are tied; the last 6 repeats the second text, which has the better rank
        (preference([3], [5], [6], [7], [6], scores=(3.0, 2.0, 2.0, 1.0)), [(5, 6), (5, 7)]),
        (preference([3], [5], [5], scores=(2.0, 1.0)), []),  # one answer with two scores
        (preference([3], [5], [6], [5], [7]), [(5, 6), (5, 7), (6, 7)]),
    ):
        assert [(p.chosen.response_ids.item(), p.rejected.response_ids.item()) for p in pairs_of([record])] == expected
        columns = PairwiseObjective(RewardModelConfig()).columns([record])
        answers = [r.item() for r in record.responses]
        pairs = zip(columns['better'].tolist(), columns['worse'].tolist(), strict=True)
        assert [(answers[b], answers[w]) for b, w in pairs] == expected


def test_the_reference_scores_a_shared_answer_once(monkeypatch):
    trainer = make('dpo', [preference([3], [5], [6], [7])])
    seen = []
    score = Reference.sums
    monkeypatch.setattr(Reference, 'sums', lambda self, batch: seen.append(batch.num_sequences) or score(self, batch))
    trainer.fit()
    assert sum(seen) == 3


def test_kto_of_pairs_and_of_a_sequence_given_twice():
    pair = pairs_of([preference([3], [5], [6], [7])])
    twice = sequence([4], [5, 2])
    for records in (pair, [TokenizedLabelled(sequence=twice, label=label) for label in (True, False)]):
        trainer = make('kto', records, moved=True)
        trainer.fit()
        found = {id(r.sequence): r.ref_logp for r in trainer.train_data}
        for record in trainer.train_data:
            want = sum(logp(trainer.initial, record.sequence))
            assert record.ref_logp == found[id(record.sequence)] == pytest.approx(want, abs=1e-4)


def z0_by_hand(trainer: Any, crossed: list[Sequence]) -> float:
    policy = trainer.strategy.unwrap(trainer.model)
    return max(0.0, sum(sum(logp(policy, s)) - sum(logp(trainer.initial, s)) for s in crossed) / len(crossed))


@pytest.mark.parametrize('last', [5, 9])
def test_z0_of_a_last_batch_of_one_record_takes_another_prompt(last):
    one, two, three = sequence([3, 4], [5, 6, 2]), sequence([7], [9, 8, 2]), sequence([3, 5], [last, 2])
    records = [TokenizedLabelled(sequence=s, label=s is not two) for s in (one, two, three)]
    trainer = make('kto', records, shuffle=False, moved=True, train_batch_size=2, lr=0.0)
    trainer.fit()
    want = z0_by_hand(trainer, [sequence([3, 4], [last, 2])])
    own = z0_by_hand(trainer, [three])
    assert abs(want - own) > 1e-3  # negative control: with its own prompt
    assert trainer.log.phases[1]['kto/kl'] == pytest.approx(want, rel=1e-3, abs=1e-6)


def test_z0_of_pairs_takes_answers_under_another_prompt():
    """Neighbours with the same prompt are skipped."""
    records = [preference([3, 5], [5, 9, 2], [6, 10, 2]), preference([4], [11, 2], [5, 8, 2])]
    trainer = make('kto', records, shuffle=False, moved=True, lr=0.0)
    trainer.fit()
    (a, b), (c, d) = (r.sequences() for r in records)
    under = lambda s, other: sequence(other.prompt_ids.tolist(), s.response_ids.tolist())  # noqa: E731
    want = z0_by_hand(trainer, [under(a, c), under(b, c), under(c, a), under(d, a)])
    own = z0_by_hand(trainer, [a, under(b, c), c, under(d, a)])
    assert abs(want - own) > 1e-3
    assert trainer.log.phases[0]['kto/kl'] == pytest.approx(want, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize(
    ('kind', 'settings', 'sentence'),
    [
        ('dpo', {'initial_model': None}, 'compares with a reference: pass initial_model, or an actor with lora_rank'),
        ('dpo', {'loss_type': 'sigmod'}, "loss_type='sigmod' is not known; choose one of"),
        (
            'dpo',
            {'label_smoothing': 0.2},
            "label_smoothing=0.2 belongs to the losses cdpo and robust, not to 'sigmoid'",
        ),
        ('dpo', {'records': [preference([3], [5], [5])]}, 'no record has two answers that differ'),
        ('kto', {'records': [sequence([3], [4])]}, 'not from a Sequence'),
        ('kto', {'records': [TokenizedLabelled(sequence=sequence([3], [4]), label=True)] * 2}, '2 good and 0 bad'),
        ('simpo', {'initial_model': torch.nn.Identity()}, 'SimPOTrainer has no reference: leave initial_model out'),
    ],
)
def test_mistakes(kind, settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        make(kind, **settings)


@pytest.mark.parametrize('kind', KINDS)
def test_a_resumed_run_has_the_same_bits(tmp_path, kind):
    check_resume(partial(make, kind, data(8), max_epochs=2), tmp_path, 1)


RUNS = [('dpo', True), ('dpo', False), ('kto', True), ('kto', False), ('orpo', None), ('simpo', None)]
"""method, and whether the reference is computed in advance"""


def runs(strategies: list[Any]) -> list[list[dict[str, float]]]:
    """Returns the metrics of every method under each strategy."""
    found = []
    for made, (kind, precompute) in product(strategies, RUNS):
        options = {} if precompute is None else {'precompute_ref_logprobs': precompute}
        with made(seed=5, device='cpu') as strategy:
            settings = {'max_epochs': 1, 'max_tokens_per_batch': 24, 'moved': True} | options
            trainer = make(kind, data(6), data(3), strategy=strategy, **settings)
            trainer.fit()
            found.append(trainer.log.phases)
    return found


def test_the_number_of_ranks_has_no_effect():
    alone = runs([NaiveStrategy])
    for results in run_distributed(runs, 2, [DDPStrategy, FSDPStrategy], init_group=True):
        for got, want in zip(results, 2 * alone, strict=True):
            close(got, want, rel=2e-3, abs=1e-4)


def test_a_resume_names_another_reference():
    trainer = make('dpo')
    trainer.initial.model.config.name_or_path = 'another'
    assert trainer.fingerprint()['initial_model'] == 'another'
    assert 'initial_model' not in make('dpo', lora=2).fingerprint() | make('simpo').fingerprint()
