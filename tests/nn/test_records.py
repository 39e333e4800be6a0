"""Records that stay on their rank: outlines of others, numbers of all, tensors that move with the train batches."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from chatgpt.functional.masking import joined_moments, masked_mean, masked_var, moments, whiten
from chatgpt.nn.records import fetched, is_here, lengths_only, moved, numbers, of_all_ranks
from chatgpt.strategies import DDPStrategy, FSDPStrategy
from chatgpt.strategies.ranks import Ranks
from chatgpt.strategies.sums import ExactSums, Sums
from chatgpt.testing.processes import run_distributed
from chatgpt.types import Experience

PER_TOKEN = ('logprobs', 'filtered_logprobs', 'edge_distances', 'old_logprobs', 'ref_logprobs', 'values', 'kl')
PER_TOKEN += ('rewards', 'advantages', 'returns')


def record(index: int, actions: int | None = None, **changed: Any) -> Experience:
    """Returns a record with numbers that are a function of its index, of a length that differs from its neighbours'."""
    actions = actions or 1 + index % 5
    generator = torch.Generator().manual_seed(index)
    found: dict[str, Any] = {name: torch.randn(actions, generator=generator) for name in PER_TOKEN}
    found |= {'prompt_ids': torch.arange(2 + index % 3), 'response_ids': torch.arange(actions) + index}
    mask = torch.rand(actions, generator=generator) < 0.7 if index % 2 else torch.ones(actions, dtype=torch.bool)
    found |= {'response_mask': mask, 'index': index, 'group': index // 2, 'score': float(index)}
    texts = {'prompt_text': f'prompt {index}', 'response_text': f'response {index}', 'columns': {'answer': index}}
    return Experience(**found | texts | {'finish_reason': 'eos'} | changed)


def same(a: Any, b: Any) -> bool:
    names = [f.name for f in fields(a) if f.name != 'rank']
    pairs = [(getattr(a, name), getattr(b, name)) for name in names]
    return all(torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in pairs)


def stored(records: list[Any]) -> int:
    """Returns the bytes of all tensors of the records."""
    tensors = [value for r in records for f in fields(r) if isinstance(value := getattr(r, f.name), Tensor)]
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if not t.is_meta}.values()
    )


def test_an_outline_has_lengths_and_no_numbers():
    whole = record(4, 1000)
    outline = lengths_only(whole)
    assert is_here(whole) and not is_here(outline)
    assert (outline.num_actions, outline.num_tokens, outline.score) == (1000, whole.num_tokens, 4.0)
    assert stored([whole]) > 49_000 and stored([outline]) == 1, 'a mask of one element'
    assert torch.equal(outline.response_mask, whole.response_mask)
    assert torch.equal(lengths_only(record(3)).response_mask, record(3).response_mask)
    with pytest.raises(RuntimeError):
        outline.advantages.tolist()
    with pytest.raises(RuntimeError):
        torch.cat([whole.advantages, outline.advantages]).tolist()


def test_without_other_ranks_every_record_is_here():
    records = [record(i) for i in (1, 0)]
    table = numbers(records, lambda r: r.values[:1], 1)
    assert table.dtype == torch.float64 and table[:, 0].tolist() == [float(r.values[0]) for r in records]


# ---------------------------------------------------------------------- two ranks


OWNED = ((0, 3, 4, 6), (1, 2, 5))
"""sample indices of the records of each rank"""


def on_two_ranks() -> dict[str, Any]:
    with DDPStrategy(seed=0, device='cpu') as strategy:
        me = strategy.rank
        records = of_all_ranks(strategy, [record(i) for i in OWNED[me]])
        assert [r.index for r in records] == list(range(7))
        assert [r.index for r in records if is_here(r)] == list(OWNED[me])
        assert [r.rank for r in records] == [0, 1, 1, 0, 0, 1, 0]
        for r in records:
            assert torch.equal(r.response_mask, record(r.index).response_mask)
            assert is_here(r) or (r.response_text, r.columns) == ('', {})
        there = [1, 0, 1, 0, 1, 1, 0]  # 0, 4 leave rank 0, and 1 leaves rank 1
        batch = moved(strategy, records, there)
        for r, rank in zip(batch, there, strict=True):
            assert is_here(r) == (me in (rank, r.rank))
            tensors = {f.name for f in fields(r) if isinstance(getattr(r, f.name), Tensor)} if is_here(r) else set()
            assert all(torch.equal(getattr(r, name), getattr(record(r.index), name)) for name in tensors)
        assert [r.index for r in records if is_here(r)] == list(OWNED[me]), 'the list itself is as before'
        everyone = fetched(strategy, records[2:5])
        assert all(same(r, record(i)) for r, i in zip(everyone, (2, 3, 4), strict=True))
        nothing = moved(strategy, [], [])
        return {
            'sums': numbers(records, lambda r: r.values.double().sum()[None], 1, strategy).tolist(),
            'none here': numbers([r for r in records if r.rank == 0], lambda r: r.kl[:1], 1, strategy).tolist(),
            'nothing': nothing,
        }


def test_records_of_two_ranks():
    first, second = run_distributed(on_two_ranks, 2)
    assert first == second and first['nothing'] == []
    assert first['sums'] == [[float(record(i).values.double().sum())] for i in range(7)]
    assert first['none here'] == [[float(record(i).kl[0])] for i in OWNED[0]]


def exchanged() -> list[list[float]]:
    with DDPStrategy(seed=0, device='cpu') as strategy:
        sent = [torch.arange(3.0) + 10 * strategy.rank, torch.zeros(0) if strategy.rank else torch.ones(2)]
        found = [t.tolist() for t in strategy.exchange(sent)]
        assert [t.tolist() for t in Ranks.exchange(strategy.ranks, sent)] == found, 'as built on the other members'
        parts = ['a', 'b'] if strategy.rank == 0 else ['not read', 'not read']
        assert strategy.scatter_object(parts) == Ranks.scatter_object(strategy.ranks, parts) == 'ab'[strategy.rank]
        return found


def test_ranks_exchange_tensors_of_different_lengths():
    assert run_distributed(exchanged, 2) == [[[0, 1, 2], [10, 11, 12]], [[1, 1], []]]


def with_two_processes_of_a_rank() -> dict[str, Any]:
    """Two ranks of two processes: as `with_ranks`, and which sizes of groups gather objects."""
    with FSDPStrategy(seed=0, device='cpu', tensor_parallel=2, precision='fp32') as strategy:
        sizes, gather = [], dist.all_gather_object

        def counted(found: list[Any], obj: Any, group: Any = None) -> None:
            sizes.append(len(found))
            gather(found, obj, group=group)

        dist.all_gather_object = counted
        process = strategy.processes.rank
        own = [record(i) for i in OWNED[strategy.rank]]
        own[0].values += process % 2  # as a device of its own may round otherwise
        records = of_all_ranks(strategy, own)
        dist.all_gather_object = gather
        there = [1 - r.rank for r in records]
        batch = moved(strategy, records, there)
        return {
            'sizes': sizes,
            'values': [r.values.tolist() for r in batch if is_here(r)],
            'sent': [t.tolist() for t in strategy.exchange([torch.tensor([process, r]) for r in range(2)])],
            'scattered': strategy.scatter_object(['a', 'b']),
        }


@pytest.mark.slow
def test_processes_of_a_rank_hold_the_records_of_the_first():
    found = run_distributed(with_two_processes_of_a_rank, 4)
    assert all(f['sizes'] == [2] for f in found), 'one process of each rank contributes'
    assert found[0]['values'] == found[1]['values'] == found[2]['values'] == found[3]['values']
    assert found[0]['values'] == [record(i).values.tolist() for i in range(7)]
    assert [f['sent'] for f in found] == [[[0, 0], [2, 0]], [[1, 0], [3, 0]], [[0, 1], [2, 1]], [[1, 1], [3, 1]]]
    assert [f['scattered'] for f in found] == ['a', 'a', 'b', 'b']


# ---------------------------------------------------------------------- where records go, and sums over them


class Rank:
    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size


@pytest.mark.parametrize('make', [Sums, ExactSums, lambda ranks: ExactSums(ranks, ranks_below=True)])
def test_records_go_where_rounds_take_them(make):
    lengths = [3, 9, 4, 1, 7, 7, 2, 5, 8, 6, 3]
    goes = make(Rank(0, 4)).ranks_of(lengths)
    for rank in range(4):
        sums = make(Rank(rank, 4))
        taken = {i for _, batches in sums.rounds(lengths, None) for batch in batches for i in batch}
        assert taken == {i for i, to in enumerate(goes) if to == rank} and sums.ranks_of(lengths) == goes
    if make is Sums:
        assert {i for batch in make(Rank(1, 4)).share(lengths, 12) for i in batch} == {
            i for i, to in enumerate(goes) if to == 1
        }


def test_moments_of_parts_are_those_of_all_in_any_order():
    parts = [(torch.randn(n, generator=torch.Generator().manual_seed(n)) * 3 + 5, torch.arange(n) % 3 > 0) for n in
             (1, 2, 7, 400, 31)]  # fmt: skip
    x, mask = torch.cat([p for p, _ in parts]), torch.cat([m for _, m in parts])
    table = torch.stack([moments(*part) for part in parts])
    joined = joined_moments(table)
    counted = [float(v) for v, m in zip(x.double(), mask, strict=True) if m]
    mean = sum(counted) / len(counted)
    expected = [len(counted), sum(counted), sum((v - mean) ** 2 for v in counted)]
    assert joined.tolist() == pytest.approx(expected, rel=1e-12)
    assert joined.tolist() == joined_moments(table.flip(0)).tolist(), 'to the bit'
    assert table.sum(0).tolist() != pytest.approx(expected, rel=1e-3), 'the means of the parts differ'
    apart = torch.cat([whiten(*part, over=joined) for part in parts])
    assert torch.allclose(apart, whiten(x, mask), atol=1e-6) and not torch.equal(apart[1:3], whiten(*parts[1]))
    assert float(masked_mean(apart, mask)) == pytest.approx(0, abs=1e-6)
    assert float(masked_var(apart, mask)) == pytest.approx(1, abs=1e-5)
