"""PPO of encoder-decoders: the first ratio, learning, going on from a checkpoint, and two processes."""

from __future__ import annotations

import math
import random
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from encoder_decoder_runs import exact_hashes, m2m_losses, make, prompts, several, trained
from tiny_runs import assemble, near, weights
from tiny_runs import trained as prepared

from chatgpt.data import load_demonstrations
from chatgpt.data.formats import note_model
from chatgpt.nn import Actor
from chatgpt.rollout import HFEngine
from chatgpt.strategies import NaiveStrategy
from chatgpt.testing import ENCODER_DECODERS, encoder_decoder_tokenizer, tiny_causal_lm
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer import SFTTrainer
from chatgpt.trainer.prompt_evaluation import PromptEvaluation


@pytest.mark.parametrize(
    ('family', 'roles'), [*((family, 'own') for family in ENCODER_DECODERS), ('t5', 'lora'), ('flan-t5', 'hydra')]
)
def test_the_first_ratio_is_1_and_the_first_kl_0(family, roles):
    trainer = make(family, roles)
    assert isinstance(trainer.engine, HFEngine)
    before = [p.detach().clone() for m in trainer.models().values() for p in m.parameters()]
    trainer.fit(prompts(), 1, 2, 1)
    first, second = trainer.log.phases
    assert first['ppo/first_ratio_error'] < 1e-5 and second['ppo/first_ratio_error'] < 1e-5
    assert abs(first['rollout/kl_mean']) < 1e-5 < second['rollout/kl_k3_mean']
    after = [p for m in trainer.models().values() for p in m.parameters()]
    changed = [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]
    assert any(changed) and (roles == 'own' or not all(changed))


@pytest.mark.parametrize(('family', 'roles'), [('t5', 'hydra'), ('bart', 'own')])
def test_a_run_goes_on_to_the_bit(family, roles, tmp_path: Path):
    whole, half, rest = make(family, roles), make(family, roles, run_dir=tmp_path), make(family, roles)
    whole.fit(prompts(), 2, 1, 1)
    half.fit(prompts(), 1, 1, 1)
    rest.load_checkpoint(half.save_checkpoint())
    rest.fit(prompts(), 2, 1, 1)
    assert torch.equal(weights(rest), weights(whole))


JOBS = [
    ('DDPStrategy', {}, 't5', 'own'),
    ('DDPStrategy', {}, 'bart', 'hydra'),
    ('FSDPStrategy', {'meta_init': True}, 't5', 'own'),
    ('FSDPStrategy', {}, 'bart', 'hydra'),
    ('FSDPStrategy', {'meta_init': True}, 'flan-t5', 'lora'),
]


def test_two_processes_are_one():
    ones = {key: trained('NaiveStrategy', {}, *key) for key in {job[2:] for job in JOBS}}
    for job, first, second in zip(JOBS, *run_distributed(several, 2, JOBS, init_group=True), strict=True):
        one = ones[job[2:]]
        assert first['samples'] == second['samples'] == one['samples'], job
        for a, b in zip(one['metrics'], first['metrics'], strict=True):
            for name in ('ppo/policy_loss', 'ppo/value_loss', 'ppo/actor_grad_norm', 'rollout/kl_mean'):
                assert math.isclose(a[name], b[name], rel_tol=1e-3, abs_tol=1e-5), (job, name, a[name], b[name])
            assert b['ppo/first_ratio_error'] < 1e-5
        near(first['weights'], one['weights'], atol=1e-4)


def exact_and_m2m() -> tuple[list[str], list[list[float]]]:
    return exact_hashes(['DDPStrategy', 'FSDPStrategy']), m2m_losses(['fp32', 'bf16'])


def test_exact_learning_from_texts_and_the_sines_and_dropped_blocks_of_m2m_100_under_fsdp():
    ((hashes, losses), (others, same)) = run_distributed(exact_and_m2m, 2, init_group=True)
    assert hashes == others == exact_hashes(['NaiveStrategy']) * 2
    assert losses == same and losses[0][1] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)


# ---------------------------------------------------------------------- learning


LETTERS = 'abcd'
SEED = 2
"""of seeds 0, 1 and 2 the last score is 0.83, 0.84 and 0.92, and the first 0.09, 0.20 and 0.22"""


def repeats(prompts: list[str], responses: list[str]) -> list[float]:
    return [float(response == prompt) for prompt, response in zip(prompts, responses, strict=True)]


def test_ppo_teaches_a_t5_to_repeat_its_prompt():
    draw = random.Random(SEED)
    tokenizer, model = encoder_decoder_tokenizer('t5'), tiny_causal_lm('t5', seed=SEED)
    note_model(tokenizer, model.config)
    rows = [{'prompt': letter, 'response': draw.choice(LETTERS)} for letter in LETTERS for _ in range(16)]
    torch.manual_seed(SEED)
    strategy = NaiveStrategy(seed=SEED)
    actor, optimizer = prepared(strategy, Actor(model, value_head=True), lr=3e-3, eps=1e-8)
    sft = {'train_batch_size': 16, 'max_epochs': 15, 'log_interval': 1000, 'tokenizer': tokenizer}
    SFTTrainer(strategy, actor, optimizer, load_demonstrations(rows, tokenizer)[0], **sft).fit()

    strategy = NaiveStrategy(seed=SEED)
    sizes = {'experience_batch_size': 64, 'train_batch_size': 32, 'max_epochs': 2, 'max_new_tokens': 3}
    initial = Actor(deepcopy(model))
    trainer = assemble(strategy, actor, None, repeats, initial, lr=3e-3, kl_coef=0.01, tokenizer=tokenizer, **sizes)
    drawn = {'do_sample': True, 'max_new_tokens': 3, 'num_rows': 0}
    evaluation = PromptEvaluation(list(LETTERS) * 16, tokenizer, repeats, **drawn)
    before = evaluation(trainer)['score_mean']
    trainer.fit(list(LETTERS), 1, 12, 1)
    assert before < 0.4, 'it writes letters at random'
    assert evaluation(trainer)['score_mean'] > 0.65
