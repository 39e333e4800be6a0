"""--save_adapter: what PEFT reads back onto the base is the trained model, whatever strategy holds the weights."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from chatgpt.launch.inputs import Inputs
from chatgpt.launch.recipes import finish as save
from chatgpt.launch.recipes import make_trainer
from chatgpt.launch.runs import SFTRun
from chatgpt.nn.lora import lora_layers
from chatgpt.nn.peft_format import import_peft
from chatgpt.strategies.registry import strategy_by_name
from chatgpt.testing.processes import run_distributed
from chatgpt.types import Sequence


def finish(name: str, base: str, folder: str) -> None:
    run = SFTRun(pretrain=base, save_path=folder, lora_rank=2, save_adapter=True, strategy=name)
    run.fill_defaults()
    run.validate(int(os.environ.get('WORLD_SIZE', '1')))
    with strategy_by_name(name) as strategy:
        sequence = Sequence(
            prompt_ids=torch.tensor([2]), response_ids=torch.tensor([3]), response_mask=torch.tensor([True])
        )
        inputs = Inputs(run=run, settings=run.config(), tokenizer=None, train=[sequence], model=base)
        trainer = make_trainer(inputs, strategy)
        with torch.no_grad():  # as if trained: B is no longer zero
            for layer in lora_layers(strategy.unwrap(trainer.models()['actor'])).values():
                layer.lora_B.add_(0.125)
        save(run, trainer)


def test_base_and_adapter_are_the_trained_model(model_folder: Path, tmp_path):
    run_distributed(finish, 2, 'fsdp', str(model_folder), str(tmp_path))
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / 'actor')
    ids = torch.tensor([[2, 3, 5, 7]])
    ours = AutoModelForCausalLM.from_pretrained(model_folder)
    plain = ours(ids).logits
    import_peft(ours, tmp_path / 'adapter')
    torch.testing.assert_close(ours.eval()(ids).logits, whole(ids).logits, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(plain, whole(ids).logits, atol=1e-3)
    peft = pytest.importorskip('peft')
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_folder), tmp_path / 'adapter')
    torch.testing.assert_close(theirs.eval()(ids).logits, whole(ids).logits, rtol=1e-4, atol=1e-5)
