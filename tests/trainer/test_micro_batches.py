"""Micro-batches of a train batch: split over the ranks by cost, and with or without padding the same losses."""

from __future__ import annotations

from typing import Any

import torch
from ppo_on_ids import run
from tiny_runs import close

import chatgpt.nn.packing as packing_module
from chatgpt.batching import collate, micro_batches
from chatgpt.nn import GPTActor
from chatgpt.strategies import DDPStrategy
from chatgpt.testing.fakes import tiny_config
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer.step import Learner, Work, learn_batch
from chatgpt.types import Sequence

# In this order half and half would give one rank 36 tokens and the other 10.
LENGTHS = [10, 9, 9, 8, 3, 3, 2, 2]

# ---------------------------------------------------------------- balanced by cost


def sequence(length: int) -> Sequence:
    ids = torch.arange(3, 3 + length)
    return Sequence(prompt_ids=ids[:1], response_ids=ids[1:], response_mask=torch.ones(length - 1, dtype=torch.bool))


def test_ranks_get_equal_costs_by_hand():
    cuts = [[[LENGTHS[i] for i in cut] for cut in cuts] for cuts in micro_batches(LENGTHS, 2, 20)]
    # Longest first, each to the rank with fewer sequences, then with fewer tokens, then to rank 0; forwards of up to 20
    # padded tokens.
    assert cuts == [[[10, 8], [3, 2]], [[9, 9], [3, 2]]]


def learn() -> tuple[list[int], int]:
    """Tokens of the records that this rank learned from, and the number of its micro-batches."""
    seen: list[list[int]] = []

    def loss(model: Any, batch: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        seen.append(batch.attention_mask.sum(1).tolist())
        return -(model(batch).logprobs * batch.action_mask).sum() / sum(LENGTHS), {}

    with DDPStrategy(device='cpu') as strategy:
        actor = GPTActor(config=tiny_config('gpt2'))
        actor, optimizer = strategy.prepare((actor, torch.optim.SGD(actor.parameters(), lr=0.1)))
        work = Work(
            [sequence(n) for n in LENGTHS], [Learner('actor', actor, optimizer, loss)], collate, lambda r: r.num_tokens
        )
        learn_batch(strategy, [work], max_tokens=20)
    return sorted(n for records in seen for n in records), len(seen)


def test_what_two_processes_learn_from():
    (first, num_first), (second, num_second) = run_distributed(learn, 2)
    assert sorted(first + second) == sorted(LENGTHS)
    assert (len(first), sum(first)) == (len(second), sum(second)) == (4, 23)
    assert num_first == num_second


# ---------------------------------------------------------------- with and without padding


# ---------------------------------------------------------------- packed


def test_packed_and_plain_ppo_have_the_same_losses(monkeypatch):
    calls: list[int] = []
    original = packing_module._packed_hidden
    monkeypatch.setattr(packing_module, '_packed_hidden', lambda *args: calls.append(1) or original(*args))
    (packed, _), num_packed = run(packing=True), len(calls)
    (plain, _) = run(packing=False)
    # Learning alone: 3 phases of 2 passes over 2 batches, actor and critic; scoring: initial model and critic.
    assert num_packed >= 3 * (2 * 2 * 2 + 2) and len(calls) == num_packed
    assert packed.log.samples() == plain.log.samples()
    assert len({e.num_actions for phase in packed.log.experiences for e in phase}) > 2
    close(packed.log.phases, plain.log.phases, abs=2e-5)
