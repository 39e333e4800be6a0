"""FSDP2 on gloo: it passes the conformance suite, on one process and two, with and without CPU offload."""

from __future__ import annotations

import pytest

from chatgpt.testing.conformance import BF16, FP32, all_checks, run_conformance
from chatgpt.testing.processes import run_distributed


def conform(folder: str, precision: str, cpu_offload: bool) -> dict[str, str]:
    from chatgpt.strategies import FSDPStrategy

    tolerance = FP32 if precision == 'fp32' else BF16
    return run_conformance(
        lambda: FSDPStrategy(precision=precision, cpu_offload=cpu_offload, device='cpu'),
        tolerance=tolerance,
        folder=folder,
    )


@pytest.mark.parametrize(
    ('world_size', 'precision', 'cpu_offload'),
    [(1, 'fp32', False), (2, 'fp32', False), (2, 'fp32', True), (2, 'bf16', False)],
)
def test_conformance(world_size, precision, cpu_offload, tmp_path):
    fresh = (world_size, precision, cpu_offload) == (2, 'fp32', False)  # each rank with an order of sets of its own
    for results in run_distributed(conform, world_size, str(tmp_path), precision, cpu_offload, fresh=fresh):
        assert set(results) == set(all_checks())
        assert set(results.values()) == {'passed'}, results
