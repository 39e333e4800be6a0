"""Combinations of models, adapters and strategies that are refused: tables of `chatgpt.rules` for runs and for setups
of the planner. Imports no torch."""

from __future__ import annotations

from typing import Any

from chatgpt.rules import Rule, changed
from chatgpt.strategies.registry import SHARDED, STRATEGIES, StrategyEntry


def _entry(s: Any) -> StrategyEntry:
    return STRATEGIES.find(s.strategy)


def _on_trunk(s: Any) -> bool:
    return bool(getattr(s, 'on_trunk', False) or getattr(s, 'shared_trunk', False))


PRECISION_RULES = [
    Rule(
        lambda s: _entry(s).only_16_bits and s.precision == 'fp32',
        '--strategy {s.strategy} computes in 16 bits, and --precision is fp32: give --precision bf16 (or fp16) with it',
    )
]
GROUP_RULES = [
    Rule(
        lambda s: s.tensor_parallel > 1 and not _entry(s).takes_tensor_parallel,
        lambda s: f'tensor_parallel={s.tensor_parallel} needs strategy {SHARDED}, and it is {s.strategy}',
    ),
    *changed(
        ('reproducible', 'compile_blocks', 'num_layers_unfrozen', 'environment'),
        lambda s: s.tensor_parallel > 1,
        'tensor_parallel={s.tensor_parallel} does not go with {name}={value!r}: leave one of them out',
    ),
    Rule(
        lambda s: s.sequence_parallel > 1 and not _entry(s).takes('sequence_parallel'),
        lambda s: f'sequence_parallel={s.sequence_parallel} needs strategy {SHARDED}, and it is {s.strategy}',
    ),
    Rule(
        lambda s: s.sequence_parallel > 1 and s.tensor_parallel > 1,
        'sequence_parallel={s.sequence_parallel} does not go with tensor_parallel={s.tensor_parallel}: leave one of '
        'them out',
    ),
    *changed(
        ('reproducible', 'compile_blocks', 'environment'),
        lambda s: s.sequence_parallel > 1,
        'sequence_parallel={s.sequence_parallel} does not go with {name}={value!r}: leave one of them out',
    ),
]
"""of ranks of several processes"""
MODEL_RULES = [
    *PRECISION_RULES,
    *GROUP_RULES,
    *changed(
        (
            *('lora_alpha', 'lora_dropout', 'lora_target_modules', 'lora_train_bias', 'save_adapter', 'quantize'),
            'shared_trunk',
        ),
        lambda s: not s.lora_rank,
        '{name} is about adapters, and there are none: give lora_rank too',
    ),
    Rule(
        lambda s: s.lora_rank and getattr(s, 'num_layers_unfrozen', -1) > 0 and not _on_trunk(s),
        'lora_rank and num_layers_unfrozen are two ways to share the trunk with the reference; choose one',
    ),
    Rule(
        lambda s: s.quantize != 'none' and not _on_trunk(s),
        'quantize={s.quantize!r} is of the base that the models share: give shared_trunk too',
    ),
    Rule(
        lambda s: s.optimizer.endswith('8bit') and not _entry(s).memory_model().whole,
        'optimizer={s.optimizer} needs whole weights on each process: use strategy naive or ddp',
    ),
    Rule(
        lambda s: _on_trunk(s) and getattr(s, 'lora_train_bias', 'none') != 'none',
        'lora_train_bias: the biases of a shared or quantized base are frozen; leave it out',
    ),
    Rule(
        lambda s: _on_trunk(s) and not _entry(s).memory_model().whole,
        'strategy={s.strategy} shards weights; a shared or quantized base is whole on each process: use naive or ddp',
    ),
    Rule(
        lambda s: (
            _on_trunk(s) and (getattr(s, 'critic', 'own') == 'shared' or getattr(s, 'num_layers_unfrozen', -1) > 0)
        ),
        'shared_trunk gives the critic an adapter of its own; leave critic=shared and num_layers_unfrozen out',
    ),
    Rule(
        lambda s: _on_trunk(s) and getattr(s, 'offload', 'none') != 'none',
        'shared_trunk: offload={s.offload} would move the base that all models compute with; leave it out',
    ),
]
