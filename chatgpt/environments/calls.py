"""Parses tool calls in generated text, for tokenizers without a response template.

The form is recognised by the chat template: Hermes and Qwen write `<tool_call>{"name": ..., "arguments":
{...}}</tool_call>`, Llama 3 a bare `{"name": ..., "parameters": {...}}`, Mistral `[TOOL_CALLS] [{"name": ...,
"arguments": {...}}]` or `[TOOL_CALLS]name[ARGS]{...}`. If parsing fails, the turn is text without calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

_THINKING = re.compile(r'\A\s*(?:<think>)?(.*?)</think>\s*', re.DOTALL)
_TAGGED = re.compile(r'<tool_call>\s*(.*?)\s*</tool_call>', re.DOTALL)
_MARK = '[TOOL_CALLS]'
_NAMED = re.compile(r'\s*([\w.\-]+)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?\[ARGS\]\s*')

MOST_LEVELS = 100
"""of nested arguments; messages go to other processes by pickle, which reads some hundred"""
Found = tuple[str, list[Any]]
"""the text around the calls, and the calls"""


def reader(template: str) -> Callable[[str], dict[str, Any]] | None:
    """Returns a function that parses a turn's text into a message of the assistant, by the form of calls in the chat
    template; None for an unknown form."""
    if '<tool_call>' in template and '<function=' not in template and '<arg_key>' not in template:
        find = _tagged
    elif _MARK in template:
        find = _marked
    elif '"parameters"' in template and '"name"' in template:
        find = _bare
    else:
        return None
    return lambda text: _message(text, find)


def checked_calls(calls: Any) -> list[dict[str, Any]]:
    """Returns calls in the form of messages: [{'type': 'function', 'function': {'name', 'arguments'}, 'id'?}]. Raises
    ValueError for anything else.
    """
    checked = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get('function', call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get('name'), str):
            raise ValueError(f'{call!r:.80} is no call of a tool')
        arguments = function.get('arguments', function.get('parameters'))
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if not isinstance(arguments, Mapping | None):
            raise ValueError(f'the arguments {arguments!r:.80} have no names')
        _check_depth(arguments)
        kind = call.get('type', 'function')
        kept = {'type': kind, 'function': {'name': function['name'], 'arguments': dict(arguments or {})}}
        number = call.get('id', function.get('id'))
        checked.append(kept | ({'id': str(number)} if number is not None else {}))
    return checked


def _check_depth(value: Any, levels: int = MOST_LEVELS) -> None:
    if not levels:
        raise ValueError(f'arguments of a call are nested in more than {MOST_LEVELS} levels')
    for inner in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        _check_depth(inner, levels - 1)


def _message(text: str, find: Callable[[str], Found]) -> dict[str, Any]:
    thinking = _THINKING.match(text)
    message: dict[str, Any] = {'role': 'assistant', 'content': text}
    try:
        content, calls = find(text[thinking.end() :] if thinking else text)
        calls = checked_calls(calls)
    except (ValueError, RecursionError):  # also from json
        return message
    message['content'] = content.strip()
    if thinking and thinking[1].strip():
        message['reasoning_content'] = thinking[1].strip()
    return message | ({'tool_calls': calls} if calls else {})


def _tagged(text: str) -> Found:
    return _TAGGED.sub('', text), [json.loads(found) for found in _TAGGED.findall(text)]


def _marked(text: str) -> Found:
    before, mark, after = text.partition(_MARK)
    if not mark:
        return text, []
    if not _NAMED.match(after):
        calls, _ = json.JSONDecoder().raw_decode(after.strip())
        return before, calls if isinstance(calls, list) else [calls]
    found = []
    for part in after.split(_MARK):
        named = _NAMED.match(part)
        if named is None:
            raise ValueError(f'{part!r:.80} is no call of a tool')
        arguments, _ = json.JSONDecoder().raw_decode(part, named.end())
        found.append({'name': named[1], 'arguments': arguments} | ({'id': named[2]} if named[2] else {}))
    return before, found


def _bare(text: str) -> Found:
    """Parses a text of JSON objects only, separated by semicolons. Any other text has no calls."""
    rest, calls = text.replace('<|python_tag|>', '').strip(), []
    if not rest.startswith('{'):
        return text, []
    while rest:
        call, end = json.JSONDecoder().raw_decode(rest)
        named = isinstance(call, dict) and 'name' in call
        if not named or not ('parameters' in call or 'arguments' in call):
            return text, []
        calls.append(call)
        rest = rest[end:].lstrip('; \n')
    return '', calls
