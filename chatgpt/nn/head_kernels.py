"""Kernels that compute log-probs from an actor's hidden states: `Actor.logprob_kernel`.

| name | computes | needs |
|---|---|---|
| plain | `functional.logprobs`: torch's softmax over chunks of rows | nothing; any head |
| fused | `functional.fused_logprobs`: blocks of the vocabulary | an output layer that is a plain `nn.Linear` |
| liger | Triton kernels of liger-kernel (arXiv 2410.10989) | that, CUDA, and no gradient of the entropy |
| auto | fused on an accelerator if the head allows it, else plain | |

If all rows fit into one chunk, plain recomputes nothing, so fused runs plain. With tensor parallelism, where each
process has some rows of the output layer, all but liger run fused.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from chatgpt.functional import logprobs
from chatgpt.functional.choices import KERNELS
from chatgpt.functional.fused_logprobs import fused_logprobs
from chatgpt.functional.logprobs import WithEntropy, chunked_logprobs, rows_per_chunk


def check_kernel(kernel: str, head: nn.Module | None, linear: bool | None, model: str) -> None:
    """Raises ValueError for an unknown kernel, a missing package, or an unsupported head. `linear`: True if the output
    layer `head` alone computes the logits of the model called `model`; None if not known yet."""
    check_name(kernel)
    if kernel in ('auto', 'plain'):
        return
    if linear is False:
        raise ValueError(
            f'logprob_kernel={kernel!r}: the logits of {model} are more than its output layer (a soft cap or a '
            "scale); choose 'plain'"
        )
    if linear_weights(head) is None:
        raise ValueError(
            f'logprob_kernel={kernel!r} reads the weight of a plain nn.Linear, and the output layer of {model} is a '
            f"{type(head).__name__} (an adapter, quantized or sharded weights); choose 'plain'"
        )


def check_name(kernel: str) -> None:
    """Raises ValueError for an unknown kernel, or if its package or device is missing."""
    if kernel not in KERNELS:
        raise ValueError(f'logprob_kernel={kernel!r} is not one of {", ".join(KERNELS)}')
    if kernel != 'liger':
        return
    if find_spec('liger_kernel') is None:
        raise ValueError(
            "logprob_kernel='liger' needs liger-kernel, which is not installed: pip install 'chatgpt-rlhf[liger]', or "
            "choose 'fused'"
        )
    if not torch.cuda.is_available() and os.environ.get('TRITON_INTERPRET') != '1':
        raise ValueError("logprob_kernel='liger' runs Triton kernels, and there is no GPU here; choose 'fused'")


def linear_weights(head: nn.Module | None) -> tuple[Tensor, Tensor | None] | None:
    """Returns weight (V, D) and bias (V,) of a plain linear output layer, else None: a layer with hooks, or with a
    tensor subclass as weight, must be called itself.
    """
    if type(head) is not nn.Linear or head._forward_hooks or head._forward_pre_hooks or head._backward_hooks:
        return None
    weight, bias = head.weight, head.bias
    whole = all(_is_whole(x) for x in (weight, bias) if x is not None)
    return (weight, bias) if whole and weight.is_floating_point() else None


def _is_whole(x: Tensor) -> bool:
    """Returns True for an ordinary tensor: no DTensor, and none of Gemini's."""
    acts = type(x).__torch_function__ is not torch._C._disabled_torch_function_impl
    return type(x) is Tensor or not (acts or hasattr(x, 'to_local'))


def head_logprobs(
    states: Tensor,
    head: Callable[[Tensor], Tensor],
    layer: Any,
    ids: Tensor,
    *,
    kernel: str,
    vocab_size: int,
    temperature: float = 1.0,
    with_entropy: WithEntropy = False,
) -> tuple[Tensor, Tensor | None]:
    """Computes `chunked_logprobs` with a kernel. `head` maps states (N, D) to logits; `layer` is the output layer if
    `head` is that alone, else None.

    Raises ValueError if a kernel other than 'auto' does not support the head, the device or the arguments.
    """
    options: Any = {'temperature': temperature, 'with_entropy': with_entropy}
    part = getattr(layer, 'vocabulary', None)
    if part is not None and kernel != 'liger':
        return fused_logprobs(states, layer.weight, layer.bias, ids, part=part, **options)
    weights = None if kernel == 'plain' else linear_weights(layer)
    if weights is None or not (kernel == 'liger' or _uses_fused(kernel, states, head, vocab_size)):
        if kernel in ('fused', 'liger') and weights is None:
            raise ValueError(
                f'logprob_kernel={kernel!r} cannot read the weight of this output layer under this strategy; choose '
                "'plain'"
            )
        return chunked_logprobs(states, head, ids, vocab_size=vocab_size, **options)
    if kernel == 'liger':
        return liger_logprobs(states, *weights, ids, **options)
    return fused_logprobs(states, *weights, ids, **options)


def _uses_fused(kernel: str, states: Tensor, head: Any, vocab_size: int) -> bool:
    """Returns True to use the fused kernel: not if all rows fit into one chunk, and with 'auto' only on an
    accelerator."""
    if kernel == 'auto' and logprobs.kind_of_device(states) == 'cpu':
        return False
    return states.shape[0] > rows_per_chunk(states, head, vocab_size)


# --- liger ----------------------------------------------------------------------------------------------------------


def check_liger_temperature(temperature: float, in_fp32: bool) -> None:
    """Raises ValueError for a temperature that is not a power of two, unless in fp32: 'liger' divides the states by it,
    and in 16 bits that rounds them."""
    if not in_fp32 and math.frexp(temperature)[0] != 0.5:
        raise ValueError(
            f"logprob_kernel='liger' divides the hidden states by the temperature, and in 16 bits {temperature:g}, "
            "which is no power of two, would round them; choose 'fused'"
        )


def liger_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    *,
    temperature: float = 1.0,
    with_entropy: WithEntropy = False,
) -> tuple[Tensor, Tensor | None]:
    """As `fused_logprobs`, but the temperature divides the states, which is exact for a power of two.

    Raises:
        ValueError: states on a CPU without TRITON_INTERPRET=1; an entropy with gradients; in 16 bits, a temperature
            that is not a power of two.
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
    with torch.autocast(kind, enabled=False):  # autocast would cast the weight per chunk and cache that without a graph
        states, rows = hidden.to(dtype), weight.to(dtype)
        shift = None if bias is None else bias.to(dtype)
        if temperature != 1.0:
            states, shift = states / temperature, None if shift is None else shift / temperature
        wide = torch.promote_types(dtype, torch.float32)
        nll = liger_fused_linear_cross_entropy(states, rows, ids, bias=shift, reduction='none', accum_dtype=wide)
    return -nll, entropy
