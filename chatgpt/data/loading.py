"""Loads a source as examples or token records in one call. Bad records are errors, or are counted. For prompts see
`prompts`.

    examples = load_examples('pairs.jsonl', kind='preference', skip_bad_records=True)      # text
    train, validation = load_demonstrations('alpaca.json', tokenizer, max_length=512, validation_percentage=5)
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from itertools import islice
from typing import Any, Generic, TypeVar

from chatgpt.data.examples import BadRecord, Demonstration, Example, Kind, Labelled, Preference, PromptExample, as_kind
from chatgpt.data.formats import adopt_template, begin_ids
from chatgpt.data.reading import SKIPPED, BadRecords, any_usable, read_records
from chatgpt.data.shapes import method_hint, misspelt, to_example
from chatgpt.data.tokenize import (
    Overflow,
    TokenizedLabelled,
    TokenizedPreference,
    TokenizerOptions,
    tokenize_demonstration,
    tokenize_labelled,
    tokenize_preference,
)
from chatgpt.types import Sequence

T = TypeVar('T')
_EXAMPLES = (PromptExample, Demonstration, Preference, Labelled)


class Loaded(list[T], Generic[T]):
    """A list with the number of skipped records and their reasons."""

    def __init__(self, items: Iterable[T] = (), bad: BadRecords | None = None) -> None:
        super().__init__(items)  # consumes the items, so that the count is complete
        self.num_skipped = bad.num_skipped if bad else 0
        self.reasons = list(bad.reasons) if bad else []
        """the first few, as `file, line n: reason`"""
        self.has_turns = bool(bad and 'chat' in bad.noticed)
        """True if the tokenizer's chat template was used for any"""


def left_out(data: Any) -> str:
    """Describes the records that were skipped in `data` (a `Loaded` or a `PromptSet`), as the end of a sentence; '' for
    none."""
    if not data.num_skipped:
        return ''
    return f', {data.num_skipped} bad ones left out ({data.reasons[0]}{", ..." if data.num_skipped > 1 else ""})'


def load_examples(
    source: Any,
    *,
    kind: Kind | None = None,
    columns: Mapping[str, str] | None = None,
    skip_bad_records: bool = False,
    split: str = 'train',
    subset: str | None = None,
    streaming: bool = False,
    text_separator: str = '\n\n',
    max_examples: int | None = None,
    bad: BadRecords | None = None,
) -> Loaded[Any]:
    """Returns all examples of a source, in text form.

    Args:
        source: a path, a hub name, a `datasets` object, or rows (see `reading.read_records`).
        kind: converts records to a kind ('prompt', 'demonstration', 'preference', 'labelled'); None keeps their own.
        columns: the source's own column names, {known name: name in the source}, e.g. {'prompt': 'instruction_text'}.
        skip_bad_records: skip and count bad records (`num_skipped`) instead of stopping at the first.
        streaming: do not download a hub data set; with `max_examples` only its beginning is read.
        bad: replaces `skip_bad_records`, for a caller that continues counting.

    Raises ValueError: missing, empty or unreadable source; a bad record, as `file, line n: reason`; no usable record at
        all.
    """
    bad = bad or BadRecords(skip_bad_records)
    found = _examples(
        source, kind, columns, bad, split=split, subset=subset, streaming=streaming, text_separator=text_separator
    )
    return Loaded(islice(found, max_examples), bad)


def load_demonstrations(source: Any, tokenizer: Any, **options: Any) -> tuple[Loaded[Sequence], Loaded[Sequence]]:
    """Returns training and validation sequences for SFT, or plain text for PPO-ptx.

    Args:
        max_length, overflow, apply_chat_template: see `tokenize.TokenizerOptions`.
        skip_bad_records: skip and count bad records instead of stopping at the first.
        validation_source: of the validation part; without it `validation_percentage` of the records, by default none,
            are split off by `seed` (`split_examples`).
        **options: any other is passed to `load_examples`.

    Raises:
        ValueError: a record that cannot be used; names file, line and reason.
    """
    return _load_tokenized(source, 'demonstration', tokenize_demonstration, tokenizer, **options)


def load_preferences(
    source: Any, tokenizer: Any, **options: Any
) -> tuple[Loaded[TokenizedPreference], Loaded[TokenizedPreference]]:
    """Returns training and validation preferences, for reward models and the DPO family. Arguments as for
    `load_demonstrations`."""
    return _load_tokenized(source, 'preference', tokenize_preference, tokenizer, **options)


def load_labelled(
    source: Any, tokenizer: Any, **options: Any
) -> tuple[Loaded[TokenizedLabelled], Loaded[TokenizedLabelled]]:
    """Returns training and validation sequences with labels: classes, KTO's desirable or not, rewards. Arguments as for
    `load_demonstrations`."""
    return _load_tokenized(source, 'labelled', tokenize_labelled, tokenizer, **options)


def split_examples(examples: SequenceOf[T], percentage: float, *, seed: int = 0) -> tuple[list[T], list[T]]:
    """Splits examples into training and validation parts, each in the order given; `percentage` of them (rounded, at
    least one) are for validation.

    The choice depends on a hash of (seed, position), so that no library version changes it. 0 gives an empty validation
    part. Raises ValueError for a percentage outside 0 to 100, or if no training example would be left.

    >>> train, validation = split_examples(list(range(10)), 20, seed=1)
    >>> len(train), len(validation), sorted(train + validation) == list(range(10))
    (8, 2, True)
    """
    if not 0 <= percentage < 100:
        raise ValueError(f'validation percentage {percentage}; give a number from 0 to below 100')
    if percentage == 0:
        return list(examples), []
    count = max(1, round(len(examples) * percentage / 100))
    if count >= len(examples):
        raise ValueError(
            f'{len(examples)} examples cannot be split: {percentage} % for validation would leave none to train on'
        )
    ranked = sorted(
        range(len(examples)), key=lambda i: hashlib.blake2b(f'{seed} {i}'.encode(), digest_size=16).digest()
    )
    chosen = set(ranked[:count])
    return [e for i, e in enumerate(examples) if i not in chosen], [e for i, e in enumerate(examples) if i in chosen]


def _load_tokenized(
    source: Any,
    kind: Kind,
    tokenize: Callable[[Any, Any, TokenizerOptions], T],
    tokenizer: Any,
    *,
    max_length: int | None = None,
    overflow: Overflow = 'truncate',
    apply_chat_template: bool | None = None,
    skip_bad_records: bool = False,
    validation_source: Any = None,
    validation_percentage: float = 0,
    seed: int = 0,
    **reading: Any,
) -> tuple[Loaded[T], Loaded[T]]:
    options = TokenizerOptions(
        max_length=max_length,
        overflow=overflow,
        apply_chat_template=apply_chat_template,
        begin=tuple(begin_ids(tokenizer)),
        cuts=[],
    )
    if validation_source is not None and validation_percentage:
        raise ValueError('validation_source and validation_percentage are both given; give one')
    parts = []
    for one in (source, validation_source):
        bad = BadRecords(skip_bad_records)
        found = [] if one is None else load_examples(one, kind=kind, bad=bad, **reading)
        parts.append(Loaded(_tokenized(found, tokenize, tokenizer, options, bad), bad))
        _warn(bad, options, len(parts[-1]))
        if one is not None and not parts[-1]:
            raise ValueError(f'none of {bad.num_skipped} records can be used; the first: {bad.reasons[0]}')
    train, validation = parts
    if validation_percentage:
        train[:], validation[:] = split_examples(train, validation_percentage, seed=seed)
    return train, validation


def _tokenized(
    examples: Iterable[Any],
    tokenize: Callable[[Any, Any, TokenizerOptions], T],
    tokenizer: Any,
    options: TokenizerOptions,
    bad: BadRecords,
) -> Iterator[T]:
    cuts = options.cuts if options.cuts is not None else []
    cuts.clear()  # counts this source only
    for example in examples:
        if adopt_template(example.prompt, tokenizer, options.apply_chat_template):
            bad.notice('chat', example.where)
        try:
            record = tokenize(example, tokenizer, options)
        except BadRecord as reason:
            bad.report(example.where, str(reason))
            continue
        if len(cuts) > len(bad.noticed.get('cut', ())):
            bad.notice('cut', example.where)
        if isinstance(record, TokenizedPreference) and not record.has_pair:
            bad.notice('equal', example.where)
        yield record


def _warn(bad: BadRecords, options: TokenizerOptions, count: int) -> None:
    """Warns about records that training changes or only partly uses."""
    if places := bad.noticed.get('cut'):
        cuts, limit = options.cuts or [], options.max_length
        length, where = max(zip(cuts, places, strict=True), key=lambda cut: cut[0])
        warnings.warn(
            f'{len(places)} of {count} records are longer than {limit} tokens and were cut: the prompt loses its '
            f'beginning, then the response its end. The longest has {length} tokens ({where}). Raise max_length '
            "(--max_len) where the model's context allows it, or leave such records out",
            stacklevel=4,
        )
    if places := bad.noticed.get('equal'):
        warnings.warn(
            f'{len(places)} of {count} preferences have answers that do not differ (the same tokens, or equal scores) '
            f'and teach nothing; the first: {places[0]}',
            stacklevel=4,
        )
    if places := bad.noticed.get('preference'):
        warnings.warn(
            f'{len(places)} of {count} records are preferences, the first: {places[0]}; only the best answer of each '
            'is learned here. DPO and reward models learn from the others too (load_preferences, '
            'examples/train_preference.py)',
            stacklevel=4,
        )


def _examples(
    source: Any, kind: Kind | None, columns: Mapping[str, str] | None, bad: BadRecords, **reading: Any
) -> Iterator[Example]:
    if kind not in (None, 'prompt', 'demonstration', 'preference', 'labelled'):
        raise ValueError(f"kind={kind!r}; give 'prompt', 'demonstration', 'preference', 'labelled' or None")
    if isinstance(source, (list, tuple)) and source and all(isinstance(item, _EXAMPLES) for item in source):
        pairs: Iterable[tuple[Any, str]] = ((example, example.where) for example in source)
    else:
        pairs = ((record.data, record.where) for record in read_records(source, bad, **reading))
    found = False

    def made(pair: tuple[Any, str]) -> Any:
        item, where = pair
        return item if isinstance(item, _EXAMPLES) else to_example(_renamed(item, columns), where)

    pairs = iter(pairs)
    for item, where in pairs:
        example: Any = None
        try:
            example = made((item, where))
            if kind == 'demonstration' and isinstance(example, Preference):
                bad.notice('preference', where)
            example = as_kind(example, kind) if kind else example
        except BadRecord as reason:
            instead = misspelt(item) or ('' if found else method_hint(example))
            others = found or bad.skip or any_usable(pairs, lambda p: as_kind(made(p), kind) if kind else made(p))
            bad.report(where, f'{reason}{instead}', SKIPPED if others else '')
            continue
        found = True
        yield example
    if not found:
        raise ValueError(f'none of {bad.num_skipped} records can be used; the first: {bad.reasons[0]}')


def _renamed(data: dict[str, Any], columns: Mapping[str, str] | None) -> dict[str, Any]:
    if not columns:
        return data
    for ours, theirs in columns.items():
        if theirs not in data:
            raise BadRecord(
                f'there is no column {theirs!r} (given for {ours}); the columns are {", ".join(map(repr, data))}'
            )
    back = {theirs: ours for ours, theirs in columns.items()}
    return {back.get(name, name): value for name, value in data.items() if name in back or name not in columns}
