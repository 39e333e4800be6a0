"""How examples read as text, before they become ids.

Plain text is used as it is. Conversations and instructions go through the tokenizer's chat template. A tokenizer that
has none is given `default_template` by the loaders (`adopt_template`), so that the saved tokenizer, and whoever asks
it, formats as training did:

    \\n\\nHuman: ...\\n\\nAssistant: ...<end token>

which is the form of Anthropic's HH data; a system message stands in front, a tool's answer reads `\\n\\nTool: ...`, and
every turn of the assistant ends with the end token. With apply_chat_template=False conversations read like that,
without end tokens in the prompt, and instructions read

    ### Instruction:
    ...

    ### Input:          (only where there is one)
    ...

    ### Response:

which are Alpaca's headings. An encoder-decoder reads the prompt with its encoder and writes the response with its
decoder, so each has the special tokens that the tokenizer itself puts around a text (`frame`); `note_model` notes on a
tokenizer what it is for. Left out: ids and lengths (see `tokenize`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from chatgpt.dataset.examples import BadRecord, Instruction, Message, PromptText, ResponseText, instruction_text

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

    apply_chat_template: None: conversations and instructions do, plain text does not; True: all do, plain text as one
    turn of the
        user; False: none does. '' (text without a prompt) never does.
    """
    if prompt == '':
        return False
    return not isinstance(prompt, str) if apply_chat_template is None else apply_chat_template


def default_template(tokenizer: Any) -> str:
    """The chat template of a tokenizer that has none. It writes the begin token where the tokenizer adds one by
    itself."""
    return ('{{ bos_token }}' if begin_ids(tokenizer) else '') + _TEMPLATE


def adopt_template(prompt: PromptText, tokenizer: Any, apply_chat_template: bool | None) -> bool:
    """`use_template`; a tokenizer that has no template and needs one now has `default_template`, and is saved with
    it."""
    used = use_template(prompt, tokenizer, apply_chat_template)
    if used and not tokenizer.chat_template:
        tokenizer.chat_template = default_template(tokenizer)
    return used


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
    """Note on a tokenizer whether the model that it is for, of this config, is an encoder-decoder. Nothing without
    one of both."""
    apart = bool(getattr(config, 'is_encoder_decoder', False))
    if tokenizer is not None and config is not None and apart != is_for_encoder_decoder(tokenizer):
        tokenizer.for_encoder_decoder = apart


def is_for_encoder_decoder(tokenizer: Any) -> bool:
    """What `note_model` noted, as `chatgpt.nn.load_tokenizer` does by itself; False where nobody did."""
    return bool(getattr(tokenizer, 'for_encoder_decoder', False))


def frame(tokenizer: Any) -> Frame:
    """The special tokens of a tokenizer for an encoder-decoder.

    >>> frame(t5_tokenizer)                                        # doctest: +SKIP
    Frame(before=[], after=[1], start=[])
    """
    languages = getattr(tokenizer, 'src_lang', None), getattr(tokenizer, 'tgt_lang', None)
    known = getattr(tokenizer, 'known_frame', None)  # it is asked for with each record
    if known is not None and known[0] == languages:
        return known[1]
    body = list(tokenizer('a', add_special_tokens=False, verbose=False)['input_ids'])
    before, after = _around(body, list(tokenizer('a', verbose=False)['input_ids']), tokenizer)
    body = list(tokenizer(text_target='a', add_special_tokens=False, verbose=False)['input_ids'])
    start, _ = _around(body, list(tokenizer(text_target='a', verbose=False)['input_ids']), tokenizer)
    tokenizer.known_frame = languages, Frame(before, after, start)
    return tokenizer.known_frame[1]


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


def _templated(turns: Sequence[Message], tokenizer: Any, *, add_generation_prompt: bool) -> str:
    chat = [{'role': turn.role, 'content': turn.content} for turn in turns]
    try:
        template = tokenizer.chat_template or default_template(tokenizer)
        return tokenizer.apply_chat_template(
            chat, chat_template=template, tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except ImportError:
        raise
    except Exception as error:  # a template may refuse an order of roles in any way it likes
        raise BadRecord(
            f"the tokenizer's chat template refuses the turns: {' '.join(str(error).split())[:200]}"
        ) from error


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
