"""Prompts: from a source to `Prompt` records, and the order in which a run draws them.

The order is a function of the seed: a new permutation every epoch, without replacement within one. Its whole state is the number of
prompts drawn so far, so it resumes exactly and knows nothing of ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from typing import Any

import torch
from torch import Tensor

from chatgpt.dataset.reading import BadRecords, read_records
from chatgpt.types import Prompt


class PromptSet(SequenceOf[Prompt]):
    """A fixed list of prompts."""

    def __init__(self, prompts: SequenceOf[Prompt], num_skipped: int = 0) -> None:
        if not prompts:
            raise ValueError('there are no prompts')
        self._prompts = list(prompts)
        self.num_skipped = num_skipped
        """bad records that were left out"""

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, position: Any) -> Any:
        return self._prompts[position]

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self._prompts)

    def fingerprint(self) -> str:
        """The number of prompts and a hash of their ids, for telling at a resume whether the data changed."""
        digest = hashlib.sha256()
        for prompt in self._prompts:
            digest.update(prompt.ids.numpy().tobytes() + b'|')
        return f'{len(self)} prompts, sha256 {digest.hexdigest()[:16]}'


class PromptOrder:
    """Which prompt the run-wide draw number `i` takes: permutation number i // n of (seed, epoch), position i % n.

    >>> order = PromptOrder(3, seed=0)
    >>> sorted(order[i] for i in range(3, 6))
    [0, 1, 2]
    """

    def __init__(self, num_prompts: int, seed: int) -> None:
        self.num_prompts = num_prompts
        self.seed = seed
        self._epoch = -1
        self._permutation: list[int] = []

    def __getitem__(self, draw: int) -> int:
        epoch, position = divmod(draw, self.num_prompts)
        if epoch != self._epoch:
            digest = hashlib.blake2b(f'prompts {self.seed} {epoch}'.encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, 'little') >> 1)
            self._permutation = torch.randperm(self.num_prompts, generator=generator).tolist()
            self._epoch = epoch
        return self._permutation[position]


def load_prompts(
    source: Any,
    tokenizer: Any,
    *,
    column: str = 'prompt',
    max_prompt_tokens: int | None = None,
    apply_chat_template: bool = False,
    skip_bad_records: bool = False,
) -> PromptSet:
    """Prompts from a file, a hub data set, or rows.

    Args:
        source: csv, json, jsonl, parquet, a hub name, a `datasets` object, or a list of dicts or texts.
        tokenizer: turns a prompt into ids, with the special tokens it adds by itself, but no end token.
        column: holds the prompt; the other columns go to reward functions.
        max_prompt_tokens: keep only the last so many tokens of a prompt.
        apply_chat_template: give the prompt to the tokenizer's chat template as the user's turn.
        skip_bad_records: leave bad records out and count them, instead of stopping at the first.

    Raises:
        ValueError: a missing file or column, an empty prompt; names file, line and reason.
    """
    bad = BadRecords(skip_bad_records)
    prompts = []
    for record in read_records(source, bad):
        text = record.data.get(column)
        if column not in record.data:
            raise ValueError(f'{record.where}: there is no column {column!r}; the columns are {sorted(record.data)}')
        if not isinstance(text, str) or not text.strip():
            bad.report(record.where, f'the prompt in column {column!r} is empty' if not text or isinstance(text, str) else 'the prompt is not text')
            continue
        columns = {k: v for k, v in record.data.items() if k != column}
        prompts.append(_tokenized(text, tokenizer, columns, max_prompt_tokens, apply_chat_template))
    if not prompts:
        raise ValueError(f'{source}: no usable prompt' if isinstance(source, str) else 'no usable prompt')
    return PromptSet(prompts, bad.num_skipped)


def as_prompts(prompts: Any, tokenizer: Any = None) -> PromptSet:
    """A `PromptSet` from what a trainer is given: one already, `Prompt` records, id tensors, texts, or dicts with a 'prompt'.

    Raises:
        ValueError: texts without a tokenizer, or something that is no prompt.
    """
    if isinstance(prompts, PromptSet):
        return prompts
    items = list(prompts)
    if not items:
        raise ValueError('there are no prompts')
    if isinstance(items[0], (str, dict)):
        if tokenizer is None:
            raise ValueError('prompts given as text need a tokenizer; pass tokenizer=..., or give id tensors')
        return load_prompts([{'prompt': i} if isinstance(i, str) else i for i in items], tokenizer)
    records = []
    for i, item in enumerate(items):
        if isinstance(item, Tensor) and item.dim() == 2 and item.shape[0] == 1:
            item = item[0]
        if isinstance(item, Tensor):
            item = Prompt(ids=item.to(torch.int64).cpu())
        if not isinstance(item, Prompt) or item.ids.dim() != 1:
            raise ValueError(f'prompt {i} is a {type(item).__name__}; give texts, dicts with a prompt, Prompt records or 1-D id tensors')
        if len(item.ids) == 0:
            raise ValueError(f'prompt {i} is empty; give it at least a begin token')
        records.append(item)
    return PromptSet(records)


def _tokenized(text: str, tokenizer: Any, columns: dict[str, Any], max_tokens: int | None, chat: bool) -> Prompt:
    if chat:
        text = tokenizer.apply_chat_template([{'role': 'user', 'content': text}], tokenize=False, add_generation_prompt=True)
    ids = list(tokenizer(text, add_special_tokens=not chat)['input_ids'])
    if ids and ids[-1] == tokenizer.eos_token_id and len(ids) > 1:
        ids.pop()  # a prompt that ends with the end token would ask for nothing
    if not ids:
        raise ValueError(f'the prompt {text[:40]!r} has no tokens')
    return Prompt(ids=torch.tensor(ids[-max_tokens:] if max_tokens else ids), text=text, columns=columns)
