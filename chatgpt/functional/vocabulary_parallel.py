"""Log-probs of given tokens where each process of a tensor group has some rows of the output layer (Shoeybi et al.
2019, "Megatron-LM", section 3): log p = picked logit − log-sum-exp.

Each process goes over its own rows in blocks, as `fused_logprobs` does. Then three numbers for each token pass between
them: the greatest logit, and with it the sums of powers and of powers times logits, and the picked logit, which one
process knows. So the logits of all the vocabulary are nowhere. Backward, the gradient of its rows is each process's
own, and the gradients of the states are summed.

Letters: N tokens, D width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from chatgpt.functional import logprobs as plain
from chatgpt.functional.fused_logprobs import MIN_COLUMNS, _add_product, _blocks, _logits, _positions
from chatgpt.functional.logprobs import WithEntropy


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


def vocabulary_parallel_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    part: VocabularyPart,
    *,
    temperature: float = 1.0,
    with_entropy: WithEntropy = False,
    block_size: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`fused_logprobs` of the whole weight, by all processes of a group together. A collective, backward too.

    Args:
        hidden: (N, D), the same on all processes.
        weight: (rows, D), this process's rows of (V, D).
        bias: (rows,) or None.
        ids: (N,) int64, 0 .. V - 1, the same on all.
        part: the group and where the rows begin.
        block_size: columns of a block; None bounds N times it as `chunked_logprobs` bounds its chunks.

    Returns:
        log-probs (N,) fp32 (fp64 of fp64), and entropy (N,) or None, equal to the bit on all processes. They can be
        differentiated once.
    """
    if not temperature > 0:
        raise ValueError(f'temperature={temperature!r} must be positive')
    if block_size is None:
        bound = plain.CHUNK_ELEMENTS_CPU if hidden.device.type == 'cpu' else plain.CHUNK_ELEMENTS_ACCELERATOR
        block_size = max(MIN_COLUMNS, bound // max(1, hidden.shape[0]))
    kind, dtype = hidden.device.type, hidden.dtype
    if torch.is_autocast_enabled(kind) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
    logprobs, entropy = _Logprobs.apply(
        hidden, weight, bias, ids, part, float(temperature), with_entropy, block_size, dtype
    )
    return logprobs, entropy if with_entropy else None


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        part: VocabularyPart,
        temperature: float,
        with_entropy: WithEntropy,
        block_size: int,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(dtype, torch.float32)
        states, own_ids, group = hidden.to(dtype), ids - part.start, part.group
        picked = torch.zeros(hidden.shape[:1], dtype=wide, device=hidden.device)
        total, surprise = torch.zeros_like(picked), torch.zeros_like(picked)
        top = torch.full_like(picked, torch.finfo(wide).min)
        with torch.autocast(hidden.device.type, enabled=False):
            for columns, rows in _blocks(weight, block_size, dtype):
                logits = _logits(states, rows, bias, columns, temperature, wide)
                inside, position = _positions(own_ids, columns)
                picked = torch.where(inside, logits.gather(1, position[:, None])[:, 0], picked)
                highest = torch.maximum(top, logits.amax(1))
                total, surprise = _moved(total, surprise, top - highest)
                logits.sub_(highest[:, None])
                powers = logits.exp()
                total = total + powers.sum(1)
                if with_entropy:
                    surprise = surprise + logits.clamp_min_(torch.finfo(wide).min).mul_(powers).sum(1)
                top = highest
            highest = group.max(top)
            total, surprise = _moved(total, surprise, top - highest)
            total, surprise, picked = group.sum(torch.stack([total, surprise, picked])).unbind()
            log_total = total.log()
            entropy = log_total - surprise / total
        ctx.settings = (part, temperature, with_entropy is True, block_size, dtype, hidden.dtype)
        ctx.save_for_backward(states, weight, bias, own_ids, highest + log_total, entropy)
        if with_entropy is not True:
            ctx.mark_non_differentiable(entropy)
        ctx.set_materialize_grads(False)
        return picked - highest - log_total, entropy

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor | None, entropy_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        part, temperature, entropy_learns, block_size, dtype, hidden_dtype = ctx.settings
        none = (None,) * 6
        if grad is None and (entropy_grad is None or not entropy_learns):
            return None, None, None, *none
        states, weight, bias, own_ids, log_total, entropy = ctx.saved_tensors
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
                inside, position = _positions(own_ids, columns)
                logits_grad.scatter_add_(1, position[:, None], torch.where(inside, grad, 0.0)[:, None])
                logits_grad = logits_grad.div_(temperature)
                if bias_grad is not None:
                    bias_grad[columns] = logits_grad.sum(0).to(bias_grad.dtype)
                logits_grad = logits_grad.to(dtype)
                if hidden_grad is not None:
                    _add_product(hidden_grad, logits_grad, rows)
                if weight_grad is not None:
                    weight_grad[columns] = (logits_grad.t() @ states).to(weight_grad.dtype)
        if hidden_grad is not None:
            hidden_grad = part.group.sum(hidden_grad).to(hidden_dtype)
        return hidden_grad, weight_grad, bias_grad, *none


def _moved(total: Tensor, surprise: Tensor, by: Tensor) -> tuple[Tensor, Tensor]:
    """Σ e^(l − m) and Σ e^(l − m) (l − m) for a maximum that is −`by` higher."""
    shrink = by.exp()
    return total * shrink, (surprise + total * by) * shrink
