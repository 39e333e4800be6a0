"""`full_model(folded=False)`: adapters apart from the weights, where every process holds all of them."""

from __future__ import annotations

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


@pytest.mark.parametrize('precision', ['fp32', 'bf16'])
@pytest.mark.parametrize('kind', [NaiveStrategy, DDPStrategy])
def test_whole_weights_are_yielded_with_adapters_unmerged(kind, precision):
    with kind(device='cpu', precision=precision) as strategy:
        prepared = strategy.prepare(actor_with_adapters())
        before = {name: p.detach().clone() for name, p in strategy.unwrap(prepared).named_parameters()}
        with strategy.full_model(prepared, folded=False) as full:
            found = dict(full.named_parameters())
            assert any('lora_B' in name and bool(p.all()) for name, p in found.items())
            assert not any(module.training for module in full.modules())
            assert all(torch.equal(found[name], p) for name, p in before.items())
        with strategy.full_model(prepared) as full:  # negative control: folded
            changed = [
                n for n, p in full.named_parameters() if n in before and not torch.equal(p, before[n].to(p.dtype))
            ]
            assert any(name.endswith('c_attn.weight') for name in changed)


def refusal() -> str:
    with FSDPStrategy(device='cpu') as strategy:
        prepared = strategy.prepare(actor_with_adapters())
        with (
            pytest.raises(ValueError, match='cannot stay apart') as raised,
            strategy.full_model(prepared, folded=False),
        ):
            pass
    return str(raised.value)


def test_shards_are_refused():
    assert run_distributed(refusal, 2)[1].startswith('FSDPStrategy shards weights')
