"""Data sets of `coati` from JSON files, and the prompts of a loader."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from chatgpt_compat.colossalai.data import _ALPACA, AlpacaDataCollator, _Demonstrations


class SupervisedDataset(_Demonstrations):
    """A JSON list of instruction, input, output in Alpaca's template; only the output is learned."""

    def __init__(
        self, data_path: str, tokenizer: Any, max_datasets_size: int | None = None, max_length: int = 512
    ) -> None:
        with open(data_path, encoding='utf-8') as file:
            rows = json.load(file)[:max_datasets_size]
        pairs = ((_ALPACA[bool(row.get('input'))].format_map(row), row['output'] + tokenizer.eos_token) for row in rows)
        super().__init__(pairs, tokenizer, max_length)


class DataCollatorForSupervisedDataset(AlpacaDataCollator):
    """Pads demonstrations on the right."""


class PromptDataset(Dataset[dict[str, Tensor]]):
    """The instructions of a JSON list: input_ids and attention_mask, each (max_length,), padded by the tokenizer."""

    def __init__(
        self, data_path: str, tokenizer: Any, max_datasets_size: int | None = None, max_length: int = 96
    ) -> None:
        with open(data_path, encoding='utf-8') as file:
            texts = [row['instruction'] for row in json.load(file)[:max_datasets_size]]
        limits = {'max_length': max_length, 'padding': 'max_length', 'truncation': True}
        self.rows = dict(tokenizer(texts, return_tensors='pt', **limits))

    def __len__(self) -> int:
        return len(self.rows['input_ids'])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: tensor[index] for name, tensor in self.rows.items()}


def prompts(loader: Any, pad: int | None) -> list[Tensor]:
    """Returns the prompts of a loader, int64 ids without padding, in the order of its data set. Raises ValueError if it
    is not a DataLoader."""
    if not isinstance(loader, DataLoader):
        raise ValueError(f'prompt_dataloader is a {type(loader).__name__}; give a torch DataLoader')
    dataset: Any = loader.dataset
    return [_prompt(loader.collate_fn([dataset[i]]), pad) for i in range(len(dataset))]


def _prompt(batch: Any, pad: int | None) -> Tensor:
    ids = (batch['input_ids'] if isinstance(batch, Mapping) else batch).reshape(-1).to(torch.int64).cpu()
    if isinstance(batch, Mapping) and 'attention_mask' in batch:
        return ids[batch['attention_mask'].reshape(-1).bool().cpu()]
    real = torch.ones_like(ids, dtype=torch.bool) if pad is None else ids != pad
    where = real.nonzero().reshape(-1)
    return ids[where[0] : where[-1] + 1] if len(where) else ids[:1]
