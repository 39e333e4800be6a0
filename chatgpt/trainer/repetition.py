"""How much responses repeat: runs of four tokens that occur again in the same response, or in another of the phase.

Both are shares of what is there, on token ids, so no tokenizer is needed. Sources: seq-rep-4 of Welleck et al. 2020,
"Neural text generation with unlikelihood training", and distinct-n of Li et al. 2016.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
from torch import Tensor

RUN = 4
"""tokens of a run"""
FACTORS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93], dtype=np.uint64)
"""odd 64-bit numbers: their sum of products with four ids tells runs apart but for one pair in about 10^19"""


def repetition(responses: SequenceOf[Tensor], masks: SequenceOf[Tensor] | None = None) -> dict[str, float]:
    """`rollout/repetition_within` and `_across` of (A,) id tensors; nothing where no response has four tokens.

    With `masks`, (A,) bool, only runs are looked at whose four tokens are all True: the policy's own words.

    Within: mean over the responses of the share of their runs that stood earlier in the same response. Across: the
    share of the responses' different runs that another response of the phase has as well, the first of them not
    counted; it grows with the number of responses and is to be compared with itself.
    """
    ids = np.concatenate([np.zeros(0, dtype=np.int64), *(r.cpu().numpy() for r in responses)]).astype(np.uint64)
    row = np.repeat(np.arange(len(responses)), [len(r) for r in responses])
    if len(ids) < RUN:
        return {}
    whole = row[: -RUN + 1] == row[RUN - 1 :]
    if masks is not None:
        own = np.concatenate([m.cpu().numpy() for m in masks])
        whole = whole & np.logical_and.reduce([own[k : len(own) - RUN + 1 + k] for k in range(RUN)])
    runs = sum(ids[k : len(ids) - RUN + 1 + k] * FACTORS[k] for k in range(RUN))[whole]
    row = row[: -RUN + 1][whole]
    if not len(runs):
        return {}
    # A response's number, spread over all bits, makes equal runs of two responses different.
    of_response, first = np.unique(runs ^ (row.astype(np.uint64) + np.uint64(1)) * FACTORS[0], return_index=True)
    total = np.bincount(row)
    different = np.bincount(row[first], minlength=len(total))
    long = total > 0
    return {
        'rollout/repetition_within': float(np.mean(1.0 - different[long] / total[long])),
        'rollout/repetition_across': 1.0 - len(np.unique(runs)) / len(of_response),
    }
