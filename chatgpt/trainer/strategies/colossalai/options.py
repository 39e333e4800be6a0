"""The options of `ColossalAIStrategy`: which fit together, and the import of colossalai. Left out: what the options
do."""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch

from chatgpt.trainer.strategies.streaming import check_stream_blocks

Placement = Literal['cuda', 'cpu', 'auto']

INSTALL = 'pip install --no-deps -r requirements-colossalai.txt'
_GEMINI_ONLY = ('shard_init', 'search_range_mb', 'hidden_dim', 'min_chunk_size_mb', 'gpu_margin_mem_ratio')
FP16_ONLY = (
    'initial_scale',
    'growth_factor',
    'backoff_factor',
    'growth_interval',
    'hysteresis',
    'min_scale',
    'max_scale',
)


def check_options(options: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """ValueError for a value that is not allowed, and for an option that would be ignored."""
    stage, precision, placement = options['stage'], options['precision'], options['placement_policy']
    allowed = {
        'stage': (1, 2, 3),
        'placement_policy': ('cuda', 'cpu', 'auto'),
        'precision': ('bf16', 'fp16') if stage == 3 else ('auto', 'fp32', 'bf16', 'fp16'),
        'norm_type': (2, 2.0),
    }
    for name, values in allowed.items():
        if options[name] not in values:
            where = f' under stage={stage}' if name == 'precision' else ''
            raise ValueError(
                f'{name}={options[name]!r}{where} is not one of {", ".join(map(repr, dict.fromkeys(values)))}'
            )
    changed = {name for name, value in options.items() if value != defaults[name]}

    def refuse(names: Iterable[str], reason: str) -> None:
        for name in names:
            if name in changed:
                raise ValueError(f'{name}={options[name]!r} {reason}; leave it at {defaults[name]!r}')

    check_stream_blocks(options['stream_blocks'])
    if options['tensor_parallel'] != 1:
        parts = f'tensor_parallel={options["tensor_parallel"]}'
        if stage == 3:
            raise ValueError(f'{parts}: Gemini (stage=3) has no parts of layers; use stage=1 or 2, or FSDPStrategy')
        for name in ('placement_policy', 'reproducible'):
            if name in changed:
                raise ValueError(f'{parts} does not go with {name}={options[name]!r}: leave one of them out')
    if options['reproducible'] is not None and (stage == 3 or precision == 'fp16'):
        what = 'Gemini (stage=3) keeps gradients in 16 bits' if stage == 3 else "precision='fp16' is scaled by upstream"
        raise ValueError(
            f"reproducible='exact': {what}, which no other strategy repeats; use stage=1 or 2 in fp32 or bf16, or "
            'FSDPStrategy'
        )
    if stage < 3:
        if options['stream_blocks'] is True:
            raise ValueError(
                f'stream_blocks=True: stage={stage} keeps whole weights on the device; only stage=3 can stream them'
            )
        refuse(_GEMINI_ONLY, f'is an option of Gemini (stage=3) and stage={stage} cannot honour it')
    else:
        refuse(('reduce_bucket_size',), 'is an option of stages 1 and 2; Gemini reduces chunk by chunk')
        if placement != 'auto':
            refuse(('gpu_margin_mem_ratio',), f"needs placement_policy='auto', not {placement!r}")
    if precision != 'fp16':
        refuse(FP16_ONLY, f"scales the loss under precision='fp16', not {precision!r}")
    if not 0 <= options['gpu_margin_mem_ratio'] <= 1:
        raise ValueError(f'gpu_margin_mem_ratio={options["gpu_margin_mem_ratio"]} must lie between 0 and 1')
    if options['max_norm'] < 0:
        raise ValueError(f'max_norm={options["max_norm"]} must not be negative; 0 turns clipping off')


def import_colossalai() -> None:
    """Import it once; its first import takes seconds and warns of packages that nothing here uses."""
    if importlib.util.find_spec('colossalai') is None:
        raise ImportError(f'ColossalAIStrategy needs colossalai, which is not installed; run: {INSTALL}')
    name = 'CUDA_DEVICE_MAX_CONNECTIONS'
    before = os.environ.get(name)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        try:
            importlib.import_module('colossalai.booster.plugin')
        except ImportError as error:
            raise ImportError(f'ColossalAIStrategy cannot import colossalai ({error}); run: {INSTALL}') from error
    if not torch.cuda.is_available() and before is None:
        os.environ.pop(name, None)  # upstream sets it on import; without CUDA it means nothing


def check_kernels(stage: int) -> None:
    """Gemini's optimizers are CUDA kernels that upstream compiles when the first one is made, and it asks for the
    toolkit even where they are compiled already. ImportError without it, before anything is joined or loaded."""
    if stage < 3 or not torch.cuda.is_available():
        return
    from torch.utils.cpp_extension import CUDA_HOME

    if CUDA_HOME is None or not os.access(os.path.join(CUDA_HOME, 'bin', 'nvcc'), os.X_OK):
        raise ImportError(
            f'ColossalAIStrategy(stage=3): HybridAdam is compiled by nvcc, and there is none (CUDA_HOME: {CUDA_HOME}); '
            f'install the CUDA {torch.version.cuda} toolkit and set CUDA_HOME, or use stage=2 or FSDPStrategy'
        )
