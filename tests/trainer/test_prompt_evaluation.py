"""Evaluation on prompts: metrics by hand, equal draws, no effect on training, files, ranks, the best checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_runs
import torch
from tiny_runs import Log, preference, sequence, trained, weights

from chatgpt.nn import GPTActor
from chatgpt.rollout import Call, LocalEngine
from chatgpt.rollout.sampling import SamplingParams
from chatgpt.strategies import DDPStrategy, FSDPStrategy, NaiveStrategy
from chatgpt.strategies.checkpoint import list_checkpoints
from chatgpt.strategies.checkpoint.folder import score_of
from chatgpt.testing.fakes import char_tokenizer, tiny_config
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer import DPOTrainer, PromptEvaluation
from chatgpt.trainer.callbacks import Evaluator, MetricsWriter, SaveCheckpoint
from chatgpt.types import Prompt

PROMPTS = [{'prompt': text, 'want': want} for text, want in (('a', 3), ('bc', 1), ('def', 0))]
TOKENIZER = char_tokenizer()


def length(prompts: list[str], responses: list[str]) -> list[float]:
    return [float(len(r)) for r in responses]


def metric(samples: list[str], prompts: list[str], outputs: list[str], want: list[int]) -> dict[str, list[float]]:
    assert samples == [p + o for p, o in zip(prompts, outputs, strict=True)]
    return {'missing': [w - len(o) for w, o in zip(want, outputs, strict=True)]}


def config(dropout: float = 0.0) -> Any:
    return tiny_config('gpt2', vocab_size=len(TOKENIZER), positions=32, dropout=dropout)


def sft(*callbacks: Any, dropout: float = 0.0, **settings: Any) -> Any:
    data = [sequence([4 + i % 5], [6, 7 + i % 3, 2]) for i in range(8)]
    return tiny_runs.sft(data, config=config(dropout), tokenizer=TOKENIZER, callbacks=callbacks, **settings)


def evaluation_of(prompts: Any = PROMPTS, **settings: Any) -> PromptEvaluation:
    return PromptEvaluation(prompts, **{'max_new_tokens': 6, 'num_rows': 0} | settings)


def responses_of(evaluation: PromptEvaluation, trainer: Any) -> list[str]:
    evaluation(trainer)
    return [row['response'] for row in evaluation.last]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_numbers_are_those_of_the_responses():
    trainer = sft()
    evaluation = evaluation_of(reward=length, metric_fn=metric, max_new_tokens=5)
    found = evaluation(trainer)
    # by hand: the greedy continuation, token after token, by the model itself
    net = trainer.strategy.unwrap(trainer.model).model.eval()
    texts, ended, actions = [], [], []
    for row in PROMPTS:
        ids = TOKENIZER(row['prompt'], add_special_tokens=False)['input_ids']
        start = len(ids)
        while len(ids) - start < 5 and (len(ids) == start or ids[-1] != TOKENIZER.eos_token_id):
            ids.append(int(net(torch.tensor([ids])).logits[0, -1].argmax()))
        texts.append(TOKENIZER.decode(ids[start:], skip_special_tokens=True))
        ended.append(ids[-1] == TOKENIZER.eos_token_id)
        actions.append(len(ids) - start)
    lengths = [len(t) for t in texts]
    mean = sum(lengths) / 3
    assert found['score_mean'] == pytest.approx(mean)
    assert found['score_std'] == pytest.approx((sum((n - mean) ** 2 for n in lengths) / 3) ** 0.5)
    assert found['length_mean'] == pytest.approx(sum(actions) / 3)
    assert found['ended'] == pytest.approx(sum(ended) / 3)
    assert found['metrics/missing'] == pytest.approx((4 - sum(lengths)) / 3)
    assert [(row['prompt'], row['response']) for row in evaluation.last] == [
        *zip(('a', 'bc', 'def'), texts, strict=True)
    ]
    assert set(evaluation_of(['a'])(trainer)) == {'length_mean', 'ended'}  # without a reward there is no score


def test_draws_repeat_and_are_neither_those_of_another_seed_nor_of_the_training():
    trainer = sft()
    drawn = {'do_sample': True, 'max_new_tokens': 12}
    again = evaluation_of(seed=1, **drawn)
    first = responses_of(again, trainer)
    assert responses_of(again, trainer) == responses_of(evaluation_of(seed=1, **drawn), trainer) == first
    assert responses_of(evaluation_of(seed=2, **drawn), trainer) != first
    engine = LocalEngine()
    engine.begin(trainer.strategy.unwrap(trainer.model))
    prompt = Prompt(ids=torch.tensor(TOKENIZER('a', add_special_tokens=False)['input_ids']))
    sampling = SamplingParams(max_new_tokens=12, eos_token_ids=(TOKENIZER.eos_token_id,))
    training = engine.generate(Call.of([prompt] * 4, sampling, seed=0, indices=range(4)))
    engine.end()
    responses = [TOKENIZER.decode(s.response_ids, skip_special_tokens=True) for s in training]
    assert responses != responses_of(evaluation_of(['a'] * 4, **drawn), trainer)


def test_evaluating_leaves_no_trace_in_the_training():
    plain = sft(dropout=0.2)
    before = weights(plain)
    plain.fit()
    for do_sample in (False, True):
        watched = sft(Evaluator(evaluation_of(reward=length, do_sample=do_sample), 1), dropout=0.2)
        watched.fit()
        assert torch.equal(weights(plain), weights(watched))
    assert not torch.equal(weights(plain), before)


def test_dropout_is_off_while_evaluating_and_back_on_after_it():
    trainer, evaluation = sft(dropout=0.5), evaluation_of(max_new_tokens=12)
    trainer.model.train()
    first = responses_of(evaluation, trainer)
    assert trainer.strategy.unwrap(trainer.model).training
    trainer.model.eval()
    assert responses_of(evaluation, trainer) == first


def test_before_during_and_after_with_a_table_for_each_that_a_resume_cuts_back(tmp_path, capsys):
    def make() -> Any:
        evaluation = evaluation_of(iter(PROMPTS), reward=length, metric_fn=metric, num_rows=2)
        callbacks = Evaluator(evaluation, 3, metric='score_mean'), SaveCheckpoint(interval=2, keep_last=9)
        return sft(*callbacks, MetricsWriter(), run_dir=tmp_path)

    def check() -> None:
        assert [r['step'] for r in lines(tmp_path / 'eval.jsonl')] == [0, 3, 4]
        rows = lines(tmp_path / 'eval_samples.jsonl')
        assert [(r['step'], r['prompt']) for r in rows] == [(s, p) for s in (0, 3, 4) for p in ('a', 'bc')]
        assert all(r['missing'] == {'a': 3, 'bc': 1}[r['prompt']] - r['score'] for r in rows)
        have = ['eval/score_mean' in r for r in lines(tmp_path / 'metrics.jsonl')]
        assert have == [False, False, True, False]

    first = make()
    first.fit()
    assert first.phase == 4 and 'evaluation samples after phase 3' in capsys.readouterr().out
    check()
    again = make()
    assert again.load_checkpoint(tmp_path / 'checkpoints' / 'step-00000002')
    again.fit()
    check()


@pytest.mark.parametrize(
    ('scores', 'kept'),
    [([0.0, 0.2, 0.9, 0.1], [4, 5]), ([0.0, 0.9, 0.2, 0.1], [2, 5]), ([0.0, 0.2, 0.4, 0.9], [5])],
)
def test_the_best_checkpoint_by_an_evaluation_is_kept_the_last_one_included(tmp_path, scores, kept):
    values = iter(scores)  # before, at 2, at 4, after the last phase (5)
    saver = SaveCheckpoint(interval=2, keep_last=1, keep_best=1, metric='eval/score_mean')
    evaluator = Evaluator(lambda trainer: {'score_mean': next(values)}, 2)
    sft(evaluator, saver, run_dir=tmp_path, max_steps=5, max_epochs=9).fit()
    assert sorted(p.name for p in (tmp_path / 'checkpoints').iterdir()) == [f'step-{k:08d}' for k in kept]


def test_the_last_evaluation_scores_a_checkpoint_that_its_phase_has_written(tmp_path):
    values = iter([0.0, 0.2, 0.9])  # before, at 2, after the last phase (3)
    saver = SaveCheckpoint(interval=1, keep_last=1, keep_best=1, metric='eval/score_mean')
    sft(Evaluator(lambda trainer: {'score_mean': next(values)}, 2), saver, run_dir=tmp_path, max_steps=3).fit()
    [kept] = list_checkpoints(tmp_path / 'checkpoints')
    assert kept.name == 'step-00000003' and score_of(kept) == 0.9


def test_dpo_and_ppo_generate_with_their_actor():
    strategy, evaluator = NaiveStrategy(seed=5, device='cpu'), Evaluator(evaluation_of(reward=length), 1)
    actor, optim = trained(strategy, GPTActor(config=config()))
    settings = {'tokenizer': TOKENIZER, 'callbacks': [Log(), evaluator], 'max_epochs': 1}
    pairs = [preference([4], [5, 2], [6, 2])] * 4
    DPOTrainer(strategy, actor, optim, pairs, initial_model=GPTActor(config=config()), **settings).fit()
    assert {'eval/score_mean', 'eval/length_mean'} <= evaluator.last.keys()
    evaluator = Evaluator(evaluation_of(max_new_tokens=3), 1)  # the trainer's tokenizer and reward
    tiny_runs.ppo(None, length, config=config(), callbacks=[evaluator]).fit(['a', 'b'], 1, 1, 1)
    assert 0 <= evaluator.last['eval/score_mean'] <= 3


def test_a_metric_gets_the_columns_of_all_prompts():
    def wanted(prompts: list[str], outputs: list[str], want: list[Any]) -> dict[str, list[float]]:
        assert want == [None, 1, 0]
        return {'n': [1.0] * 3}

    evaluation = evaluation_of([{'prompt': 'a'}, *PROMPTS[1:]], metric_fn=wanted, max_new_tokens=1)
    assert evaluation(sft())['metrics/n'] == 1.0
    with pytest.raises(ValueError, match="PromptEvaluation: the trainer has no model 'critic'; it has actor"):
        evaluation_of(model='critic')(sft())


def test_a_metric_of_another_length_is_refused():
    with pytest.raises(ValueError, match="metric_fn: 'n' has 1 numbers for 3 samples"):
        evaluation_of(metric_fn=lambda **_: {'n': [1.0]}, max_new_tokens=1)(sft())


def evaluated(kinds: list[Any]) -> list[tuple[dict[str, float], int, int]]:
    """Evaluates under each strategy, on three prompts and on one, which leaves a rank without work."""
    found = []
    for kind in kinds:
        for prompts in (PROMPTS, PROMPTS[:1]):
            calls: list[int] = []

            def counted(calls: list[int] = calls, *, samples: Any, **given: Any) -> dict[str, list[float]]:
                calls.append(1)
                return metric(samples, **given)

            with kind(seed=5, device='cpu') as strategy:
                evaluator = Evaluator(evaluation_of(prompts, reward=length, metric_fn=counted, do_sample=True), 2)
                sft(evaluator, strategy=strategy).fit()
                found.append((evaluator.last, len(calls), strategy.rank))
    return found


def test_the_number_of_ranks_has_no_effect():
    alone = evaluated([NaiveStrategy]) * 2
    for results in run_distributed(evaluated, 2, [DDPStrategy, FSDPStrategy], init_group=True):
        for (want, _, _), (last, calls, rank) in zip(alone, results, strict=True):
            assert last == pytest.approx(want)
            # before, phase 2, phase 4: a metric function runs once, on rank 0
            assert calls == (3 if rank == 0 else 0)
