"""The cases that `liger_golden.json` was recorded from. No generator, so that they are the same everywhere."""

from __future__ import annotations

import torch
from torch import nn


def golden_case(temperature, bias, trained):
    """The numbers that `liger_golden.json` was recorded from; no generator, so that they are the same everywhere."""
    head = nn.Linear(8, 50, bias=bias)
    with torch.no_grad():
        head.weight.copy_(torch.sin(torch.arange(400.0)).view(50, 8))
        if bias:
            head.bias.copy_(torch.cos(torch.arange(50.0)))
    head.requires_grad_(trained)
    hidden = (2 * torch.cos(0.7 * torch.arange(88.0))).view(11, 8).requires_grad_()
    return hidden, head, torch.arange(11) * 17 % 50, torch.linspace(-1, 1, 11)


CASES = [(t, b, trained) for t in (1.0, 2.0, 0.7) for b in (True, False) for trained in (True, False)]


def numbers(compute, temperature, bias, trained):
    hidden, head, ids, weights = golden_case(temperature, bias, trained)
    logprobs, entropy = compute(hidden, head, ids, temperature=temperature, with_entropy='detached')
    (logprobs * weights).sum().backward()
    assert not entropy.requires_grad
    found = [logprobs, entropy, hidden.grad, *(p.grad for p in head.parameters() if trained)]
    return [x.detach().flatten().tolist() for x in found]
