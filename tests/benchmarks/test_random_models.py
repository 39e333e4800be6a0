"""Models of random weights: whole, tied as theirs, and computing what transformers' own construction computes."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

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


@pytest.mark.parametrize(
    ('device', 'world_size', 'strategy', 'capped', 'want'),
    [
        ('cpu', 1, 'naive', False, None),
        ('cuda:0', 2, 'ddp', False, None),  # each process would draw other numbers
        ('cuda:0', 1, 'naive', False, ('cuda:0', 'cuda:0')),
        ('cuda:0', 1, 'ddp', False, ('cuda:0', 'cuda:0')),
        ('cuda:0', 1, 'naive', True, ('cpu', 'cuda:0')),
        ('cuda:0', 1, 'fsdp_cpu', False, ('cpu', 'cuda:0')),
    ],
)
def test_where_weights_are_drawn_and_put(device, world_size, strategy, capped, want):
    on = SimpleNamespace(device=torch.device(device), world_size=world_size)
    found = dummy.places(dummy.DummyRun(strategy=strategy), on, capped=capped)
    assert found == (None if want is None else tuple(map(torch.device, want)))


@pytest.mark.parametrize('strategy', ['naive', 'fsdp', 'fsdp_cpu'])
def test_drawn_networks_train_under_every_strategy(strategy, monkeypatch):
    monkeypatch.setattr(dummy, 'places', lambda settings, strategy, capped: (CPU, CPU))
    one = {'num_episodes': 1, 'max_timesteps': 1, 'update_timesteps': 1, 'max_epochs': 1}
    told = []
    settings = dummy.DummyRun(strategy=strategy, prompt_length=6, max_length=10, **one)
    result = dummy.run(settings, 'gpt', 'tiny', told=lambda phases: told.append(len(phases)))
    assert told == [1] and result['phases'][0]['updates'] == 1
    assert result['memory']['planned_phase'] != 'load'  # weights that were drawn in place were not loaded
