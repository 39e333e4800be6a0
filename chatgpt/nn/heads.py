"""Heads that map a hidden state to one number, directly or as the mean over bins, always computed in fp32.

A head keeps the seed of its initial weights, so that a head built on the meta device can be initialised later.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from chatgpt.functional.values import expected_value
from chatgpt.nn.tensor_files import HEAD_FILE, check_fit, open_weights, read_weights, save_tensors, stored_file
from chatgpt.nn.weights import draw_seed, seeded

NEAR_ZERO = 1e-3
"""std of a critic head's weights relative to 1/sqrt(width)"""


class SeededLinear(nn.Linear):
    """Linear(width, out), weights N(0, std), bias 0."""

    def __init__(self, width: int, out: int, std: float) -> None:
        self.std, self.seed = std, draw_seed()
        super().__init__(width, out)

    def reset_parameters(self) -> None:
        with torch.no_grad():
            if not self.weight.is_meta:
                self.weight.copy_(self._drawn())
            self.bias.zero_()

    def _drawn(self) -> Tensor:
        with seeded(self.seed):
            return torch.randn(self.weight.shape) * self.std

    @property
    def is_untrained(self) -> bool:
        """True if the weights are the initial ones."""
        if self.weight.is_meta:
            return not hasattr(self, 'initial_state')  # a loaded head has one
        return torch.equal(self.weight.cpu(), self._drawn().to(self.weight.dtype))


class CategoricalHead(SeededLinear):
    """Linear(width, bins) with weights near zero, whose value is the mean of the bins of [low, high] under softmax of
    its outputs; a new one predicts about the middle of the range.

    Source: HL-Gauss, Farebrother et al. 2024, arXiv 2403.03950.
    """

    def __init__(self, width: int, bins: int, low: float, high: float) -> None:
        self.low, self.high = float(low), float(high)
        super().__init__(width, bins, NEAR_ZERO / math.sqrt(width))

    @property
    def support(self) -> dict[str, float]:
        """The bins: their number, and the ends of the range."""
        return {'bins': self.out_features, 'low': self.low, 'high': self.high}

    def to_values(self, logits: Tensor) -> Tensor:
        """(..., K) → (..., 1)."""
        return expected_value(logits, self.low, self.high).unsqueeze(-1)


def critic_head(width: int) -> SeededLinear:
    """Returns Linear(width, 1) with weights near zero, so that a new critic predicts about 0."""
    return SeededLinear(width, 1, NEAR_ZERO / math.sqrt(width))


def reward_head(width: int) -> SeededLinear:
    """Returns Linear(width, 1), weights N(0, 1 / (width + 1)), bias 0.

    Source: standard deviation 1/sqrt(d + 1), Stiennon et al. 2020; "The N implementation details of RLHF with PPO";
    arXiv 2403.17031.
    """
    return SeededLinear(width, 1, 1.0 / math.sqrt(width + 1))


def mlp_head(width: int) -> nn.Sequential:
    """Returns trlX's value head, width → 2 width → ReLU → 1; its last layer starts near zero."""
    # U(-1/sqrt(width), 1/sqrt(width)), nn.Linear's initialisation, has a standard deviation of 1/sqrt(3 width).
    first = SeededLinear(width, 2 * width, 1 / math.sqrt(3 * width))
    return nn.Sequential(first, nn.ReLU(), critic_head(2 * width))


def in_fp32(head: nn.Module, hidden: Tensor) -> Tensor:
    """Returns the numbers of `head` for hidden states in fp32 (fp64 stays fp64), also under autocast: (..., D) → (...).
    Of a `CategoricalHead` its values.

    A bf16 value has 8 bits of mantissa, too few for a difference of values. Raises ValueError for another head with
    more than one output.
    """
    return head_outputs(head, hidden)[0]


def head_outputs(head: nn.Module, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Returns what `in_fp32` does, and the outputs of the head, (..., K); K is 1 but for a `CategoricalHead`."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    with torch.autocast(device_type=hidden.device.type, enabled=False):
        if all(parameter.dtype == wide for parameter in head.parameters()):
            out = head(hidden.to(wide))
        else:  # a model cast for the collect phase: its head is in 16 bits, the product is not
            widened = {name: parameter.to(wide) for name, parameter in head.named_parameters()}
            out = functional_call(head, widened, hidden.to(wide))
        to_values = getattr(head, 'to_values', None)
        values = out if to_values is None else to_values(out.to(wide))
    if values.shape != (*hidden.shape[:-1], 1):
        raise ValueError(
            f'value head: it gives {tuple(values.shape)} for states {tuple(hidden.shape)}; it must give one number per '
            'state'
        )
    return values.squeeze(-1).to(wide), out


# --- files ----------------------------------------------------------------------------------------------------------


def save_head(head: Any, head_state: dict[str, Tensor], folder: str | Path) -> None:
    """Writes a head's tensors, by the names of its own state dict, into a model's folder, with the bins of a
    `CategoricalHead`."""
    support = {name: repr(value) for name, value in support_of(head).items()}
    save_tensors(head_state, Path(folder, HEAD_FILE), support or None)


def support_of(head: Any) -> dict[str, float]:
    """Returns the bins of a `CategoricalHead`; {} for other heads."""
    return getattr(head, 'support', {})


def head_width(head: Any) -> int:
    """Returns the width of the states that a linear head or an `mlp_head` takes."""
    first: Any = head[0] if isinstance(head, nn.Sequential) else head
    return int(first.in_features)


def stored_support(source: str | Path) -> dict[str, float] | None:
    """Returns `support_of` the head that is stored in a folder or under a hub name, read from the file's header; None
    without a head."""
    path = stored_file(source, HEAD_FILE)
    if path is None:
        return None
    return _support_in(path)


def _support_in(path: Path) -> dict[str, float]:
    stored = open_weights(path).metadata() or {}
    found = {name: float(stored[name]) for name in ('bins', 'low', 'high') if name in stored}
    return found | {'bins': int(found['bins'])} if found else {}


def centred_head(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns a reward model's head from the model's state dict, with `score_bias` subtracted from its last bias, so
    that the head alone computes the score."""
    head = {n.removeprefix('value_head.'): t for n, t in state.items() if n.startswith('value_head.')}
    if 'score_bias' not in state:
        return head
    last = max(head).replace('weight', 'bias')
    return head | {last: head.get(last, 0.0) - state['score_bias'].reshape(1)}


def load_head(source: str | Path, **hub: Any) -> nn.Module | None:
    """Returns the head that `save_head` wrote into this folder or that of a hub name, or None if there is none.

    Raises ValueError for a damaged file, and for a head that is neither linear, nor an `mlp_head`, nor a
    `CategoricalHead`.
    """
    path = stored_file(source, HEAD_FILE, **hub)
    if path is None:
        return None
    tensors = read_weights(path)
    head: nn.Module
    if set(tensors) == {'weight'}:  # of a classifier
        tensors['bias'] = tensors['weight'].new_zeros(len(tensors['weight']))
    if set(tensors) == {'weight', 'bias'}:
        width, support = tensors['weight'].shape[-1], _support_in(path)
        head = CategoricalHead(width, **support) if support else critic_head(width)  # type: ignore[arg-type]
    elif set(tensors) == {'0.weight', '0.bias', '2.weight', '2.bias'}:
        head = mlp_head(tensors['0.weight'].shape[-1])
    else:
        raise ValueError(
            f'{path}: it holds {", ".join(sorted(tensors)[:4])}, neither a linear head nor an MLP head; make the head, '
            'load these tensors into it, and give it as value_head'
        )
    wrong = [(n, tensors[n].shape, t.shape) for n, t in head.state_dict().items() if tensors[n].shape != t.shape]
    check_fit(head, lambda _: path, (), (), wrong)
    set_state(head, tensors)
    return head


def set_state(module: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Copies parameters and buffers into `module`. Those on the meta device are kept as `initial_state` until it is
    materialised."""
    for name, child in module.named_modules():
        prefix = f'{name}.' if name else ''
        own = {
            n: t
            for n, t in [*child.named_parameters(recurse=False), *child.named_buffers(recurse=False)]
            if prefix + n in tensors
        }
        kept = {n: tensors[prefix + n].detach().to('cpu', t.dtype, copy=True) for n, t in own.items()}
        if any(t.is_meta for t in own.values()):
            child.initial_state = getattr(child, 'initial_state', {}) | kept  # type: ignore[assignment]
        else:
            with torch.no_grad():
                for n, t in own.items():
                    t.copy_(kept[n])
