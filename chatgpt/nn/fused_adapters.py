"""Adapters beside weights that cannot take them, in fewer kernels, for decoding on a GPU.

Beside its base an adapted layer runs four kernels: x A^T, the product with B^T, the scaling and the sum. Inside
`fused_adapters` layers with the same input share one product with their stacked A, and each adds its part with one
`addmm_`, for which B is scaled beforehand: 11 kernels in a Llama block in place of 28. Results differ by rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chatgpt.nn.lora import AdaptedLayer

SAME_INPUT = (('q_proj', 'k_proj', 'v_proj'), ('query', 'key', 'value'), ('gate_proj', 'up_proj'), ('w1', 'w3'))
"""names of the layers of a module that are called with the same tensor"""


class _Group:
    """Layers with the same input. Its factors keep their addresses, which captured graphs read."""

    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers
        self.down: Tensor | None = None
        """(n r, in): the stacked A"""
        self.ups: list[Tensor] = []
        """(out, r): B, scaled"""
        self.x: Tensor | None = None
        self.low: Any = None
        self.unused = 0

    def make(self, x: Tensor) -> None:
        """Makes factors of x's dtype on its device."""
        down = torch.cat([layer.lora_A for layer in self.layers])
        # not in inference mode, so that they can be updated outside of it
        with torch.inference_mode(False), torch.no_grad():
            self.down = torch.empty_like(down, dtype=x.dtype, device=x.device)
            self.ups = [torch.empty_like(layer.lora_B, dtype=x.dtype, device=x.device) for layer in self.layers]
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copies the current factors, if any have been made."""
        if self.down is not None:
            self.down.copy_(torch.cat([layer.lora_A for layer in self.layers]))
            for up, layer in zip(self.ups, self.layers, strict=True):
                up.copy_(layer.lora_B * layer.scaling)

    def forget(self) -> None:
        self.x, self.low, self.unused = None, None, 0

    def lows(self, given: Tensor, x: Tensor) -> Tensor:
        """Returns x A^T of all layers, (..., n r); computed for the first of them, kept until the last. given: the
        tensor before a cast to x."""
        if self.x is not given:
            if self.down is None or self.down.dtype != x.dtype or self.down.device != x.device:
                self.make(x)
            assert self.down is not None
            self.x, self.low, self.unused = given, F.linear(x, self.down), len(self.layers)
        low, self.unused = self.low, self.unused - 1
        if self.unused == 0:
            self.forget()
        return low

    def forward_of(self, number: int) -> Callable[[Tensor], Tensor]:
        layer, start = self.layers[number], sum(layer.r for layer in self.layers[:number])

        def forward(given: Tensor) -> Tensor:
            kind = given.device.type
            x = given.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else given
            y = layer.base_output(x)
            low = self.lows(given, x)[..., start : start + layer.r]
            y.view(-1, y.shape[-1]).addmm_(low.flatten(0, -2), self.ups[number].t())
            return y

        return forward


def _groups(model: nn.Module) -> list[_Group]:
    """Returns the groups of all adapters that are beside their weights. Each is kept by its first layer."""
    found: list[_Group] = []
    if any(getattr(module, 'is_streamed', False) for module in model.modules()):  # weights are not kept in memory
        return found
    for parent in model.modules():
        adapted = {
            name: child
            for name, child in parent.named_children()
            if isinstance(child, AdaptedLayer)
            and child.adapter_on
            and not child.merged
            and 'forward' not in vars(child)
        }
        rest = [[name] for name in adapted if not any(name in names for names in SAME_INPUT)]
        for names in (*SAME_INPUT, *rest):
            layers: list[Any] = [adapted[name] for name in names if name in adapted]
            if layers:
                kept = getattr(layers[0], 'fused', None)
                if kept is None or [*map(id, kept.layers)] != [*map(id, layers)]:
                    layers[0].fused = kept = _Group(layers)
                found.append(kept)
    return found


@contextmanager
def fused_adapters(model: nn.Module) -> Iterator[None]:
    """Context in which adapters beside their weights are computed together. Requires grad mode off and dropout off, and
    no other thread may run the same model."""
    groups = _groups(model)
    try:
        for group in groups:
            group.refresh()
            for number, layer in enumerate(group.layers):
                layer.forward = group.forward_of(number)
        yield
    finally:
        for group in groups:
            group.forget()
            for layer in group.layers:
                vars(layer).pop('forward', None)
