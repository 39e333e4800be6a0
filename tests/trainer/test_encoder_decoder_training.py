"""PPO of encoder-decoders: the first ratio, learning, going on from a checkpoint, and two processes."""

from __future__ import annotations

import math
import random
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from encoder_decoder_runs import exact_hash, m2m_losses, make, prompts, train
from phase_log import Log

from chatgpt.data import load_demonstrations
from chatgpt.data.formats import note_model
from chatgpt.nn import Actor
from chatgpt.rollout import HFEngine
from chatgpt.strategies import NaiveStrategy
from chatgpt.testing import ENCODER_DECODERS, encoder_decoder_tokenizer, tiny_causal_lm
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer import PPOTrainer, SFTTrainer
from chatgpt.trainer.prompt_evaluation import PromptEvaluation


def scores(log: Log) -> list[float]:
    return [phase['rollout/score_mean'] for phase in log.phases]


@pytest.mark.parametrize('roles', ['own', 'hydra', 'lora'])
@pytest.mark.parametrize('family', ENCODER_DECODERS)
def test_the_first_ratio_is_1_and_the_first_kl_0(family, roles):
    log = Log()
    trainer = make(family, roles=roles, more=[log])
    assert isinstance(trainer.engine, HFEngine)
    before = [p.detach().clone() for m in trainer.models().values() for p in m.parameters()]
    trainer.fit(prompts(), 1, 2, 1)
    assert log.phases[0]['ppo/first_ratio_error'] < 1e-5 and log.phases[1]['ppo/first_ratio_error'] < 1e-5
    assert abs(log.phases[0]['rollout/kl_mean']) < 1e-5 < log.phases[1]['rollout/kl_k3_mean']
    after = [p for m in trainer.models().values() for p in m.parameters()]
    changed = [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]
    assert any(changed) and (roles == 'own' or not all(changed))


@pytest.mark.parametrize(('family', 'roles'), [('t5', 'own'), ('flan-t5', 'hydra'), ('bart', 'own')])
def test_it_learns(family, roles):
    log = Log()
    make(family, roles=roles, lr=1e-2, more=[log]).fit(prompts(16), 1, 15, 1)
    assert sum(scores(log)[-3:]) / 3 > sum(scores(log)[:3]) / 3 + 0.4, scores(log)


@pytest.mark.parametrize(('family', 'roles'), [('t5', 'hydra'), ('bart', 'own')])
def test_a_run_goes_on_to_the_bit(family, roles, tmp_path: Path):
    whole = make(family, roles=roles)
    whole.fit(prompts(), 2, 2, 1)
    half = make(family, roles=roles, run_dir=tmp_path)
    half.fit(prompts(), 1, 2, 1)
    saved = half.save_checkpoint()
    rest = make(family, roles=roles)
    rest.load_checkpoint(saved)
    rest.fit(prompts(), 2, 2, 1)
    for name, module in whole.models().items():
        again = dict(rest.models()[name].named_parameters())
        assert all(torch.equal(p, again[n]) for n, p in module.named_parameters())


@pytest.fixture(scope='module')
def alone() -> dict[tuple[str, str], dict[str, Any]]:
    return {key: train('NaiveStrategy', {}, *key) for key in (('t5', 'own'), ('bart', 'hydra'), ('flan-t5', 'lora'))}


@pytest.mark.parametrize(
    ('kind', 'options', 'family', 'roles'),
    [
        ('DDPStrategy', {}, 't5', 'own'),
        ('DDPStrategy', {}, 'bart', 'hydra'),
        ('FSDPStrategy', {'meta_init': True}, 't5', 'own'),
        ('FSDPStrategy', {}, 'bart', 'hydra'),
        ('FSDPStrategy', {'meta_init': True}, 'flan-t5', 'lora'),
    ],
)
def test_two_processes_are_one(kind, options, family, roles, alone):
    one = alone[family, roles]
    first, second = run_distributed(train, 2, kind, options, family, roles)
    assert first['samples'] == second['samples'] == one['samples']
    for a, b in zip(one['metrics'], first['metrics'], strict=True):
        for name in ('ppo/policy_loss', 'ppo/value_loss', 'ppo/actor_grad_norm', 'rollout/kl_mean'):
            assert math.isclose(a[name], b[name], rel_tol=1e-3, abs_tol=1e-5), (name, a[name], b[name])
        assert b['ppo/first_ratio_error'] < 1e-5
    for model, weights in one['weights'].items():
        for name, weight in weights.items():
            assert (weight - first['weights'][model][name]).abs().max() < 1e-4, (model, name)


def test_sines_and_dropped_blocks_of_m2m_100_under_fsdp():
    first, second = run_distributed(m2m_losses, 2, 'FSDPStrategy', 'fp32')
    assert first == second and first[1] < first[0]
    in_bf16, _ = run_distributed(m2m_losses, 2, 'FSDPStrategy', 'bf16')
    assert in_bf16 == pytest.approx(first, rel=2e-3)


@pytest.mark.parametrize('kind', ['DDPStrategy', 'FSDPStrategy'])
def test_learning_from_texts_is_exact(kind):
    one = exact_hash('NaiveStrategy', 'bart')
    assert run_distributed(exact_hash, 2, kind, 'bart')[0] == one


# ---------------------------------------------------------------------- learning


LETTERS = 'abcd'
SEED = 2
"""of seeds 0, 1 and 2 the last score is 0.83, 0.84 and 0.92, and the first 0.09, 0.20 and 0.22"""


def repeats(prompts: list[str], responses: list[str]) -> list[float]:
    return [float(response == prompt) for prompt, response in zip(prompts, responses, strict=True)]


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def test_ppo_teaches_a_t5_to_repeat_its_prompt():
    draw = random.Random(SEED)
    tokenizer, model = encoder_decoder_tokenizer('t5'), tiny_causal_lm('t5', seed=SEED)
    note_model(tokenizer, model.config)
    rows = [{'prompt': letter, 'response': draw.choice(LETTERS)} for letter in LETTERS for _ in range(16)]
    torch.manual_seed(SEED)
    strategy = NaiveStrategy(seed=SEED)
    actor, optimizer = strategy.prepare((policy := Actor(model, value_head=True), optimizer_of(policy)))
    sft = {'train_batch_size': 16, 'max_epochs': 15, 'log_interval': 1000, 'tokenizer': tokenizer}
    SFTTrainer(strategy, actor, optimizer, load_demonstrations(rows, tokenizer)[0], **sft).fit()

    strategy = NaiveStrategy(seed=SEED)
    initial = strategy.prepare(Actor(deepcopy(model)))
    actor, optimizer = strategy.prepare((actor, optimizer_of(actor)))
    trainer = PPOTrainer(
        strategy,
        actor,
        None,
        repeats,
        initial,
        optimizer,
        tokenizer=tokenizer,
        max_new_tokens=3,
        experience_batch_size=64,
        train_batch_size=32,
        max_epochs=2,
        kl_coef=0.01,
    )
    drawn = {'do_sample': True, 'max_new_tokens': 3, 'num_rows': 0}
    evaluation = PromptEvaluation(list(LETTERS) * 16, tokenizer, repeats, **drawn)
    before = evaluation(trainer)['score_mean']
    trainer.fit(list(LETTERS), 1, 12, 1)
    after = evaluation(trainer)['score_mean']
    assert before < 0.4, 'it writes letters at random'
    assert after > 0.65
