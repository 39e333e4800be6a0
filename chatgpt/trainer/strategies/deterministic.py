"""torch's deterministic algorithms and those attention kernels whose backward has one order of sums, for a whole
process.

Left out: operators without a deterministic kernel, which compute as ever and are named in a warning of torch's.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.utils import deterministic as torch_deterministic

_WORKSPACE = 'CUBLAS_WORKSPACE_CONFIG'


class Deterministic:
    """Switches on when it is made; `restore` puts back what was set before.

    cuBLAS reads its variable when it is first used, so this comes before any computation on a GPU; a value of the
    user's own stays.
    """

    def __init__(self) -> None:
        self._algorithms = torch.are_deterministic_algorithms_enabled()
        self._warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        self._cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
        self._attention = torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()
        self._memory: Any = torch_deterministic
        self._fill = self._memory.fill_uninitialized_memory
        os.environ.setdefault(_WORKSPACE, ':4096:8')
        torch.use_deterministic_algorithms(True, warn_only=True)
        self._memory.fill_uninitialized_memory = False  # for finding reads of it; it costs a pass
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
        self._use_attention(cudnn=False, mem_efficient=False)  # what stays: FlashAttention and plain matrix products

    def restore(self) -> None:
        torch.use_deterministic_algorithms(self._algorithms, warn_only=self._warn_only)
        self._memory.fill_uninitialized_memory = self._fill
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = self._cudnn
        self._use_attention(*self._attention)

    @staticmethod
    def _use_attention(cudnn: bool, mem_efficient: bool) -> None:
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        torch.backends.cuda.enable_mem_efficient_sdp(mem_efficient)
