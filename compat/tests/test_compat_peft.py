"""Models with adapters have the methods of PEFT's models, on the adapters that are trained."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from chatgpt.nn import has_lora
from chatgpt_compat.peft import adapted
from chatgpt_compat.trl.pairs import RewardConfig, RewardTrainer
from chatgpt_compat.trl.sft import SFTConfig, SFTTrainer

peft = pytest.importorskip('peft')
IDS = torch.tensor([[3, 4, 5, 6]])
LORA = {'r': 2, 'target_modules': ['c_attn'], 'lora_dropout': 0.0}


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(IDS).logits


@pytest.mark.parametrize('kind', ['peft_config', 'peft model'])
def test_a_trained_adapter_is_saved_by_the_model(kind: str, gpt2: Path, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(gpt2)
    before, config = logits(base), peft.LoraConfig(task_type='CAUSAL_LM', **LORA)
    given = peft.get_peft_model(base, config) if kind == 'peft model' else base
    trainer = SFTTrainer(
        given,
        SFTConfig(str(tmp_path / 'run'), max_steps=2, learning_rate=0.1, save_strategy='no', disable_tqdm=True),
        train_dataset=[{'text': 'one day a cat'}] * 8,
        processing_class=AutoTokenizer.from_pretrained(gpt2),
        peft_config=None if kind == 'peft model' else config,
    )
    trainer.train()
    after = logits(trainer.model)
    assert not torch.allclose(before, after, atol=1e-3)
    for number, model in enumerate({id(m): m for m in (given, trainer.model)}.values()):
        folder = tmp_path / str(number)
        model.save_pretrained(folder)
        assert {'adapter_config.json', 'adapter_model.safetensors'} == {p.name for p in folder.iterdir()}
        read = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(gpt2), folder)
        torch.testing.assert_close(logits(read), after, atol=1e-4, rtol=1e-4)
        with model.disable_adapter():
            torch.testing.assert_close(logits(model), before)
    merged = given.merge_and_unload()
    assert not has_lora(merged)
    merged.save_pretrained(tmp_path / 'merged')
    read = AutoModelForCausalLM.from_pretrained(tmp_path / 'merged')
    torch.testing.assert_close(logits(read), after, atol=1e-4, rtol=1e-4)


def test_a_copy_saves_its_own_adapter(gpt2: Path, tmp_path: Path, capsys: Any) -> None:
    model = adapted(AutoModelForCausalLM.from_pretrained(gpt2), LORA)
    model.print_trainable_parameters()
    assert 'trainable params: 512 || all params' in capsys.readouterr().out  # 2 (32 + 96), in two blocks
    other = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if 'lora_B' in name:
                parameter.fill_(0.5)
    other.save_pretrained(tmp_path / 'other')
    read = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(gpt2), tmp_path / 'other')
    torch.testing.assert_close(logits(read), logits(other), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(logits(read), logits(model), atol=1e-3)


def test_a_classifier_is_saved_whole(gpt2: Path, tmp_path: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(gpt2, num_labels=1)
    model.config.pad_token_id = 0
    trainer = RewardTrainer(
        model,
        RewardConfig(str(tmp_path / 'run'), max_steps=2, learning_rate=0.1, save_strategy='no', disable_tqdm=True),
        train_dataset=[{'chosen': 'one day a cat', 'rejected': 'one day a dog'}] * 8,
        processing_class=AutoTokenizer.from_pretrained(gpt2),
        peft_config=LORA,
    )
    trainer.train()
    trainer.model.save_pretrained(tmp_path / 'saved')
    read = AutoModelForSequenceClassification.from_pretrained(tmp_path / 'saved')
    torch.testing.assert_close(logits(read), logits(model), atol=1e-4, rtol=1e-4)
