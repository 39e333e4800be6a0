"""ILQL: the loss by hand, rewards at the right tokens, target heads, decoding, learning, ranks, files."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tiny_runs import SMALL, check_resume, close, near, offline, sequence
from transformers import GPT2LMHeadModel

from chatgpt.data import TokenizedLabelled
from chatgpt.launch.inputs import Inputs
from chatgpt.launch.models import build_model
from chatgpt.launch.runs import run_class
from chatgpt.nn import ILQLModel, initial_tensors
from chatgpt.rollout import Call, LocalEngine, SamplingParams
from chatgpt.strategies import DDPStrategy, FSDPStrategy, NaiveStrategy
from chatgpt.testing.fakes import char_tokenizer, tiny_config
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer import BetaEvaluation, ILQLTrainer, PromptEvaluation, rewarded
from chatgpt.trainer.callbacks import Callback, Evaluator
from chatgpt.trainer.objectives.ilql import standardized, turn_ends
from chatgpt.trainer.saving import save_pretrained
from chatgpt.types import Prompt

VOCAB = 16


def model(seed: int = 5, two_qs: bool = True, vocab: int = VOCAB) -> ILQLModel:
    torch.manual_seed(seed)
    made = ILQLModel(GPT2LMHeadModel(tiny_config('gpt2', **SMALL | {'vocab_size': vocab})), two_qs=two_qs)
    with torch.no_grad():  # targets differ from the heads, as after some steps
        for number, p in enumerate(made.target_q_heads.parameters()):
            torch.manual_seed(number)
            p.add_(0.1 * torch.randn(p.shape))
    return made


def make(data: Any, eval_data: Any = None, *, strategy: Any = None, two_qs: bool = True, **settings: Any) -> Any:
    strategy = strategy or NaiveStrategy(seed=5, device='cpu')
    return offline(ILQLTrainer, strategy, model(two_qs=two_qs), data, eval_data, **settings)


DIALOGUES = [
    sequence([3, 4], [5, 6, 7, 8, 2], [1, 1, 0, 1, 1]),
    sequence([9], [10, 2]),
    sequence([3], [4, 5, 6, 7], [0, 1, 1, 0]),
]
REWARDS = [[1.0, -2.0], 3.0, 0.5]


def by_hand(net: ILQLModel, data: list[Any], c: Any) -> dict[str, float]:
    """Returns every term, token by token, in float64 from plain modules."""
    net = net.double()
    sums = dict.fromkeys(('td_loss', 'value_loss', 'cql_loss', 'awac_loss'), 0.0)
    count = 0
    for r in data:
        ids = torch.cat([r.prompt_ids, r.response_ids])
        with torch.no_grad():
            hidden = net.model.transformer(ids[None]).last_hidden_state[0]
            logp = net.model.lm_head(hidden).log_softmax(-1)
            v = net.v_head(hidden)[:, 0]
            qs, targets = ([head(hidden) for head in heads] for heads in (net.q_heads, net.target_q_heads))
        start = len(r.prompt_ids) - 1
        counted = [t for t in range(len(r.response_ids)) if r.response_mask[t]]
        for k, t in enumerate(counted):
            s, a = start + t, int(r.response_ids[t])
            following = float(v[start + counted[k + 1]]) if k + 1 < len(counted) else 0.0
            target_q = min(float(q[s, a]) for q in targets)
            u = target_q - float(v[s])
            sums['td_loss'] += sum((float(q[s, a]) - float(r.rewards[t]) - c.gamma * following) ** 2 for q in qs)
            sums['value_loss'] += (c.tau if u >= 0 else 1 - c.tau) * u * u
            sums['cql_loss'] += c.cql_scale * sum(float(q[s].logsumexp(-1)) - float(q[s, a]) for q in qs)
            sums['awac_loss'] += c.awac_scale * -float(logp[s, a]) * float(torch.tensor(c.beta * u).exp())
            count += 1
    return {name: value / count for name, value in sums.items()}


@pytest.mark.parametrize(
    ('settings', 'two_qs'),
    [
        ({}, True),
        ({'beta': 2.0, 'tau': 0.9, 'gamma': 0.5}, False),
        ({'cql_scale': 0.0, 'awac_scale': 2.0, 'max_tokens_per_batch': 8}, True),
    ],
)
def test_the_loss_by_hand(settings, two_qs):
    data = rewarded(DIALOGUES, REWARDS)
    trainer = make(data, shuffle=False, standardize_rewards=False, two_qs=two_qs, **settings)
    want = by_hand(model(two_qs=two_qs), data, trainer.config)
    trainer.fit()
    seen = trainer.log.phases[0]
    for name, value in want.items():
        assert seen[f'ilql/{name}'] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    assert seen['ilql/loss'] == pytest.approx(sum(want.values()), rel=1e-4)
    shifted = [replace(r, rewards=r.rewards.roll(1)) for r in data]  # the negative control
    assert abs(by_hand(model(two_qs=two_qs), shifted, trainer.config)['td_loss'] - want['td_loss']) > 1e-3


def test_rewards_are_at_the_last_token_that_counts():
    records = rewarded(DIALOGUES, REWARDS)
    assert [r.rewards.tolist() for r in records] == [[0, 1, 0, 0, -2], [0, 3], [0, 0, 0.5, 0]]
    dense = rewarded(DIALOGUES[:1], [[1.0, 2.0, 3.0, 4.0, 5.0]])[0]
    assert dense.rewards.tolist() == [1, 2, 0, 4, 5]
    assert turn_ends(DIALOGUES[0].response_mask) == [1, 4]


def test_rewards_are_standardised_over_the_data_set_without_those_of_eval_data():
    records = standardized(rewarded(DIALOGUES, REWARDS))
    sums = torch.stack([r.rewards.sum() for r in records])
    assert float(sums.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(sums.std()) == pytest.approx(1.0, abs=1e-6)  # divided by n − 1, as in trlX
    assert sums.tolist() == pytest.approx([-0.907265, 1.072222, -0.164957], abs=1e-5)  # (x − 2.5 / 3) / √(8.1667 / 2)
    assert not any(r.rewards[~r.response_mask].any() for r in records)
    for same in (rewarded(DIALOGUES[:1], [9.0]), rewarded(DIALOGUES, [2.0, 2.0, 2.0])):
        assert all(float(r.rewards.abs().sum()) == 0.0 for r in standardized(same))
    beside = make(rewarded(DIALOGUES, REWARDS), rewarded(DIALOGUES, [100.0, -50.0, 7.0]))
    for a, b in zip(records, beside.train_data, strict=True):
        assert torch.equal(a.rewards, b.rewards)
    # with the moments of the training data
    assert float(beside.eval_data[0].rewards.sum()) == pytest.approx((100.0 - 2.5 / 3) / 2.020726, rel=1e-5)
    assert beside.evaluate(rewarded(DIALOGUES, REWARDS)) == beside.evaluate(beside.train_data), 'also of new records'


@pytest.mark.parametrize('interval', [1, 3])
def test_targets_are_updated_at_intervals(interval):
    settings = {'train_batch_size': 3, 'max_epochs': 1, 'target_sync_interval': interval, 'alpha': 0.25}
    trainer = make(rewarded(DIALOGUES * 4, REWARDS * 4), **settings)
    net = trainer.model
    expected = [p.clone() for p in net.target_q_heads.parameters()]

    class Follow(Callback):
        def on_learn_batch_end(self, trainer: Any, metrics: Any) -> None:
            if trainer.num_updates % interval == 0:
                for e, q in zip(expected, net.q_heads.parameters(), strict=True):
                    e.copy_(0.75 * e + 0.25 * q.detach())

    trainer.callbacks.callbacks.append(Follow())
    trainer.fit()
    assert trainer.num_updates == 4
    for want, got in zip(expected, net.target_q_heads.parameters(), strict=True):
        assert torch.allclose(want, got, atol=1e-6)
        assert not got.requires_grad


def test_decoding_is_the_papers_policy():
    net = model().eval()
    hidden = torch.randn(3, 16)
    plain = net.model.lm_head(hidden)
    assert torch.equal(net.head(hidden), plain)
    target = torch.minimum(*(head(hidden) for head in net.target_q_heads))
    for beta in (0.0, 1.0, 20.0):
        with net.decoding(beta):
            want = plain.log_softmax(-1) + beta * (target - net.v_head(hidden))
            assert torch.allclose(net.head(hidden), want, atol=1e-5)
    engine, prompts = LocalEngine(), [Prompt(ids=torch.tensor([3, 4]))]
    sampling = SamplingParams(max_new_tokens=6, do_sample=False)
    texts = []
    for beta in (0.0, 100.0):
        with net.decoding(beta):
            engine.begin(net)
            (sample,) = engine.generate(Call.of(prompts, sampling, seed=0, indices=[0]))
            texts.append(sample.response_ids)
            engine.end()
    ids = torch.tensor([[3, 4]])
    for t in range(6):  # greedily by hand
        state = net.model.transformer(ids).last_hidden_state[:, -1]
        q = torch.minimum(*(h(state) for h in net.target_q_heads))
        best = (net.model.lm_head(state).log_softmax(-1) + 100.0 * q).argmax(-1)
        assert int(best) == int(texts[1][t])
        ids = torch.cat([ids, best[None]], dim=1)
    assert texts[0].tolist() != texts[1].tolist()


def learnable() -> list[Any]:
    """Returns two answers to each prompt, equally often; the one with a 5 is rewarded."""
    tokens = [[3 + i % 3, [5, 2] if i % 2 else [9, 2]] for i in range(48)]
    return rewarded([sequence([p], r) for p, r in tokens], [1.0 if r[0] == 5 else 0.0 for _, r in tokens])


def test_the_improved_policy_is_better_than_the_data():
    trainer = make(learnable(), max_epochs=12, lr=1e-2, alpha=0.2, target_sync_interval=1, train_batch_size=8)
    trainer.fit()
    net, engine = trainer.model, LocalEngine()

    def share(beta: float) -> float:
        with net.decoding(beta):
            engine.begin(net)
            prompts = [Prompt(ids=torch.tensor([3 + i % 3])) for i in range(60)]
            found = engine.generate(Call.of(prompts, SamplingParams(max_new_tokens=1), seed=0, indices=range(60)))
            engine.end()
        return sum(int(s.response_ids[0]) == 5 for s in found) / 60

    assert 0.25 < share(0.0) < 0.75
    assert share(8.0) > 0.95


def length(prompts: list[str], responses: list[str]) -> list[float]:
    return [sum(map(ord, x)) / 100 for x in responses]


def over_betas(betas: tuple[float, ...], **settings: Any) -> BetaEvaluation:
    given = {'max_new_tokens': 5, 'num_rows': 0} | settings
    return BetaEvaluation(PromptEvaluation(['a', 'b', 'c'], char_tokenizer(), length, **given), betas)


def for_texts(strategy: Any, callbacks: Any = ()) -> ILQLTrainer:
    tokenizer = char_tokenizer()
    labels = ((4, 1.0), (6, 0))
    data = [TokenizedLabelled(sequence=sequence([3], [token, 5]), label=label) for token, label in labels]
    settings = {'tokenizer': tokenizer, 'train_batch_size': 2, 'max_epochs': 1, 'callbacks': callbacks}
    return offline(ILQLTrainer, strategy, model(vocab=len(tokenizer)), data, **settings)


def test_evaluation_over_betas():
    evaluator = Evaluator(over_betas((0.0, 50.0)), 1, metric='score_mean@beta=50')
    trainer = for_texts(NaiveStrategy(seed=5, device='cpu'), [evaluator])
    trainer.fit()
    assert {'eval/score_mean@beta=0', 'eval/score_mean@beta=50', 'eval/ended@beta=50'} <= evaluator.last.keys()
    assert trainer.model.decoding_beta is None  # restored: evaluations use the plain policy


def test_a_resumed_run_has_the_same_bits(tmp_path):
    check_resume(partial(make, learnable()[:24], max_epochs=1), tmp_path, 4)


def runs(kinds: list[Any]) -> list[tuple[list[dict[str, float]], dict[str, float], dict[str, torch.Tensor]]]:
    """Returns, for each strategy, the metrics of a run, an evaluation over β, and weights."""
    found = []
    for kind in kinds:
        with kind(seed=5, device='cpu') as strategy:
            evaluated = over_betas((0.0, 1.0, 20.0), top_k=4, do_sample=True)(for_texts(strategy))
            settings = {'max_epochs': 1, 'target_sync_interval': 1, 'alpha': 0.3}
            trainer = make(learnable()[:10], learnable()[:3], strategy=strategy, **settings)
            trainer.fit()
            weights = strategy.broadcast_object(strategy.full_state_dict(trainer.model))
            found.append((trainer.log.phases, evaluated, {n: t.clone() for n, t in weights.items()}))
    return found


def test_the_number_of_ranks_has_no_effect():
    ((want, evaluated, weights),) = runs([NaiveStrategy])
    assert len({evaluated[f'score_mean@beta={b}'] for b in (0, 1, 20)}) == 3
    for results in run_distributed(runs, 2, [DDPStrategy, FSDPStrategy], init_group=True):
        for phases, found, tensors in results:
            close(phases, want, rel=1e-3, abs=1e-4)
            assert found == pytest.approx(evaluated)
            near({'model': tensors}, {'model': weights}, atol=5e-4)


def test_the_folder_has_policy_and_heads(tmp_path):
    from transformers import AutoModelForCausalLM

    strategy = NaiveStrategy(device='cpu')
    net = strategy.prepare(model())
    save_pretrained(strategy, net, tmp_path / 'm')
    again = ILQLModel.from_pretrained(tmp_path / 'm')
    assert all(torch.equal(t, again.state_dict()[n]) for n, t in net.state_dict().items())
    assert AutoModelForCausalLM.from_pretrained(tmp_path / 'm').config.vocab_size == VOCAB
    assert len(again.q_heads) == 2
    with torch.device('meta'):
        sharded = ILQLModel.from_pretrained(tmp_path / 'm')
    later = dict(initial_tensors(sharded))
    assert all(torch.equal(later[n], p) for n, p in net.named_parameters())
    run: Any = run_class('ilql')(pretrain=str(tmp_path / 'm'), dataset='unused')
    built = build_model(Inputs(run=run, settings=run.config(), tokenizer=None, model=run.pretrain), 'ILQLModel')
    assert all(map(torch.equal, built.q_heads.parameters(), net.q_heads.parameters()))


def test_data_without_rewards_and_rewards_that_do_not_fit():
    for record, sentence in (
        (sequence([3], [4]), 'record 0 is a Sequence without rewards'),
        (TokenizedLabelled(sequence=sequence([3], [4]), label='good'), 'a label is no reward'),
    ):
        with pytest.raises(ValueError, match=sentence):
            make([record])
    for rewards, sentence in (
        ([1.0, 2.0], '3 sequences but 2 rewards'),
        ([[1.0, 2.0, 3.0], 1.0, 1.0], 'one for each of its 2 turns'),
        ([float('nan'), 1.0, 1.0], 'not finite'),
    ):
        with pytest.raises(ValueError, match=sentence):
            rewarded(DIALOGUES, rewards)
