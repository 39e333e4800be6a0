"""Kullback-Leibler divergence per token: estimators from log-probs, the exact sum over the vocabulary, coefficient
controllers.

Direction, everywhere: the token was drawn from the policy q, and the number estimates KL(q || p) = E_q[log q − log p]
to the reference p. With r = p / q, log r = ref_logprobs − logprobs. In the reward it is a constant; as a loss its
gradient matters, see `kl_penalty`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from chatgpt.functional.choices import KLKind

_KINDS = ('k1', 'k2', 'k3', 'abs')

MAX_LOG_RATIO = 20.0
"""log-ratios are cut to this before exp: far outside any clip range, and an infinite ratio would make NaN of a masked
gradient"""


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, kind: KLKind = 'k1') -> Tensor:
    """Estimate of KL(policy || reference) from one token drawn from the policy, with log r = ref_logprobs − logprobs.

        k1 = −log r             unbiased; may be negative
        k2 = ½ (log r)²         biased, never negative
        k3 = (r − 1) − log r    unbiased, never negative; log r above MAX_LOG_RATIO counts as that, without gradient
        abs = |log r|

    Source: Schulman 2020, "Approximating KL divergence"; 'abs' and k2 (there called 'mse') are also TRL's `kl_penalty`
    choices.

    As a loss on tokens drawn from the policy itself, the expected gradient of k1 is 0 and that of k2 is the gradient of
    the KL; k3, the choice of GRPO (Shao et al. 2024, equation 4), agrees with it to first order in log r.

    Args:
        logprobs: any shape, of the policy.
        ref_logprobs: same shape, of the reference.
        kind: 'full' needs all logits and is `kl_full`.

    Returns:
        same shape.

    Raises:
        ValueError: an unknown kind, or 'full'.
    """
    if kind == 'full':
        raise ValueError("kl kind 'full' sums over the vocabulary and needs logits; call kl_full(logits, ref_logits)")
    if kind not in _KINDS:
        raise ValueError(f'kl kind {kind!r} is not known; choose one of {[*_KINDS, "full"]}')
    log_r = ref_logprobs - logprobs
    if kind == 'k1':
        return -log_r
    if kind == 'k2':
        return 0.5 * log_r.square()
    if kind == 'k3':
        log_r = log_r.clamp_max(MAX_LOG_RATIO)
        # expm1, because r − 1 of an r near 1 would lose every digit that k3 is made of.
        return torch.expm1(log_r) - log_r
    return log_r.abs()


def kl_full(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """Σ_v q(v) (log q(v) − log p(v)): the exact KL(policy || reference) at each token.

    Args:
        logits: (..., V) of the policy, already divided by the temperature, any float dtype.
        ref_logits: (..., V) of the reference, likewise.

    Returns:
        (...) fp32 (fp64 for fp64 logits). Tokens that the policy cannot draw (−inf) add 0; a token that only the
        reference cannot draw counts as if its log-prob were the lowest finite number.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    lowest = torch.finfo(dtype).min
    logq = torch.log_softmax(logits.to(dtype), dim=-1)
    logp = torch.log_softmax(ref_logits.to(dtype), dim=-1)
    return (logq.exp() * (logq.clamp_min(lowest) - logp.clamp_min(lowest))).sum(dim=-1)


class FixedKLController:
    """A KL coefficient that stays what it is.

    >>> controller = FixedKLController(0.1)
    >>> controller.update(12.0, 64)
    >>> controller.value
    0.1
    """

    def __init__(self, coef: float) -> None:
        if coef < 0:
            raise ValueError(f'kl coefficient {coef!r} must not be negative')
        self.value = float(coef)

    def update(self, kl: float, num_samples: int) -> None:
        """Does nothing: present so that both controllers are driven alike."""

    def state_dict(self) -> dict[str, Any]:
        return {'kind': 'fixed', 'value': self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = _value_of(state, 'fixed')


class AdaptiveKLController:
    """A KL coefficient that follows a target.

        value ← value · (1 + clip(kl / target − 1, −0.2, 0.2) · num_samples / horizon)

    Source: Ziegler et al. 2019, "Fine-tuning language models from human preferences", section 2.2.

    Args:
        init_coef: first value of the coefficient.
        target: mean KL per response, in nats.
        horizon: the larger, the slower the coefficient moves; in samples.
    """

    def __init__(self, init_coef: float, target: float, horizon: float) -> None:
        for name, number in (('init_coef', init_coef), ('target', target), ('horizon', horizon)):
            if not number > 0:
                raise ValueError(f'{name}={number!r} of an adaptive KL controller must be positive')
        self.value = float(init_coef)
        self.target = float(target)
        self.horizon = float(horizon)

    def update(self, kl: float, num_samples: int) -> None:
        """Move the coefficient after `num_samples` responses, of all ranks, with this mean KL per response."""
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * num_samples / self.horizon

    def state_dict(self) -> dict[str, Any]:
        """The moving part, as plain numbers; target and horizon are settings and stay with the object."""
        return {'kind': 'adaptive', 'value': self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = _value_of(state, 'adaptive')


def _value_of(state: dict[str, Any], kind: str) -> float:
    if state.get('kind') != kind:
        raise ValueError(
            f'the saved state belongs to a {state.get("kind")!r} KL controller, this one is {kind!r}; use the same '
            'kl_target setting'
        )
    return float(state['value'])
