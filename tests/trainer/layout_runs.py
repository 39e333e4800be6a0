"""Legs of runs that move between layouts, by name, and what compares them."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

from layouts import FP32, UPDATES_PER_PHASE, Leg, Log, Tolerance, compare_logs, compare_weights, differing, run_legs

PER_LEG = 2
RING = ['naive', 'ddp(2)', 'fsdp(2)', 'naive', 'zero1(2)', 'zero2(2)', 'naive']
TOTAL = PER_LEG * len(RING)
BEFORE_COLOSSALAI = 4
"""legs of the ring that do without"""


class Runs:
    """Legs by name; each writes its checkpoint into a folder of its name."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.logs = folder, dict[str, Log]()

    def run(self, **legs: Leg) -> None:
        named = [replace(leg, target=self.folder / name) for name, leg in legs.items()]
        self.logs |= zip(legs, run_legs(named), strict=True)

    def same_layout(self, layout: str, phases: int = 4) -> dict[str, Leg]:
        """Straight through, to the half, and on from there."""
        whole, key = Leg(layout=layout, until=phases, total=phases), layout.split('(')[0]
        rest = replace(whole, source=self.folder / f'{key}_half')
        return {f'{key}_whole': whole, f'{key}_half': replace(whole, until=phases // 2), f'{key}_rest': rest}

    def ring(self, first: int, last: int) -> dict[str, Leg]:
        return {
            f'ring{i}': Leg(
                layout=RING[i], until=(i + 1) * PER_LEG, total=TOTAL, source=self.folder / f'ring{i - 1}' if i else None
            )
            for i in range(first, last)
        }

    def compare(
        self, want: str, got: str, *, first: int, phases: int, at: str = '', tolerance: Tolerance = FP32
    ) -> None:
        """Samples, losses and weights; a draw next to an edge is reported and ends the comparison, but not in the first
        phase."""
        report = compare_logs(self.logs[want], self.logs[got], first=first, tolerance=tolerance)
        if report is not None:
            warnings.warn(f'{got} was compared with {want} up to a draw next to an edge: {report}', stacklevel=2)
            assert not report.startswith(f'phase {first + 1}:'), report
            return
        compare_weights(
            self.folder / want / at, self.folder / got, steps=phases * UPDATES_PER_PHASE, tolerance=tolerance
        )

    def check_ring(self, first: int, last: int) -> None:
        for i in range(first, last):
            phases = (i + 1) * PER_LEG
            assert len(self.logs[f'ring{i}'].metrics) == PER_LEG
            self.compare('straight', f'ring{i}', first=i * PER_LEG, phases=phases, at=f'step-{phases:08d}')

    def check_bits(self, layout: str) -> None:
        key = layout.split('(')[0]
        whole, half, rest = (self.logs[f'{key}_{name}'] for name in ('whole', 'half', 'rest'))
        assert half.metrics + rest.metrics == whole.metrics
        texts = [
            [[(s.index, s.prompt_text, s.response_text) for s in phase] for phase in log.samples]
            for log in (whole, half, rest)
        ]
        assert texts[1] + texts[2] == texts[0]
        assert any(text for phase in texts[0] for _, _, text in phase)
        assert differing(self.folder / f'{key}_whole', self.folder / f'{key}_rest') == []
