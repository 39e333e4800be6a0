"""Converts canonical examples to records of a shape, and writes them to a file. An example that the shape cannot
represent is an error. Conversations become plain text in a shape of text (`formats.plain_prompt`), and text becomes
turns in a shape of turns (`formats.prompt_turns`)."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable
from itertools import combinations
from pathlib import Path
from typing import Any

from chatgpt.data.examples import (
    BadRecord,
    Demonstration,
    Example,
    Instruction,
    Labelled,
    Message,
    Preference,
    PromptText,
    ResponseText,
    as_kind,
)
from chatgpt.data.formats import plain_prompt, prompt_turns, render, response_turns

_SHAREGPT = {'user': 'human', 'assistant': 'gpt', 'system': 'system', 'tool': 'observation'}
OUTPUT_SUFFIXES = ('.jsonl', '.json', '.csv', '.parquet')


def to_records(example: Example, shape: str) -> list[dict[str, Any]]:
    """Returns the records of one example in a shape of `TARGETS`; several if ranked responses become pairs. Raises
    BadRecord.

    >>> to_records(Demonstration(prompt='2 + 3?', response='5'), 'messages')
    [{'messages': [{'role': 'user', 'content': '2 + 3?'}, {'role': 'assistant', 'content': '5'}]}]
    """
    if shape not in TARGETS:
        raise ValueError(f'unknown shape {shape!r}; known are {", ".join(TARGETS)}')
    return TARGETS[shape](example)


def _prompt(example: Example) -> list[dict[str, Any]]:
    """Returns the prompt and further columns, which reward functions may read; a text response is the answer."""
    answer = {}
    if isinstance(example, Demonstration) and isinstance(example.response, str):
        answer = {'answer': example.response}
    return [{**answer, **example.columns, 'prompt': plain_prompt(as_kind(example, 'prompt').prompt)}]


def _completion(example: Example) -> list[dict[str, Any]]:
    found: Any = as_kind(example, 'demonstration')
    if found.prompt == '':
        raise BadRecord('a text without a prompt, where prompt and completion are needed')
    return [{'prompt': plain_prompt(found.prompt), 'completion': _answer_text(found.prompt, found.response)}]


def _alpaca(example: Example) -> list[dict[str, Any]]:
    found: Any = as_kind(example, 'demonstration')
    prompt = found.prompt
    given = None
    if isinstance(prompt, Instruction):
        given = prompt
    elif isinstance(prompt, str) and prompt:
        given = Instruction(prompt)
    elif isinstance(prompt, tuple) and len(prompt) == 1:
        given = Instruction(prompt[0].content)
    if given is None or not isinstance(found.response, str):
        raise BadRecord('more than one question and its answer, which instruction, input and output cannot hold')
    return [{'instruction': given.instruction, 'input': given.input, 'output': found.response}]


def _preference(example: Example) -> list[dict[str, Any]]:
    found: Any = as_kind(example, 'preference')
    prompt = plain_prompt(found.prompt)
    texts = [_answer_text(found.prompt, response) for response in found.responses]
    columns = {'prompt': prompt} if prompt else {}
    return [{**columns, 'chosen': texts[i], 'rejected': texts[j], **own} for i, j, own in _pairs(found)]


def _pairs(found: Preference) -> list[tuple[int, int, dict[str, float]]]:
    """Returns each better and worse response of an example by number, with the columns of their scores. Raises
    BadRecord if all are equally good."""
    numbers = combinations(range(len(found.responses)), 2)
    if (scores := found.scores) is None:
        return [(i, j, {}) for i, j in numbers]
    pairs = [
        (i, j, {'score_chosen': scores[i], 'score_rejected': scores[j]}) for i, j in numbers if scores[i] > scores[j]
    ]
    if not pairs:
        raise BadRecord('equal scores of all answers, where a better and a worse one are needed')
    return pairs


def _dialogues(example: Example) -> list[dict[str, Any]]:
    """Returns whole dialogues as text in the format of HH, which can be split into turns again."""
    found: Any = as_kind(example, 'preference')
    prompt = plain_prompt(found.prompt if isinstance(found.prompt, str) else prompt_turns(found.prompt))
    if prompt and not prompt.endswith('\n\nAssistant:'):
        prompt = f'\n\nHuman: {prompt}\n\nAssistant:'
    spaced = [_answer_text(prompt_turns(found.prompt) if prompt else '', response) for response in found.responses]
    return [{'chosen': prompt + spaced[i], 'rejected': prompt + spaced[j], **own} for i, j, own in _pairs(found)]


def _ranked(example: Example) -> list[dict[str, Any]]:
    found: Any = as_kind(example, 'preference')
    if found.prompt == '':
        raise BadRecord('texts without a prompt, where prompt and responses are needed')
    record: dict[str, Any] = {'prompt': plain_prompt(found.prompt)}
    record['responses'] = [_answer_text(found.prompt, response) for response in found.responses]
    return [record | ({'scores': list(found.scores)} if found.scores else {})]


def _labelled(example: Example) -> list[dict[str, Any]]:
    """Returns KTO's shape: one desirable and one undesirable response of a pair; of ranked ones the first and the
    last."""
    if isinstance(example, Preference):
        _pairs(example)
        given = [(example.responses[0], True), (example.responses[-1], False)]
    elif isinstance(example, Labelled) and isinstance(example.label, bool):
        given = [(example.response, example.label)]
    else:
        raise BadRecord('neither a preference nor a labelled answer (label true or false)')
    if example.prompt == '':
        raise BadRecord('a text without a prompt, where a conversation is needed')
    turns = prompt_turns(example.prompt)
    return [
        {'messages': [t._asdict() for t in (*turns, *response_turns(response, example.prompt))], 'label': label}
        for response, label in given
    ]


def _text_label(example: Example) -> list[dict[str, Any]]:
    if not isinstance(example, Labelled):
        raise BadRecord('no label, where a labelled example is needed')
    return [{'text': _whole_text(example), 'label': example.label}]


TARGETS: dict[str, Callable[[Example], list[dict[str, Any]]]] = {
    'prompt': _prompt,
    'prompt_completion': _completion,
    'alpaca': _alpaca,
    'messages': lambda example: [{'messages': [turn._asdict() for turn in _all_turns(example)]}],
    'sharegpt': lambda example: [
        {'conversations': [{'from': _SHAREGPT[turn.role], 'value': turn.content} for turn in _all_turns(example)]}
    ],
    'preference': _preference,
    'dialogues': _dialogues,
    'ranked': _ranked,
    'kto': _labelled,
    'text_label': _text_label,
    'text': lambda example: [{'text': _whole_text(as_kind(example, 'demonstration'))}],
}


def _answer_text(prompt: PromptText, response: ResponseText) -> str:
    return ''.join(piece.text for piece in render(prompt, response, None, apply_chat_template=False)[1:])


def _whole_text(example: Demonstration | Labelled) -> str:
    return plain_prompt(example.prompt) + _answer_text(example.prompt, example.response)


def _all_turns(example: Example) -> tuple[Message, ...]:
    found: Any = as_kind(example, 'demonstration')
    if found.prompt == '':
        raise BadRecord('a text without a prompt, where a conversation is needed')
    return (*prompt_turns(found.prompt), *response_turns(found.response, found.prompt))


def write_records(records: Iterable[dict[str, Any]], path: str | Path, *, overwrite: bool = False) -> int:
    """Writes records to a .jsonl, .json, .csv or .parquet file and returns their number. In csv, lists are JSON text.

    The file is replaced atomically. Raises ValueError: unknown suffix, an existing file without `overwrite`, no
    records.
    """
    path = Path(path)
    if path.suffix not in OUTPUT_SUFFIXES:
        raise ValueError(f'{path}: unknown kind of file {path.suffix!r}; give one of {", ".join(OUTPUT_SUFFIXES)}')
    if path.exists() and not overwrite:
        raise ValueError(f'{path}: the file exists; give another name, or --overwrite (in Python overwrite=True)')
    if not path.parent.is_dir():
        raise ValueError(f'{path}: there is no folder {path.parent}; make it first')
    rows = list(records)
    if not rows:
        raise ValueError(f'{path}: there are no records to write')
    part = path.with_name(f'.{path.name}.part')
    try:
        _write(rows, part, path.suffix)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return len(rows)


def _write(rows: list[dict[str, Any]], path: Path, suffix: str) -> None:
    if suffix == '.parquet':
        import pyarrow
        import pyarrow.parquet

        names = dict.fromkeys(key for row in rows for key in row)  # pyarrow takes those of the first row
        filled = [dict.fromkeys(names) | row for row in rows]
        try:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(filled), path)
        except pyarrow.ArrowException as error:
            raise ValueError(f'parquet cannot hold these columns ({error}); write .jsonl') from error
        return
    with open(path, 'w', encoding='utf-8', newline='') as file:
        if suffix == '.json':
            json.dump(rows, file, ensure_ascii=False, indent=2, default=_plain)
            file.write('\n')
        elif suffix == '.jsonl':
            file.writelines(json.dumps(row, ensure_ascii=False, default=_plain) + '\n' for row in rows)
        else:
            writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
            writer.writeheader()
            for row in rows:
                nested = {
                    key: json.dumps(v, ensure_ascii=False, default=_plain)
                    for key, v in row.items()
                    if isinstance(v, (list, dict))
                }
                writer.writerow(row | nested)


def _plain(value: Any) -> Any:
    """Returns what JSON has in place of a value that it has not: numbers and lists for numpy's, else the text."""
    return value.tolist() if hasattr(value, 'tolist') else str(value)
