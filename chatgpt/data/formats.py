"""Formats examples as text, before tokenization.

Plain text is used unchanged. Conversations and instructions are formatted by the tokenizer's chat template, or if it
has none by `default_template`:

    \\n\\nHuman: ...\\n\\nAssistant: ...<end token>

This is the form of Anthropic's HH data, with a system message in front, `\\n\\nTool: ...` for tool output, and the end
token after every turn of the assistant. With apply_chat_template=False conversations have the same form without end
tokens in the prompt, and instructions have Alpaca's headings (`plain_prompt`).

Decisions about a model are kept in a record for its tokenizer (`notes_of`), which itself does not change: whether plain
text is a turn of the user, the adopted template, and whether the model is an encoder-decoder, for which prompt and
response each have the special tokens that the tokenizer adds to a text (`frame`). `save_tokenizer` writes choice and
template into a model's folder, so that later uses of the model format text as in training.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from chatgpt.data.examples import (
    BadRecord,
    Instruction,
    Message,
    PromptText,
    ResponseText,
    instruction_text,
    split_speakers,
)

_TEMPLATE = (
    '{% for message in messages %}'
    "{% if message['role'] == 'system' %}{{ message['content'] | trim }}"
    "{% elif message['role'] == 'user' %}{{ '\\n\\nHuman: ' + message['content'] | trim }}"
    "{% elif message['role'] == 'tool' %}{{ '\\n\\nTool: ' + message['content'] | trim }}"
    "{% else %}{{ '\\n\\nAssistant: ' + message['content'] | trim }}{{ eos_token }}{% endif %}"
    '{% endfor %}'
    "{% if add_generation_prompt %}{{ '\\n\\nAssistant:' }}{% endif %}"
)
_SPEAKERS = {'user': 'Human', 'assistant': 'Assistant', 'tool': 'Tool'}


class Piece(NamedTuple):
    """A part of a text. Either all of its tokens count in the loss, or none."""

    text: str
    trained: bool


def use_template(prompt: PromptText, tokenizer: Any, apply_chat_template: bool | None) -> bool:
    """Returns True if a prompt is formatted by the tokenizer's chat template.

    apply_chat_template: None for conversations and instructions, and for plain text by the tokenizer's `text_choice`;
        True for all, with plain text as turns (`prompt_turns`); False for none. Never for '' (text without a prompt).
    """
    if prompt == '':
        return False
    if apply_chat_template is None:
        return not isinstance(prompt, str) or bool(text_choice(tokenizer))
    return apply_chat_template


TEXT_CHOICE = 'text_is_user_turn'
"""key in the tokenizer_config.json of a saved model: True if its training made text a turn of the user"""
_MARK = 'zqmark'
_valid_templates: set[str] = set()  # chat templates that include the messages


@dataclass
class Notes:
    """Our record about a tokenizer."""

    text_is_turn: bool | None = None
    """True if text is a turn of the user; None without a choice"""
    template: str | None = None
    """the adopted chat template of a tokenizer without one"""
    is_encoder_decoder: bool = False
    frame: tuple[Any, Frame] | None = None
    """with the languages that it belongs to"""


_notes: WeakKeyDictionary[Any, Notes] = WeakKeyDictionary()


def notes_of(tokenizer: Any) -> Notes:
    """Returns the record about a tokenizer, initially with the choice that was saved with it."""
    if tokenizer is None:
        return Notes()
    if tokenizer not in _notes:
        saved = getattr(tokenizer, 'init_kwargs', None) or {}
        _notes[tokenizer] = Notes(text_is_turn=saved.get(TEXT_CHOICE))
    return _notes[tokenizer]


def copy_tokenizer(tokenizer: Any) -> Any:
    """Returns a copy with its own record, initially that of the original."""
    copied = copy.copy(tokenizer)
    _notes[copied] = replace(notes_of(tokenizer))
    return copied


def template_of(tokenizer: Any) -> str | None:
    """Returns a tokenizer's own chat template, or the one that was adopted for it."""
    return getattr(tokenizer, 'chat_template', None) or notes_of(tokenizer).template


def save_tokenizer(tokenizer: Any, folder: str | os.PathLike[str]) -> None:
    """Writes `tokenizer.save_pretrained` with the choice for text and the adopted template."""
    notes = notes_of(tokenizer)
    if notes.text_is_turn is not None or notes.template is not None:
        tokenizer, choice = copy.copy(tokenizer), notes.text_is_turn
        if choice is not None:
            tokenizer.init_kwargs = {**(getattr(tokenizer, 'init_kwargs', None) or {}), TEXT_CHOICE: choice}
        tokenizer.chat_template = getattr(tokenizer, 'chat_template', None) or notes.template
    tokenizer.save_pretrained(folder)


def text_choice(tokenizer: Any) -> bool | None:
    """Returns True if text is a turn of the user, as chosen or saved with the tokenizer; None without a choice."""
    return notes_of(tokenizer).text_is_turn


def choice_facts(tokenizer: Any) -> dict[str, bool]:
    """Returns the choice for the entry 'data' of run.json; empty without a choice."""
    choice = text_choice(tokenizer)
    return {} if choice is None else {'apply_chat_template': choice}


def choose_text(tokenizer: Any, apply_chat_template: bool | None) -> None:
    """Records the user's choice; None keeps the recorded one.

    Raises:
        ValueError: the chat template is requested and there is none.
    """
    if apply_chat_template and not template_of(tokenizer):
        raise ValueError('apply_chat_template: the tokenizer has no chat template; leave it out, or take a chat model')
    if apply_chat_template is not None:
        notes_of(tokenizer).text_is_turn = apply_chat_template


def text_is_turn(tokenizer: Any, apply_chat_template: bool | None = None) -> bool:
    """Returns True if text is a turn of the user: as given, else as recorded for the tokenizer, else False. Records the
    result. Warns once if a tokenizer has a chat template and there is no choice."""
    choice = text_choice(tokenizer) if apply_chat_template is None else apply_chat_template
    if choice is None and template_of(tokenizer):
        warnings.warn(
            'the prompts are plain text, to which the chat template of the model is not applied: give '
            '--apply_chat_template (apply_chat_template=True) to make each text a turn of the user, and a '
            'dialogue (\\n\\nHuman: ...\\n\\nAssistant:) its turns, or prompts as '
            'messages ([{"role": "user", "content": ...}]); --no_apply_chat_template (False) keeps plain text without '
            'this warning',
            stacklevel=2,
        )
        choice = False
    if choice is not None:
        notes_of(tokenizer).text_is_turn = choice
    return bool(choice)


def check_template(tokenizer: Any) -> None:
    """Raises ValueError for a chat template that does not include the messages."""
    template = str(template_of(tokenizer))
    if template in _valid_templates:
        return
    try:
        shown = _templated((Message('user', _MARK),), tokenizer, add_generation_prompt=True)
    except BadRecord:  # it may reject this conversation and accept others
        return
    if _MARK not in shown.lower():
        raise ValueError(
            f"the tokenizer's chat template ignores the messages: a user's turn reads {shown[:60]!r} whatever it says; "
            'set tokenizer.chat_template to the template of the model'
        )
    _valid_templates.add(template)


def default_template(tokenizer: Any) -> str:
    """Returns the chat template for a tokenizer without one. It includes the begin token if the tokenizer adds one."""
    return ('{{ bos_token }}' if begin_ids(tokenizer) else '') + _TEMPLATE


def adopt_template(prompt: PromptText, tokenizer: Any, apply_chat_template: bool | None) -> bool:
    """`use_template` that records the choice for text (`text_is_turn`), and `default_template` if a template is needed
    and the tokenizer has none.

    Raises:
        ValueError: the template ignores the messages.
    """
    if isinstance(prompt, str) and prompt:
        text_is_turn(tokenizer, apply_chat_template)
    used = use_template(prompt, tokenizer, apply_chat_template)
    if used:
        if not template_of(tokenizer):
            notes_of(tokenizer).template = default_template(tokenizer)
        check_template(tokenizer)
    return used


def adopt_turns(tokenizer: Any, data: Any) -> None:
    """Makes text a turn of the user for a model that is trained on conversations, unless a choice is recorded."""
    if getattr(data, 'has_turns', False):
        note_turns(tokenizer)


def note_turns(tokenizer: Any) -> None:
    """Makes text a turn of the user, unless a choice is recorded."""
    notes = notes_of(tokenizer)
    notes.text_is_turn = True if notes.text_is_turn is None else notes.text_is_turn


def shown_format(tokenizer: Any) -> str:
    """Returns a short conversation in the model's format, for display."""
    return repr(
        _templated(
            (Message('user', 'QUESTION'), Message('assistant', 'ANSWER')), tokenizer, add_generation_prompt=False
        )
    )


def begin_ids(tokenizer: Any) -> list[int]:
    """Returns [begin token] if the tokenizer adds it by itself, else []."""
    begin = tokenizer.bos_token_id
    if begin is None:
        return []
    return [begin] if list(tokenizer('a', verbose=False)['input_ids'])[:1] == [begin] else []


class Frame(NamedTuple):
    """Special tokens that the tokenizer of an encoder-decoder adds to texts."""

    before: list[int]
    """before the prompt: BART's begin token, none for T5"""
    after: list[int]
    """after the prompt: the end token"""
    start: list[int]
    """before the response, after the decoder's start token: BART's begin token, none for T5. Every response ends with
    the end token"""


def note_model(tokenizer: Any, config: Any) -> None:
    """Records whether the model with this config is an encoder-decoder. Does nothing without tokenizer or config."""
    if tokenizer is not None and config is not None:
        notes_of(tokenizer).is_encoder_decoder = bool(getattr(config, 'is_encoder_decoder', False))


def is_for_encoder_decoder(tokenizer: Any) -> bool:
    """Returns True if `note_model`, which `chatgpt.nn.load_tokenizer` calls, has recorded an encoder-decoder."""
    return notes_of(tokenizer).is_encoder_decoder


def frame(tokenizer: Any) -> Frame:
    """Returns the special tokens that a tokenizer adds for an encoder-decoder.

    >>> frame(t5_tokenizer)                                        # doctest: +SKIP
    Frame(before=[], after=[1], start=[])
    """
    languages = getattr(tokenizer, 'src_lang', None), getattr(tokenizer, 'tgt_lang', None)
    notes = notes_of(tokenizer)
    if notes.frame is not None and notes.frame[0] == languages:  # cached, because every record needs it
        return notes.frame[1]
    body = list(tokenizer('a', add_special_tokens=False, verbose=False)['input_ids'])
    before, after = _around(body, list(tokenizer('a', verbose=False)['input_ids']), tokenizer)
    body = list(tokenizer(text_target='a', add_special_tokens=False, verbose=False)['input_ids'])
    start, _ = _around(body, list(tokenizer(text_target='a', verbose=False)['input_ids']), tokenizer)
    notes.frame = languages, Frame(before, after, start)
    return notes.frame[1]


def _around(body: list[int], whole: list[int], tokenizer: Any) -> tuple[list[int], list[int]]:
    places = range(len(whole) - len(body) + 1) if body else [int(whole[:1] == [tokenizer.bos_token_id])]
    at = next((i for i in places if whole[i : i + len(body)] == body), 0)
    return whole[:at], whole[at + len(body) :]


def prompt_turns(prompt: PromptText) -> tuple[Message, ...]:
    """Returns a prompt as turns: a dialogue in one text is split into its turns; other text and instructions are one
    turn of the user."""
    if isinstance(prompt, Instruction):
        prompt = instruction_text(prompt)
    return (_split_dialogue(prompt) or (Message('user', prompt),)) if isinstance(prompt, str) else prompt


def _split_dialogue(text: str) -> tuple[Message, ...]:
    """Returns the turns of a dialogue in one text that asks for an answer (`split_speakers`); () for other text."""
    before, turns = split_speakers(f'\n\n{text.lstrip()}')
    if before.strip() or len(turns) < 2 or turns[0].role != 'user' or turns.pop() != ('assistant', ''):
        return ()
    if turns[-1].role != 'user' or not all(turn.content for turn in turns):
        return ()
    joined: list[Message] = []
    for turn in turns:
        if joined and joined[-1].role == turn.role:  # many templates refuse two turns of one role
            turn = Message(turn.role, f'{joined.pop().content}\n\n{turn.content}')
        joined.append(turn)
    return tuple(joined)


def response_turns(response: ResponseText, prompt: PromptText = '') -> tuple[Message, ...]:
    """Returns a response as turns, without the space that separates it from a dialogue in one text."""
    if isinstance(response, str):
        in_dialogue = isinstance(prompt, str) and _split_dialogue(prompt)
        return (Message('assistant', response.strip() if in_dialogue else response),)
    return response


def render_prompt(prompt: PromptText, tokenizer: Any, apply_chat_template: bool | None = None) -> str:
    """Returns the model's input text, up to the beginning of the response. Raises BadRecord if the template rejects the
    turns."""
    if use_template(prompt, tokenizer, apply_chat_template):
        return _templated(prompt_turns(prompt), tokenizer, add_generation_prompt=True)
    return plain_prompt(prompt)


def plain_prompt(prompt: PromptText) -> str:
    """Formats a prompt without a chat template.

    >>> plain_prompt((Message('user', 'Hello'),))
    '\\n\\nHuman: Hello\\n\\nAssistant:'
    """
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Instruction):
        given = f'### Input:\n{prompt.input}\n\n' if prompt.input.strip() else ''
        return f'### Instruction:\n{prompt.instruction}\n\n{given}### Response:\n'
    return ''.join(map(_plain_turn, prompt)) + '\n\nAssistant:'


def render(
    prompt: PromptText, response: ResponseText, tokenizer: Any, apply_chat_template: bool | None = None
) -> list[Piece]:
    """Formats prompt and response as pieces: the prompt (not trained), then turns of the assistant (trained) and of
    others (not).

    A chat template's piece includes what the template writes after a turn, such as its end token. The plain form has no
    end token; tokenization adds it to every trained piece. Of a template that rewrites earlier turns, such as one that
    drops their reasoning, only the last answer is a trained piece. Raises BadRecord if the template's text cannot be
    split into turns, or lacks a part of an answer.
    """
    if use_template(prompt, tokenizer, apply_chat_template):
        return _template_pieces(prompt_turns(prompt), response_turns(response, prompt), tokenizer)
    first = Piece(plain_prompt(prompt), False)
    if isinstance(response, str):
        # a space precedes the response in a conversation, but not after plain text and headings
        space = ' ' if isinstance(prompt, tuple) and not response[:1].isspace() else ''
        return [first, Piece(space + response, True)]
    pieces = [first]
    for number, turn in enumerate(response):
        if turn.role != 'assistant':
            pieces.append(Piece(_plain_turn(turn), False))
            continue
        if number:
            pieces.append(Piece('\n\nAssistant:', False))
        pieces.append(Piece(' ' + turn.content, True))
    return pieces


def _plain_turn(turn: Message) -> str:
    return turn.content if turn.role == 'system' else f'\n\n{_SPEAKERS[turn.role]}: {turn.content}'


def apply_template(
    messages: Sequence[Mapping[str, Any]], tokenizer: Any, *, add_generation_prompt: bool, **options: Any
) -> str:
    """Formats messages by the chat template. Raises BadRecord if the template rejects them."""
    own = getattr(tokenizer, 'chat_template', None)
    template = None if own else template_of(tokenizer) or default_template(tokenizer)
    try:
        return tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=add_generation_prompt, **options
        )
    except ImportError:
        raise
    except Exception as error:  # a template may raise anything
        roles = ', '.join(message['role'] for message in messages)
        raise BadRecord(
            f"the tokenizer's chat template refuses messages of {roles}: {' '.join(str(error).split())[:200]}"
        ) from error


def _templated(turns: Sequence[Message], tokenizer: Any, *, add_generation_prompt: bool) -> str:
    return apply_template([t._asdict() for t in turns], tokenizer, add_generation_prompt=add_generation_prompt)


OWN_TEMPLATE = 'copy the folder of the tokenizer, change chat_template there, and give that folder with --tokenizer'


def _template_pieces(prompt: tuple[Message, ...], response: tuple[Message, ...], tokenizer: Any) -> list[Piece]:
    turns = [*prompt, *response]
    answers = [i for i in range(len(prompt), len(turns)) if turns[i].role == 'assistant']
    before_each = [_templated(turns[:i], tokenizer, add_generation_prompt=True) for i in answers]
    after_each = [_templated(turns[: i + 1], tokenizer, add_generation_prompt=False) for i in answers]
    pieces: list[Piece] = []
    for i, before, after, done in zip(answers, before_each, after_each, ['', *after_each], strict=False):
        if not before.startswith(done):
            warnings.warn(
                "the tokenizer's chat template rewrites earlier turns of a conversation: of each, only the last answer "
                f'is learned. To learn all of them {OWN_TEMPLATE}',
                stacklevel=2,
            )
            last = _answer_in(turns[answers[-1]], before_each[-1], after_each[-1])
            return [Piece(before_each[-1], False), Piece(last, True)]
        pieces += [Piece(before[len(done) :], False), Piece(_answer_in(turns[i], before, after), True)]
    return pieces


def _answer_in(turn: Message, before: str, after: str) -> str:
    """Returns what a template writes for an answer. Raises BadRecord if it lacks a part of it."""
    answer, lacks = after[len(before) :], ''
    content, written = (''.join(text.split()) for text in (turn.content, answer))
    if not after.startswith(before):  # such as <think>
        lacks = 'begins answers with something that it leaves out afterwards'
    elif content not in written and len(written) < len(content):  # such as what <think> encloses
        lacks = 'leaves out a part of the answer'
    if lacks:
        raise BadRecord(f"the tokenizer's chat template {lacks}; {OWN_TEMPLATE}")
    return answer
