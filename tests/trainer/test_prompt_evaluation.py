"""Evaluation on eval prompts: numbers by hand, the same draws, no trace in the training, files, ranks, the best
checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from phase_log import sequence

from chatgpt.data import TokenizedPreference
from chatgpt.nn import GPTActor, GPTCritic
from chatgpt.rollout import Call, LocalEngine
from chatgpt.rollout.sampling import SamplingParams
from chatgpt.strategies import DDPStrategy, FSDPStrategy, NaiveStrategy
from chatgpt.testing.fakes import char_tokenizer, tiny_config
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer import DPOTrainer, PPOTrainer, PromptEvaluation, SFTTrainer
from chatgpt.trainer.callbacks import Evaluator, MetricsWriter, ProgressBar, SaveCheckpoint
from chatgpt.types import Prompt

PROMPTS = [{'prompt': text, 'want': want} for text, want in (('a', 3), ('bc', 1), ('def', 0))]
TOKENIZER = char_tokenizer()


def length(prompts: list[str], responses: list[str]) -> list[float]:
    return [float(len(r)) for r in responses]


def metric(samples: list[str], prompts: list[str], outputs: list[str], want: list[int]) -> dict[str, list[float]]:
    assert samples == [p + o for p, o in zip(prompts, outputs, strict=True)]
    return {'missing': [w - len(o) for w, o in zip(want, outputs, strict=True)]}


def an_actor(dropout: float = 0.0) -> GPTActor:
    torch.manual_seed(3)
    return GPTActor(config=tiny_config('gpt2', vocab_size=len(TOKENIZER), positions=32, dropout=dropout))


def sft(
    callbacks: list[Any], *, strategy: Any = None, dropout: float = 0.0, run_dir: Path | None = None, **kw: Any
) -> SFTTrainer:
    strategy = strategy or NaiveStrategy(seed=5, device='cpu')
    actor = an_actor(dropout)
    actor, optim = strategy.prepare((actor, torch.optim.AdamW(actor.parameters(), lr=1e-2, eps=1e-5)))
    data = [sequence([4 + i % 5], [6, 7 + i % 3, 2]) for i in range(8)]
    given: dict[str, Any] = {'train_batch_size': 4, 'max_epochs': 2, 'log_interval': 1} | kw
    quiet = ProgressBar(enabled=False)
    return SFTTrainer(
        strategy, actor, optim, data, tokenizer=TOKENIZER, callbacks=[quiet, *callbacks], run_dir=run_dir, **given
    )


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_numbers_are_those_of_the_responses():
    trainer = sft([])
    evaluation = PromptEvaluation(PROMPTS, reward=length, metric_fn=metric, max_new_tokens=5, num_rows=0)
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
    assert [row['response'] for row in evaluation.last] == texts
    assert [row['prompt'] for row in evaluation.last] == ['a', 'bc', 'def']


def test_without_a_reward_there_is_no_score():
    assert set(PromptEvaluation(['a'], max_new_tokens=2, num_rows=0)(sft([]))) == {'length_mean', 'ended'}


def test_sampled_evaluations_repeat_their_draws_and_another_seed_does_not():
    trainer = sft([])

    def said(seed: int) -> list[str]:
        evaluation = PromptEvaluation(PROMPTS, seed=seed, do_sample=True, max_new_tokens=12, num_rows=0)
        twice = []
        for _ in range(2):
            evaluation(trainer)
            twice.append([row['response'] for row in evaluation.last])
        assert twice[0] == twice[1]
        return twice[0]

    assert said(1) == said(1)
    assert said(1) != said(2)


def test_draws_are_not_those_of_the_training():
    trainer = sft([])
    evaluation = PromptEvaluation(['a'] * 4, do_sample=True, max_new_tokens=12, num_rows=0)
    evaluation(trainer)
    engine = LocalEngine()
    engine.begin(trainer.strategy.unwrap(trainer.model))
    prompt = Prompt(ids=torch.tensor(TOKENIZER('a', add_special_tokens=False)['input_ids']))
    sampling = SamplingParams(max_new_tokens=12, eos_token_ids=(TOKENIZER.eos_token_id,))
    training = engine.generate(Call.of([prompt] * 4, sampling, seed=0, indices=range(4)))
    engine.end()
    responses = [TOKENIZER.decode(s.response_ids, skip_special_tokens=True) for s in training]
    assert responses != [row['response'] for row in evaluation.last]


@pytest.mark.parametrize('do_sample', [False, True])
def test_evaluating_leaves_no_trace_in_the_training(do_sample):
    plain = sft([], dropout=0.2)
    plain.fit()
    evaluation = PromptEvaluation(PROMPTS, reward=length, do_sample=do_sample, max_new_tokens=4, num_rows=0)
    watched = sft([Evaluator(evaluation, 1)], dropout=0.2)
    watched.fit()
    a, b = plain.model.state_dict(), watched.model.state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert any(not torch.equal(t, u) for t, u in zip(a.values(), an_actor().state_dict().values(), strict=True))


def test_dropout_is_off_while_evaluating_and_back_on_after_it():
    trainer = sft([], dropout=0.5)
    trainer.model.train()
    evaluation = PromptEvaluation(PROMPTS, max_new_tokens=12, num_rows=0)
    evaluation(trainer)
    first = [row['response'] for row in evaluation.last]
    assert trainer.strategy.unwrap(trainer.model).training
    trainer.model.eval()
    evaluation(trainer)
    assert [row['response'] for row in evaluation.last] == first


def test_before_during_and_after_with_a_table_for_each(tmp_path, capsys):
    evaluation = PromptEvaluation(iter(PROMPTS), reward=length, metric_fn=metric, max_new_tokens=4, num_rows=2)
    trainer = sft([Evaluator(evaluation, 3, metric='score_mean'), MetricsWriter()], run_dir=tmp_path)
    trainer.fit()
    assert trainer.phase == 4
    assert [r['step'] for r in lines(tmp_path / 'eval.jsonl')] == [0, 3, 4]
    rows = lines(tmp_path / 'eval_samples.jsonl')
    assert [(r['step'], r['prompt']) for r in rows] == [(s, p) for s in (0, 3, 4) for p in ('a', 'bc')]
    assert all(r['missing'] == {'a': 3, 'bc': 1}[r['prompt']] - r['score'] for r in rows)
    assert [name in r for r in lines(tmp_path / 'metrics.jsonl') for name in ('eval/score_mean',)] == [
        False,
        False,
        True,
        False,
    ]
    assert 'evaluation samples after phase 3' in capsys.readouterr().out


def test_a_resumed_run_cuts_the_table_back(tmp_path):
    def make() -> SFTTrainer:
        evaluation = PromptEvaluation(['a'], max_new_tokens=2)
        return sft([Evaluator(evaluation, 1), SaveCheckpoint(interval=2, keep_last=9)], run_dir=tmp_path)

    make().fit()
    assert [r['step'] for r in lines(tmp_path / 'eval_samples.jsonl')] == [0, 1, 2, 3, 4]
    again = make()
    assert again.load_checkpoint(tmp_path / 'checkpoints' / 'step-00000002')
    again.fit()
    assert [r['step'] for r in lines(tmp_path / 'eval_samples.jsonl')] == [0, 1, 2, 3, 4]
    assert [r['step'] for r in lines(tmp_path / 'eval.jsonl')] == [0, 1, 2, 3, 4]


def test_the_best_checkpoint_by_an_evaluation_is_kept_the_last_one_included(tmp_path):
    scores = iter([0.0, 0.2, 0.9, 0.1])  # before, at 2, at 4, after the last phase (5)

    def kept(values: Any, folder: Path) -> list[str]:
        def fake(trainer: Any) -> dict[str, float]:
            return {'score_mean': next(values)}

        saver = SaveCheckpoint(interval=2, keep_last=1, keep_best=1, metric='eval/score_mean')
        sft([Evaluator(fake, 2), saver], run_dir=folder, max_steps=5, max_epochs=9).fit()
        return sorted(p.name for p in (folder / 'checkpoints').iterdir())

    assert kept(scores, tmp_path / 'a') == ['step-00000004', 'step-00000005']
    assert kept(iter([0.0, 0.9, 0.2, 0.1]), tmp_path / 'b') == ['step-00000002', 'step-00000005']
    assert kept(iter([0.0, 0.2, 0.4, 0.9]), tmp_path / 'c') == ['step-00000005']


def test_stop_strings_end_a_response_and_are_cut():
    trainer = sft([])
    free = PromptEvaluation(PROMPTS, do_sample=True, max_new_tokens=20, num_rows=0)
    free(trainer)
    whole = [row['response'] for row in free.last]
    special = ''.join(TOKENIZER.all_special_tokens)  # a stop string may also be found in the name of one of these
    letter = next(c for text in whole for c in text[2:-1] if c.strip() and c not in special)
    cut = PromptEvaluation(PROMPTS, do_sample=True, max_new_tokens=20, num_rows=0, stop_strings=[letter])
    cut(trainer)
    assert [row['response'] for row in cut.last] == [text.split(letter)[0] for text in whole]


def test_dpo_and_ppo_speak_through_their_actor():
    strategy = NaiveStrategy(seed=5, device='cpu')
    actor = an_actor()
    actor, optim = strategy.prepare((actor, torch.optim.AdamW(actor.parameters(), lr=1e-3)))
    answers = [torch.tensor([5, 2]), torch.tensor([6, 2])]
    masks = [torch.ones(2, dtype=torch.bool)] * 2
    pairs = [TokenizedPreference(prompt_ids=torch.tensor([4]), responses=answers, response_masks=masks)] * 4
    evaluator = Evaluator(PromptEvaluation(PROMPTS, reward=length, max_new_tokens=3, num_rows=0), 1)
    initial = strategy.prepare(an_actor())
    quiet = ProgressBar(enabled=False)
    DPOTrainer(
        strategy,
        actor,
        optim,
        pairs,
        initial_model=initial,
        tokenizer=TOKENIZER,
        callbacks=[quiet, evaluator],
        max_epochs=1,
    ).fit()
    assert {'eval/score_mean', 'eval/length_mean'} <= evaluator.last.keys()

    actor, critic = an_actor(), GPTCritic(config=tiny_config('gpt2', vocab_size=len(TOKENIZER), positions=32))
    (actor, optim), (critic, critic_optim), initial = strategy.prepare(
        (actor, torch.optim.AdamW(actor.parameters(), lr=1e-3)),
        (critic, torch.optim.AdamW(critic.parameters(), lr=1e-3)),
        an_actor(),
    )
    evaluator = Evaluator(
        PromptEvaluation(PROMPTS, max_new_tokens=3, num_rows=0), 1
    )  # the trainer's tokenizer and reward
    PPOTrainer(
        strategy,
        actor,
        critic,
        length,
        initial,
        optim,
        critic_optim,
        tokenizer=TOKENIZER,
        callbacks=[quiet, evaluator],
        experience_batch_size=4,
        train_batch_size=4,
        max_new_tokens=3,
    ).fit(['a', 'b'], 1, 1, 1)
    assert 0 <= evaluator.last['eval/score_mean'] <= 3


def test_a_metric_of_another_length_is_refused():
    with pytest.raises(ValueError, match="metric_fn: 'n' has 1 numbers for 3 samples"):
        PromptEvaluation(PROMPTS, metric_fn=lambda **_: {'n': [1.0]}, max_new_tokens=1)(sft([]))


def on_two_ranks() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, kind in (('ddp', DDPStrategy), ('fsdp', FSDPStrategy)):
        for prompts in (PROMPTS, PROMPTS[:1]):  # one prompt leaves a rank without work
            with kind(seed=5, device='cpu') as strategy:
                calls: list[int] = []

                def counted(calls: list[int] = calls, *, samples: Any, **given: Any) -> dict[str, list[float]]:
                    calls.append(1)
                    return metric(samples, **given)

                evaluation = PromptEvaluation(
                    prompts, reward=length, metric_fn=counted, do_sample=True, max_new_tokens=6, num_rows=0
                )
                evaluator = Evaluator(evaluation, 2)
                sft([evaluator], strategy=strategy).fit()
                found[f'{name} {len(prompts)}'] = evaluator.last, len(calls), strategy.rank
    return found


def test_the_number_of_ranks_does_not_enter():
    alone = {}
    for prompts in (PROMPTS, PROMPTS[:1]):
        evaluator = Evaluator(
            PromptEvaluation(prompts, reward=length, metric_fn=metric, do_sample=True, max_new_tokens=6, num_rows=0), 2
        )
        sft([evaluator]).fit()
        alone[len(prompts)] = evaluator.last
    for results in run_distributed(on_two_ranks, 2, init_group=True):
        for name, (last, calls, rank) in results.items():
            assert last == pytest.approx(alone[int(name[-1])]), name
            assert calls == (3 if rank == 0 else 0), (
                name
            )  # before, phase 2, phase 4: a metric function runs once, on rank 0
