"""What callbacks keep in a checkpoint goes back to them, whatever they call it."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
import torch
from tiny_runs import sft

from chatgpt.strategies.checkpoint import Piece, TensorReader
from chatgpt.trainer.callbacks import Callback


class Keeper(Callback):
    """Keeps one tensor under a name of its choice."""

    def __init__(self, group: str, value: float) -> None:
        self.group, self.data = group, torch.tensor([value, value + 1])

    def checkpoint_pieces(self, trainer: Any) -> dict[str, list[Piece]]:
        return {self.group: [Piece('kept', (2,), 0, 2, self.data)]}

    def load_checkpoint_pieces(self, trainer: Any, name: str, reader: TensorReader) -> bool:
        assert name == self.group
        self.data = reader.read('kept', 0, 2).clone()
        return True


class OtherKeeper(Keeper):
    pass


@pytest.mark.parametrize('group', ['statistics', 'actor', 'actor_optim', 'rng', 'a/b', 'x_ema', 'wx@yz'])
def test_a_group_of_any_name_loads_again(tmp_path, group):
    path = sft(callbacks=[Keeper(group, 3.0), OtherKeeper(group, 7.0)]).save_checkpoint(tmp_path / 'saved')
    one, other = Keeper(group, 0.0), OtherKeeper(group, 0.0)
    resumed = sft(callbacks=[other, one])
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        resumed.load_checkpoint(path)
    assert (one.data.tolist(), other.data.tolist()) == ([3.0, 4.0], [7.0, 8.0])


def test_the_checkpoint_records_the_owners_and_a_run_without_one_says_whose_is_left_out(tmp_path):
    path = sft(callbacks=[Keeper('statistics', 3.0)]).save_checkpoint(tmp_path / 'saved')
    owners = json.loads((path / 'manifest.json').read_text())['meta']['owners']
    assert owners == {'actor': 'models', 'actor_optim': 'optimizers', 'statistics': 'Keeper.0', 'rng': 'rng'}
    told = 'statistics is of a callback that this run does not have, Keeper; it is left out'
    with pytest.warns(UserWarning, match=told):
        sft().load_checkpoint(path)
