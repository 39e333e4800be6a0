"""GPT-2's GELU in blocks: the very bits of the plain module, forward and backward."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.activations import NewGELUActivation

from chatgpt.nn import Actor, gelu
from chatgpt.nn.gelu import BlockwiseNewGELU

SHAPES = [(3, 5), (1, gelu._BLOCK), (2, gelu._BLOCK // 2 + 7), (5, gelu._BLOCK + 13)]


def run(module, x, grad):
    x = x.clone().requires_grad_()
    y = module(x * 1.0)
    y.backward(grad)
    return y.detach(), x.grad


@pytest.mark.parametrize('shape', SHAPES)
@pytest.mark.parametrize('transposed', [False, True])
def test_same_bits(shape, transposed):
    torch.manual_seed(0)
    x, grad = torch.randn(shape) * 3, torch.randn(shape)
    x.view(-1)[:5] = torch.tensor([float('inf'), -float('inf'), 1e-40, -0.0, 88.0])
    if transposed:
        x, grad = x.t(), grad.t()
    for ours, plain in zip(run(BlockwiseNewGELU(), x, grad), run(NewGELUActivation(), x, grad), strict=True):
        assert torch.equal(ours.nan_to_num(7.0), plain.nan_to_num(7.0))
    with torch.no_grad():
        assert torch.equal(BlockwiseNewGELU()(x).nan_to_num(7.0), NewGELUActivation()(x).nan_to_num(7.0))


def test_another_order_of_additions_would_be_seen():
    torch.manual_seed(0)
    x, grad = torch.randn(SHAPES[-1]), torch.randn(SHAPES[-1])
    plain = run(NewGELUActivation(), x, grad)
    fused = run(lambda z: torch.nn.functional.gelu(z, approximate='tanh'), x, grad)
    assert not torch.equal(plain[0], fused[0]) and not torch.equal(plain[1], fused[1])


def test_16_bits_round_once():
    x = torch.randn(4, 1000).bfloat16()
    exact = NewGELUActivation()(x.double())
    ours, plain = ((module(x).double() - exact).abs().mean() for module in (BlockwiseNewGELU(), NewGELUActivation()))
    assert ours < plain


def test_an_actor_has_it_and_weights_keep_their_names():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=16))
    names = list(model.state_dict())
    Actor(model)
    assert [type(block.mlp.act) for block in model.transformer.h] == [BlockwiseNewGELU] * 2
    assert list(model.state_dict()) == names
