"""Models with random weights drawn on the device, since one CPU thread takes 25 ns per number and models have billions.

Matrices are N(0, 0.02²); norms and biases have their initial values. Weights differ from those that `chatgpt.nn` draws
from the same seed on the CPU.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers


def random_model(auto_class: str, config: Any, *, place: Any, draw: Any, dtype: Any = None) -> Any:
    """Returns a model of `auto_class` on the device `place`, drawn on the device `draw`. dtype: default
    torch.float32."""
    model = empty_model(auto_class, config, torch.float32 if dtype is None else dtype)
    fill(model, model, place, draw)
    return model.eval()


def empty_model(auto_class: str, config: Any, dtype: Any) -> Any:
    """Returns a model on the meta device."""
    with torch.device('meta'):
        return getattr(transformers, auto_class).from_config(config, dtype=dtype)


def fill(module: Any, model: Any, place: Any, draw: Any) -> None:
    """Draws the meta-device tensors of `module`, a part of `model`. Tied parameters of a module stay tied."""
    made: dict[Any, Any] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None and parameter.is_meta:
                if parameter not in made:
                    made[parameter] = torch.nn.Parameter(
                        _drawn(parameter, name, draw).to(place), parameter.requires_grad
                    )
                owner._parameters[name] = made[parameter]
        computed = [name for name, buffer in owner._buffers.items() if buffer is not None and buffer.is_meta]
        for name in computed:
            owner._buffers[name] = torch.zeros_like(owner._buffers[name], device=place)
        if computed and not owner._parameters:
            model._init_weights(owner)  # computes buffers such as rotary frequencies


def _drawn(parameter: Any, name: str, draw: Any) -> Any:
    drawn = torch.empty(parameter.shape, dtype=parameter.dtype, device=draw)
    if parameter.dim() >= 2:
        return drawn.normal_(std=0.02)
    return drawn.fill_(1.0 if name == 'weight' else 0.0)
