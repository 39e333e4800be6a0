"""Deterministic cases for liger-kernel, without a random generator. As a script: records its results in
`liger_golden.json`.

TRITON_INTERPRET=1 python tests/nn/record_liger.py      # with liger-kernel and triton installed
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import torch
from torch import nn

from chatgpt.nn.head_kernels import liger_logprobs


def golden_case(temperature, bias, trained):
    """Returns the inputs of `liger_golden.json`, the same on every machine."""
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


def main() -> None:
    cases = {
        ' '.join(str(x) for x in case): numbers(
            lambda hidden, head, ids, **options: liger_logprobs(hidden, head.weight, head.bias, ids, **options), *case
        )
        for case in CASES
    }
    rounded = {name: [[float(f'{x:.7g}') for x in row] for row in rows] for name, rows in cases.items()}
    found = {'liger-kernel': version('liger-kernel'), 'triton': version('triton'), 'cases': rounded}
    Path(__file__).with_name('liger_golden.json').write_text(
        json.dumps(found, indent=None, separators=(',', ':')) + '\n'
    )


if __name__ == '__main__':
    main()
