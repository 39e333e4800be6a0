"""Comparison of two checkpoints by their tensors, in any layout of pieces; the hash of the weights by hand."""

from __future__ import annotations

import hashlib
import struct

import pytest
import torch

from chatgpt.strategies.checkpoint import CheckpointReader, Piece, parting, pieces_of, write_checkpoint
from chatgpt.strategies.checkpoint.parting import TensorDifference, compare_checkpoints, weights_hash

OWNERS = {'rng': 'rng', 'actor': 'models', 'critic': 'models', 'actor_optim': 'optimizers'}


def tensors() -> dict[str, dict[str, torch.Tensor]]:
    return {
        'critic/': {'bias': torch.tensor([1.0, float('nan')])},
        'actor/': {'weight': torch.arange(6.0).view(2, 3), 'half': torch.tensor([1.5], dtype=torch.bfloat16)},
        'actor_optim/': {'weight/exp_avg': torch.zeros(2, 3), 'weight/step': torch.tensor(4.0)},
        'rng/0/': {'torch': torch.tensor([1, 2, 3], dtype=torch.uint8)},
    }


def written(folder, groups, sharded: bool = False) -> CheckpointReader:
    pieces = {prefix: list(pieces_of(named)) for prefix, named in groups.items()}
    if sharded:
        pieces = {prefix: [half for piece in of for half in halves(piece)] for prefix, of in pieces.items()}
    write_checkpoint(folder, pieces, meta={'owners': OWNERS})
    return CheckpointReader(folder)


def halves(piece: Piece) -> list[Piece]:
    cut = piece.stop // 3
    parts = [(0, cut), (cut, piece.stop)]
    return [Piece(piece.name, piece.shape, a, b, piece.data[a:b].clone()) for a, b in parts if b > a]


def test_the_hash_by_hand_and_in_any_layout(tmp_path, monkeypatch):
    stream = b'actor/half bfloat16 1\n' + struct.pack('<H', 0x3FC0)
    stream += b'actor/weight float32 2x3\n' + struct.pack('<6f', 0, 1, 2, 3, 4, 5)
    stream += b'critic/bias float32 2\n' + struct.pack('<2f', 1.0, float('nan'))
    want = hashlib.sha256(stream).hexdigest()
    whole, sharded = written(tmp_path / 'a', tensors()), written(tmp_path / 'b', tensors(), sharded=True)
    assert weights_hash(whole) == weights_hash(sharded) == want
    monkeypatch.setattr(parting, 'BLOCK', 4)
    assert weights_hash(sharded) == want
    assert compare_checkpoints(whole, sharded) is None


@pytest.mark.parametrize('block', [1 << 22, 2])
def test_the_first_element_that_differs(tmp_path, monkeypatch, block):
    monkeypatch.setattr(parting, 'BLOCK', block)
    other = tensors()
    other['actor/']['weight'][1, 2] = torch.nextafter(torch.tensor(5.0), torch.tensor(6.0))
    other['actor/']['weight'][1, 1] = 9.0
    other['actor_optim/']['weight/exp_avg'][0, 1] = -0.0  # an equal number with other bits
    other['rng/0/']['torch'] += 1  # each rank has its own, so it is not compared
    a, b = written(tmp_path / 'a', tensors()), written(tmp_path / 'b', other, sharded=True)
    assert compare_checkpoints(a, b) == TensorDifference('actor/weight', (1, 1), (4.0, 9.0), elements=2, tensors=2)
    assert weights_hash(a) != weights_hash(b)
    other['actor/'] = tensors()['actor/']
    c = written(tmp_path / 'c', other)
    found = compare_checkpoints(a, c)
    assert found == TensorDifference('actor_optim/weight/exp_avg', (0, 1), (0.0, 0.0), 1, 1)
    assert str(found.values[1]) == '-0.0'
    assert weights_hash(a) == weights_hash(c)  # the hash covers weights only


def test_names_shapes_and_numbers_without_a_shape(tmp_path):
    other = tensors()
    other['actor/']['weight'] = torch.arange(6.0).view(3, 2)
    other['critic/']['more'] = torch.ones(1)
    a, b = written(tmp_path / 'a', tensors()), written(tmp_path / 'b', other)
    assert compare_checkpoints(a, b) == TensorDifference('actor/weight', None, ('float32 2x3', 'float32 3x2'), 0, 2)
    assert weights_hash(a) != weights_hash(b)
    other = tensors()
    other['critic/']['more'] = torch.ones(1)
    assert compare_checkpoints(a, written(tmp_path / 'c', other)).values == (None, 'float32 1')
    other = tensors()
    other['actor_optim/']['weight/step'] += 1
    found = compare_checkpoints(a, written(tmp_path / 'd', other))
    assert found == TensorDifference('actor_optim/weight/step', (), (4.0, 5.0), 1, 1)
