"""`full_model(folded=False)`: adapters apart from the weights, where every process holds all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from chatgpt.nn import Actor
from chatgpt.strategies import DDPStrategy, FSDPStrategy, NaiveStrategy
from chatgpt.testing import tiny_causal_lm
from chatgpt.testing.processes import run_distributed


def actor_with_adapters() -> Actor:
    actor = Actor(tiny_causal_lm('gpt2'), lora_rank=2)
    with torch.no_grad():
        for name, p in actor.named_parameters():
            if 'lora_B' in name:
                p.fill_(0.5)
    return actor


def check_unmerged(kind: Any, precision: str) -> None:
    with kind(device='cpu', precision=precision) as strategy:
        prepared = strategy.prepare(actor_with_adapters())
        before = {name: p.detach().clone() for name, p in strategy.unwrap(prepared).named_parameters()}
        with strategy.full_model(prepared, folded=False) as full:
            found = dict(full.named_parameters())
            assert any('lora_B' in name and bool(p.all()) for name, p in found.items())
            assert not any(module.training for module in full.modules())
            assert all(torch.equal(found[name], p) for name, p in before.items())
        with strategy.full_model(prepared) as full:  # negative control: folded
            found = dict(full.named_parameters())
            layer = next(name for name in before if name.endswith('c_attn.weight'))
            assert not torch.equal(found[layer], before[layer].to(found[layer].dtype))


@pytest.mark.parametrize('precision', ['fp32', 'bf16'])
def test_whole_weights_are_yielded_with_adapters_unmerged(precision):
    check_unmerged(NaiveStrategy, precision)


def test_under_ddp_too():
    run_distributed(check_unmerged, 2, DDPStrategy, 'bf16')


def refusal() -> str:
    with FSDPStrategy(device='cpu') as strategy:
        prepared = strategy.prepare(actor_with_adapters())
        with pytest.raises(ValueError) as raised, strategy.full_model(prepared, folded=False):
            pass
    return str(raised.value)


def test_shards_are_refused():
    assert run_distributed(refusal, 2)[1].startswith('FSDPStrategy shards weights, and adapters cannot stay apart')
