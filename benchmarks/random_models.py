"""Models of random weights whose numbers are drawn on the device: on one thread of a CPU each takes 25 ns, and the models
of a benchmark have billions.

Matrices are N(0, 0.02²), norms and biases as they start. Left out: the numbers that `chatgpt.nn` gives a new model from a
seed, which are a CPU's.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers


def random_model(auto_class: str, config: Any, *, place: Any, draw: Any, dtype: Any = None) -> Any:
    """A model of transformers' `auto_class` on the device `place`, numbers drawn on `draw`. dtype: torch.float32."""
    model = empty_model(auto_class, config, torch.float32 if dtype is None else dtype)
    fill(model, model, place, draw)
    return model.eval()


def empty_model(auto_class: str, config: Any, dtype: Any) -> Any:
    """Shapes without numbers."""
    with torch.device('meta'):
        return getattr(transformers, auto_class).from_config(config, dtype=dtype)


def checkpoint_blocks(model: Any) -> None:
    """Let the backward pass recompute activations."""
    # transformers 5.17 has only the older name, which 5.23 deprecates
    enable = getattr(model, 'activation_checkpointing_enable', model.gradient_checkpointing_enable)
    enable({'use_reentrant': False})


def fill(module: Any, model: Any, place: Any, draw: Any) -> None:
    """Numbers for what of `module`, a part of `model`, is on the meta device. Tied parameters of a module stay tied."""
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
            model._init_weights(owner)  # transformers computes frequencies and the like there


def _drawn(parameter: Any, name: str, draw: Any) -> Any:
    drawn = torch.empty(parameter.shape, dtype=parameter.dtype, device=draw)
    if parameter.dim() >= 2:
        return drawn.normal_(std=0.02)
    return drawn.fill_(1.0 if name == 'weight' else 0.0)
