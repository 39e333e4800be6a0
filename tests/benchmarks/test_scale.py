"""scale.py: traffic and time of a tiny model, by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / 'benchmarks'))

import scale

FOUND = {'part': 100, 'outside': 20, 'trained': 100, 'micro_batches': 3, 'waits': False, 'exchanged': 0, 'summed': 0}


@pytest.mark.parametrize(
    'training, parts, changed, nvlink, network',
    [
        # gathers 3 x 2 (80 + 80 + 20) and sums 3 x 4 x 100 are 2,280, of which a card of eight sends 7/8
        (8, {}, {}, 1995, 0),
        (8, {}, {'waits': True}, 7 / 8 * (3 * 360 + 400), 0),
        (16, {}, {}, 15 / 16 * 2280, 2280 / 2 / 8),  # half of each tensor enters each of two machines by eight ports
        (16, {'replicas': 2}, {}, 1995, 3 * 8 * 100 / 8 / 2),
        (8, {'sequence_parallel': 8}, {'exchanged': 50}, 1995 + 3 * 50, 0),
        (16, {'tensor_parallel': 8}, {'summed': 8}, 3 * 3 * 2 * 7, 2280 / 2),  # the two cards of a part are apart
    ],
)
def test_traffic_of_an_update(training, parts, changed, nvlink, network):
    case = scale.Case(model='8B', cards=training, training=training, parts=parts)
    assert scale.traffic(FOUND | changed, case) == pytest.approx((nvlink, network))


def test_time_counts_passes_over_weights_and_attention():
    found, given = {'multiplied': 1e9, 'attended': 1e8}, {'model': '8B', 'cards': 8, 'training': 4, 'tokens': 1000}
    of_pass = 1000 / 4 / 0.4 / 989e12  # seconds per FLOP of a token, for one sequence
    whole, adapters = scale.Case(**given, worker=4), scale.Case(**given, options=scale.LORA)
    assert scale.learn_s(found, whole) == pytest.approx(256 * 4 * 2.1e9 * of_pass)
    assert scale.learn_s(found, adapters) == pytest.approx(256 * (3 * 2e9 + 4e8) * of_pass)
    scored = scale.phase_s(found, whole) - 4 * scale.learn_s(found, whole)
    assert scored == pytest.approx(1024 * 2 * 2.1e9 * of_pass)


def test_a_record_holds_49_bytes_per_token_of_the_response():
    assert scale.record_bytes(2000) - scale.record_bytes(1000) == pytest.approx(49_000, rel=1e-3)
