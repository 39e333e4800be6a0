"""How examples read as text, before they become ids.

Plain text is used as it is. Conversations and instructions go through the tokenizer's chat template, or, where it has
none, through `default_template`:

    \\n\\nHuman: ...\\n\\nAssistant: ...<end token>

which is the form of Anthropic's HH data; a system message stands in front, a tool's answer reads `\\n\\nTool: ...`, and
every turn of the assistant ends with the end token. With apply_chat_template=False conversations read like that,
without end tokens in the prompt, and instructions read with Alpaca's headings (`plain_prompt`).

What is decided once for a model is kept in a record of ours about its tokenizer (`notes_of`), which itself stays as it
is: whether plain text is a turn of the user, the template that was adopted, and whether its model is an
encoder-decoder, of which prompt and response each have the special tokens that the tokenizer puts around a text
(`frame`). `save_tokenizer` writes choice and template into a model's folder, so that whatever uses the model later
formats text as its training did.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from chatgpt.data.examples import BadRecord, Instruction, Message, PromptText, ResponseText, instruction_text

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
    """A stretch of text whose tokens either all count in the loss or none of them."""

    text: str
    trained: bool


def use_template(prompt: PromptText, tokenizer: Any, apply_chat_template: bool | None) -> bool:
    """Whether a prompt goes through the tokenizer's chat template.

    apply_chat_template: None: conversations and instructions do, and plain text if the tokenizer's `text_choice` says
        so; True: all do, plain text as one turn of the user; False: none does. '' (text without a prompt) never does.
    """
    if prompt == '':
        return False
    if apply_chat_template is None:
        return not isinstance(prompt, str) or bool(text_choice(tokenizer))
    return apply_chat_template


TEXT_CHOICE = 'text_is_user_turn'
"""in the tokenizer_config.json of a saved model: whether its training made text a turn of the user"""
_MARK = 'zqmark'
_sound: set[str] = set()  # templates that show the messages


@dataclass
class Notes:
    """What is known of a tokenizer beside what it holds itself."""

    text_is_turn: bool | None = None
    """whether text is a turn of the user; None where nobody has chosen"""
    template: str | None = None
    """the chat template of a tokenizer that brings none, once one was needed"""
    apart: bool = False
    """whether its model is an encoder-decoder"""
    frame: tuple[Any, Frame] | None = None
    """with the languages that it is for"""


_notes: WeakKeyDictionary[Any, Notes] = WeakKeyDictionary()


def notes_of(tokenizer: Any) -> Notes:
    """The record about a tokenizer, which begins with the choice that was saved with it."""
    if tokenizer is None:
        return Notes()
    if tokenizer not in _notes:
        saved = getattr(tokenizer, 'init_kwargs', None) or {}
        _notes[tokenizer] = Notes(text_is_turn=saved.get(TEXT_CHOICE))
    return _notes[tokenizer]


def copy_tokenizer(tokenizer: Any) -> Any:
    """A copy with a record of its own, which begins as that of the original."""
    copied = copy.copy(tokenizer)
    _notes[copied] = replace(notes_of(tokenizer))
    return copied


def template_of(tokenizer: Any) -> str | None:
    """Its own chat template, or the one that was adopted for it."""
    return getattr(tokenizer, 'chat_template', None) or notes_of(tokenizer).template


def save_tokenizer(tokenizer: Any, folder: str | os.PathLike[str]) -> None:
    """`tokenizer.save_pretrained` with the choice for text and the adopted template."""
    notes = notes_of(tokenizer)
    if notes.text_is_turn is not None or notes.template is not None:
        tokenizer, choice = copy.copy(tokenizer), notes.text_is_turn
        if choice is not None:
            tokenizer.init_kwargs = {**(getattr(tokenizer, 'init_kwargs', None) or {}), TEXT_CHOICE: choice}
        tokenizer.chat_template = getattr(tokenizer, 'chat_template', None) or notes.template
    tokenizer.save_pretrained(folder)


def text_choice(tokenizer: Any) -> bool | None:
    """Whether text is a turn of the user, as chosen or saved with the tokenizer; None where nobody has chosen."""
    return notes_of(tokenizer).text_is_turn


def choice_facts(tokenizer: Any) -> dict[str, bool]:
    """The choice as run.json says it, in 'data'; nothing where none is noted."""
    choice = text_choice(tokenizer)
    return {} if choice is None else {'apply_chat_template': choice}


def choose_text(tokenizer: Any, apply_chat_template: bool | None) -> None:
    """Note what the user asks for; None leaves what is noted.

    Raises:
        ValueError: the chat template is asked for and there is none.
    """
    if apply_chat_template and not template_of(tokenizer):
        raise ValueError('apply_chat_template: the tokenizer has no chat template; leave it out, or take a chat model')
    if apply_chat_template is not None:
        notes_of(tokenizer).text_is_turn = apply_chat_template


def text_is_turn(tokenizer: Any, apply_chat_template: bool | None = None) -> bool:
    """Whether text is a turn of the user: as asked for, else as noted on the tokenizer, else not. The answer is noted;
    where a tokenizer has a chat template and nobody has chosen, one warning says so."""
    choice = text_choice(tokenizer) if apply_chat_template is None else apply_chat_template
    if choice is None and template_of(tokenizer):
        warnings.warn(
            'the prompts are plain text, to which the chat template of the model is not applied: give '
            '--apply_chat_template (apply_chat_template=True) to make each text a turn of the user, or prompts as '
            'messages ([{"role": "user", "content": ...}]); --no_apply_chat_template (False) keeps plain text without '
            'this warning',
            stacklevel=2,
        )
        choice = False
    if choice is not None:
        notes_of(tokenizer).text_is_turn = choice
    return bool(choice)


def check_template(tokenizer: Any) -> None:
    """Raises ValueError for a chat template that leaves out what the messages say."""
    template = str(template_of(tokenizer))
    if template in _sound:
        return
    try:
        shown = _templated((Message('user', _MARK),), tokenizer, add_generation_prompt=True)
    except BadRecord:  # it may refuse this conversation and take others
        return
    if _MARK not in shown.lower():
        raise ValueError(
            f"the tokenizer's chat template ignores the messages: a user's turn reads {shown[:60]!r} whatever it says; "
            'set tokenizer.chat_template to the template of the model'
        )
    _sound.add(template)


def default_template(tokenizer: Any) -> str:
    """The chat template of a tokenizer that has none. It writes the begin token where the tokenizer adds one by
    itself."""
    return ('{{ bos_token }}' if begin_ids(tokenizer) else '') + _TEMPLATE


def adopt_template(prompt: PromptText, tokenizer: Any, apply_chat_template: bool | None) -> bool:
    """`use_template`, with the choice for text noted (`text_is_turn`). Where a template is needed and the tokenizer
    has none, `default_template` is noted.

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
    """For a model that is trained on conversations text is a turn of the user too, unless something else is noted."""
    if getattr(data, 'has_turns', False):
        note_turns(tokenizer)


def note_turns(tokenizer: Any) -> None:
    """Note that text is a turn of the user, unless something else is noted."""
    notes = notes_of(tokenizer)
    notes.text_is_turn = True if notes.text_is_turn is None else notes.text_is_turn


def shown_format(tokenizer: Any) -> str:
    """How a short conversation reads, for people."""
    return repr(
        _templated(
            (Message('user', 'QUESTION'), Message('assistant', 'ANSWER')), tokenizer, add_generation_prompt=False
        )
    )


def begin_ids(tokenizer: Any) -> list[int]:
    """[begin token] where the tokenizer adds it by itself, else []."""
    begin = tokenizer.bos_token_id
    if begin is None:
        return []
    return [begin] if list(tokenizer('a', verbose=False)['input_ids'])[:1] == [begin] else []


class Frame(NamedTuple):
    """Special tokens around texts of an encoder-decoder, as its tokenizer puts them there by itself."""

    before: list[int]
    """the prompt; of BART its begin token, of T5 none"""
    after: list[int]
    """the prompt; the end token"""
    start: list[int]
    """the response, which ends with the end token in any case; of BART its begin token again, which follows the
    decoder's start token"""


def note_model(tokenizer: Any, config: Any) -> None:
    """Note whether the model of a tokenizer, of this config, is an encoder-decoder. Nothing without one of both."""
    if tokenizer is not None and config is not None:
        notes_of(tokenizer).apart = bool(getattr(config, 'is_encoder_decoder', False))


def is_for_encoder_decoder(tokenizer: Any) -> bool:
    """What `note_model` noted, as `chatgpt.nn.load_tokenizer` does by itself; False where nobody did."""
    return notes_of(tokenizer).apart


def frame(tokenizer: Any) -> Frame:
    """The special tokens of a tokenizer for an encoder-decoder.

    >>> frame(t5_tokenizer)                                        # doctest: +SKIP
    Frame(before=[], after=[1], start=[])
    """
    languages = getattr(tokenizer, 'src_lang', None), getattr(tokenizer, 'tgt_lang', None)
    notes = notes_of(tokenizer)
    if notes.frame is not None and notes.frame[0] == languages:  # it is asked for with each record
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
    """A prompt as turns: plain text and instructions are one turn of the user."""
    if isinstance(prompt, Instruction):
        prompt = instruction_text(prompt)
    return (Message('user', prompt),) if isinstance(prompt, str) else prompt


def response_turns(response: ResponseText) -> tuple[Message, ...]:
    return (Message('assistant', response),) if isinstance(response, str) else response


def render_prompt(prompt: PromptText, tokenizer: Any, apply_chat_template: bool | None = None) -> str:
    """The text that the model is given; it ends where the answer begins. Raises BadRecord when the template refuses the
    turns."""
    if use_template(prompt, tokenizer, apply_chat_template):
        return _templated(prompt_turns(prompt), tokenizer, add_generation_prompt=True)
    return plain_prompt(prompt)


def plain_prompt(prompt: PromptText) -> str:
    """A prompt without a chat template.

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
    """Prompt and answer as pieces: the prompt first (not trained), then turns of the assistant (trained) and of others
    (not).

    The pieces of a chat template end with what the template puts after a turn, its end token included. The plain form
    has no end token; it comes with the ids, after every trained piece. Raises BadRecord when the template cannot be cut
    at the turns.
    """
    if use_template(prompt, tokenizer, apply_chat_template):
        return _template_pieces(prompt_turns(prompt), response_turns(response), tokenizer)
    first = Piece(plain_prompt(prompt), False)
    if isinstance(response, str):
        # a turn of a conversation is set off by a space; after plain text and headings the answer stands as it is
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
    """The text of messages by the chat template. Raises BadRecord where the template refuses them."""
    own = getattr(tokenizer, 'chat_template', None)
    template = None if own else template_of(tokenizer) or default_template(tokenizer)
    try:
        return tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=add_generation_prompt, **options
        )
    except ImportError:
        raise
    except Exception as error:  # a template may refuse messages in any way it likes
        roles = ', '.join(message['role'] for message in messages)
        raise BadRecord(
            f"the tokenizer's chat template refuses messages of {roles}: {' '.join(str(error).split())[:200]}"
        ) from error


def _templated(turns: Sequence[Message], tokenizer: Any, *, add_generation_prompt: bool) -> str:
    return apply_template([t._asdict() for t in turns], tokenizer, add_generation_prompt=add_generation_prompt)


def _template_pieces(asked: tuple[Message, ...], answered: tuple[Message, ...], tokenizer: Any) -> list[Piece]:
    turns, done = [*asked, *answered], ''
    pieces: list[Piece] = []
    for i, turn in enumerate(turns):
        if i < len(asked) or turn.role != 'assistant':
            continue
        before = _templated(turns[:i], tokenizer, add_generation_prompt=True)
        after = _templated(turns[: i + 1], tokenizer, add_generation_prompt=False)
        if not before.startswith(done) or not after.startswith(before):
            raise BadRecord(
                f"the tokenizer's chat template rewrites earlier turns when turn {i + 1} is added, so answers cannot "
                'be told apart; use apply_chat_template=False'
            )
        pieces += [Piece(before[len(done) :], False), Piece(after[len(before) :], True)]
        done = after
    return pieces
