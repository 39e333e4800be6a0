"""The layout of `collate`, and the split into micro-batches and over ranks."""

import pytest
import torch

from chatgpt.batching import collate, cut_by_tokens, micro_batches, split_over_ranks
from chatgpt.types import Sequence


def sequence(prompt: list[int], response: list[int], mask: list[bool] | None = None) -> Sequence:
    return Sequence(
        prompt_ids=torch.tensor(prompt, dtype=torch.int64),
        response_ids=torch.tensor(response, dtype=torch.int64),
        response_mask=torch.tensor(mask if mask is not None else [True] * len(response)),
    )


def test_collate_lays_out_two_sequences_as_drawn_by_hand():
    batch = collate([sequence([5, 6], [7]), sequence([8], [9, 1], [False, True])], pad_id=3)
    assert batch.input_ids.tolist() == [[5, 6, 7], [8, 9, 1]]
    assert batch.action_index.tolist() == [1, 3, 4]
    assert batch.action_ids.tolist() == [7, 9, 1]
    assert batch.action_rows.tolist() == [0, 1, 1]
    assert batch.action_mask.tolist() == [True, False, True]
    assert batch.last_index.tolist() == [2, 5]


def test_collate_pads_on_the_right_and_masks_it():
    batch = collate([sequence([5], [7]), sequence([8, 8, 8], [9, 1])], pad_id=3)
    assert batch.input_ids[0].tolist() == [5, 7, 3, 3, 3]
    assert batch.attention_mask[0].tolist() == [True, True, False, False, False]
    assert batch.position_ids[0].tolist() == [0, 1, 2, 3, 4]
    # Each action is predicted by the state before it in the same row.
    flat_ids = batch.input_ids.flatten()
    assert flat_ids[batch.action_index + 1].tolist() == batch.action_ids.tolist()
    assert batch.last_index.tolist() == [1, 9]


@pytest.mark.parametrize(
    ('sequences', 'message'), [([sequence([], [1])], 'empty prompt'), ([sequence([1], [])], 'empty response')]
)
def test_collate_refuses_what_has_nothing_to_predict(sequences, message):
    with pytest.raises(ValueError, match=message):
        collate(sequences)


def test_cut_by_tokens_counts_padded_tokens():
    # Padded size is rows x longest: 5+4 would be 2 x 5 = 10 > 9, so the 5 is alone.
    assert cut_by_tokens([4, 5, 1, 4], 9) == [[1], [0, 3], [2]]
    assert cut_by_tokens([4, 5, 1, 4], None) == [[1, 0, 3, 2]]
    assert cut_by_tokens([100, 2, 3], 10) == [[0], [2, 1]]  # a sequence above the limit is alone


@pytest.mark.parametrize('world_size', [1, 2, 3])
def test_split_over_ranks_deals_everything_once_and_evenly(world_size):
    lengths = [9, 1, 7, 3, 5, 5, 2]
    shares = split_over_ranks(lengths, world_size)
    assert sorted(i for share in shares for i in share) == list(range(7))
    counts = [len(s) for s in shares]
    assert max(counts) - min(counts) <= 1
    shares = split_over_ranks([10, 10, 1, 1], 2)  # by their tokens
    assert [sum([10, 10, 1, 1][i] for i in share) for share in shares] == [11, 11]


def test_a_dummy_batch_has_no_weight():
    columns = {'advantages': torch.tensor([]), 'better': torch.tensor([], dtype=torch.int64)}
    batch = collate([], columns=columns, totals={'tokens': 7}, num_dummies=2)
    assert batch.num_sequences == batch.num_actions == 2
    assert not batch.action_mask.any() and not batch.sequence_mask.any()
    assert {name: column.tolist() for name, column in batch.columns.items()} == {
        'advantages': [0.0, 0.0],
        'better': [0, 0],
    }
    assert batch.columns['better'].dtype is torch.int64 and batch.totals == {'tokens': 7}
    real = collate([sequence([1], [2, 3])], columns={'advantages': torch.tensor([1.0, 2.0])})
    assert real.sequence_mask.tolist() == [True] and real.columns['advantages'].tolist() == [1.0, 2.0]


@pytest.mark.parametrize(('world_size', 'max_tokens'), [(1, None), (2, 12), (3, 12)])
def test_micro_batches_hold_everything_once_and_are_equally_many(world_size, max_tokens):
    lengths = [5, 3, 9, 1, 4]
    ranks = micro_batches(lengths, world_size, max_tokens)
    assert len({len(cuts) for cuts in ranks}) == 1
    assert sorted(i for cuts in ranks for cut in cuts for i in cut) == list(range(5))
    assert (
        all(len(cut) * max(lengths[i] for i in cut) <= 12 for cuts in ranks for cut in cuts if cut)
        or max_tokens is None
    )


def test_ranks_get_equal_costs_and_equally_many_micro_batches_by_hand():
    lengths = [10, 9, 9, 8, 3, 3, 2, 2]  # halves of the list would have 36 and 10 tokens
    cuts = [[[lengths[i] for i in cut] for cut in cuts] for cuts in micro_batches(lengths, 2, 20)]
    # Longest first, each to the rank with fewer sequences, then fewer tokens, then rank 0; micro-batches of up to 20
    # padded tokens.
    assert cuts == [[[10, 8], [3, 2]], [[9, 9], [3, 2]]]
    assert micro_batches([10, 1, 1, 9], 2, 10) == [[[0], [2]], [[3], [1]]]
    assert micro_batches([10, 10, 10], 2, 10) == [[[0], [2]], [[1], []]]
