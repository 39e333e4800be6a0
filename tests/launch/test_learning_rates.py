"""The default learning rate of a run: by trained parameters and method, and printed."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

import chatgpt
from chatgpt.launch.recipes import learning_rate
from chatgpt.launch.runs import PPORun, Run, run_class
from chatgpt.monitor.learning_rate import recommended_lr
from chatgpt.nn import GPTActor
from chatgpt.strategies import NaiveStrategy
from chatgpt.testing.fakes import tiny_config


def run_of(method: str, **settings: object) -> Run:
    run = run_class(method)(**settings)
    run.method = method
    return run


def to_one_digit(rate: float) -> object:
    power = 10.0 ** math.floor(math.log10(rate))
    return pytest.approx(round(rate / power) * power, rel=1e-9)


@pytest.mark.parametrize(
    ('method', 'share'),
    [('sft', 1), ('reward-model', 1), ('ppo', 1 / 5), ('grpo', 1 / 5), ('orpo', 1 / 2)],
)
def test_by_method_and_size(capsys, method, share):
    actor = GPTActor(config=tiny_config('gpt2'))
    count = sum(p.numel() for p in actor.parameters())
    rate = learning_rate(run_of(method, pretrain='m'), NaiveStrategy(), actor)
    assert rate == to_one_digit(9e-6 * math.sqrt(6e9 / count) * share)
    out = capsys.readouterr().out
    assert out == f'lr {rate:g}, as {count:,} parameters are trained; --lr sets another (docs/learning_rates.md)\n'


@pytest.mark.parametrize(('method', 'batch'), [('dpo', 4), ('dpo', 64), ('simpo', 16), ('kto', 8)])
def test_preference_losses_go_with_the_square_root_of_the_batch(capsys, method, batch):
    actor = GPTActor(config=tiny_config('gpt2'))
    count = sum(p.numel() for p in actor.parameters())
    rate = learning_rate(run_of(method, pretrain='m', train_batch_size=batch), NaiveStrategy(), actor)
    assert rate == to_one_digit(9e-6 * math.sqrt(6e9 / count) / 15 * math.sqrt(batch / 64))
    assert f'{count:,} parameters are trained, with batches of {batch};' in capsys.readouterr().out


def test_what_is_trained_counts_and_adapters_take_ten_times_the_rate_of_the_whole_model(capsys):
    actor = GPTActor(config=tiny_config('gpt2'), lora_rank=2)
    whole, trained = (sum(p.numel() for p in actor.parameters() if p.requires_grad or every) for every in (True, False))
    rate = learning_rate(run_of('ppo', pretrain='m', lora_rank=2), NaiveStrategy(), actor)
    assert rate == to_one_digit(10 * 9e-6 * math.sqrt(6e9 / whole) / 5)
    assert f'{trained:,} of {whole:,} parameters are trained, as LoRA' in capsys.readouterr().out
    half = GPTActor(config=tiny_config('gpt2'))
    for p in list(half.parameters())[::2]:
        p.requires_grad_(False)
    trained = sum(p.numel() for p in half.parameters() if p.requires_grad)
    rate = learning_rate(run_of('ppo', pretrain='m'), NaiveStrategy(), half)
    assert rate == to_one_digit(9e-6 * math.sqrt(6e9 / trained) / 5)
    # a model with only its head trained has the rate of the head's size, not that of an adapter
    assert recommended_lr(6 * 10**9, 'rm', 6 * 10**7, adapters=False) == pytest.approx(9e-5)


def test_a_given_rate_is_taken_in_silence(capsys):
    run = run_of('ppo', pretrain='m', lr=0.25, critic_lr=0.5)
    actor = GPTActor(config=tiny_config('gpt2'))
    assert [learning_rate(run, NaiveStrategy(), actor, name) for name in ('lr', 'critic_lr')] == [0.25, 0.5]
    assert capsys.readouterr().out == ''


def test_a_critic_has_the_rate_of_a_reward_model_and_both_reach_the_optimizers(tiny_folder, capsys):
    trainer = chatgpt.train(
        tiny_folder, reward_fn=lambda prompts, responses: [0.0] * len(prompts), prompts=['a', 'b'],
        num_timesteps=1, experience_batch_size=2, train_batch_size=2, max_new_tokens=2, strategy='naive',
    )  # fmt: skip
    found = dict(re.findall(r'^(lr|critic_lr) (\S+), as', capsys.readouterr().out, re.MULTILINE))
    assert float(found['lr']) == trainer.actor_optim.param_groups[0]['lr']
    trunk, head = trainer.critic_optim.param_groups
    assert float(found['critic_lr']) == trunk['lr'] == pytest.approx(head['lr'] / 10)
    assert len(head['params']) == 2 and 3 < float(found['critic_lr']) / float(found['lr']) < 8


def test_a_value_head_on_the_trunk_has_the_rate_of_an_adapter_or_the_one_given(tiny_folder, capsys):
    def groups(**given: Any) -> list[dict[str, Any]]:
        trainer = chatgpt.train(
            tiny_folder, reward_fn=lambda prompts, responses: [0.0] * len(prompts), prompts=['a', 'b'],
            num_timesteps=1, experience_batch_size=2, train_batch_size=2, max_new_tokens=2, strategy='naive',
            critic='shared', **given,
        )  # fmt: skip
        assert trainer.critic_optim is None
        actor, (trunk, head) = trainer.strategy.unwrap(trainer.actor), trainer.actor_optim.param_groups
        assert [id(p) for p in head['params']] == [id(p) for p in actor.value_head.parameters()]
        assert [id(p) for p in trunk['params'] + head['params']] == [id(p) for p in actor.parameters()]
        return [trunk, head]

    trunk, head = groups()
    found = dict(re.findall(r'^(lr|critic_lr) ([\d.e-]+),? (?:as|for the new)', capsys.readouterr().out, re.MULTILINE))
    assert [float(found['lr']), float(found['critic_lr'])] == [trunk['lr'], head['lr']]
    assert head['lr'] / trunk['lr'] == pytest.approx(50, rel=0.2)  # 10 of adapters, 5 of a critic
    trunk, head = groups(lr=1e-4, critic_lr=2e-4)
    assert [trunk['lr'], head['lr']] == [1e-4, 2e-4] and 'critic_lr' not in capsys.readouterr().out


def test_sgd_has_no_default():
    with pytest.raises(ValueError, match='optimizer=sgd has no default learning rate: give lr'):
        PPORun(pretrain='m', optimizer='sgd').validate()
