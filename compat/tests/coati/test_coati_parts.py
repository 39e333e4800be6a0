"""Losses, data and trainers of `coati` that differ between its versions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Adam
from torch.utils.data import DataLoader

from chatgpt.nn import GPTRM
from chatgpt.strategies import NaiveStrategy as OurNaiveStrategy
from chatgpt.testing import tiny_config
from chatgpt.testing.fakes import char_tokenizer
from chatgpt_compat.coati import SERVED
from chatgpt_compat.coati.data import SupervisedDataset
from chatgpt_compat.coati.trainers import RewardModelTrainer
from chatgpt_compat.colossalai import SERVED as MARCH
from chatgpt_compat.colossalai.data import HhRlhfDataset
from chatgpt_compat.colossalai.losses import LogSigLoss
from chatgpt_compat.tables import load


def test_the_value_loss_has_a_half() -> None:
    values, old, reward = torch.tensor([1.0, 0.0]), torch.tensor([0.9, 0.0]), torch.tensor([3.0, 1.0])
    for name in ('models.ValueLoss', 'models.loss.ValueLoss'):
        assert float(load(SERVED[name])()(values, old, reward)) == pytest.approx((2**2 + 1) / 2 / 2)
    assert float(load(MARCH['models.loss.ValueLoss'])()(values, old, reward)) == pytest.approx((2**2 + 1) / 2)


def test_the_strategy_is_that_of_coati() -> None:
    found = load(SERVED['trainer.strategies.naive.NaiveStrategy'])
    assert found is load(SERVED['trainer.strategies.NaiveStrategy']) and hasattr(found, 'save_pretrained')


def test_a_row_with_an_empty_input_has_the_template_without_one(tmp_path: Path) -> None:
    rows = [{'instruction': 'a', 'output': 'b'}, {'instruction': 'a', 'input': '', 'output': 'b'}]
    (tmp_path / 'rows.json').write_text(json.dumps(rows))
    one, two = SupervisedDataset(str(tmp_path / 'rows.json'), char_tokenizer()).input_ids
    assert torch.equal(one, two)


@pytest.fixture
def parts() -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = GPTRM(config=tiny_config('gpt2', positions=64))
    return model, OurNaiveStrategy(), Adam(model.parameters())


def loader(count: int, size: int) -> Any:
    rows = [{'chosen': f'q {i} good {i}', 'rejected': f'q {i} bad'} for i in range(count)]
    return DataLoader(HhRlhfDataset(rows, char_tokenizer(), 32), batch_size=size)  # type: ignore[arg-type]


@pytest.mark.parametrize('place', ['positions', 'names', 'fit by position', 'fit by name', 'fit as in 0.3.3'])
def test_loaders_of_a_reward_model_are_taken_in_both_places(parts: Any, place: str) -> None:
    train, valid, held_out = loader(6, 2), loader(2, 1), loader(4, 1)
    named = {'train_dataloader': train, 'valid_dataloader': valid, 'eval_dataloader': held_out}
    given = (LogSigLoss(), train, valid, held_out, 1) if place == 'positions' else (LogSigLoss(),)
    trainer = RewardModelTrainer(*parts, *given, **(named if place == 'names' else {}))
    fit: Any = {
        'fit by position': lambda: trainer.fit(train, valid, held_out),
        'fit by name': lambda: trainer.fit(**named),
        'fit as in 0.3.3': lambda: trainer.fit(train, held_out, 'logs', False),
    }
    if place == 'fit as in 0.3.3':
        fit[place]()
    else:
        with pytest.warns(UserWarning, match='valid_dataset is not read'):
            fit.get(place, trainer.fit)()
    assert (trainer.num_updates, len(trainer.train_data), len(trainer.eval_data)) == (3, 6, 4)
