"""Other systems' names of settings: accepted if they mean the same, suggested if similar, in Python and in flags."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

import chatgpt
from chatgpt.launch.__main__ import peek
from chatgpt.launch.config_file import parse_run
from chatgpt.launch.methods import METHODS
from chatgpt.launch.runs import PPORun, SFTRun, run_class
from chatgpt.launch.theirs import DATA_NAMES, PPO_NAMES, RUN_NAMES
from chatgpt.names import THEIRS, hint
from chatgpt.nn import Actor, Critic, RewardModel
from chatgpt.strategies.registry import STRATEGIES
from chatgpt.trainer import PPOConfig, PPOTrainer, RFTTrainer, SFTConfig, SFTTrainer

NOTHING: Any = None


def run(cls: Any, *argv: str) -> Any:
    return parse_run(cls, description='', positional='prompt_path' if cls is PPORun else 'dataset', argv=list(argv))


def test_every_name_of_the_table_maps_to_a_setting():
    known = {f.name for cls in map(run_class, METHODS) for f in fields(cls)}
    known |= {*RUN_NAMES, *PPO_NAMES, *DATA_NAMES, *STRATEGIES}
    known |= {
        'run_dir',
        'num_timesteps',
        'callbacks',
        'max_length',
        'num_workers',
        'num_nodes',
        'max_failures',
        'weights',
    }  # settings of trainers, data, the launcher and inference
    for name, entries in THEIRS.items():
        assert entries
        for entry in entries:
            assert entry.name in known or (entry.name == '' and entry.remark), name
            assert entry.name != name


def test_names_with_the_same_meaning_are_accepted():
    words = '--model_name_or_path gpt2 --output_dir=out --learning_rate 1e-3 --per_device_train_batch_size 2'
    sft = run(SFTRun, *words.split(), *'--num_train_epochs=3 --max_seq_length=99 --lr_scheduler_type=cosine'.split())
    assert (sft.pretrain, sft.save_path, sft.lr, sft.train_batch_size) == ('gpt2', 'out', 1e-3, 2)
    assert (sft.max_epochs, sft.max_len, sft.lr_schedule) == (3, 99, 'cosine')
    words = '--init_kl_coef=0.3 --cliprange=0.1 --num_ppo_epochs=2 --response_length=9 --top_k=0.0 vf_coef=0.5'
    ppo = run(PPORun, *words.split())
    found = (ppo.kl_coef, ppo.eps_clip, ppo.max_epochs, ppo.max_new_tokens, ppo.top_k, ppo.value_coef)
    assert found == (0.3, 0.1, 2, 9, 0, 0.5)
    assert run(PPORun, '--num_train_epochs=2').num_episodes == 2
    assert run(run_class('orpo'), '--beta=0.2').weight == 0.2
    assert peek(['--output_dir', 'out']) == peek(['--save_path=out']) == {'save_path': 'out'}


FLAGS = ('lr', 'lora_rank', 'lora_train_bias', 'quantize', 'strategy', 'seed', 'training_iteration', 'kl_coef', 'help')
FLAGS += ('eps_clip', 'value_clip', 'train_batch_size', 'experience_batch_size', 'num_episodes', 'save_path', 'lam')


@pytest.mark.parametrize(
    ('name', 'known', 'suggestion'),
    [
        ('learning_rat', FLAGS, '; did you mean --learning_rate? Here it is --lr'),
        ('learning-rate', FLAGS, '; here it is --lr'),
        ('deepspeed', FLAGS, '; here it is --strategy, such as fsdp or colossalai_zero2'),
        ('deepspeed', ['naive', 'fsdp', 'colossalai_zero2'], '; here it is --colossalai_zero2, or fsdp'),
        ('load_in_4bit', FLAGS, '; here it is --quantize nf4'),
        ('lrr', FLAGS, '; did you mean --lr?'),
        ('epsilon_high', ('eps_clip_high',), '; here it is --eps_clip_high, the distance from 1'),
        ('batch_size', FLAGS, '; did you mean --train_batch_size, --experience_batch_size?'),
        ('Save-Path', FLAGS, '; did you mean --save_path?'),
        ('x', FLAGS, ''),
        ('quite_other', FLAGS, ''),
        ('num_episodes', ('num_timesteps', 'eval_episodes'), '; here it is --num_timesteps, each of which collects'),
        ('dataset', ('data_nam', 'target'), ''),
        ('score_mean', ('rollout/score_mean', 'ppo/loss'), '; did you mean --rollout/score_mean?'),
    ],
)
def test_suggestions(name, known, suggestion):
    found = hint(name, known, '--')
    assert found.startswith(suggestion) and bool(found) == bool(suggestion)


@pytest.mark.parametrize(
    ('call', 'message'),
    [
        (
            lambda: chatgpt.train('gpt2', samples=['a'], mini_batch_size=4),
            'not a setting of sft; here it is train_batc',
        ),
        (
            lambda: chatgpt.train('gpt2', prompts=['a'], reward_fn=len, num_train_epochs=2),
            'of ppo; here it is num_timesteps',
        ),
        (lambda: PPOConfig(learning_rate=4), 'the learning rate is that of the optimizer that the trainer is given'),
        (lambda: SFTConfig(train_batch_sise=4), "SFTConfig has no setting 'train_batch_sise'; did you mean train_batc"),
        (lambda: PPOTrainer(NOTHING, NOTHING, None, None, None, NOTHING, cliprange=0.1), 'here it is eps_clip'),
        (lambda: RFTTrainer(NOTHING, NOTHING, NOTHING, [], None, response_length=3), 'here it is max_new_tokens'),
        (lambda: SFTTrainer(NOTHING, NOTHING, NOTHING, [], per_device_train_batch_size=3), 'it is train_batch_size'),
        (lambda: Actor('gpt2'), r'to load one: AutoActor\(pretrained=NAME_OR_FOLDER\)'),
        (lambda: Critic(pretrained='gpt2'), r'to load one: AutoCritic\(pretrained=NAME_OR_FOLDER\)'),
        (lambda: RewardModel(pretrained='gpt2'), r'to load one: AutoRM\(pretrained=NAME_OR_FOLDER\)'),
    ],
)
def test_in_python(call, message):
    with pytest.raises(ValueError, match=message):
        call()
