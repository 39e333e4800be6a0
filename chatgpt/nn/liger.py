"""Log-probs by liger-kernel's fused linear cross-entropy (Hsu et al. 2024, arXiv 2410.10989; BSD 2-clause).

Its Triton kernel turns a chunk of logits into losses and their gradient in place. With reduction='none' it computes
each chunk's logits again in the backward pass, where the gradient of every token is known, and sums the weight's
gradient in fp32, which is asked for here.

Left out: its entropy, which it has none of. As a metric that is a pass of our own, another product with the head.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from chatgpt.functional.fused_logprobs import fused_logprobs
from chatgpt.functional.logprobs import WithEntropy
from chatgpt.nn.head_kernels import check_liger_temperature


def liger_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    *,
    temperature: float = 1.0,
    with_entropy: WithEntropy = False,
) -> tuple[Tensor, Tensor | None]:
    """As `fused_logprobs`. The temperature divides the states: exact where it is a power of two, else up to rounding in
    fp32.

    Raises:
        ValueError: states on a CPU, where Triton does not run (but with TRITON_INTERPRET=1); an entropy with gradients;
            a temperature that is no power of two in 16 bits, where dividing the states would change their last digits.
    """
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    kind, dtype = hidden.device.type, hidden.dtype
    if kind == 'cpu' and os.environ.get('TRITON_INTERPRET') != '1':
        raise ValueError("logprob_kernel='liger' runs Triton kernels, which need a GPU; choose 'fused' or 'plain'")
    if with_entropy is True and torch.is_grad_enabled():
        raise ValueError(
            "logprob_kernel='liger' has no gradient of the entropy: leave entropy_coef at 0, or choose 'fused'"
        )
    if torch.is_autocast_enabled(kind) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
    check_liger_temperature(temperature, dtype in (torch.float32, torch.float64))
    entropy = None
    if with_entropy:
        with torch.no_grad():
            entropy = fused_logprobs(hidden, weight, bias, ids, temperature=temperature, with_entropy='detached')[1]
    if not len(ids):
        return fused_logprobs(hidden, weight, bias, ids, temperature=temperature)[0], entropy
    with torch.autocast(kind, enabled=False):  # it would cast the weight once per chunk, and keep that without a graph
        states, rows = hidden.to(dtype), weight.to(dtype)
        shift = None if bias is None else bias.to(dtype)
        if temperature != 1.0:
            states, shift = states / temperature, None if shift is None else shift / temperature
        wide = torch.promote_types(dtype, torch.float32)
        nll = liger_fused_linear_cross_entropy(states, rows, ids, bias=shift, reduction='none', accum_dtype=wide)
    return -nll, entropy
