"""GPT-2's GELU in one kernel: the plain module's function and gradient, in fp64 to its last digits."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.activations import NewGELUActivation

from chatgpt.nn import Actor
from chatgpt.nn.trunk import FusedNewGELU


def run(module, x, grad):
    x = x.clone().requires_grad_()
    y = module(x)
    y.backward(grad)
    return y.detach(), x.grad


@pytest.mark.parametrize(('dtype', 'tolerance'), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
def test_function_and_gradient_are_the_plain_ones(dtype, tolerance):
    torch.manual_seed(0)
    x, grad = torch.randn(7, 1000, dtype=dtype) * 3, torch.randn(7, 1000, dtype=dtype)
    for ours, plain in zip(run(FusedNewGELU(), x, grad), run(NewGELUActivation(), x, grad), strict=True):
        torch.testing.assert_close(ours, plain, atol=tolerance, rtol=tolerance)
    exact = run(torch.nn.GELU(), x, grad)  # negative control: GELU without the approximation is told apart
    assert not torch.allclose(run(FusedNewGELU(), x, grad)[0], exact[0], atol=1e-5)


def test_a_value_by_hand():
    x = 1.5
    want = 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    assert FusedNewGELU()(torch.tensor(x, dtype=torch.float64)).item() == pytest.approx(want, abs=1e-14)


def test_16_bits_round_once():
    x = torch.randn(4, 1000).bfloat16()
    exact = NewGELUActivation()(x.double())
    ours, plain = ((module(x).double() - exact).abs().mean() for module in (FusedNewGELU(), NewGELUActivation()))
    assert ours < plain


def test_an_actor_has_it_and_weights_keep_their_names():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=16))
    names = list(model.state_dict())
    Actor(model)
    assert [type(block.mlp.act) for block in model.transformer.h] == [FusedNewGELU] * 2
    assert list(model.state_dict()) == names
