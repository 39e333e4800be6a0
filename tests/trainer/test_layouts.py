"""Runs that move between strategies and world sizes, and runs that resume under the same one. All legs on two processes
run in one job, and those that need colossalai in another."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import layouts
import pytest
from layouts import BF16, FP32, Leg, Log, Tolerance, compare_logs, compare_weights, differing
from optional_packages import needs_colossalai

from chatgpt.strategies.checkpoint import CheckpointReader, pieces_of, write_checkpoint

pytestmark = pytest.mark.system
PER_LEG = 2
RING = ['naive', 'ddp(2)', 'fsdp(2)', 'naive', 'zero1(2)', 'zero2(2)', 'naive']
TOTAL = PER_LEG * len(RING)
BEFORE_COLOSSALAI = 4
"""legs of the ring without colossalai"""


class Runs:
    """Legs by name; each writes its checkpoint into a folder of its name."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.logs = folder, dict[str, Log]()

    def run(self, **legs: Leg) -> None:
        named = [replace(leg, target=self.folder / name) for name, leg in legs.items()]
        self.logs |= zip(legs, layouts.run_legs(named), strict=True)

    def same_layout(self, layout: str, phases: int = 4) -> dict[str, Leg]:
        """Returns three legs: the whole run, its first half, and the second."""
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
        """Compares samples, losses and weights; a draw next to an edge ends the comparison with a report, but fails in
        the first phase."""
        report = compare_logs(self.logs[want], self.logs[got], first=first, tolerance=tolerance)
        if report is not None:
            warnings.warn(f'{got} was compared with {want} up to a draw next to an edge: {report}', stacklevel=2)
            assert not report.startswith(f'phase {first + 1}:'), report
            return
        compare_weights(
            self.folder / want / at, self.folder / got, steps=phases * layouts.UPDATES_PER_PHASE, tolerance=tolerance
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


@pytest.fixture(scope='module')
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    runs = Runs(tmp_path_factory.mktemp('layouts'))
    runs.run(straight=Leg(layout='naive', until=TOTAL, total=TOTAL, every=PER_LEG), **runs.same_layout('naive'))
    return runs


@pytest.fixture(scope='module')
def plain(runs: Runs) -> Runs:
    runs.run(**runs.ring(0, 3), **runs.same_layout('ddp(2)'), **runs.same_layout('fsdp(2)'), **runs.ring(3, 4))
    return runs


@pytest.fixture(scope='module')
def colossal(plain: Runs) -> Runs:
    gemini = plain.same_layout('gemini(2) bf16')
    on = Leg(layout='zero2(2) bf16', until=4, total=4, source=plain.folder / 'gemini_half')
    into = Leg(layout='gemini(2) bf16', until=4, total=4, source=plain.folder / 'zero1_half')
    plain.run(
        **plain.ring(4, 6),
        **plain.same_layout('zero1(2)'),
        **gemini,
        zero1_to_gemini=into,
        zero1_to_zero2_bf16=replace(into, layout='zero2(2) bf16'),
        gemini_to_zero2_bf16=on,
        gemini_to_zero2=replace(on, layout='zero2(2)'),
        gemini_to_fsdp=replace(on, layout='fsdp(2)'),
        gemini_to_naive=replace(on, layout='naive'),
        **plain.ring(6, 7),
    )
    return plain


def test_ring_of_layouts(plain):
    plain.check_ring(0, BEFORE_COLOSSALAI)


@pytest.mark.parametrize('layout', ['naive', 'ddp(2)', 'fsdp(2)'])
def test_the_same_layout_resumes_to_the_bit(plain, layout):
    plain.check_bits(layout)


def test_the_comparison_detects_another_run(runs):
    """Negative control: detects a run with one weight changed."""
    other = runs.folder / 'disturbed'
    disturb(runs.folder / 'naive_half', other)
    runs.run(disturbed_rest=replace(runs.same_layout('naive')['naive_rest'], source=other))
    with pytest.raises(AssertionError, match=r'not explained by edge distance|phase 3, '):
        compare_logs(runs.logs['naive_whole'], runs.logs['disturbed_rest'], first=2)
    with pytest.raises(AssertionError, match='lr per step apart'):
        compare_weights(runs.folder / 'naive_whole', runs.folder / 'disturbed_rest', steps=4)
    assert 'actor/model.transformer.ln_f.weight' in differing(runs.folder / 'naive_half', other)


def disturb(source: Path, target: Path) -> None:
    reader, content = CheckpointReader(source), layouts.tensors(source)
    content['actor/model.transformer.ln_f.weight'] = content['actor/model.transformer.ln_f.weight'] * 1.01
    shaped = {name: tensor.reshape(reader.shape(name)) for name, tensor in content.items()}
    write_checkpoint(target, {'': pieces_of(shaped)}, meta=reader.meta, state=reader.json())


@needs_colossalai
def test_ring_through_colossalai(colossal):
    colossal.check_ring(BEFORE_COLOSSALAI, len(RING))


@needs_colossalai
@pytest.mark.parametrize('layout', ['zero1(2)', 'gemini(2) bf16'])
def test_colossalai_resumes_to_the_bit(colossal, layout):
    colossal.check_bits(layout)


@needs_colossalai
@pytest.mark.parametrize('to', ['gemini_to_zero2', 'gemini_to_fsdp'])
def test_from_gemini_into_fp32(colossal, to):
    """A checkpoint of Gemini continues under any fp32 layout as under Naive."""
    colossal.compare('gemini_to_naive', to, first=0, phases=2)


@needs_colossalai
@pytest.mark.parametrize(
    ('gemini', 'zero'), [('gemini_rest', 'gemini_to_zero2_bf16'), ('zero1_to_gemini', 'zero1_to_zero2_bf16')]
)
def test_gemini_continues_like_zero_in_bf16(colossal, gemini, zero):
    """From Gemini's own checkpoint, and from one of another layout in fp32."""
    colossal.compare(gemini, zero, first=0, phases=2, tolerance=BF16)


@pytest.mark.slow
@needs_colossalai
def test_every_layout_to_every_other(tmp_path):
    cells = layouts.every_pair(tmp_path)
    assert len(cells) >= 64
    assert {pair: cell for pair, cell in cells.items() if cell.startswith('FAILED')} == {}
