"""A stand-in for the package `colossalai` if it is not installed: the names that `chatgpt` scripts import from it."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from typing import Any

SERVED: dict[str, str] = {
    f'nn.optimizer.{name}': 'chatgpt_compat.colossalai.package:hybrid_adam'
    for name in ('HybridAdam', 'CPUAdam', 'FusedAdam')
} | {'logging.get_dist_logger': 'chatgpt_compat.colossalai.package:get_dist_logger'}

INSTEAD: dict[str, str] = {
    **dict.fromkeys(
        ('launch', 'launch_from_torch'), 'strategy = DDPStrategy() or FSDPStrategy(), which starts the process group'
    ),
    'utils': 'torch and the strategy, such as strategy.device; or install colossalai (README, requirements-colossalai)',
    **dict.fromkeys(
        ('nn', 'tensor', 'booster', 'zero'),
        'strategy = ColossalAIStrategy(...), with colossalai installed (README, requirements-colossalai)',
    ),
    'testing': 'chatgpt.testing.processes.run_distributed',
}


def hybrid_adam(
    model_params: Any,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    adamw_mode: bool = True,
    nvme_offload_fraction: float = 0.0,
    nvme_offload_dir: str | None = None,
    verbose: bool = False,
) -> Any:
    """Returns torch's AdamW, or Adam without `adamw_mode`, which make the same update, for strategies that do not need
    colossalai. Raises ValueError for arguments that torch's do not have."""
    import torch

    if not bias_correction or nvme_offload_fraction or nvme_offload_dir:
        what = 'offload to NVMe' if bias_correction else 'bias_correction=False'
        raise ValueError(f'{what} needs colossalai itself (README, requirements-colossalai)')
    kind = torch.optim.AdamW if adamw_mode else torch.optim.Adam
    return kind(model_params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


def use_without_gpu() -> None:
    """Makes the installed colossalai run on the CPU if there is no GPU, as `ColossalAIStrategy` does. A version that
    does not allow it is left unchanged."""
    import torch

    from chatgpt.strategies.colossalai import bridge, import_colossalai

    if not torch.cuda.is_available():
        with suppress(ImportError, RuntimeError):
            import_colossalai()
            bridge()


class _Logger(logging.LoggerAdapter[logging.Logger]):
    """A logger that ignores `ranks`: rank 0 logs."""

    def log(self, level: int, msg: object, ranks: Any = None, **kwargs: Any) -> None:  # type: ignore[override]
        super().log(level, msg, **kwargs)


def get_dist_logger(name: str = 'colossalai') -> _Logger:
    logging.basicConfig(format='%(message)s')
    logger = logging.getLogger(name)
    logger.setLevel(logging.INFO if os.environ.get('RANK', '0') == '0' else logging.ERROR)
    return _Logger(logger, {})
