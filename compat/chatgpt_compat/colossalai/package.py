"""The package `colossalai` where it is not installed: what its `chatgpt` scripts import of it, and may not even use."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

_HERE = 'chatgpt_compat.colossalai.package'
SERVED: dict[str, str] = {
    'nn.optimizer.HybridAdam': f'{_HERE}:hybrid_adam',
    'nn.optimizer.CPUAdam': f'{_HERE}:hybrid_adam',
    'nn.optimizer.FusedAdam': f'{_HERE}:hybrid_adam',
    'logging.get_dist_logger': f'{_HERE}:get_dist_logger',
}

INSTEAD: dict[str, str] = {
    'launch': 'strategy = DDPStrategy() or FSDPStrategy(), which starts the process group',
    'launch_from_torch': 'strategy = DDPStrategy() or FSDPStrategy(), which starts the process group',
    'utils': 'torch and the strategy, such as strategy.device; or install colossalai (README, requirements-colossalai)',
    'nn': 'strategy = ColossalAIStrategy(...), with colossalai installed (README, requirements-colossalai)',
    'tensor': 'strategy = ColossalAIStrategy(...), with colossalai installed (README, requirements-colossalai)',
    'booster': 'strategy = ColossalAIStrategy(...), with colossalai installed (README, requirements-colossalai)',
    'zero': 'strategy = ColossalAIStrategy(...), with colossalai installed (README, requirements-colossalai)',
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
    """torch's Adam in its place, the same update: AdamW, or Adam without `adamw_mode`. It is for the strategies that
    need no colossalai.

    Raises:
        ValueError: what torch's has not.
    """
    import torch

    if not bias_correction:
        raise ValueError('bias_correction=False needs colossalai itself (README, requirements-colossalai)')
    if nvme_offload_fraction or nvme_offload_dir:
        raise ValueError('offload to NVMe needs colossalai itself (README, requirements-colossalai)')
    kind = torch.optim.AdamW if adamw_mode else torch.optim.Adam
    return kind(model_params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


def use_without_gpu() -> None:
    """Where there is no GPU: the installed one runs on the CPU, as `ColossalAIStrategy` has it. One that this cannot be
    done to is left as it is."""
    import torch

    from chatgpt.strategies.colossalai import bridge, import_colossalai

    if not torch.cuda.is_available():
        with suppress(ImportError, RuntimeError):
            import_colossalai()
            bridge()


class _Logger:
    """Logging whose `ranks` says nothing: rank 0 logs."""

    def __init__(self, name: str) -> None:
        import os

        logging.basicConfig(format='%(message)s')
        self._logger = logging.getLogger(name)
        self._logger.setLevel(logging.INFO if os.environ.get('RANK', '0') == '0' else logging.ERROR)

    def info(self, message: str, ranks: Any = None) -> None:
        self._logger.info(message)

    def warning(self, message: str, ranks: Any = None) -> None:
        self._logger.warning(message)

    def debug(self, message: str, ranks: Any = None) -> None:
        self._logger.debug(message)

    def error(self, message: str, ranks: Any = None) -> None:
        self._logger.error(message)


def get_dist_logger(name: str = 'colossalai') -> _Logger:
    return _Logger(name)
