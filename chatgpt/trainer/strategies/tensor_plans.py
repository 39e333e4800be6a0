"""Plans of tensor parallelism for families of which transformers has none: what Megatron-LM cuts (Shoeybi et al. 2019,
section 3), and what has to be told to their attention, which counts heads itself.

Left out: what the styles do (`tensor_parallel`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from chatgpt.trainer.strategies.tensor_group import TensorGroup

FUSED = 'colwise_qkv'
"""colwise, of a layer that puts out all queries, then all keys, then all values"""

_OF_FAMILY: dict[str, dict[str, str]] = {
    'gpt2': {
        'h.*.attn.c_attn': FUSED,
        'h.*.attn.c_proj': 'rowwise',
        'h.*.mlp.c_fc': 'colwise',
        'h.*.mlp.c_proj': 'rowwise',
    },
    'gptj': {
        'h.*.attn.q_proj': 'colwise',
        'h.*.attn.k_proj': 'colwise',
        'h.*.attn.v_proj': 'colwise',
        'h.*.attn.out_proj': 'rowwise',
        'h.*.mlp.fc_in': 'colwise',
        'h.*.mlp.fc_out': 'rowwise',
    },
    'bloom': {
        'h.*.self_attention.query_key_value': 'colwise',
        'h.*.self_attention.dense': 'rowwise',
        'h.*.mlp.dense_h_to_4h': 'colwise',
        'h.*.mlp.dense_4h_to_h': 'rowwise',
    },
    'opt': {
        'decoder.layers.*.self_attn.q_proj': 'colwise',
        'decoder.layers.*.self_attn.k_proj': 'colwise',
        'decoder.layers.*.self_attn.v_proj': 'colwise',
        'decoder.layers.*.self_attn.out_proj': 'rowwise',
        'decoder.layers.*.self_attn_layer_norm': 'replicate',
        'decoder.layers.*.fc1': 'colwise',
        'decoder.layers.*.fc2': 'rowwise',
        'decoder.layers.*.final_layer_norm': 'replicate',
    },
}
_COUNTS = {
    'GPT2Attention': ('num_heads', 'split_size'),
    'GPTJAttention': ('num_attention_heads',),
    'BloomAttention': ('num_heads',),
    'OPTAttention': ('num_heads',),
}
"""by class of attention: what it holds of heads, or of their width"""


def family_plan(model: Any) -> dict[str, str]:
    """The plan of a transformers model, names as in it; empty for a family that has none here.

    Raises:
        ValueError: BLOOM that multiplies weights piece by piece instead of calling its layers.
    """
    prefix = getattr(model, 'base_model_prefix', None)
    plan = _OF_FAMILY.get(model.config.model_type) if prefix is not None else None
    if plan is None:
        return {}
    if getattr(model.config, 'slow_but_exact', False) and model.config.pretraining_tp > 1:
        raise ValueError('tensor_parallel does not know slow_but_exact=True with pretraining_tp > 1; leave one out')
    inside = f'{prefix}.' if prefix and hasattr(model, prefix) else ''
    return {inside + name: style for name, style in plan.items()} | {'lm_head': 'colwise_gather_output'}


def is_transposed(layer: nn.Module) -> bool:
    """GPT-2's `Conv1D`, or one with an adapter: a linear layer whose weight is stored (in, out). Known by name, for
    strategies are imported without transformers."""
    return any(kind.__name__ == 'Conv1D' for kind in type(layer).__mro__)


def count_own_heads(module: nn.Module, group: TensorGroup) -> None:
    """Tell every attention of `module` how many heads this process has; BLOOM's, which of the position biases."""
    for attention in module.modules():
        kinds = [kind.__name__ for kind in type(attention).__mro__]
        for name in next((_COUNTS[kind] for kind in kinds if kind in _COUNTS), ()):
            setattr(attention, name, getattr(attention, name) // group.size)
        if 'BloomAttention' in kinds:
            attention.register_forward_pre_hook(_OwnBiases(group), with_kwargs=True)


class _OwnBiases:
    def __init__(self, group: TensorGroup) -> None:
        self.group = group

    def __call__(self, attention: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        alibi: Tensor = kwargs['alibi']  # (rows x all heads, 1, S)
        own = attention.num_heads
        by_head = alibi.unflatten(0, (-1, own * self.group.size)).narrow(1, own * self.group.index, own)
        return args, kwargs | {'alibi': by_head.flatten(0, 1)}
