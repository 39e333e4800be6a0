"""Tokenizes observations. Ids are only appended to a transcript, never rendered or tokenized again, so training uses
the ids that were sampled.

`PlainText` encodes text unchanged. `ChatTemplate` renders the first messages once, and then appends what the template
writes after a turn: the rest of the assistant's ending, the messages, the generation prompt. This requires a template
that never changes earlier text, which is tested on example conversations before sampling; other templates are an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os.path import commonprefix
from typing import Any, Literal, Protocol

from chatgpt.data.formats import (
    apply_template,
    begin_ids,
    copy_tokenizer,
    note_turns,
    template_of,
    text_choice,
    text_is_turn,
)
from chatgpt.data.tokenize import encode
from chatgpt.environments.base import EnvironmentSettings, InvalidStep, Observation, joined
from chatgpt.environments.calls import checked_calls, reader

Ended = Literal['eos', 'stop', 'length']

_MARK = 'zqmark'
_ANSWERS = ('Yes, that is so.', '<think>\nLet me see.\n</think>\n\nYes, that is so.')
_CALL_ID = '000000000'  # Mistral's template requires nine characters
_ANCHOR = 'A'


class TranscriptFormat(Protocol):
    """Converts observations to ids."""

    def first(self, prompt: Any, observation: Observation) -> list[int]:
        """Returns the ids before the first turn. `prompt`: the data row's `Prompt`, without ids if there is no data."""

    def after(self, turn_ids: Sequence[int], ended: Ended, observation: Observation) -> list[int]:
        """Returns the ids to append between a turn and the next."""


class PlainText:
    """Observations are text, each encoded separately without changes. Raises ValueError for messages, which need a chat
    template.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def first(self, prompt: Any, observation: Observation) -> list[int]:
        start = prompt.ids.tolist() or begin_ids(self.tokenizer)
        return start + self._encoded(observation)

    def after(self, turn_ids: Sequence[int], ended: Ended, observation: Observation) -> list[int]:
        if not isinstance(observation, str):
            raise InvalidStep('the environment speaks in messages, which need a tokenizer with a chat template')
        return self._encoded(observation)

    def _encoded(self, observation: Observation) -> list[int]:
        if not isinstance(observation, str):
            raise ValueError('the environment speaks in messages, which need a tokenizer with a chat template')
        return encode(observation, self.tokenizer)


class ChatTemplate:
    """Observations are messages, formatted by the tokenizer's chat template. Text is a message of the user.

    Args:
        tokenizer: with a chat template.
        tools: JSON schemas of tools that the model may call; None if there are none, and turns are text.
        options: further arguments of `apply_chat_template`, such as enable_thinking.

    Raises:
        ValueError: there is no template; it omits tools, calls or results; its form of calls is unknown; or a
            conversation cannot be continued by appending (also raised at the first conversation with a system message
            or another role).
    """

    def __init__(
        self, tokenizer: Any, tools: Sequence[Mapping[str, Any]] | None = None, options: Mapping[str, Any] | None = None
    ) -> None:
        if not template_of(tokenizer):
            raise ValueError(
                'the tokenizer has no chat template, which an environment of messages or tools needs; set '
                'tokenizer.chat_template'
            )
        self.tokenizer, self.options = tokenizer, dict(options or {})
        self.tools = None if tools is None else [dict(tool) for tool in tools]
        self._tried: set[tuple[bool, str]] = set()
        self._read: Callable[[str], dict[str, Any]] | None = None
        if self.tools is None:
            self._try_out(False, 'user')
        else:
            self._check_tools(self.tools)
            self._try_out(False, 'tool')

    # ------------------------------------------------------------------ ids

    def messages(self, prompt: Any) -> list[dict[str, Any]]:
        """Returns the data row's prompt as a conversation: its turns, or its text as one turn of the user. Raises
        ValueError if the prompt has only ids.
        """
        if prompt.messages is not None:
            return [dict(message) for message in prompt.messages]
        if len(prompt.ids) and not prompt.text:
            raise ValueError('a prompt given as ids cannot go through a chat template; give its text or its turns')
        return [{'role': 'user', 'content': prompt.text}] if prompt.text else []

    def first(self, prompt: Any, observation: Observation) -> list[int]:
        """Messages are the whole conversation; text is added to the prompt's last turn, as in TRL.

        Raises InvalidStep for messages that the template rejects.
        """
        messages = observation if isinstance(observation, list) else joined(self.messages(prompt), observation)
        role = 'user' if self.tools is None else 'tool'
        self._try_out(bool(messages) and messages[0]['role'] == 'system', role)
        if not messages:
            raise InvalidStep('a first observation without messages leaves nothing to answer')
        try:
            return encode(self._render(messages, begin=True), self.tokenizer)
        except ValueError as error:
            raise InvalidStep(str(error)) from error

    def after(self, turn_ids: Sequence[int], ended: Ended, observation: Observation) -> list[int]:
        """Raises InvalidStep for messages that the template rejects."""
        messages = [{'role': 'user', 'content': observation}] if isinstance(observation, str) else list(observation)
        if not messages:
            raise InvalidStep('an observation without messages leaves nothing for the next turn to answer')
        self._try_out(False, _kind(messages))
        try:
            ids = self._encoded(self._tail(messages))
        except ValueError as error:
            raise InvalidStep(str(error)) from error
        if ended == 'eos' and self._ending() and (ids[0] == turn_ids[-1] or self._is_special(ids[0])):
            return ids[1:]  # the model has generated the end token or another one for it
        return ids

    def _is_special(self, token: int) -> bool:
        added = self.tokenizer.added_tokens_decoder.get(token)
        return added is not None and added.special

    # ------------------------------------------------------------------ generated turns

    def message(self, turn_ids: Sequence[int], ended: Ended, before: Sequence[int] = ()) -> dict[str, Any]:
        """Returns a turn as a message of the assistant: 'content'; 'tool_calls' if there are any; 'truncated' if it
        reached the token limit. Calls that cannot be parsed are text.

        Args:
            before: ids before the turn, at least from the last generation prompt on.
        """
        message = self._parsed(list(turn_ids), ended, list(before))
        return message | ({'truncated': True} if ended == 'length' else {})

    def _parsed(self, ids: list[int], ended: Ended, before: list[int]) -> dict[str, Any]:
        text = {'role': 'assistant', 'content': self.tokenizer.decode(ids, skip_special_tokens=True)}
        if self._read is not None:
            written = self.tokenizer.decode(ids[:-1] if ended == 'eos' else ids, skip_special_tokens=False)
            message = self._read(written)
            return message if 'tool_calls' in message else message | text
        try:
            found = self.tokenizer.parse_response(ids, prefix=before, tools=self.tools)
            message = {**found, 'role': 'assistant', 'content': found.get('content') or ''}
            if message.pop('tool_calls', None):
                message['tool_calls'] = checked_calls(found['tool_calls'])
            return message
        except (ValueError, TypeError, AttributeError, RecursionError):  # a turn that cannot be parsed is text
            return text

    # ------------------------------------------------------------------ the template

    def _render(self, messages: list[dict[str, Any]], begin: bool = False) -> str:
        options = self.options | ({'tools': self.tools} if self.tools else {})
        return apply_template(messages, self.tokenizer, add_generation_prompt=begin, **options)

    def _tail(self, messages: list[dict[str, Any]]) -> str:
        """Returns what the template writes after the last character of a turn: its ending, `messages`, the generation
        prompt."""
        question = {'role': 'user', 'content': 'x'}
        if _kind(messages) != 'tool':
            answer = {'role': 'assistant', 'content': _MARK}
            return _behind(self._render([question, answer, *messages], begin=True))
        results = [message for message in messages if message['role'] == 'tool']
        calls = [_call(m.get('name') or 'tool', m.get('tool_call_id') or _CALL_ID, {'x': _MARK}) for m in results]
        for some in (calls, calls[-1:]):  # Llama 3's template writes at most one call
            call = {'role': 'assistant', 'content': '', 'tool_calls': some}
            try:
                short, long = self._render([question, call]), self._render([question, call, *messages], begin=True)
                break
            except ValueError:
                if len(some) == 1:
                    raise
        # the model generates the end of a call, and the template what follows
        before, after = (_behind(text, len(some)) for text in (short, long))
        if not before.endswith(self._ending()) or not after.startswith(before):
            raise _rewrites(before, after, messages)
        return self._ending() + after[len(before) :]

    def _ending(self) -> str:
        """Returns what the template writes after a last message of the assistant."""
        answered = self._render([{'role': 'user', 'content': 'x'}, {'role': 'assistant', 'content': _MARK}])
        return _behind(answered)

    def _encoded(self, tail: str) -> list[int]:
        """Returns the ids of a text that follows other text."""
        anchor = encode(_ANCHOR, self.tokenizer)
        ids = encode(_ANCHOR + tail, self.tokenizer)
        if ids[: len(anchor)] != anchor:
            raise ValueError(
                f"the tokenizer runs what the chat template writes after a turn, {tail[:40]!r}, into the turn's last "
                'token, so it cannot be appended; let the template end a turn with a special token'
            )
        return ids[len(anchor) :]

    # ------------------------------------------------------------------ tests of the template

    def _try_out(self, system: bool, kind: str) -> None:
        """Raises ValueError unless appending gives the same text as rendering, for three rounds of example turns with
        and without thinking."""
        if (system, kind) in self._tried:
            return
        for content in _ANSWERS if kind != 'tool' else ('', *_ANSWERS):
            messages = [{'role': 'system', 'content': 'Be brief.'}] if system else []
            messages.append({'role': 'user', 'content': 'Is it so?'})
            so_far = self._render(messages, begin=True)
            for number in range(3):
                answer: dict[str, Any] = {'role': 'assistant', 'content': content}
                if kind == 'tool':
                    answer['tool_calls'] = [_call(self._tool_name(), _CALL_ID, {'n': number})]
                    if content not in self._render([*messages, answer]):
                        break  # some templates drop text next to a call
                follows = self._observed(kind, f'It is {number}.')
                messages += [answer, *follows]
                whole, tail = self._render(messages, begin=True), self._tail(follows)
                if not whole.startswith(so_far):
                    raise _rewrites(so_far, whole, follows)
                body = whole[len(so_far) :]
                if not body.endswith(tail) or not _is_unchanged(body.removesuffix(tail), content, kind):
                    raise _rewrites(so_far + content + tail, whole, follows)
                self._encoded(tail)
                so_far = whole
        self._tried.add((system, kind))

    def _observed(self, kind: str, content: str) -> list[dict[str, Any]]:
        if kind != 'tool':
            return [{'role': kind, 'content': content}]
        return [{'role': 'tool', 'name': self._tool_name(), 'tool_call_id': _CALL_ID, 'content': content}]

    def _tool_name(self) -> str:
        return self.tools[0]['function']['name'] if self.tools else 'tool'

    def _check_tools(self, tools: list[dict[str, Any]]) -> None:
        """Raises ValueError unless the template includes tools, calls and results, and its calls can be parsed."""
        question = [{'role': 'user', 'content': 'Is it so?'}]
        shown = self._render(question, begin=True)
        for tool in tools:
            if tool['function']['name'] not in shown:
                raise ValueError(
                    "the tokenizer's chat template shows no tools: it leaves out "
                    f'{tool["function"]["name"]!r}; take a model that was trained to call tools, or set a template'
                )
        called = _call(self._tool_name(), _CALL_ID, {'zqkey': 'zqvalue'})
        call = {'role': 'assistant', 'content': '', 'tool_calls': [called]}
        whole = self._render([*question, call, *self._observed('tool', 'zqresult')], begin=True)
        for part, word in (('calls', 'zqkey'), ('calls', 'zqvalue'), ('results', 'zqresult')):
            if word not in whole[whole.index('Is it so?') :]:
                raise ValueError(f"the tokenizer's chat template leaves out the {part} of tools; set another one")
        if getattr(self.tokenizer, 'response_template', None) is None:
            self._read = reader(self.tokenizer.get_chat_template(tools=self.tools))
        written = self._render([*question, call]).removesuffix(self._ending())
        written = written[len(commonprefix([shown, written])) :]
        message = self.message(encode(written, self.tokenizer), 'length', encode(shown, self.tokenizer))
        if [found['function'] for found in message.get('tool_calls', ())] != [called['function']]:
            raise ValueError(
                f"the tokenizer's chat template writes calls of tools as {written[:80]!r}, which is not understood; "
                'set tokenizer.response_template'
            )


def _uses_messages(environment: Any) -> bool:
    return bool(getattr(environment, 'tools', None) or getattr(environment, 'messages', False))


def _choice(tokenizer: Any, settings: EnvironmentSettings) -> bool | None:
    return text_choice(tokenizer) if settings.apply_chat_template is None else settings.apply_chat_template


def transcript_for(environment: Any, tokenizer: Any, settings: EnvironmentSettings) -> TranscriptFormat:
    """Returns the format of an environment's transcripts: `ChatTemplate` where all observations are turns, otherwise
    `TextOrChat`."""
    options = settings.chat_template_kwargs
    if _uses_messages(environment) or _choice(tokenizer, settings):
        note_turns(tokenizer)
        return ChatTemplate(tokenizer, getattr(environment, 'tools', None) or None, options)
    return TextOrChat(tokenizer, options, settings.apply_chat_template)


def for_workers(tokenizer: Any, settings: EnvironmentSettings) -> tuple[Any, EnvironmentSettings]:
    """Returns a tokenizer and settings with which another process chooses the same format: what is recorded of a
    tokenizer is not pickled with it."""
    sent = copy_tokenizer(tokenizer)
    sent.chat_template = template_of(tokenizer)
    return sent, replace(settings, apply_chat_template=_choice(tokenizer, settings))


def choose_text_for(environment: Any, tokenizer: Any) -> None:
    """Records that text prompts are turns of the user, for an environment of messages. Call it before reading
    prompts."""
    if template_of(tokenizer) and _uses_messages(environment):
        note_turns(tokenizer)


class TextOrChat:
    """`PlainText` until a prompt or an environment's first observation is messages, from then on a `ChatTemplate`."""

    def __init__(
        self, tokenizer: Any, options: Mapping[str, Any] | None = None, apply_chat_template: bool | None = None
    ) -> None:
        self.tokenizer, self.options, self.apply_chat_template = tokenizer, options, apply_chat_template
        self.format: TranscriptFormat = PlainText(tokenizer)

    def first(self, prompt: Any, observation: Observation) -> list[int]:
        chat = prompt.messages is not None and template_of(self.tokenizer) and self.apply_chat_template is not False
        turns = isinstance(observation, list) or chat
        if turns and isinstance(self.format, PlainText):
            self.format = ChatTemplate(self.tokenizer, options=self.options)
            note_turns(self.tokenizer)
        elif isinstance(self.format, PlainText):
            text_is_turn(self.tokenizer, self.apply_chat_template)  # warns once of a template without a choice
        return self.format.first(prompt, observation)

    def after(self, turn_ids: Sequence[int], ended: Ended, observation: Observation) -> list[int]:
        return self.format.after(turn_ids, ended, observation)


def _behind(text: str, count: int = 1) -> str:
    parts = text.split(_MARK, count)
    if len(parts) <= count:
        raise ValueError("the tokenizer's chat template leaves out what the assistant says; set another one")
    return parts[-1]


def _kind(messages: Sequence[Mapping[str, Any]]) -> str:
    return 'tool' if any(message['role'] == 'tool' for message in messages) else str(messages[0]['role'])


def _call(name: str, number: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {'type': 'function', 'id': number, 'function': {'name': name, 'arguments': arguments}}


def _is_unchanged(body: str, content: str, kind: str) -> bool:
    """Returns True if the template does not change a turn's text; a call may be written in any way."""
    return content.strip() in body if kind == 'tool' else content.strip() == body.strip()


def _rewrites(before: str, after: str, messages: Sequence[Mapping[str, Any]]) -> ValueError:
    at = len(commonprefix([before, after]))
    start = max(at - 24, 0)
    return ValueError(
        f"the tokenizer's chat template rewrites what came before once a message of {messages[0]['role']} follows: "
        f'{before[start : at + 40]!r} becomes {after[start : at + 40]!r}, so a conversation cannot go on by appending; '
        'set tokenizer.chat_template to one that keeps earlier turns as they were'
    )
