"""Hugging Face's callbacks and what scripts read of trainers and configs, in TRL's later trainers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoTokenizer, EarlyStoppingCallback, TrainerCallback

from chatgpt_compat.modules import serving
from chatgpt_compat.trl import pairs, sft
from chatgpt_compat.trl.config import PPOConfig

TEXTS = [{'text': 'one day a cat'}] * 8


def trainer_of(folder: Path, out: Path, callbacks: Any = (), **given: Any) -> Any:
    args: dict[str, Any] = {'max_steps': 6, 'per_device_train_batch_size': 2, 'save_strategy': 'no'}
    args |= {'disable_tqdm': True, 'logging_steps': 1} | given
    return sft.SFTTrainer(
        str(folder),
        sft.SFTConfig(str(out), **args),
        train_dataset=TEXTS,
        eval_dataset=TEXTS[:2],
        processing_class=AutoTokenizer.from_pretrained(folder),
        callbacks=list(callbacks),
    )


@pytest.mark.parametrize('name', ['loss', 'eval_loss', None])
@pytest.mark.parametrize('rate', [0.0, 0.01])
def test_early_stopping(gpt2: Path, tmp_path: Path, name: str | None, rate: float) -> None:
    """It stops where the loss stays the same, and not while it falls."""
    trainer = trainer_of(
        gpt2,
        tmp_path,
        [EarlyStoppingCallback(early_stopping_patience=2)],
        learning_rate=rate,
        lr_scheduler_type='constant',
        eval_strategy='steps',
        eval_steps=1,
        **({'load_best_model_at_end': True} if name is None else {'metric_for_best_model': name}),
    )
    assert trainer.args.greater_is_better is False
    assert trainer.train().global_step == (6 if rate else 3)
    losses = [line['eval_loss'] for line in trainer.state.log_history if 'eval_loss' in line]
    assert trainer.state.best_metric == min(losses)


def test_callbacks_are_given_the_parts_and_are_obeyed(gpt2: Path, tmp_path: Path) -> None:
    got: list[tuple[str, Any]] = []

    class Asks(TrainerCallback):
        def on_init_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
            got.append(('init', parts))

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any, tokenizer: Any, **_: Any) -> None:
            control.should_evaluate = control.should_save = state.global_step == 2

        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **_: Any) -> None:
            got.append(('evaluated', state.global_step))

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            got.append(('saved', state.global_step))

    trainer = trainer_of(gpt2, tmp_path, [Asks], max_steps=4)
    ((_, parts),) = got
    assert parts['model'] is trainer.model and parts['tokenizer'] is parts['processing_class'] is trainer.tokenizer
    assert parts['optimizer'] is trainer.optimizer and parts['lr_scheduler'] is None
    trainer.train()
    assert got[1:] == [('evaluated', 2), ('saved', 2)]
    assert [p.name for p in (tmp_path / 'checkpoints').iterdir()] == ['step-00000002']
    callback = trainer.callbacks[0]
    trainer.create_model_card(model_name='x')
    trainer.add_callback(TrainerCallback())
    assert trainer.pop_callback(Asks) is callback and trainer.pop_callback(Asks) is None
    trainer.remove_callback(TrainerCallback)
    assert trainer.callbacks == []


def test_a_callback_saves_where_a_checkpoint_is_due(gpt2: Path, tmp_path: Path) -> None:
    class Saves(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_save = True

    trainer_of(gpt2, tmp_path, [Saves], max_steps=2, save_strategy='steps', save_steps=2).train()
    assert sorted(p.name for p in (tmp_path / 'checkpoints').iterdir()) == ['step-00000001', 'step-00000002']


def test_rates_of_transformers_arguments_are_taken(gpt2: Path, tmp_path: Path) -> None:
    args = transformers.TrainingArguments(str(tmp_path), learning_rate=5e-5, logging_steps=500, report_to=[])
    trainer = pairs.DPOTrainer(
        str(gpt2),
        None,
        args,
        train_dataset=[{'prompt': 'one day', 'chosen': ' a cat', 'rejected': ' went'}] * 2,
        processing_class=AutoTokenizer.from_pretrained(gpt2),
    )
    assert (trainer.args.learning_rate, trainer.args.logging_steps) == (5e-5, 500)


def test_padding_of_tokenized_rows_is_left_out(gpt2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(gpt2)
    row = {'input_ids': [4, 5, 6, 7, 0, 0], 'labels': [-100, -100, 6, 7, 0, 0], 'attention_mask': [1, 1, 1, 1, 0, 0]}
    left = {k: v[::-1] for k, v in row.items()} | {'completion_mask': [0, 0, 1, 0, 1, 0], 'labels': None}
    one, two = sft.sequences_of([row, left], tokenizer, sft.SFTConfig(), 3)
    assert one.prompt_ids.tolist() + one.response_ids.tolist() == [4, 5, 6]
    assert one.response_mask.tolist() == [False, True]
    assert two.prompt_ids.tolist() + two.response_ids.tolist() == [7, 6, 5]
    assert two.response_mask.tolist() == [False, True]
    pair = {f'input_ids_{side}': [4, 5 + i, 0] for i, side in enumerate(('chosen', 'rejected'))}
    pair |= {f'attention_mask_{side}': [1, 1, 0] for side in ('chosen', 'rejected')}
    (found,) = pairs.RewardTrainer.records(None, [pair])  # type: ignore[arg-type]
    assert [r.tolist() for r in found.responses] == [[5], [6]]


def test_what_scripts_read_of_a_config(monkeypatch: pytest.MonkeyPatch) -> None:
    args: Any = sft.SFTConfig('out', log_level='info')
    assert args.device == torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')
    assert (args.n_gpu, args.world_size, args.process_index) == (int(torch.cuda.is_available()), 1, 0)
    assert args.should_save and args.should_log and args.get_process_log_level() == 20
    assert json.loads(args.to_json_string())['output_dir'] == 'out'
    assert args.to_sanitized_dict()['max_seq_length'] == 'None'
    with args.main_process_first(desc='map'):
        pass
    monkeypatch.setenv('RANK', '1')
    assert not args.should_save
    assert PPOConfig('out').output_dir == 'out'
    with serving():
        import trl

        assert trl.__version__ == '0.11.4'
