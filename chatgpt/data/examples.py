"""Canonical examples in text form: `PromptExample`, `Demonstration`, `Preference`, `Labelled`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, NamedTuple

Kind = Literal['prompt', 'demonstration', 'preference', 'labelled']


class Message(NamedTuple):
    """One turn of a conversation."""

    role: str
    """system, user, assistant or tool"""
    content: str


_SPEAKER = re.compile(r'\n\n(Human|Assistant):')
_ROLE_OF = {'Human': 'user', 'Assistant': 'assistant'}


def split_speakers(text: str) -> tuple[str, list[Message]]:
    """Splits a dialogue in one text, '\\n\\nHuman: ...\\n\\nAssistant: ...', the form of HH (Bai et al. 2022). Returns
    the text before the first speaker, and the turns, of which some may be empty.

    >>> split_speakers('\\n\\nHuman: hi\\n\\nAssistant:')
    ('', [Message(role='user', content='hi'), Message(role='assistant', content='')])
    """
    first, *rest = _SPEAKER.split(text)
    return first, [Message(_ROLE_OF[who], said.strip()) for who, said in zip(rest[::2], rest[1::2], strict=True)]


@dataclass(frozen=True, slots=True)
class Instruction:
    """An instruction with an optional input, as in Alpaca's data."""

    instruction: str
    input: str = ''


PromptText = str | Instruction | tuple[Message, ...]
"""plain text, used unchanged; an instruction; or the turns of a conversation before the response"""
ResponseText = str | tuple[Message, ...]
"""one response; or several turns, beginning with the assistant's"""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptExample:
    prompt: PromptText
    columns: dict[str, Any] = field(default_factory=dict)
    """every column of the record that is not part of the prompt"""
    where: str = 'data'


@dataclass(frozen=True, kw_only=True, slots=True)
class Demonstration:
    """A prompt and a response to learn from; plain text has the prompt ''."""

    prompt: PromptText
    response: ResponseText
    columns: dict[str, Any] = field(default_factory=dict)
    where: str = 'data'


@dataclass(frozen=True, kw_only=True, slots=True)
class Preference:
    """A prompt and two or more responses, best first; the prompt is '' if whole texts are compared. Responses may be
    equal."""

    prompt: PromptText
    responses: tuple[ResponseText, ...]
    scores: tuple[float, ...] | None = None
    """one per response, if the data has them (for margins)"""
    columns: dict[str, Any] = field(default_factory=dict)
    where: str = 'data'


@dataclass(frozen=True, kw_only=True, slots=True)
class Labelled:
    """A text with a label: a class, a bool (True: desirable), or a reward. Text without a prompt has the prompt ''."""

    prompt: PromptText
    response: ResponseText
    label: bool | int | float | str
    columns: dict[str, Any] = field(default_factory=dict)
    where: str = 'data'


def check_order(scores: Sequence[float]) -> None:
    """Raises BadRecord if scores are not in descending order."""
    if any(worse > better for better, worse in pairwise(scores)):
        raise BadRecord(
            f'scores {tuple(scores)} contradict the order of the answers, which is best first (chosen, then rejected); '
            'mend one of them, or leave the scores out'
        )


Example = PromptExample | Demonstration | Preference | Labelled


class BadRecord(ValueError):
    """This record cannot be used. The message is the reason, without file and line."""


def instruction_text(prompt: Instruction) -> str:
    """Returns instruction and input as one user message."""
    return f'{prompt.instruction}\n\n{prompt.input}' if prompt.input.strip() else prompt.instruction


def shorten(turns: tuple[Message, ...]) -> ResponseText:
    """Returns a single turn of the assistant as text, and several turns unchanged."""
    return turns[0].content if len(turns) == 1 and turns[0].role == 'assistant' else turns


def split_turns(turns: Sequence[Message], *, last: bool = False) -> tuple[tuple[Message, ...], ResponseText]:
    """Splits a conversation before its first turn of the assistant, or its last one. A single turn is returned as text.
    Raises BadRecord."""
    answers = [i for i, turn in enumerate(turns) if turn.role == 'assistant']
    if not answers:
        raise BadRecord('the conversation has no turn of the assistant')
    if all(turn.role == 'system' for turn in turns[: answers[0]]):
        raise BadRecord('the conversation begins with the assistant; nothing was asked before')
    cut = answers[-1] if last else answers[0]
    return tuple(turns[:cut]), shorten(tuple(turns[cut : answers[-1] + 1]))


def as_kind(example: Example, kind: Kind) -> Any:
    """Converts an example to another kind. Raises BadRecord if that is not possible.

    As a prompt, a conversation gives the turns before its last response, other examples their prompt. As a
    demonstration, a preference gives its best response. A response labelled undesirable (False) is not a demonstration.
    """
    if isinstance(example, _CLASSES[kind]):
        return example
    columns, where = example.columns, example.where
    if kind == 'prompt' and not isinstance(example, PromptExample):
        prompt = example.prompt
        if prompt == '':
            raise BadRecord('a text without a prompt, where a prompt is needed')
        if isinstance(example, Demonstration) and isinstance(example.response, tuple) and isinstance(prompt, tuple):
            prompt, _ = split_turns((*prompt, *example.response), last=True)
        return PromptExample(prompt=prompt, columns=columns, where=where)
    if kind == 'demonstration':
        if isinstance(example, Labelled) and example.label is False:
            raise BadRecord('labelled undesirable (false), so not a demonstration')
        if isinstance(example, (Preference, Labelled)):
            response = example.responses[0] if isinstance(example, Preference) else example.response
            return Demonstration(prompt=example.prompt, response=response, columns=columns, where=where)
        if isinstance(example, PromptExample) and isinstance(example.prompt, tuple):
            prompt, response = split_turns(example.prompt)  # a last turn of the user has no response to learn from
            return Demonstration(prompt=prompt, response=response, columns=columns, where=where)
    half = [name for name in ('chosen', 'rejected') if columns.get(name) is not None]
    if kind == 'preference' and len(half) == 1:
        raise BadRecord(f'{half[0]!r} alone, where a preference has chosen and rejected')
    raise BadRecord(f'a {_NAMES[type(example)]}, where a {_NAMES[_CLASSES[kind]].split(" (")[0]} is needed')


_CLASSES: dict[str, type] = {
    'prompt': PromptExample,
    'demonstration': Demonstration,
    'preference': Preference,
    'labelled': Labelled,
}
_NAMES = {
    PromptExample: 'prompt (without an answer)',
    Demonstration: 'demonstration (one answer, no label)',
    Preference: 'preference (ranked answers)',
    Labelled: 'labelled example',
}
