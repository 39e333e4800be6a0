"""Log-probs of given tokens through a linear head, by blocks of the vocabulary: no (N, V) tensor in either direction.

`logprobs.chunked_logprobs` cuts the rows. It takes any head, keeps torch's own softmax, and pays for it in the backward
pass: each chunk adds a gradient of the head's size, which for a large vocabulary takes longer than its products. Here
the columns are cut.

- Forward: log-sum-exp and entropy are sums over the vocabulary and grow block by block under a running maximum (Milakov
  & Gimelshein 2018), so each block of the weight is read once.
- Backward: with the log-sum-exp kept, a block's gradient needs no other block. Its logits are computed again, and its
  rows of the weight's gradient are written once, over all N rows.
- A frozen head (LoRA) needs only the gradient of the states, g_i (W[id_i] − Σ_v p_iv W_v) / temperature: one number g_i
  times a row that is known in the forward pass, where it is attention with the weight as keys and values (Dao et al.
  2022). Nothing is computed again then.

Why the gradient is not taken in the forward pass where the head is trained: its weight's gradient is a sum over rows of
g_i times something, and PPO's g_i follows from the very log-probs (ratio, clipping). Only a loss whose weights of
tokens are known before, as in SFT, could.

Where each process of a tensor group has some rows of the output layer (`VocabularyPart`; Shoeybi et al. 2019,
"Megatron-LM", section 3), each goes over its own rows. Then three numbers for each token pass between them: the
greatest logit, and with it the sums of powers and of powers times logits, and the picked logit, which one process
knows. Backward, the gradient of its rows is each process's own, and the gradients of the states are summed.

Letters: N tokens, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from chatgpt.functional import logprobs as plain
from chatgpt.functional.logprobs import WithEntropy

MIN_COLUMNS = 128
"""of a block, however many rows there are"""


class Group(Protocol):
    """The processes that share an output layer. Both give a new tensor, equal to the bit on all."""

    def sum(self, x: Tensor) -> Tensor: ...

    def max(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class VocabularyPart:
    """Which rows of an embedding or output layer a process has: from `start` on, of `size`."""

    group: Group
    start: int
    size: int

    def __deepcopy__(self, memo: Any) -> VocabularyPart:
        return self


def fused_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    *,
    temperature: float = 1.0,
    with_entropy: WithEntropy = False,
    block_size: int | None = None,
    part: VocabularyPart | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of `ids` (and the entropy) under softmax((hidden Wᵀ + b) / temperature).

    The numbers are those of `chunked_logprobs` up to rounding: products in autocast's dtype where it is on and in the
    dtype of `hidden` elsewhere, all else in fp32 (fp64 stays fp64). Gradients of the weight are summed over all N rows
    in one product.

    Args:
        hidden: (N, D) states that predict the tokens.
        weight: (V, D), in any float dtype.
        bias: (V,) or None.
        ids: (N,) int64.
        block_size: columns of a block; None bounds N times it as `chunked_logprobs` bounds its chunks.
        part: weight and bias are this process's rows; hidden and ids (0 .. V - 1) are the same on all processes of the
            group. The call is then a collective, backward too.

    Returns:
        log-probs (N,) fp32, and entropy (N,) fp32 or None, equal to the bit on all processes of a group. They can be
        differentiated once.
    """
    if not temperature > 0:
        raise ValueError(f'temperature={temperature!r} must be positive')
    if hidden.dim() != 2 or ids.shape != hidden.shape[:1] or weight.shape[1:] != hidden.shape[1:]:
        raise ValueError(
            'hidden must be (N, D), weight (V, D) and ids (N,); got '
            f'{tuple(hidden.shape)}, {tuple(weight.shape)} and {tuple(ids.shape)}'
        )
    if block_size is None:
        block_size = max(MIN_COLUMNS, plain.chunk_elements(hidden) // max(1, hidden.shape[0]))
    kind = hidden.device.type
    dtype = hidden.dtype
    if torch.is_autocast_enabled(kind) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
    learns = torch.is_grad_enabled()
    head_learns = learns and (weight.requires_grad or (bias is not None and bias.requires_grad))
    # The row that a frozen head needs holds for the log-prob alone: the entropy's gradient is another.
    pulls = learns and hidden.requires_grad and not head_learns and with_entropy is not True and part is None
    logprobs, entropy = _FusedLogprobs.apply(
        hidden, weight, bias, ids, float(temperature), with_entropy, block_size, dtype, pulls, part
    )
    return logprobs, entropy if with_entropy else None


class _FusedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        temperature: float,
        with_entropy: WithEntropy,
        block_size: int,
        dtype: torch.dtype,
        pulls: bool,
        part: VocabularyPart | None,
    ) -> tuple[Tensor, Tensor]:
        ids = ids if part is None else ids - part.start
        wide = torch.promote_types(dtype, torch.float32)
        lowest = torch.finfo(wide).min  # not −inf, whose differences are NaN
        n, states = hidden.shape[0], hidden.to(dtype)
        top = hidden.new_full((n,), lowest, dtype=wide)
        total, chosen, surprise = (torch.zeros_like(top) for _ in range(3))
        mean = torch.zeros(hidden.shape, dtype=wide, device=hidden.device) if pulls else None
        with torch.autocast(hidden.device.type, enabled=False):
            for columns, rows in _blocks(weight, block_size, dtype):
                logits = _logits(states, rows, bias, columns, temperature, wide)
                inside, position = _positions(ids, columns)
                chosen = torch.where(inside, logits.gather(1, position[:, None])[:, 0], chosen)
                highest = torch.maximum(top, logits.amax(1))
                if mean is not None:
                    mean.mul_((top - highest).exp_()[:, None])
                total, surprise = _moved(total, surprise, top - highest)
                logits.sub_(highest[:, None])
                powers = logits.exp()
                if with_entropy:
                    surprise = surprise + logits.clamp_min_(lowest).mul_(powers).sum(1)
                total = total + powers.sum(1)
                if mean is not None:
                    _add_product(mean, powers.to(dtype), rows)
                top = highest
            if part is not None:
                highest = part.group.max(top)
                total, surprise = _moved(total, surprise, top - highest)
                total, surprise, chosen = part.group.sum(torch.stack([total, surprise, chosen])).unbind()
                top = highest
            log_total = total.log()
            entropy = log_total - surprise / total
            pull = None
            if mean is not None:
                pull = (weight[ids].to(wide) - mean / total[:, None]).div_(temperature).to(dtype)
        ctx.settings = (temperature, with_entropy is True, block_size, dtype, pulls, part)
        if pulls:
            ctx.save_for_backward(pull)
        else:
            ctx.save_for_backward(states, weight, bias, ids, top + log_total, entropy)
        ctx.hidden_dtype = hidden.dtype
        if with_entropy is not True:
            ctx.mark_non_differentiable(entropy)
        ctx.set_materialize_grads(False)
        return chosen - top - log_total, entropy

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor | None, entropy_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        temperature, entropy_learns, block_size, dtype, pulls, part = ctx.settings
        none = (None,) * 7
        if grad is None and (entropy_grad is None or not entropy_learns):
            return None, None, None, *none
        if pulls:
            (pull,) = ctx.saved_tensors
            assert grad is not None
            return (pull * grad[:, None].to(dtype)).to(ctx.hidden_dtype), None, None, *none
        states, weight, bias, ids, log_total, entropy = ctx.saved_tensors
        wide = log_total.dtype
        grad = torch.zeros_like(log_total) if grad is None else grad.to(wide)
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        hidden_grad = torch.zeros(states.shape, dtype=wide, device=states.device) if for_hidden else None
        weight_grad = torch.empty_like(weight) if for_weight else None
        bias_grad = torch.empty_like(bias) if for_bias else None
        with torch.autocast(states.device.type, enabled=False):
            for columns, rows in _blocks(weight, block_size, dtype):
                logp = _logits(states, rows, bias, columns, temperature, wide).sub_(log_total[:, None])
                logits_grad = logp.exp()
                if entropy_learns and entropy_grad is not None:  # ∂H/∂l = −p (log p + H)
                    weights = logp.clamp_min_(torch.finfo(wide).min).add_(entropy[:, None])
                    logits_grad.mul_(weights.mul_(-entropy_grad[:, None]).sub_(grad[:, None]))
                else:
                    logits_grad.mul_(-grad[:, None])
                inside, position = _positions(ids, columns)
                logits_grad.scatter_add_(1, position[:, None], torch.where(inside, grad, 0.0)[:, None])
                if temperature != 1.0:
                    logits_grad.div_(temperature)
                if bias_grad is not None:
                    bias_grad[columns] = logits_grad.sum(0).to(bias_grad.dtype)
                logits_grad = logits_grad.to(dtype)
                if hidden_grad is not None:
                    _add_product(hidden_grad, logits_grad, rows)
                if weight_grad is not None:
                    weight_grad[columns] = (logits_grad.t() @ states).to(weight_grad.dtype)
        if hidden_grad is not None:
            hidden_grad = (hidden_grad if part is None else part.group.sum(hidden_grad)).to(ctx.hidden_dtype)
        return hidden_grad, weight_grad, bias_grad, *none


def _moved(total: Tensor, surprise: Tensor, by: Tensor) -> tuple[Tensor, Tensor]:
    """Σ e^(l − m) and Σ e^(l − m) (l − m) for a maximum that is −`by` higher."""
    shrink = by.exp()
    return total * shrink, (surprise + total * by) * shrink


def _blocks(weight: Tensor, size: int, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Columns of a block of the vocabulary, and its rows of the weight in the dtype of the products."""
    for start in range(0, weight.shape[0], size):
        columns = slice(start, min(start + size, weight.shape[0]))
        yield columns, weight[columns].to(dtype)


def _logits(
    states: Tensor, rows: Tensor, bias: Tensor | None, columns: slice, temperature: float, wide: torch.dtype
) -> Tensor:
    """A block's logits divided by the temperature, in a tensor of their own."""
    logits = F.linear(states, rows, None if bias is None else bias[columns].to(rows.dtype)).to(wide)
    return logits if temperature == 1.0 else logits.div_(temperature)


def _positions(ids: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Whether a row's token lies in the block, and where in it; 0 for one that does not."""
    inside = (ids >= columns.start) & (ids < columns.stop)
    return inside, torch.where(inside, ids - columns.start, 0)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, in the dtype of `total`."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a @ b)
