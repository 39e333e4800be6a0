"""Names of the variants of formulas. Imports no torch, so that settings and --help can read them."""

from __future__ import annotations

from typing import Literal, get_args

LogprobKernel = Literal['auto', 'plain', 'fused', 'liger']
"""ways to compute log-probs from hidden states (`chatgpt.nn.head_kernels`)"""
KERNELS = get_args(LogprobKernel)
KLKind = Literal['k1', 'k2', 'k3', 'abs', 'full']
OffPolicy = Literal['token_truncate', 'token_mask', 'sequence_truncate', 'sequence_mask']
Aggregation = Literal['token', 'sequence', 'sequence_sum']
