"""How many rows the local engine's cache has where memory is short: on a stand-in for a GPU's free memory."""

from __future__ import annotations

import pytest
import torch
from engine_calls import conversed

from chatgpt.nn import Actor
from chatgpt.rollout import Call, LocalEngine, SamplingParams
from chatgpt.rollout.local.slot_cache import bytes_per_slot
from chatgpt.testing import tiny_causal_lm
from chatgpt.types import Prompt

PROMPTS = [Prompt(ids=torch.arange(3, 5 + i % 4)) for i in range(12)]
SAMPLING = SamplingParams(max_new_tokens=7, eos_token_ids=(5, 9, 17))
PER_SLOT = 2 * 2 * 32 * 4  # tiny GPT-2: keys and values, two layers, 32 wide, fp32
LONGEST = 5 + 7 - 1


class Small(LocalEngine):
    def __init__(self, free: int, **kw) -> None:
        super().__init__(**kw)
        self.free, self.rows = free, []

    def free_bytes(self, device):
        held = self._cache.layers if self._cache else []
        return self.free - sum(layer.keys.nbytes + layer.values.nbytes for layer in held)

    def cache(self, rows, capacity):
        self.rows.append(rows)
        return super().cache(rows, capacity)


def generated(engine, calls: int = 1):
    engine.begin(Actor(tiny_causal_lm('gpt2')))
    samples = [engine.generate(Call.of(PROMPTS, SAMPLING, seed=3, indices=range(12))) for _ in range(calls)]
    engine.end()
    return [[s.response_ids.tolist() for s in call] for call in samples]


def test_bytes_by_hand():
    assert bytes_per_slot(Actor(tiny_causal_lm('gpt2'))) == PER_SLOT


@pytest.mark.parametrize('fixed', [False, True])
@pytest.mark.parametrize(('rows', 'most'), [(0, 1), (1, 1), (5, 5), (40, 12)])
def test_rows_are_what_fits_and_tokens_stay(rows, most, fixed):
    """Rows and slots of fixed steps are rounded up, where there is room: 16 for 12, and 64 for 11."""
    engine = Small(int(rows * PER_SLOT * (64 if fixed else LONGEST) / 0.6) + 1, fixed_steps=fixed)
    most = 16 if fixed and most == 12 else most
    assert generated(engine) == generated(LocalEngine())
    assert engine.rows == [most]


def test_a_cache_that_is_there_is_used_again_and_may_become_wider():
    engine = Small(int(5 * PER_SLOT * LONGEST / 0.6) + 1)
    generated(engine, calls=2)
    assert engine.rows == [5, 5]


def test_a_cpu_has_no_bound_and_a_gpu_what_is_free_or_kept_by_torch(monkeypatch):
    for name, value in {'memory_reserved': 700, 'memory_allocated': 300, 'mem_get_info': (1000, 9000)}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    engine = LocalEngine()
    assert engine.free_bytes(torch.device('cpu')) is None
    assert engine.free_bytes(torch.device('cuda', 0)) == 1400


@pytest.mark.parametrize('fixed', [False, True])
@pytest.mark.parametrize(('rows', 'most'), [(0, 1), (3, 3), (40, 8)])
def test_rows_that_are_kept_between_turns_are_what_fits(rows, most, fixed):
    """Twice those that are decoded at once, where that fits."""

    sampling = SamplingParams(max_new_tokens=16, eos_token_ids=(5, 9, 17))
    longest = 64 if fixed else 5 + 16 - 1
    engine = Small(int(rows * PER_SLOT * (longest + 1) / 0.6) + 1, fixed_steps=fixed, max_batch_size=4)
    found, wanted = (
        conversed(one, Actor(tiny_causal_lm('gpt2')), PROMPTS, sampling) for one in (engine, LocalEngine())
    )
    assert found == wanted
    assert engine.rows == [most]
