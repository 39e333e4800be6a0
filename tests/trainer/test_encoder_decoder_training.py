"""PPO of encoder-decoders on token ids: the first ratio, learning, resuming, and two processes."""

from __future__ import annotations

import hashlib
import random
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import SMALL, assemble, check_outcome, fit, outcome, ppo, sequence, sft, trained, weights

from chatgpt.data import load_demonstrations
from chatgpt.data.formats import note_model
from chatgpt.nn import Actor
from chatgpt.rollout import HFEngine
from chatgpt.strategies import NaiveStrategy
from chatgpt.testing import ENCODER_DECODERS, encoder_decoder_tokenizer, tiny_causal_lm
from chatgpt.testing.fakes import tiny_config
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer import SFTTrainer, strategies
from chatgpt.trainer.prompt_evaluation import PromptEvaluation

VOCAB, GOOD = 16, (5, 6, 7, 8)


def prompts(num: int = 7) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB, (1 + i % 4,), generator=g) for i in range(num)]


class Scorer:
    """The share of good tokens, from ids alone; each rank scores its own."""

    def score(self, samples: Any, strategy: Any) -> list[float]:
        return [sum(int(t) in GOOD for t in s.response_ids) / s.num_actions for s in samples]


ROLES: dict[str, dict[str, Any]] = {
    'own': {},  # critic and initial model of their own
    'hydra': {'num_layers_unfrozen': 1, 'value_head': True},  # values and reference from the actor
    'lora': {'lora_rank': 2},
}


def make(family: str = 't5', roles: str = 'own', strategy: Any = None, **settings: Any) -> Any:
    sizes = {'experience_batch_size': 8, 'train_batch_size': 8, 'max_epochs': 2, 'max_tokens_per_batch': 48}
    given = sizes | {'kl_coef': 0.01, 'eos_token_id': 2, 'pad_token_id': 0, 'tokenizer': None} | settings
    return ppo(strategy, Scorer(), config=tiny_config(family, **SMALL), **ROLES[roles] | given)


def make_strategy(kind: str, **options: Any) -> Any:
    return getattr(strategies, kind)(seed=3, device='cpu', **options)


def outcome_of(kind: str, options: dict[str, Any], family: str, roles: str) -> dict[str, Any]:
    with make_strategy(kind, **options) as strategy:
        return outcome(strategy, fit(make(family, roles, strategy), 2, prompts()))


def run_jobs(jobs: list[tuple[str, dict[str, Any], str, str]]) -> list[dict[str, Any]]:
    return [outcome_of(*job) for job in jobs]


def exact_hashes(kinds: list[str]) -> list[str]:
    """Returns hashes of the weights after a few steps of SFT under `reproducible='exact'`."""
    g = torch.Generator().manual_seed(1)
    lengths = [(1 + i % 5, 1 + i % 7) for i in range(12)]
    data = [sequence(*(torch.randint(3, VOCAB, (n,), generator=g).tolist() for n in both)) for both in lengths]
    found = []
    for kind in kinds:
        with make_strategy(kind, reproducible='exact') as strategy:
            config = tiny_config('bart', **SMALL, layers=3)
            trainer = sft(data, strategy=strategy, config=config, train_batch_size=8, max_epochs=1, lr=3e-3)
            trainer.fit()
            weights = strategy.full_state_dict(trainer.model)
            content = b''.join(weights[name].numpy().tobytes() for name in sorted(weights))
            found.append(hashlib.sha256(content).hexdigest())
    return found


def m2m_losses(precisions: list[str]) -> list[list[float]]:
    """Returns losses of two steps of SFT under FSDP, of an M2M-100 with sinusoidal positions and LayerDrop of 0.5."""
    from transformers import M2M100Config

    sizes = {'d_model': 16, 'vocab_size': VOCAB, 'max_position_embeddings': 32, 'dropout': 0.0}
    drops = {'attention_dropout': 0.0, 'activation_dropout': 0.0}
    for side in ('encoder', 'decoder'):
        sizes |= {f'{side}_layers': 3, f'{side}_ffn_dim': 32, f'{side}_attention_heads': 2, f'{side}_layerdrop': 0.5}
    data = [sequence([3 + k % 13 for k in range(2 + i)], list(range(3, 4 + i))) for i in range(8)]
    found = []
    for precision in precisions:
        with make_strategy('FSDPStrategy', precision=precision) as strategy:
            config = M2M100Config(**sizes, **drops, pad_token_id=1, decoder_start_token_id=2)
            trainer = sft(data, strategy=strategy, config=config, train_batch_size=8, lr=1e-3)
            trainer.fit()
            found.append([phase['sft/loss'] for phase in trainer.log.phases])
    return found


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
def test_a_run_resumes_to_the_bit(family, roles, tmp_path: Path):
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


def test_two_processes_equal_one_process():
    ones = {key: outcome_of('NaiveStrategy', {}, *key) for key in {job[2:] for job in JOBS}}
    for job, first, second in zip(JOBS, *run_distributed(run_jobs, 2, JOBS, init_group=True), strict=True):
        check_outcome(first, ones[job[2:]], atol=1e-4, rel=1e-3, abs=1e-5)
        assert first['samples'] == second['samples'], job
        assert all(phase['ppo/first_ratio_error'] < 1e-5 for phase in first['metrics'])


def exact_and_m2m() -> tuple[list[str], list[list[float]]]:
    return exact_hashes(['DDPStrategy', 'FSDPStrategy']), m2m_losses(['fp32', 'bf16'])


def test_exact_learning_from_texts_and_the_sines_and_dropped_blocks_of_m2m_100_under_fsdp():
    (hashes, losses), (_, same) = run_distributed(exact_and_m2m, 2, init_group=True)  # rank 0 has whole weights
    assert hashes == exact_hashes(['NaiveStrategy']) * 2
    assert losses == same and losses[0][1] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)


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
    actor, optimizer = trained(strategy, Actor(model, value_head=True), lr=3e-3, eps=1e-8)
    given = {'train_batch_size': 16, 'max_epochs': 15, 'log_interval': 1000, 'tokenizer': tokenizer}
    SFTTrainer(strategy, actor, optimizer, load_demonstrations(rows, tokenizer)[0], **given).fit()

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
