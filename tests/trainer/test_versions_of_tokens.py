"""Versions of the weights per token: between processes, in a checkpoint, in the metrics of staleness."""

from __future__ import annotations

import math
import types

import pytest
import torch
from fake_trainer import experience

from chatgpt.rollout.wire import pack_samples, unpack_samples
from chatgpt.trainer.config import PPOConfig
from chatgpt.trainer.in_flight import joined_records, record_of, share_of
from chatgpt.trainer.metrics import mismatch_metrics
from chatgpt.trainer.selection import Selection
from chatgpt.types import Prompt

MIXED = torch.tensor([3, 3, 4])


def two(version: int, versions: list[torch.Tensor | None]) -> list:
    return [experience(i, [1], [5, 6, 7], version=version, versions=v) for i, v in enumerate(versions)]


def of(packed) -> list[list[int] | None]:
    count = len(packed.lengths)
    samples = unpack_samples(packed, [Prompt(ids=torch.tensor([1]))] * count, range(count), range(count), 1.0)
    return [None if s.versions is None else s.versions.tolist() for s in samples]


def test_versions_travel_with_a_sample():
    assert of(pack_samples(two(3, [None, None]), 3)) == [None, None]
    assert of(pack_samples(two(3, [None, MIXED]), 3)) == [[3, 3, 3], [3, 3, 4]]


def test_versions_of_some_ranks_are_in_a_checkpoint():
    packed = [pack_samples(two(2, [None, None]), 2), pack_samples(two(2, [None, MIXED]), 2)]
    record = {'version': 2} | joined_records([record_of(each) for each in packed])
    assert of(share_of(record, 0, 4)) == [[2] * 3, [2] * 3, [2] * 3, [3, 3, 4]]
    assert of(share_of({'version': 2} | joined_records([record_of(packed[0])]), 0, 2)) == [None, None]


def test_staleness_is_of_tokens():
    config = PPOConfig(max_staleness=4)
    selection = Selection(config, types.SimpleNamespace(is_rank_0=True, world_size=1))  # type: ignore[arg-type]
    selection(two(3, [None, MIXED]), 5, lambda count: None)
    ages = [2, (2 + 2 + 1) / 3]
    assert selection.metrics['rollout/staleness_mean'] == pytest.approx(sum(ages) / 2)
    assert selection.metrics['rollout/staleness_max'] == 2.0


def test_mismatch_and_staleness_are_reported_apart():
    old = [torch.tensor([-1.0, -1.5, -0.5]), torch.tensor([-2.0, -1.0, -1.2])]
    engine = [torch.tensor([-1.2, -1.1, -0.4]), torch.tensor([-1.0, -1.3, -0.2])]
    mask = torch.tensor([True, True, False])
    records = [
        experience(i, [1], [5, 6, 7], version=4, versions=v, old_logprobs=a, logprobs=b, response_mask=mask)
        for i, (a, b, v) in enumerate(zip(old, engine, (None, torch.tensor([3, 4, 4])), strict=True))
    ]
    k3 = [math.exp(d) - 1 - d for d in (0.2, -0.4, -1.0, 0.3)]  # of the tokens that count; the third is old
    found = mismatch_metrics(records, 4)
    assert found['rollout/mismatch_kl'] == pytest.approx((k3[0] + k3[1] + k3[3]) / 3, rel=1e-6)
    assert found['rollout/staleness_kl'] == pytest.approx(k3[2], rel=1e-6)
    assert found['rollout/engine_kl'] == pytest.approx(sum(k3) / 4, rel=1e-6)
    assert 'rollout/mismatch_kl' not in mismatch_metrics(records, 5)  # no token of the present weights
    assert 'rollout/staleness_kl' not in mismatch_metrics(records)
