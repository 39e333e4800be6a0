"""Log-probs of given tokens through a linear head, by blocks of the vocabulary: no (N, V) tensor, backward included.

`logprobs.chunked_logprobs` splits the rows. It takes any head and torch's own softmax, but in the backward pass each
chunk adds a gradient of the head's size, which for a large vocabulary takes longer than the matrix products. This
module splits the columns.

- Forward: log-sum-exp and entropy are sums over the vocabulary, accumulated block by block under a running maximum
  (Milakov & Gimelshein 2018), so each block of the weight is read once.
- Backward: the log-sum-exp is saved, so a block's gradient needs no other block. Its logits are recomputed, and its
rows
  of the weight's gradient are written once, summed over all N rows.
- A frozen head (LoRA) needs only the gradient of the states, g_i (W[id_i] − Σ_v p_iv W_v) / temperature. The factor of
  g_i is computed in the forward pass, as attention with the weight as keys and values (Dao et al. 2022), and nothing is
  recomputed.

A trained head's gradient cannot be computed in the forward pass: it is a sum over rows weighted by g_i, and PPO's g_i
depends on the log-probs (ratio, clipping). Only a loss with token weights that are known before, as in SFT, allows it.

With tensor parallelism each process of the group has some rows of the output layer (`VocabularyPart`; Shoeybi et al.
2019, "Megatron-LM", section 3). Each computes its own rows; then the processes reduce, per token, the greatest logit,
the sums of exponentials and of exponentials times logits, and the logit of the token, which one process has. In the
backward pass the gradients of the states are summed.

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
"""least columns of a block"""


class Group(Protocol):
    """The processes that share an output layer. Both methods return a new tensor, bitwise equal on all processes."""

    def sum(self, x: Tensor) -> Tensor: ...

    def max(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class VocabularyPart:
    """The rows of an embedding or output layer that a process has: they begin at `start`, the whole has `size` rows."""

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
    """Returns log-probs of `ids` (and the entropy) under softmax((hidden Wᵀ + b) / temperature).

    Equals `chunked_logprobs` up to rounding. Matrix products are in autocast's dtype, or without autocast in the dtype
    of `hidden`; everything else is in fp32 (fp64 stays fp64). The weight's gradient is summed over all N rows in one
    product.

    Args:
        hidden: (N, D) states that predict the tokens.
        weight: (V, D), in any float dtype.
        bias: (V,) or None.
        ids: (N,) int64.
        block_size: columns of a block; None bounds N · block_size as `chunked_logprobs` bounds its chunks.
        part: weight and bias are this process's rows; hidden and ids (0 .. V - 1) are the same on all processes of the
            group. Forward and backward are then collectives.

    Returns:
        log-probs (N,) fp32, and entropy (N,) fp32 or None, bitwise equal on all processes of a group. They can be
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
    trains = torch.is_grad_enabled()
    head_trains = trains and (weight.requires_grad or (bias is not None and bias.requires_grad))
    # The factor that is saved for a frozen head belongs to the log-prob; the entropy has another gradient.
    saves_grad = trains and hidden.requires_grad and not head_trains and with_entropy is not True and part is None
    logprobs, entropy = _FusedLogprobs.apply(
        hidden, weight, bias, ids, float(temperature), with_entropy, block_size, dtype, saves_grad, part
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
        saves_grad: bool,
        part: VocabularyPart | None,
    ) -> tuple[Tensor, Tensor]:
        ids = ids if part is None else ids - part.start
        wide = torch.promote_types(dtype, torch.float32)
        lowest = torch.finfo(wide).min  # not −inf, whose differences are NaN
        n, states = hidden.shape[0], hidden.to(dtype)
        top = hidden.new_full((n,), lowest, dtype=wide)
        total, chosen, weighted = (torch.zeros_like(top) for _ in range(3))
        mean = torch.zeros(hidden.shape, dtype=wide, device=hidden.device) if saves_grad else None
        with torch.autocast(hidden.device.type, enabled=False):
            for columns, rows in _blocks(weight, block_size, dtype):
                logits = _logits(states, rows, bias, columns, temperature, wide)
                inside, position = _positions(ids, columns)
                chosen = torch.where(inside, logits.gather(1, position[:, None])[:, 0], chosen)
                highest = torch.maximum(top, logits.amax(1))
                if mean is not None:
                    mean.mul_((top - highest).exp_()[:, None])
                total, weighted = _rescaled(total, weighted, top - highest)
                logits.sub_(highest[:, None])
                exps = logits.exp()
                if with_entropy:
                    weighted = weighted + logits.clamp_min_(lowest).mul_(exps).sum(1)
                total = total + exps.sum(1)
                if mean is not None:
                    _add_product(mean, exps.to(dtype), rows)
                top = highest
            if part is not None:
                highest = part.group.max(top)
                total, weighted = _rescaled(total, weighted, top - highest)
                total, weighted, chosen = part.group.sum(torch.stack([total, weighted, chosen])).unbind()
                top = highest
            log_total = total.log()
            entropy = log_total - weighted / total
            state_grad = None
            if mean is not None:
                state_grad = (weight[ids].to(wide) - mean / total[:, None]).div_(temperature).to(dtype)
        ctx.settings = (temperature, with_entropy is True, block_size, dtype, saves_grad, part)
        if saves_grad:
            ctx.save_for_backward(state_grad)
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
        temperature, entropy_trains, block_size, dtype, saves_grad, part = ctx.settings
        none = (None,) * 7
        if grad is None and (entropy_grad is None or not entropy_trains):
            return None, None, None, *none
        if saves_grad:
            (state_grad,) = ctx.saved_tensors
            assert grad is not None
            return (state_grad * grad[:, None].to(dtype)).to(ctx.hidden_dtype), None, None, *none
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
                if entropy_trains and entropy_grad is not None:  # ∂H/∂l = −p (log p + H)
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


def _rescaled(total: Tensor, weighted: Tensor, by: Tensor) -> tuple[Tensor, Tensor]:
    """Returns Σ e^(l − m) and Σ e^(l − m) (l − m) for a maximum m that is greater by −`by`."""
    shrink = by.exp()
    return total * shrink, (weighted + total * by) * shrink


def _blocks(weight: Tensor, size: int, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Yields the columns of each block of the vocabulary, and its rows of the weight in the dtype of the products."""
    for start in range(0, weight.shape[0], size):
        columns = slice(start, min(start + size, weight.shape[0]))
        yield columns, weight[columns].to(dtype)


def _logits(
    states: Tensor, rows: Tensor, bias: Tensor | None, columns: slice, temperature: float, wide: torch.dtype
) -> Tensor:
    """Returns a block's logits divided by the temperature, as a new tensor."""
    logits = F.linear(states, rows, None if bias is None else bias[columns].to(rows.dtype)).to(wide)
    return logits if temperature == 1.0 else logits.div_(temperature)


def _positions(ids: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Returns for each row whether its token is in the block, and its position there, 0 if it is not."""
    inside = (ids >= columns.start) & (ids < columns.stop)
    return inside, torch.where(inside, ids - columns.start, 0)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, in the dtype of `total`."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a @ b)
