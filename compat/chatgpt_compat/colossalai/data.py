"""Data sets of ColossalAI's `chatgpt`, tokenized as there but not padded to `max_length`.

Preferences are (chosen ids, mask, rejected ids, mask), each (1, S); demonstrations are dicts of input_ids and labels,
where −100 does not count. `preferences` and `demonstrations` convert them to the library's records.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from chatgpt.data import TokenizedPreference
from chatgpt.types import Sequence

IGNORE = -100
PREFERENCE = 'give (chosen ids, chosen mask, rejected ids, rejected mask)'
_INTRO = 'Below is an instruction that describes a task'
_ALPACA = {
    True: _INTRO
    + ', paired with an input that provides further context. Write a response that appropriately completes the request.'
    '\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:',
    False: _INTRO + '. Write a response that appropriately completes the request.'
    '\n\n### Instruction:\n{instruction}\n\n### Response:',
}
"""Alpaca's prompt, with and without an input"""


def is_rank_0() -> bool:
    return os.environ.get('RANK', '0') == '0'


class _Pairs(Dataset[tuple[Tensor, Tensor, Tensor, Tensor]]):
    """Preferences from rows with a chosen and a rejected text, and optionally a prompt before both."""

    def __init__(
        self, dataset: Iterable[Mapping[str, str]], tokenizer: Any, max_length: int, special_token: str | None = None
    ) -> None:
        end = tokenizer.eos_token if special_token is None else special_token
        self.items = []
        for row in dataset:
            item: list[Tensor] = []
            for name in ('chosen', 'rejected'):
                text = row.get('prompt', '') + row[name] + end
                ids = tokenizer(text, max_length=max_length, truncation=True, return_tensors='pt')
                item += [ids['input_ids'], ids['attention_mask']]
            self.items.append((item[0], item[1], item[2], item[3]))

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.items[index]


class RmStaticDataset(_Pairs):
    """Rows of prompt, chosen, rejected, as in Dahoas/rm-static."""


class HhRlhfDataset(_Pairs):
    """Rows of chosen and rejected dialogues, as in Anthropic/hh-rlhf."""


class RewardDataset(_Pairs):
    """The pairs of February 2023, which end with <|endoftext|>."""

    def __init__(self, dataset: Iterable[Mapping[str, str]], tokenizer: Any, max_length: int) -> None:
        super().__init__(dataset, tokenizer, max_length, '<|endoftext|>')


class _Demonstrations(Dataset[dict[str, Tensor]]):
    """Ids of prompt and completion; a prompt that is given separately is not learned."""

    def __init__(self, pairs: Iterable[tuple[str, str]], tokenizer: Any, max_length: int | None) -> None:
        length = max_length or tokenizer.model_max_length
        limit = {'truncation': True, 'max_length': length} if length < 2**31 else {}  # transformers' value for no limit
        self.input_ids, self.labels = [], []
        for prompt, completion in pairs:
            ids = tokenizer(prompt + completion, return_tensors='pt', **limit)['input_ids'][0]
            labels = ids.clone()
            if prompt:
                labels[: len(tokenizer(prompt, **limit)['input_ids'])] = IGNORE
            self.input_ids.append(ids)
            self.labels.append(labels)

    def __len__(self) -> int:
        return len(self.input_ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {'input_ids': self.input_ids[index], 'labels': self.labels[index]}


class SFTDataset(_Demonstrations):
    """Rows of prompt and completion; both are learned, as in ColossalAI."""

    def __init__(self, dataset: Iterable[Mapping[str, str]], tokenizer: Any, max_length: int = 512) -> None:
        texts = (row['prompt'] + row['completion'] + '<|endoftext|>' for row in dataset)
        super().__init__((('', text) for text in texts), tokenizer, max_length)


class AlpacaDataset(_Demonstrations):
    """A JSON list of instruction, input, output in Alpaca's template; only the output is learned. Rows with an input
    longer than `max_length` characters are dropped."""

    def __init__(self, data_path: str, tokenizer: Any, max_length: int | None = None) -> None:
        with open(data_path) as file:
            rows = json.load(file)
        rows = [row for row in rows if max_length is None or len(row.get('input', '')) <= max_length]
        pairs = ((_ALPACA[bool(row.get('input'))].format_map(row), row['output'] + tokenizer.eos_token) for row in rows)
        super().__init__(pairs, tokenizer, None)


@dataclass
class AlpacaDataCollator:
    """Pads demonstrations on the right."""

    tokenizer: Any

    def __call__(self, instances: SequenceOf[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Returns input_ids, labels and attention_mask, each (B, S)."""
        pad = self.tokenizer.pad_token_id

        def padded(name: str, value: int) -> Tensor:
            return torch.nn.utils.rnn.pad_sequence(
                [row[name] for row in instances], batch_first=True, padding_value=value
            )

        ids = padded('input_ids', pad)
        lengths = torch.tensor([len(row['input_ids']) for row in instances])
        mask = torch.arange(ids.shape[1])[None] < lengths[:, None]
        return {'input_ids': ids, 'labels': padded('labels', IGNORE), 'attention_mask': mask}


# ---------------------------------------------------------------------- records


def preferences(dataset: Any) -> list[TokenizedPreference]:
    """Returns records of a reward-model data set; the ids that both responses begin with are the prompt. Raises
    ValueError for items of another kind."""
    return [_preference(i, dataset[i]) for i in range(len(dataset))]


def _preference(number: int, item: Any) -> TokenizedPreference:
    if not isinstance(item, (tuple, list)) or len(item) != 4:
        raise ValueError(f'preference {number} is a {type(item).__name__}; {PREFERENCE}')
    chosen, rejected = _real(item[0], item[1]), _real(item[2], item[3])
    shortest = min(len(chosen), len(rejected))
    if shortest < 2:
        raise ValueError(f'preference {number} has an answer of {shortest} tokens; give at least 2 with the prompt')
    differs = (chosen[:shortest] != rejected[:shortest]).nonzero()
    common = int(differs[0]) if len(differs) else shortest
    start = min(max(common, 1), shortest - 1)
    if not common:
        raise ValueError(f'preference {number}: its answers share no first token, so there is no prompt')
    answers = [chosen[start:], rejected[start:]]
    return TokenizedPreference(
        prompt_ids=chosen[:start],
        responses=answers,
        response_masks=[torch.ones(len(a), dtype=torch.bool) for a in answers],
    )


def _real(ids: Tensor, mask: Tensor) -> Tensor:
    return ids.reshape(-1)[mask.reshape(-1).bool()].to(torch.int64).cpu()


def demonstrations(loader: Any) -> list[Sequence]:
    """Returns records of a loader over demonstrations: every item of its data set, through its collate function; the
    sampler is ignored. Raises ValueError if it is not a DataLoader, and for batches without input_ids."""
    if not isinstance(loader, DataLoader):
        raise ValueError(f'train_dataloader is a {type(loader).__name__}; give a torch DataLoader')
    dataset: Any = loader.dataset
    return [_demonstration(i, loader.collate_fn([dataset[i]])) for i in range(len(dataset))]


def _demonstration(number: int, batch: Any) -> Sequence:
    if not isinstance(batch, Mapping) or 'input_ids' not in batch:
        raise ValueError(f'demonstration {number} has no input_ids; give a dict of input_ids, labels, attention_mask')
    ids = batch['input_ids'].reshape(-1)
    real = batch.get('attention_mask', torch.ones_like(ids)).reshape(-1).bool()
    labels = batch.get('labels', ids).reshape(-1)[real]
    ids = ids[real].to(torch.int64).cpu()
    counts = (labels != IGNORE).cpu()
    start = max(int(counts.nonzero()[0]) if counts.any() else len(ids) - 1, 1)
    if start >= len(ids):
        raise ValueError(f'demonstration {number} has {len(ids)} tokens; give at least 2')
    return Sequence(prompt_ids=ids[:start], response_ids=ids[start:], response_mask=counts[start:])
