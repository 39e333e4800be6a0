"""Settings of a run that exclude each other: every row of the tables refuses some settings of a user before any work,
and none refuses the defaults."""

from __future__ import annotations

from typing import Any

import pytest

from chatgpt.launch import models
from chatgpt.launch.models import set_kernels
from chatgpt.launch.rules import DATA_RULES, ENCODER_DECODER_RULES, PPO_RUN_RULES, RUN_RULES
from chatgpt.launch.runs import DataRun, PPORun, RewardRun, SFTRun, run_class
from chatgpt.nn import Actor, RewardModel, head_kernels
from chatgpt.strategies.rules import MODEL_RULES
from chatgpt.testing import tiny_causal_lm
from chatgpt.trainer.rules import DECODE_RULES

TRUNK = {'shared_trunk': True, 'lora_rank': 2}
GEMINI = {'strategy': 'colossalai_gemini', 'precision': 'bf16'}
OWN = 'file.py:Mine'
FSDP = {'tensor_parallel': 2, 'strategy': 'fsdp'}
SEQUENCES = {'sequence_parallel': 2, 'strategy': 'fsdp'}
GAME = {'environment': 'games:countdown'}
# settings of PPO that are refused on their own
ALONE: dict[str, Any] = {'lora_alpha': 3.0, 'lora_dropout': 0.1, 'lora_target_modules': ['q'], 'lora_train_bias': 'all'}
ALONE |= {'save_adapter': True, 'quantize': 'nf4', 'shared_trunk': True, 'value_coef': 0.5, 'model': 'deberta'}
ALONE |= {'temperature': 0.0, 'ptx_coef': 0.1, 'ptx_data': 'a', 'environment': OWN, 'eval_episodes': 3, 'max_turns': 3}
ALONE |= {'environment_options': {'numbers': 3}, 'max_turn_tokens': 3, 'step_timeout_s': 3.0, 'rollout_chunk_size': 1}
ALONE |= {'rollout_slice_tokens': 8, 'vllm_tensor_parallel': 2}
ALONE |= {'environment_workers': 'processes', 'num_environment_workers': 3, 'rollout_resources': {'CPU': 1.0}}
ALONE |= {'reward_weights': {'reward': 1.0}, 'atoms': 16, 'num_layers_unfrozen': 0, 'prompt_column': 'question'}
PPO_TOGETHER: list[dict[str, Any]] = [
    *(
        FSDP | given
        for given in ({'reproducible': 'exact'}, {'compile_blocks': True}, {'num_layers_unfrozen': 1}, GAME)
    ),
    *(
        SEQUENCES | given
        for given in ({'reproducible': 'exact'}, {'compile_blocks': True}, {'tensor_parallel': 2}, GAME)
    ),
    *(TRUNK | given for given in ({'lora_train_bias': 'all'}, {'strategy': 'fsdp'}, {'critic': 'shared'})),
    *(TRUNK | given for given in ({'num_layers_unfrozen': 1}, {'offload': 'idle'}, {'engine': 'vllm'})),
    TRUNK | {'rollout_workers': 1},
    {'lora_rank': 2, 'num_layers_unfrozen': 1},
    {'overlong_buffer': 80, 'max_new_tokens': 64},
    {'lora_rank': 2, 'quantize': 'nf4'},
    {'lora_rank': 2, 'lora_dropout': 0.1},
    {'optimizer': 'adamw8bit', 'strategy': 'fsdp'},
    {'compile_blocks': True, 'reproducible': 'exact'},
    {'compile_blocks': True} | GEMINI,
    *({'critic': 'shared', name: 2} for name in ('critic_epochs', 'critic_train_batch_size')),
    *({'reproducible': 'exact'} | given for given in ({'engine': 'hf'}, {'rollout_workers': 2})),
    *({'nlpo_top_p': 0.9} | given for given in ({'lora_rank': 2}, {'num_layers_unfrozen': 1}, {'engine': 'hf'})),
    {'nlpo_top_p': 0.9, 'rollout_workers': 2},
    {'logprob_kernel': 'liger', 'entropy_coef': 0.01},
    {'logprob_kernel': 'liger', 'temperature': 0.7, 'precision': 'bf16'},
    GAME | {'eval_episodes': 3, 'validation_percentage': 5.0},
    {'reward_model': 'a', 'reward_fn': 'a:b'},
    {'prompt_path': 'a', 'pretrain': 'gpt2'},
    {'prompt_path': 'a', 'reward_fn': 'a:b'},
    {'max_staleness': 1, 'tis_cap': 2.0},
    {'rollout_workers': 1, 'engine': 'hf'},
    {'engine': 'vllm', 'vllm_tensor_parallel': 2, 'rollout_workers': 1},
    {'engine': 'vllm', 'vllm_tensor_parallel': 2} | FSDP,
    {'engine': 'vllm', 'vllm_tensor_parallel': 2} | GAME,
    GAME | {'validation_percentage': 5.0},
    {'pretrain': 'm', 'optimizer': 'sgd', 'lr': 0.1},
    {'rollout_workers': 1, 'rollout_slice_tokens': 8, 'max_staleness': 1},
    GAME | {'rollout_workers': 1, 'rollout_slice_tokens': 8, 'rollout_chunk_size': 2, 'max_staleness': 1},
]
OTHERS: list[tuple[type, dict[str, Any]]] = [
    (SFTRun, {'strategy': 'colossalai_gemini', 'precision': 'fp32'}),
    (SFTRun, {'tensor_parallel': 2, 'strategy': 'ddp'}),
    (SFTRun, {'sequence_parallel': 2, 'strategy': 'ddp'}),
    (RewardRun, {'logprob_kernel': 'fused'}),
    (SFTRun, {'logprob_kernel': 'fused'} | GEMINI),
    (SFTRun, {'hub_private': True}),
    (SFTRun, {'validation_file': 'a', 'validation_percentage': 3.0}),
    (SFTRun, {'validation_percentage': 0.5}),
    (SFTRun, {'validation_file': 'a', 'dataset': 'a', 'pretrain': 'gpt2'}),
    (SFTRun, {'dataset': 'a'}),
    (run_class('ilql'), {'lora_rank': 2}),
    (run_class('dpo'), {'lora_rank': 2, 'lora_dropout': 0.1}),
]
BROKEN = [*((PPORun, {name: value}) for name, value in ALONE.items()), *((PPORun, given) for given in PPO_TOGETHER)]
BROKEN += OTHERS
BROKEN += [(PPORun, {'pretrain': 'm', 'optimizer': 'sgd'})]
TABLES: dict[type, list] = {
    PPORun: [*DECODE_RULES, *MODEL_RULES, *RUN_RULES, *PPO_RUN_RULES],
    DataRun: [*MODEL_RULES, *RUN_RULES, *DATA_RULES],
}


@pytest.fixture(autouse=True)
def liger_is_there(monkeypatch):
    monkeypatch.setattr(head_kernels, 'find_spec', lambda name: True)
    monkeypatch.setenv('TRITON_INTERPRET', '1')


@pytest.mark.parametrize(('cls', 'given'), BROKEN, ids=str)
def test_settings_that_exclude_each_other_are_refused(cls, given):
    with pytest.raises(ValueError) as error:
        cls(**given).validate()
    rules = TABLES[PPORun if cls is PPORun else DataRun]
    assert str(error.value) in [row.broken_by(cls(**given)) for row in rules]


def test_every_row_is_broken_by_one_of_them():
    for table, kind in ((MODEL_RULES, None), (RUN_RULES, None), (DATA_RULES, DataRun), (PPO_RUN_RULES, PPORun)):
        runs = [cls(**given) for cls, given in BROKEN if kind is None or issubclass(cls, kind)]
        assert [row.sentence for row in table if not any(row.broken_by(run) for run in runs)] == []


@pytest.mark.parametrize('cls', [PPORun, SFTRun, RewardRun, run_class('ilql')])
def test_defaults_break_none(cls):
    cls().validate()
    rules = TABLES[PPORun if cls is PPORun else DataRun]
    assert not any(row.broken_by(cls()) for row in [*rules, *ENCODER_DECODER_RULES])


@pytest.mark.parametrize(
    ('run', 'name'),
    [
        (SFTRun(lora_rank=2, quantize='nf4'), 'quantize'),
        (SFTRun(pack_examples=True), 'pack_examples'),
        (PPORun(reproducible='exact'), 'reproducible'),
        (PPORun(nlpo_top_p=0.9), 'nlpo_top_p'),
        (PPORun(engine='vllm'), 'engine'),
    ],
)
def test_what_an_encoder_decoder_cannot_do(run, name):
    (sentence,) = (reason for row in ENCODER_DECODER_RULES if (reason := row.broken_by(run)))
    assert name in sentence


def test_they_reach_actors_and_modules(monkeypatch):
    seen = []
    monkeypatch.setattr(models, 'compile_blocks', seen.append)
    actor, reward = Actor(tiny_causal_lm('gpt2')), RewardModel(tiny_causal_lm('gpt2').base_model)
    set_kernels(PPORun(), actor, reward, None, len)
    assert actor.logprob_kernel == 'auto' and not seen
    set_kernels(PPORun(logprob_kernel='fused', compile_blocks=True), actor, reward, None, len)
    assert actor.logprob_kernel == 'fused' and seen == [actor, reward]
