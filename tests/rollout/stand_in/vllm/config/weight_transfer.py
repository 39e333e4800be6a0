from __future__ import annotations

from dataclasses import dataclass


@dataclass
class WeightTransferConfig:
    backend: str = 'nccl'
