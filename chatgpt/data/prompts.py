"""Prompts: from a source to `Prompt` records, and the order in which a run draws them.

The order is a function of the seed, with a new permutation every epoch. Its state is the number of prompts drawn so
far.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Collection
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from chatgpt.data.examples import BadRecord, PromptExample, as_kind
from chatgpt.data.formats import adopt_template, begin_ids
from chatgpt.data.reading import (
    NAMED_BY,
    SKIPPED,
    BadRecordError,
    BadRecords,
    Record,
    any_usable,
    read_records,
    suffix_of,
    without_frame,
    without_remedy,
)
from chatgpt.data.shapes import INPUT, PROMPT, SYSTEM, method_hint, misspelt, prompt_of, shape_of, to_example
from chatgpt.data.tokenize import Overflow, tokenize_prompt
from chatgpt.names import TEXTS
from chatgpt.types import Prompt


class PromptSet(SequenceOf[Prompt]):
    """A fixed list of prompts."""

    def __init__(
        self,
        prompts: SequenceOf[Prompt],
        num_skipped: int = 0,
        reasons: SequenceOf[str] = (),
        has_turns: bool = False,
        cut: Collection[int] = (),
    ) -> None:
        if not prompts:
            raise ValueError('there are no prompts')
        self._prompts = list(prompts)
        if taken := sorted({name for prompt in prompts for name in TEXTS if name in prompt.columns}):
            self._prompts = [
                replace(prompt, columns={name: value for name, value in prompt.columns.items() if name not in TEXTS})
                for prompt in prompts
            ]
            warnings.warn(
                f'the prompts have columns called {", ".join(taken)}, which is what functions call their own '
                'arguments; they are not handed to functions. Rename such a column to use it in one',
                stacklevel=2,
            )
        self.num_skipped = num_skipped
        """number of bad records"""
        self.reasons = list(reasons)
        """the first few, as `file, line n: reason`"""
        self.has_turns = has_turns
        """True if the tokenizer's chat template was used for any"""
        self.cut = frozenset(cut)
        """positions of prompts that were truncated on the left"""

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, position: Any) -> Any:
        return self._prompts[position]

    def subset(self, positions: SequenceOf[int]) -> PromptSet:
        """Returns the prompts at these positions, with what is known of the data."""
        cut = [place for place, i in enumerate(positions) if i in self.cut]
        return PromptSet([self[i] for i in positions], self.num_skipped, self.reasons, self.has_turns, cut)

    def facts(self) -> dict[str, int]:
        """The entries of run.json about prompts: their number and the numbers of distinct, truncated and skipped ones;
        empty for prompts without text.
        """
        if not any(len(prompt.ids) for prompt in self._prompts):
            return {}  # tasks of an environment, which writes their text
        distinct = len({prompt.ids.numpy().tobytes() for prompt in self._prompts})
        return {'prompts': len(self), 'distinct': distinct, 'cut': len(self.cut), 'skipped': self.num_skipped}

    def fingerprint(self) -> str:
        """The number of prompts and a hash of their ids, by which a resume detects changed data."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        digest = hashlib.sha256()
        for prompt in self._prompts:
            digest.update(prompt.ids.numpy().tobytes() + b'|')
        return f'{len(self)} prompts, sha256 {digest.hexdigest()[:16]}'


class PromptOrder:
    """The prompt of each run-wide draw number i: position i % n of the permutation for (seed, epoch i // n).

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


def tasks_without_prompts(count: int = 1) -> PromptSet:
    """Returns empty prompts, for an environment with its own tasks."""
    return PromptSet([Prompt(ids=torch.zeros(0, dtype=torch.int64)) for _ in range(count)])


def load_prompts(
    source: Any,
    tokenizer: Any,
    *,
    column: str = 'prompt',
    max_prompt_tokens: int | None = None,
    overflow: Overflow = 'truncate',
    apply_chat_template: bool | None = None,
    skip_bad_records: bool = False,
    split: str = 'train',
    subset: str | None = None,
    max_prompts: int | None = None,
) -> PromptSet:
    """Loads prompts from a file, a hub data set, or rows.

    Args:
        source: anything `reading.read_records` takes; a .txt file holds one prompt per line.
        column: of the prompt, as text or as turns; the other columns are passed to reward functions. Records without a
            column 'prompt' may have any shape that `shapes` knows.
        max_prompt_tokens, overflow: longer prompts are truncated on the left ('truncate') or bad records ('refuse').
        apply_chat_template: see `formats.use_template`; without any choice text is used unchanged, with a warning if
            there is a template.
        skip_bad_records: skip and count bad records instead of stopping at the first.

    Raises:
        ValueError: a missing or empty file, a missing column, an empty prompt; names file, line and reason.
    """
    if max_prompt_tokens is not None and max_prompt_tokens < 1:
        raise ValueError(f'max_prompt_tokens={max_prompt_tokens}; give at least 1, or None for no limit')
    if overflow not in ('truncate', 'refuse'):
        raise ValueError(f"overflow={overflow!r}; give 'truncate' or 'refuse'")
    plain = isinstance(source, (str, Path)) and suffix_of(source) == '.txt'
    plain = plain or (isinstance(source, (list, tuple)) and bool(source) and isinstance(source[0], str))
    options: Any = {'max_tokens': max_prompt_tokens, 'overflow': overflow, 'apply_chat_template': apply_chat_template}
    options['begin'] = tuple(begin_ids(tokenizer))
    bad = BadRecords(skip_bad_records)
    prompts: list[Prompt] = []
    cut: list[int] = []
    has_turns = False
    records = read_records(source, bad, split=split, subset=subset, text_separator='\n')
    wanted = 'text' if plain else column
    for record in records:
        if max_prompts is not None and len(prompts) >= max_prompts:
            break
        try:
            example = prompt_example(record, wanted)
            has_turns = adopt_template(example.prompt, tokenizer, apply_chat_template) or has_turns
            cuts: list[int] = []
            prompts.append(tokenize_prompt(example, tokenizer, cuts=cuts, **options))
            cut += [len(prompts) - 1] if cuts else []
        except BadRecord as reason:
            others = prompts or bad.skip or any_usable(records, lambda other: prompt_example(other, wanted))
            bad.report(record.where, str(reason), SKIPPED if others else '')
    if not prompts:
        raise ValueError(f'none of {bad.num_skipped} records has a usable prompt; the first: {bad.reasons[0]}')
    return PromptSet(prompts, bad.num_skipped, bad.reasons, has_turns, cut)


def prompt_example(record: Record, column: str) -> PromptExample:
    """Returns the prompt of a record, with its other columns. Raises BadRecord."""
    data = record.data
    if column in data:
        if data[column] is None:
            raise BadRecord(f'the prompt in column {column!r} is empty')
        beside = (*SYSTEM, *(INPUT if column in PROMPT[1:] else ()))
        read = {name: data[name] for name in beside if name in data}
        prompt, _ = prompt_of({column if column in PROMPT else 'prompt': data[column]} | read)
        if isinstance(prompt, tuple) and prompt[-1].role == 'assistant':
            raise BadRecord('the prompt ends with a turn of the assistant, where an answer is to come; drop it')
        return PromptExample(prompt=prompt, columns={k: v for k, v in data.items() if k != column}, where=record.where)
    columns = ', '.join(map(repr, data)) or 'none'
    missing = f'there is no column {column!r} for the prompt; the columns are {columns}'
    if column != 'prompt':
        raise BadRecord(missing)
    try:
        shape = shape_of(data)
    except BadRecord:
        raise BadRecord(f'{missing}{misspelt(data) or NAMED_BY}') from None
    if shape in ('completion', 'instruction'):  # the answer is for reward functions and may be a number
        return PromptExample(prompt=prompt_of(data)[0], columns=_all_but_prompt(data), where=record.where)
    example = to_example(data, record.where)
    if example.prompt == '':
        raise BadRecord(f'{missing}{method_hint(example)}{NAMED_BY}')
    taken = as_kind(example, 'prompt')
    assert isinstance(taken, PromptExample)
    return PromptExample(prompt=taken.prompt, columns=_all_but_prompt(data), where=record.where)


def _all_but_prompt(data: dict[str, Any]) -> dict[str, Any]:
    """Returns the columns of a recognised record for reward functions: all, including the reference answer and what
    stands beside a question, except that of the prompt."""
    try:
        _, used = prompt_of(data)
    except BadRecord:  # whole dialogues, where prompt and responses share columns
        used = set()
    beside = () if 'instruction' in used else (*SYSTEM, *(INPUT if used & set(PROMPT) else ()))
    return {k: v for k, v in data.items() if k not in used or k in beside}


def as_prompts(prompts: Any, tokenizer: Any = None) -> PromptSet:
    """Returns a `PromptSet` of the prompts given to a trainer: a `PromptSet`, `Prompt` records, id tensors, texts,
    dicts with a 'prompt', or a file.

    Raises:
        ValueError: texts without a tokenizer, or something that is not a prompt.
    """
    if isinstance(prompts, PromptSet):
        return prompts
    if isinstance(prompts, (str, Path)):
        if tokenizer is None:
            raise ValueError(f'prompts from {str(prompts)!r} need a tokenizer; pass tokenizer=...')
        return load_prompts(prompts, tokenizer)
    items = list(without_frame(prompts))
    if not items:
        raise ValueError('there are no prompts')
    if isinstance(items[0], (str, dict)):
        if tokenizer is None:
            raise ValueError('prompts given as text need a tokenizer; pass tokenizer=..., or give id tensors')
        try:
            return load_prompts([{'prompt': i} if isinstance(i, str) else i for i in items], tokenizer)
        except BadRecordError as error:  # the caller can change a list, so skipping is not offered
            raise without_remedy(error) from None
    records = []
    for i, item in enumerate(items):
        if isinstance(item, Tensor) and item.dim() == 2 and item.shape[0] == 1:
            item = item[0]
        if isinstance(item, Tensor):
            item = Prompt(ids=item.to(torch.int64).cpu())
        if not isinstance(item, Prompt) or item.ids.dim() != 1:
            raise ValueError(
                f'prompt {i} is a {type(item).__name__}; give texts, dicts, Prompt records or 1-D id tensors'
            )
        if len(item.ids) == 0:
            raise ValueError(f'prompt {i} is empty; give it at least a begin token')
        records.append(item)
    return PromptSet(records)
