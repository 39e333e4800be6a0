"""What one process holds of a model under tensor parallelism: a module on the meta device is cut down to the parts that
the model's own plan (`base_model_tp_plan` of its config) gives a process, and then counted and traced as any other.

Layers that the plan does not name are whole on every process of a rank.
"""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor, nn

from chatgpt.nn.trunk import base_model, text_config

COLUMNS = ('colwise', 'colwise_rep', 'colwise_gather_output')
"""styles that cut what a layer puts out: (out, in) by out; the bias too"""
ROWS = ('rowwise', 'rowwise_rep', 'rowwise_split_input')
"""styles that cut what a layer takes in: (out, in) by in"""
_DIMS = {True: {'weight': 0, 'bias': 0, 'lora_B': 0}, False: {'weight': 1, 'lora_A': 1}}
"""of a layer cut by columns, or by rows: the dimension of each parameter; others are whole"""


def plan_of(config: Any) -> dict[str, str]:
    """{pattern of a module's name in the trunk: style}.

    Raises:
        ValueError: a family that has none.
    """
    text = text_config(config)
    plan = getattr(text, 'base_model_tp_plan', None)
    if not plan:
        raise ValueError(
            f'tensor_parallel: {text.model_type} has no plan for it in transformers (base_model_tp_plan); leave it out'
        )
    return dict(plan)


def keep_part(model: Any, tensor_parallel: int) -> None:
    """Leave of each parameter of `model`, one of transformers on the meta device, one process's part.

    Raises:
        ValueError: a family without a plan, or a width that cannot be divided.
    """
    if tensor_parallel == 1:
        return
    trunk, plan = base_model(model), plan_of(model.config)
    for name, module in trunk.named_modules():
        style = next((style for pattern, style in plan.items() if _matches(pattern, name)), None)
        if style in COLUMNS + ROWS:
            _cut(module, _DIMS[style in COLUMNS], tensor_parallel, name)
    head = getattr(model, 'get_output_embeddings', lambda: None)()
    embedding = trunk.get_input_embeddings()
    if head is not None and head.weight is not embedding.weight:
        _cut(head, _DIMS[True], tensor_parallel, 'the output layer')


def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r'\*', r'\d+'), name) is not None


def _cut(module: nn.Module, dims: dict[str, int], parts: int, name: str) -> None:
    for key, parameter in module._parameters.items():
        if parameter is not None and key in dims:
            module._parameters[key] = nn.Parameter(_part(parameter, dims[key], parts, name), parameter.requires_grad)


def _part(tensor: Tensor, dim: int, parts: int, name: str) -> Tensor:
    if tensor.shape[dim] % parts:
        raise ValueError(f'tensor_parallel={parts} does not divide the {tensor.shape[dim]} of {name}')
    return tensor.detach().narrow(dim, 0, tensor.shape[dim] // parts).clone()
