"""How near the numbers of another system must come."""

from __future__ import annotations

import torch

LIMIT = 1e-5 if torch.backends.cpu.get_cpu_capability() == 'AVX512' else 5e-5
"""relative; the recordings were made with AVX-512 kernels, and others round otherwise"""
