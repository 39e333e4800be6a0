"""Models of random weights: whole, tied as theirs, and computing what transformers' own construction computes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / 'benchmarks'))
import dummy
import ladders
from random_models import empty_model, fill, random_model

CPU = torch.device('cpu')
QWEN = Qwen2Config(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=64,
    tie_word_embeddings=True,
)


@pytest.mark.parametrize(
    'config', [QWEN, ladders.config('gpt', 'tiny'), ladders.config('opt', 'tiny')], ids=['qwen2', 'gpt2', 'opt']
)
def test_whole_and_as_transformers_builds_it(config):
    torch.manual_seed(0)
    model = random_model('AutoModelForCausalLM', config, place=CPU, draw=CPU)
    assert not any(t.is_meta for t in [*model.parameters(), *model.buffers()])
    other = type(model)(config).eval()
    other.load_state_dict(model.state_dict())
    ids = torch.arange(14).view(2, 7)
    assert torch.equal(model(ids).logits, other(ids).logits)  # buffers that no state_dict holds are right too
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert len(list(model.parameters())) == len(list(other.parameters()))


def test_block_by_block_and_dtype():
    model = empty_model('AutoModelForCausalLM', QWEN, torch.bfloat16)
    fill(model.model.layers[0], model, CPU, CPU)
    assert not model.model.layers[0].mlp.up_proj.weight.is_meta and model.model.layers[1].mlp.up_proj.weight.is_meta
    first = model.model.layers[0].mlp.up_proj.weight
    fill(model, model, CPU, CPU)
    assert model.model.layers[0].mlp.up_proj.weight is first  # is not drawn again
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model(torch.arange(5).view(1, 5)).logits.isfinite().all()


@pytest.mark.parametrize(
    'changed',
    [{}, {'lora_rank': 2, 'gradient_checkpointing': True}, {'num_layers_unfrozen': 1, 'critic': 'shared'}],
    ids=str,
)
def test_drawn_networks_are_those_of_the_library(changed):
    settings = dummy.DummyRun(**changed)
    config = ladders.config('gpt', 'tiny')
    found, want = (dummy.build(settings, 'gpt', config, where) for where in ((CPU, CPU), None))
    assert dummy.count(*found) == dummy.count(*want)
    assert found[0].model.is_gradient_checkpointing == want[0].model.is_gradient_checkpointing
