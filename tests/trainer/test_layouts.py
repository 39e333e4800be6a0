"""A checkpoint outlives its layout: runs that move between strategies and world sizes, and runs that go on under the
same one.

All legs on two processes run in one job, and those that need colossalai in another; each test looks at what they left.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from layout_runs import BEFORE_COLOSSALAI, PER_LEG, RING, TOTAL, Runs
from layouts import BF16, Leg, compare_logs, compare_weights, differing, every_pair, tensors
from optional_packages import needs_colossalai

from chatgpt.strategies.checkpoint import CheckpointReader, pieces_of, write_checkpoint

pytestmark = pytest.mark.system


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
def test_the_same_layout_goes_on_to_the_bit(plain, layout):
    plain.check_bits(layout)


def test_the_comparison_tells_another_run(runs):
    """Negative control: a run with one weight changed is not taken for the same one."""
    other = runs.folder / 'disturbed'
    disturb(runs.folder / 'naive_half', other)
    runs.run(disturbed_rest=replace(runs.same_layout('naive')['naive_rest'], source=other))
    with pytest.raises(AssertionError, match=r'not explained by edge distance|phase 3, '):
        compare_logs(runs.logs['naive_whole'], runs.logs['disturbed_rest'], first=2)
    with pytest.raises(AssertionError, match='lr per step apart'):
        compare_weights(runs.folder / 'naive_whole', runs.folder / 'disturbed_rest', steps=4)
    assert 'actor/model.transformer.ln_f.weight' in differing(runs.folder / 'naive_half', other)


def disturb(source: Path, target: Path) -> None:
    """A copy of a checkpoint with one layer norm scaled by a hundredth."""
    reader, content = CheckpointReader(source), tensors(source)
    content['actor/model.transformer.ln_f.weight'] = content['actor/model.transformer.ln_f.weight'] * 1.01
    shaped = {name: tensor.reshape(reader.shape(name)) for name, tensor in content.items()}
    write_checkpoint(target, {'': pieces_of(shaped)}, meta=reader.meta, state=reader.json())


@needs_colossalai
def test_ring_through_colossalai(colossal):
    colossal.check_ring(BEFORE_COLOSSALAI, len(RING))


@needs_colossalai
@pytest.mark.parametrize('layout', ['zero1(2)', 'gemini(2) bf16'])
def test_colossalai_goes_on_to_the_bit(colossal, layout):
    colossal.check_bits(layout)


@needs_colossalai
@pytest.mark.parametrize('to', ['gemini_to_zero2', 'gemini_to_fsdp'])
def test_from_gemini_into_fp32(colossal, to):
    """What Gemini wrote goes on under any fp32 layout as it does under Naive."""
    colossal.compare('gemini_to_naive', to, first=0, phases=2)


@needs_colossalai
@pytest.mark.parametrize(
    ('gemini', 'zero'), [('gemini_rest', 'gemini_to_zero2_bf16'), ('zero1_to_gemini', 'zero1_to_zero2_bf16')]
)
def test_gemini_goes_on_as_zero_in_bf16(colossal, gemini, zero):
    """From Gemini's own checkpoint and from that of another layout in fp32."""
    colossal.compare(gemini, zero, first=0, phases=2, tolerance=BF16)


@pytest.mark.slow
@needs_colossalai
def test_every_layout_to_every_other(tmp_path):
    cells = every_pair(tmp_path)
    assert len(cells) >= 64
    assert {pair: cell for pair, cell in cells.items() if cell.startswith('FAILED')} == {}
