"""PPO as a whole: it learns, repeats itself to the bit, and does not depend on micro-batches, padding and dropout."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from ppo_on_ids import GOOD, VOCAB, CountGood, fit, make, prompts, run
from stop_after import StopAfter
from tiny_runs import SMALL, assemble, weights

from chatgpt.environments import EnvironmentSettings
from chatgpt.nn import GPTRM, GPTActor
from chatgpt.strategies import NaiveStrategy
from chatgpt.strategies.checkpoint import CheckpointError
from chatgpt.testing.fakes import tiny_config
from chatgpt.trainer import NonFiniteError
from chatgpt.trainer.callbacks import EarlyStopping

BIASES: dict[str, Any] = {'lora_rank': 2, 'lora_train_bias': 'all'}


@pytest.mark.parametrize(
    'settings',
    [{}, {'value_head': True, 'value_coef': 0.5}, {'advantage_estimator': 'rloo', 'num_samples_per_prompt': 4}],
)
def test_learns_to_generate_the_good_token(settings):
    _, phases = run(12, train_batch_size=16, max_epochs=4, lr=1e-2, **settings)
    assert phases[0]['rollout/score_mean'] < 0.25
    assert phases[-1]['rollout/score_mean'] > 0.7


@pytest.mark.parametrize('value_head', [False, True])
def test_first_batch_after_a_rollout_has_ratio_one_even_where_the_model_has_dropout(value_head):
    for metrics in run(2, dropout=0.5, value_head=value_head)[1]:
        assert metrics['ppo/first_ratio_error'] < 1e-4 and abs(metrics['ppo/first_approx_kl']) < 1e-4


def test_micro_batches_change_nothing_but_rounding():
    whole, cut = run(max_tokens_per_batch=None), run(max_tokens_per_batch=16)
    for a, b in zip(whole[1], cut[1], strict=True):
        for name in ('ppo/policy_loss', 'ppo/value_loss', 'ppo/actor_grad_norm', 'rollout/score_mean'):
            assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-6), name
    steps = 3 * 2 * 2
    assert (weights(whole[0]) - weights(cut[0])).abs().max() < 0.05 * 3e-3 * steps


def test_prompts_are_sampled_without_replacement_and_a_remainder_is_learned():
    trainer = make(experience_batch_size=8)
    distinct = [torch.tensor([i]) for i in range(16)]
    trainer.fit(distinct, num_episodes=1, max_timesteps=5, update_timesteps=2)
    assert len(trainer.log.phases) == 3  # 2 + 2 + the remainder of 1
    seen = [int(e.prompt_ids[0]) for phase in trainer.log.experiences for e in phase]
    assert sorted(seen[:16]) == sorted(seen[16:32]) == list(range(16))
    assert seen[:16] != seen[16:32]


def test_early_stop_leaves_the_epochs_and_ratio_guard_skips():
    for target, stopped in ((1e-6, 1.0), (None, 0.0)):
        (metrics,) = run(1, max_epochs=4, target_kl=target)[1]
        assert metrics['ppo/early_stopped'] == stopped
        assert (metrics['ppo/num_updates'] == 8) == (not stopped)
    skipping, guarded = run(1, ratio_threshold=0.5)  # a mean ratio of about 1 exceeds it, so every batch is skipped
    assert guarded[0]['ppo/skipped_batches'] == 4.0
    assert torch.equal(weights(skipping), weights(make()))


def test_adaptive_kl_moves_the_coefficient_by_the_published_rule():
    trainer, phases = run(2, kl_target=6.0, kl_horizon=100.0, kl_coef=0.1)
    expected = 0.1
    for metrics in phases:
        assert metrics['rollout/kl_coef'] == pytest.approx(expected)
        error = min(max(metrics['rollout/kl_mean'] / 6.0 - 1.0, -0.2), 0.2)
        expected *= 1.0 + error * 16 / 100.0
    assert trainer.kl_controller.value == pytest.approx(expected)


def test_generate_then_step():
    trainer, queries = make(), prompts(8)
    before = weights(trainer).clone()
    responses = trainer.generate(queries)
    stats = trainer.step(queries, responses, [float((r == GOOD).float().mean()) for r in responses])
    assert trainer.phase == 1 and stats['ppo/first_ratio_error'] < 1e-4
    assert not torch.equal(before, weights(trainer))
    lengths = iter([1, 3, 2, 3])
    own = trainer.generate(queries[:4], length_sampler=lambda: next(lengths), eos_token_id=[])
    assert [len(r) for r in own] == [1, 3, 2, 3]
    whole = trainer.generate(queries[1], return_prompt=True)[0]
    assert torch.equal(whole[: len(queries[1])], queries[1])
    with pytest.raises(ValueError, match='unknown'):
        trainer.generate(queries, temprature=1.0)


def test_tokens_outside_the_response_mask_do_not_count():
    masks = [torch.tensor([True, False, False, True])] * 4
    queries, responses = [torch.tensor([3, 4])] * 4, [torch.tensor([5, 6, 7, 2])] * 4

    def stats(dense_at_masked: float) -> tuple[dict[str, float], torch.Tensor]:
        trainer = make(kl_coef=0.0)
        scores = [torch.tensor([0.1 * i, dense_at_masked, dense_at_masked, 1.0]) for i in range(4)]
        result = trainer.step(queries, responses, scores, masks)
        return {k: v for k, v in result.items() if not k.startswith('perf/')}, weights(trainer)

    (a, wa), (b, wb) = stats(0.0), stats(100.0)
    assert a == b and torch.equal(wa, wb)


def test_a_step_with_scores_does_not_ask_the_reward_model():
    narrow = GPTRM(config=tiny_config('gpt2', **SMALL | {'positions': 4}))
    trainer = make(reward=narrow)
    trainer.step([torch.tensor([3, 4])], [torch.tensor([4, 5, 6])], [1.0])
    assert trainer.phase == 1


def test_step_refuses():
    trainer = make()
    good = {'queries': [torch.tensor([3])], 'responses': [torch.tensor([4, 5, 6])], 'scores': [1.0]}
    for change, message in (
        ({'responses': []}, 'lists of one length'),
        ({'scores': [float('nan')]}, r'scores\[0\] is not finite'),
        ({'scores': [torch.tensor([])]}, r'scores\[0\] is empty'),
        ({'scores': [torch.tensor([1.0, 2.0])]}, r'scores\[0\] has 2 entries for 3 tokens'),
        ({'responses': [torch.tensor([], dtype=torch.int64)]}, 'response 0 is empty'),
        ({'responses': [torch.tensor([4, VOCAB, 6])]}, '^step: response 0 has the token id 16, outside of the vocab'),
        ({'queries': [torch.tensor([3, -1])]}, '^step: query 0 has the token id -1'),
        ({'queries': [torch.tensor([3] * 40)]}, r"^actor: sample\[0\] has 43 tokens, more than the model's"),
        ({'response_masks': [torch.tensor([True])]}, r'response_masks\[0\] has 1 entries for 3 tokens'),
    ):
        with pytest.raises(ValueError, match=message):
            trainer.step(**good | change)
    assert trainer.phase == 0


class Numbers:
    """A tokenizer with ids as text: 'i5.i7.'"""

    eos_token_id, bos_token_id, pad_token_id = 2, None, 0

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        return ''.join(f'i{int(i)}.' for i in ids)


@pytest.mark.parametrize('where', ['trainer', 'generate'])
def test_step_knows_that_a_response_ended_by_a_stop_string(where):
    stop = {'stop_strings': ['i6.i5.']}
    trainer = make(tokenizer=Numbers(), kl_coef=0.0, missing_eos_score=-9.0, **(stop if where == 'trainer' else {}))
    queries = [torch.tensor([3, 4])] * 4
    trainer.generate(queries, **(stop if where == 'generate' else {}))
    responses = [torch.tensor(ids) for ids in ([8, 6, 5], [8, 2], [8, 5, 6], [6, 5])]
    trainer.step(queries, responses, [1.0] * 4)
    assert [e.finish_reason for e in trainer.last_experiences] == ['stop', 'eos', 'length', 'stop']
    assert [e.rewards.sum().item() for e in trainer.last_experiences] == [1.0, 1.0, -9.0, 1.0]


def test_step_says_when_score_scaling_has_nothing_to_divide_by_and_knows_max_length():
    trainer, queries = make(score_scaling='ref', kl_coef=0.0), prompts(4)
    for scores, idle in (([0.0] * 4, 1.0), ([0.0, 0.0, 0.0, 4.0], 0.0), ([0.0] * 4, 0.0)):
        assert trainer.step(queries, trainer.generate(queries), scores)['rollout/score_scaling_idle'] == idle
    trainer = make(max_new_tokens=None, max_length=8, overlong_buffer=2, kl_coef=0.0)
    trainer.step([torch.tensor([3, 4, 5])] * 3, [torch.full((n,), 6) for n in (3, 4, 5)], [1.0] * 3)
    assert [e.rewards.sum().item() for e in trainer.last_experiences] == [1.0, 0.5, 0.0]


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        ({'kl_coeff': 0.1}, "unknown keyword 'kl_coeff'; here it is kl_coef"),
        ({'temprature': 0.1}, "unknown keyword 'temprature'; did you mean temperature"),
        ({'kl_kind': 'k9'}, "kl_kind='k9' is not known"),
        ({'ptx_coef': 0.1}, 'needs pretrain_data'),
        ({'top_p': 0.0}, 'top_p'),
        ({'overlong_buffer': 7}, 'overlong_buffer=7 is a part of max_new_tokens=6'),
        ({'overlong_buffer': 7, 'max_new_tokens': None, 'max_length': 5}, 'overlong_buffer=7 is a part of max_length'),
        ({'stop_strings': ['x']}, 'needs a tokenizer'),
    ],
)
def test_constructor_refuses(settings, message):
    with pytest.raises(ValueError, match=message):
        make(**settings)


def test_a_missing_reference_or_critic_is_refused():
    actor, biases = (GPTActor(config=tiny_config('gpt2', **SMALL), **own) for own in ({}, BIASES))
    for given in (actor, biases):  # without adapters the model with trained biases is not the initial one
        with pytest.raises(ValueError, match='kl_coef=0.1 needs a reference'):
            assemble(NaiveStrategy(), given, None, CountGood(), advantage_estimator='reinforce++')
    with pytest.raises(ValueError, match="advantage_estimator='gae' needs values"):
        assemble(NaiveStrategy(), actor, None, CountGood(), kl_coef=0.0)


def test_what_would_do_nothing_is_refused():
    for settings, message in (
        ({'critic': True, 'advantage_estimator': 'reinforce++'}, "'reinforce\\+\\+' takes no critic: pass critic=None"),
        ({'environment_settings': EnvironmentSettings()}, 'environment_settings: there is no environment'),
    ):
        with pytest.raises(ValueError, match=message):
            make(**settings)


def test_parts_of_a_phase_out_of_order_are_refused():
    trainer = make()
    with pytest.raises(ValueError, match='collect: there are no prompts: call set_prompts first'):
        trainer.collect(1)
    trainer.set_prompts(prompts())
    with pytest.raises(ValueError, match='num_timesteps=0 must be at least 1'):
        trainer.collect(0)
    with pytest.raises(ValueError, match='learn: there is no experience to learn from: collect first'):
        trainer.learn()


def test_a_stop_on_the_kl_needs_a_reference():
    stop = EarlyStopping('rollout/kl_mean', above=50.0)
    fit(make(callbacks=[stop]), 1)
    settings = {'advantage_estimator': 'reinforce++', 'kl_coef': 0.0, 'eos_token_id': 2, 'callbacks': [stop]}
    actor = GPTActor(config=tiny_config('gpt2', **SMALL))
    with pytest.raises(ValueError, match='rollout/kl_mean needs a reference, and this run measures no KL'):
        fit(assemble(NaiveStrategy(), actor, None, CountGood(), **settings), 1)


def test_a_warmup_longer_than_the_run_is_named():
    with pytest.warns(UserWarning, match='warmup_steps=100 is more than the 2 optimizer steps of this run'):
        fit(make(warmup_steps=100, train_batch_size=4, experience_batch_size=8, max_epochs=1), 1)


def test_a_loss_that_is_not_finite_stops_names_the_samples_and_leaves_the_weights():
    trainer = make(whiten_advantages=False, train_batch_size=16, max_tokens_per_batch=1)
    trainer.set_prompts(prompts())
    trainer.collect(1)
    before = weights(trainer).clone()
    list(trainer.buffer)[3].advantages[0] = float('nan')
    output = r'loss is not finite in phase 1, epoch 1, train batch 1; samples in it: 3\.'
    with pytest.raises(NonFiniteError, match=output):
        trainer.learn()
    assert torch.isfinite(before).all() and torch.equal(before, weights(trainer))


def test_after_a_gradient_that_is_not_finite_no_model_keeps_one(monkeypatch):
    trainer = make(critic=True)
    trainer.set_prompts(prompts())
    trainer.collect(1)
    monkeypatch.setattr(type(trainer.strategy), 'optimizer_step', lambda *_, **__: float('inf'))
    with pytest.raises(NonFiniteError, match='the gradient norm of the actor is inf'):
        trainer.learn()
    assert all(p.grad is None for m in (trainer.actor, trainer.critic) for p in m.parameters())


def test_a_resumed_run_ends_with_the_bits_of_an_undisturbed_one(tmp_path):
    settings = {'kl_target': 6.0, 'score_scaling': 'running'}
    straight, phases = run(4, **settings)
    stopped = fit(make(callbacks=[StopAfter(2, save=True)], run_dir=tmp_path, **settings), 4)
    assert len(stopped.log.phases) == 2
    resumed = make(run_dir=tmp_path, **settings)
    torch.manual_seed(999)  # the library does not read the global generator
    assert resumed.load_checkpoint('auto')
    fit(resumed, 4)
    assert stopped.log.phases + resumed.log.phases == phases
    assert torch.equal(weights(resumed), weights(straight))
    lines = [json.loads(line) for line in (tmp_path / 'metrics.jsonl').read_text().splitlines()]
    assert [line['step'] for line in lines] == [1, 2, 3, 4]
    again = fit(fit(make(**settings), 2), 2)  # in one process, without a checkpoint
    assert again.phase == 4 and again.log.phases == phases
    assert run(1, seed=2, **settings)[1] != phases[:1]


def test_resume_auto_without_a_checkpoint_starts_fresh_and_a_wrong_folder_is_named(tmp_path):
    trainer = make(run_dir=tmp_path)
    assert trainer.load_checkpoint('auto') is False
    with pytest.raises(FileNotFoundError, match='nowhere'):
        trainer.load_checkpoint(tmp_path / 'nowhere')
    (tmp_path / 'empty').mkdir()
    with pytest.raises(CheckpointError, match='no whole checkpoint'):
        trainer.load_checkpoint(tmp_path / 'empty')
