"""A run resumed by `train(resume_from_checkpoint=True)` of TRL's later trainers equals an uninterrupted one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from chatgpt.launch import demo_world
from chatgpt.nn import GPTActor
from chatgpt_compat.trl.config import PPOConfig
from chatgpt_compat.trl.pairs import DPOConfig, DPOTrainer
from chatgpt_compat.trl.ppo_train import PPOTrainer


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small policy with its tokenizer."""
    path = tmp_path_factory.mktemp('model')
    torch.manual_seed(0)
    GPTActor(config=demo_world.demo_config()).save_pretrained(path, tokenizer=demo_world.demo_tokenizer())
    return path


class StopAfterTwo(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == 2


def ppo(folder: Path, out: Path, callbacks: list[Any]) -> PPOTrainer:
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return PPOTrainer(
        args=PPOConfig(
            output_dir=str(out),
            per_device_train_batch_size=4,
            total_episodes=16,
            response_length=4,
            learning_rate=1e-3,
            save_steps=1,
            seed=5,
        ),
        processing_class=tokenizer,
        model=AutoModelForCausalLM.from_pretrained(folder),
        reward_model=lambda prompts, responses: [float(r.count('.')) for r in responses],
        train_dataset=[{'input_ids': tokenizer(r['prompt'])['input_ids']} for r in demo_world.demo_prompts(8)],
        callbacks=callbacks,
    )


def dpo(folder: Path, out: Path, callbacks: list[Any]) -> DPOTrainer:
    return DPOTrainer(
        str(folder),
        args=DPOConfig(
            output_dir=str(out),
            per_device_train_batch_size=4,
            max_steps=4,
            logging_steps=1,
            save_steps=1,
            learning_rate=1e-3,
        ),
        train_dataset=demo_world.demo_preferences(8),
        callbacks=callbacks,
    )


@pytest.mark.parametrize('make', [ppo, dpo])
def test_a_resumed_run_equals_an_uninterrupted_one(folder, tmp_path, make):
    whole = make(folder, tmp_path / 'whole', [])
    whole.train()
    stopped = make(folder, tmp_path / 'stopped', [StopAfterTwo])
    assert stopped.train().global_step == 2
    again = make(folder, tmp_path / 'stopped', [])
    assert again.train(resume_from_checkpoint=True).global_step == whole.state.global_step == 4
    losses = 'loss/policy_avg' if make is ppo else 'loss'
    expected, found = ([x[losses] for x in t.state.log_history if losses in x] for t in (whole, again))
    assert found == expected[2:]
    for (name, a), (_, b) in zip(
        whole.inner.models()['actor'].named_parameters(), again.inner.models()['actor'].named_parameters(), strict=True
    ):
        assert torch.equal(a, b), name


def test_the_first_run_has_nothing_to_resume(folder, tmp_path):
    assert dpo(folder, tmp_path, []).train(resume_from_checkpoint=True).global_step == 4
