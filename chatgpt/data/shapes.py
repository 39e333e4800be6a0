"""Converts records to examples by their columns.

`to_example` recognises the shape of a record (`SHAPES`) and returns the canonical example. Two compared dialogues are
split at their first difference, which must be in a turn of the assistant; later turns are kept.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from chatgpt.data.examples import (
    BadRecord,
    Demonstration,
    Example,
    Instruction,
    Labelled,
    Message,
    Preference,
    PromptExample,
    PromptText,
    ResponseText,
    check_order,
    instruction_text,
    shorten,
    split_speakers,
    split_turns,
)
from chatgpt.names import near

# known names of each column, the usual one first
PROMPT = ('prompt', 'query', 'question')
ANSWER = ('completion', 'response', 'answer', 'output')
INPUT = ('input', 'context')
SYSTEM = ('system', 'system_prompt')
TURNS = ('messages', 'conversations', 'conversation')
COMPARED = ('response1', 'response2')
PAIRS = (('chosen', 'rejected'), ('response_j', 'response_k'))
RANKED = ('responses', 'completions', 'candidates', 'answers')
LABEL = ('label', 'reward')
SHAPES = {
    'preference': 'prompt | instruction [input] | question | messages | context | input, with chosen and rejected',
    'dialogues': 'chosen and rejected as whole dialogues or texts',
    'ranked': 'prompt and responses (best first, or with scores or ranks)',
    'compared': 'prompt | instruction [input], response1 and response2 with annotator1, annotator2, ... (1, 2, or 0 '
    'for a tie)',
    'messages': 'messages | conversations, optionally with label',
    'instruction': 'instruction [input | context] and output | response',
    'completion': 'prompt | question [context] and completion | response | answer, optionally with label or reward',
    'prompt': 'prompt',
    'text': 'text, optionally with label or reward',
}
_SCORES = (('score_chosen', 'score_rejected'), ('chosen_score', 'rejected_score'))
_OPTIONAL = frozenset({'scores', 'ranks', 'margin', 'history', *TURNS}.union(*_SCORES))
"""an empty cell in one of these columns is an absent one"""
KNOWN = frozenset({'instruction', 'text'}.union(PROMPT, ANSWER, INPUT, TURNS, COMPARED, RANKED, LABEL, *PAIRS))
_COMMANDS = {
    PromptExample: 'ppo, or another one with a reward',
    Demonstration: 'sft',
    Preference: 'dpo, orpo, simpo or reward-model',
    Labelled: 'kto, ilql or reward-model',
}
_USER, _ASSISTANT = 'user', 'assistant'
_ROLES = {
    **dict.fromkeys(('system', 'developer'), 'system'),
    **dict.fromkeys(('user', 'human', 'prompter'), _USER),
    **dict.fromkeys(('assistant', 'gpt', 'chatgpt', 'bot', 'model', 'function_call'), _ASSISTANT),
    **dict.fromkeys(('tool', 'function', 'observation'), 'tool'),
}
_UNREAD = ('tool_calls', 'function_call', 'reasoning_content')
"""parts of a turn beside its content, whose loss would change what a model learns"""
_HH_ASSISTANT = '\n\nAssistant:'


def shape_of(data: Mapping[str, Any]) -> str:
    """Returns the name in `SHAPES` of a record's shape; a column that is None counts as absent. Raises BadRecord."""
    has = {key for key, value in data.items() if value is not None}
    turns = _first(has, TURNS) is not None or _holds_turns(data.get('prompt'))
    if any(better in has and worse in has for better, worse in PAIRS):
        asked = turns or has & {'instruction', 'context'} or _first(has, PROMPT) or _input_is_asked(data)
        return 'preference' if asked else 'dialogues'
    if has.issuperset(COMPARED) and ('instruction' in has or _first(has, PROMPT)):
        return 'compared'
    if _first(has, PROMPT) and _first(has, RANKED):
        return 'ranked'
    if _first(has, TURNS):
        return 'messages'
    if 'instruction' in has:
        return 'instruction'
    if _first(has, PROMPT) and _first(has, ANSWER):
        return 'completion'
    if 'prompt' in has:
        return 'prompt'
    if 'text' in has:
        return 'text'
    found = ', '.join(map(repr, data)) or 'none'
    raise BadRecord(f'no known shape in the columns found ({found}); expected one of: {"; ".join(SHAPES.values())}')


def misspelt(data: Any) -> str:
    """Returns '; rename column 'choosen' to 'chosen'' for a column similar to a missing known one; else ''."""
    columns = list(data) if isinstance(data, Mapping) else []
    names = sorted(KNOWN - {*COMPARED, *PAIRS[1]})  # the last letter of those says which answer is better
    for column in columns:
        # of several answers that are numbered or lettered, no known name says which is better
        several = any(other != column and str(other)[:-1] == str(column)[:-1] for other in columns)
        close = [] if column in KNOWN or several else [name for name in near(str(column), names) if name not in columns]
        if close and abs(len(close[0]) - len(column)) < 3:
            return f'; rename column {column!r} to {close[0]!r}'
    return ''


def method_hint(example: Any) -> str:
    """Returns '; such a file is for the command sft' for an example of another method's kind."""
    return f'; such a file is for the command {_COMMANDS[type(example)]}' if type(example) in _COMMANDS else ''


def to_example(data: Mapping[str, Any], where: str = 'data') -> Example:
    """Returns the canonical example of a record. Raises BadRecord if its shape is unknown or a part is missing.

    >>> to_example({'question': '2 + 3?', 'answer': '5'})
    Demonstration(prompt='2 + 3?', response='5', columns={}, where='data')
    """
    data = {k: v for k, v in data.items() if k not in _OPTIONAL or not (isinstance(v, str) and not v)}
    example = _BUILDERS[shape_of(data)](data, where)
    if not isinstance(example, PromptExample) and isinstance(example.prompt, tuple):
        _check_no_tools(data)
    return example


# --- builders, one for each shape ----------------------------------------------------------------------------------


def _pair_of(data: Mapping[str, Any]) -> tuple[str, str]:
    return next(pair for pair in PAIRS if data.get(pair[0]) is not None and data.get(pair[1]) is not None)


def _input_is_asked(data: Mapping[str, Any]) -> bool:
    """Returns True if the column 'input' is the prompt of a pair: a text beside two that are no dialogues."""
    asked, pair = data.get('input'), [data[name] for name in _pair_of(data)]
    texts = all(isinstance(text, str) and _HH_ASSISTANT not in text and not _holds_turns(text) for text in pair)
    return texts and isinstance(asked, str) and bool(asked.strip())


def _preference(data: Mapping[str, Any], where: str) -> Example:
    prompt, used = prompt_of(data)
    better, worse = _pair_of(data)
    pair = (_answer(data[better], better), _answer(data[worse], worse))
    if any(isinstance(r, tuple) and r[0].role != _ASSISTANT for r in pair):
        return _whole_dialogues(data, better, worse, where)  # the responses repeat the prompt's turns
    if isinstance(prompt, tuple) and prompt[-1].role == _ASSISTANT:
        raise BadRecord(f'the turns before {better} and {worse} end with an answer of the assistant; drop that answer')
    return _checked_preference(prompt, pair, _pair_scores(data), _rest(data, {*used, better, worse}), where)


def _dialogues(data: Mapping[str, Any], where: str) -> Example:
    return _whole_dialogues(data, *_pair_of(data), where)


def _whole_dialogues(data: Mapping[str, Any], better: str, worse: str, where: str) -> Example:
    columns = _rest(data, {better, worse, *TURNS, *PROMPT, *INPUT, *SYSTEM})
    if isinstance(data[better], str) and isinstance(data[worse], str) and not _holds_turns(data[better]):
        a, b = data[better], data[worse]
        if _HH_ASSISTANT not in a and _HH_ASSISTANT not in b:
            return _checked_preference('', (a, b), _pair_scores(data), columns, where)
        shared = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        cut = a.rfind(_HH_ASSISTANT, 0, shared)
        if cut < 0:
            raise BadRecord(f'{better} and {worse} share no beginning that ends with {_HH_ASSISTANT!r}')
        cut += len(_HH_ASSISTANT)
        pair = (_hh_answer(a[cut:]), _hh_answer(b[cut:]))
        _check_first_difference(pair, better, worse)
        return _checked_preference(a[:cut], pair, _pair_scores(data), columns, where)
    turns_a, turns_b = messages_of(data[better], better), messages_of(data[worse], worse)
    turns_a, turns_b = _with_system(turns_a, data), _with_system(turns_b, data)
    both = min(len(turns_a), len(turns_b))
    cut = next((i for i in range(both) if turns_a[i] != turns_b[i]), both)
    while cut > 0 and (cut == both or turns_a[cut].role != _ASSISTANT or turns_b[cut].role != _ASSISTANT):
        cut -= 1  # the responses begin at the last assistant turn at or before the first difference
    if cut == 0:
        raise BadRecord(f'{better} and {worse} share no turns before an answer of the assistant')
    pair = (shorten(turns_a[cut:]), shorten(turns_b[cut:]))
    _check_first_difference(pair, better, worse)
    return _checked_preference(turns_a[:cut], pair, _pair_scores(data), columns, where)


def _hh_answer(text: str) -> ResponseText:
    """Parses the text after the shared beginning: a response, or if the dialogue continues, turns up to the last
    response."""
    first, later = split_speakers(text)
    turns = [Message(_ASSISTANT, first.strip()), *later]
    while turns[-1].role != _ASSISTANT:
        turns.pop()
    if len(turns) == 1:
        return first
    if not all(turn.content for turn in turns):
        raise BadRecord('a turn of the dialogue is empty')
    return tuple(turns)


def _check_first_difference(pair: tuple[ResponseText, ResponseText], better: str, worse: str) -> None:
    """Raises BadRecord unless the first difference of two dialogues is in a turn of the assistant."""
    first = [response if isinstance(response, str) else response[0].content for response in pair]
    if pair[0] != pair[1] and first[0].strip() == first[1].strip():
        raise BadRecord(f'{better} and {worse} first differ in what the human says, so their answers do not compare')


def _compared(data: Mapping[str, Any], where: str) -> Example:
    """Converts PandaLM's rows, two responses and the annotators' verdicts; a response's score is its number of
    votes."""
    prompt, used = prompt_of(data)
    verdicts = {key: data[key] for key in data if re.fullmatch(r'annotator\d+', key)}
    given = [label_of(value, key) for key, value in verdicts.items() if value is not None]
    if not given or any(verdict not in (0, 1, 2) for verdict in given):
        found = f'{verdicts}' if verdicts else 'none of them'
        raise BadRecord(
            'response1 and response2 need verdicts to say which is better, in annotator1, annotator2, ... as 1, 2, or '
            f'0 for a tie; found {found}'
        )
    answers = [(float(given.count(i)), _answer(data[key], key)) for i, key in enumerate(COMPARED, 1)]
    (more, better), (fewer, worse) = sorted(answers, key=lambda answer: -answer[0])
    return _checked_preference(
        prompt, (better, worse), (more, fewer), _rest(data, {*used, *COMPARED, *verdicts}), where
    )


def _ranked(data: Mapping[str, Any], where: str) -> Example:
    prompt, used = prompt_of(data)
    key = _first_given(data, RANKED)
    values = _from_json(data[key])
    if not isinstance(values, (list, tuple)) or len(values) < 2:
        raise BadRecord(f'{key} is {_short(values)}, where a list of two or more answers is needed')
    responses = [_answer(value, f'{key}[{i}]') for i, value in enumerate(values)]
    scores: tuple[float, ...] | None = None
    for name, sign in (('scores', -1), ('ranks', 1)):
        if data.get(name) is None:
            continue
        given = _from_json(data[name])
        if (
            not isinstance(given, (list, tuple))
            or len(given) != len(responses)
            or not all(_is_number(x) for x in given)
        ):
            raise BadRecord(
                f'{name} is {_short(given)}, where {len(responses)} numbers are needed, one for each of {key}'
            )
        order = sorted(range(len(given)), key=lambda i: sign * given[i])
        responses = [responses[i] for i in order]
        if name == 'scores' or len(set(given)) < len(given):  # equal ranks make no pair
            scores = tuple(-sign * float(given[i]) for i in order)
        break
    return _checked_preference(prompt, tuple(responses), scores, _rest(data, {*used, key, 'scores', 'ranks'}), where)


def _messages(data: Mapping[str, Any], where: str) -> Example:
    key = _first_given(data, TURNS)
    turns = _with_system(messages_of(data[key], key), data)
    labelled = bool(_first_given(data, LABEL, missing=''))
    if labelled or turns[-1].role == _ASSISTANT:
        prompt, answer = split_turns(turns, last=labelled)
        return _answered(prompt, answer, data, {key, *SYSTEM}, where)
    return PromptExample(prompt=turns, columns=_rest(data, {key, *SYSTEM}), where=where)


def _answered(
    prompt: PromptText, response: ResponseText, data: Mapping[str, Any], used: set[str], where: str
) -> Demonstration | Labelled:
    """Returns a labelled example if the record has a label, else a demonstration. `used`: columns of prompt and
    response."""
    label = _first_given(data, LABEL, missing='')
    columns = _rest(data, {*used, label})
    if not label:
        return Demonstration(prompt=prompt, response=response, columns=columns, where=where)
    return Labelled(prompt=prompt, response=response, label=label_of(data[label], label), columns=columns, where=where)


def _completion(data: Mapping[str, Any], where: str) -> Example:
    prompt, used = prompt_of(data)
    key = _first_given(data, ANSWER, missing='')
    if not key:
        return PromptExample(prompt=prompt, columns=_rest(data, used), where=where)
    response = _answer(data[key], key)
    if isinstance(response, tuple) and response[0].role != _ASSISTANT:
        raise BadRecord(f'{key} begins with a {response[0].role} turn, where an answer of the assistant is needed')
    _not_blank(response, f'the {key}')
    return _answered(prompt, response, data, {*used, key}, where)


def _text(data: Mapping[str, Any], where: str) -> Example:
    text = _string(data['text'], 'text')
    _not_blank(text, 'the text')
    return _answered('', text, data, {'text'}, where)


_BUILDERS: dict[str, Callable[[Mapping[str, Any], str], Example]] = {
    'preference': _preference,
    'dialogues': _dialogues,
    'ranked': _ranked,
    'compared': _compared,
    'messages': _messages,
    'instruction': _completion,
    'completion': _completion,
    'prompt': _completion,
    'text': _text,
}


# --- parts ---------------------------------------------------------------------------------------------------------


def prompt_of(data: Mapping[str, Any]) -> tuple[PromptText, set[str]]:
    """Returns the prompt of a record and the columns that it uses. Raises BadRecord, also for an empty prompt."""
    if data.get('instruction') is not None:
        key = _input_of(data)
        instruction = _string(data['instruction'], 'instruction')
        _not_blank(instruction, 'the instruction')
        prompt = Instruction(instruction, _string(data[key], key) if key else '')
        history, used = _from_json(data.get('history')) or [], {'instruction', key, 'history', *SYSTEM}
        if not history and not _system_of(data):
            return prompt, used
        if not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in history):
            raise BadRecord('history is not a list of pairs, each a question and its answer')
        pairs = (zip((_USER, _ASSISTANT), pair, strict=True) for pair in history)
        turns = [Message(role, _string(text, 'history')) for pair in pairs for role, text in pair]
        return _with_system((*turns, Message(_USER, instruction_text(prompt))), data), used
    key = _first_given(data, TURNS, missing='')
    if key or _holds_turns(data.get('prompt')):
        key = key or 'prompt'
        turns_given = _with_system(messages_of(data[key], key), data)
        if all(turn.role == 'system' for turn in turns_given):
            raise BadRecord(f'{key} has no turn but the system message')
        return turns_given, {key, *SYSTEM}
    key = _first_given(data, (*PROMPT, *reversed(INPUT)))  # pairs may call the prompt context (ColossalAI) or input
    if _holds_turns(data[key]):
        return _with_system(messages_of(data[key], key), data), {key, *SYSTEM}
    text = _string(data[key], key)
    _not_blank(text, f'the {"prompt" if key in PROMPT else key}')
    beside = _input_of(data) if key in PROMPT[1:] else ''  # a question about a text or a table
    asked = Instruction(text, data[beside]) if beside and isinstance(data[beside], str) else None
    used = {key, beside} if asked is not None else {key}
    # a blank one too: a file's records have one format
    if _HH_ASSISTANT not in text and any(isinstance(data.get(name), str) for name in SYSTEM):
        turn = Message(_USER, instruction_text(asked) if asked is not None else text)
        return _with_system((turn,), data), {*used, *SYSTEM}
    return asked or text, used


def messages_of(value: Any, column: str) -> tuple[Message, ...]:
    """Parses turns in OpenAI's form (role, content) or ShareGPT's (from, value): one, a list, or their JSON text.
    Raises BadRecord."""
    value = _from_json(value)
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, (list, tuple)) or not value:
        raise BadRecord(f'{column} is {_short(value)}, where a list of turns is needed')
    turns = []
    for i, turn in enumerate(value, 1):
        if isinstance(turn, Message):
            turns.append(turn)
            continue
        if not isinstance(turn, Mapping):
            raise BadRecord(
                f'turn {i} of {column} is {_short(turn)}, where role and content (or from and value) are needed'
            )
        left_out = next((n for n in _UNREAD if (v := _from_json(turn.get(n))) and v == v), None)  # NaN is absent
        if left_out:
            raise BadRecord(f'turn {i} of {column} has {left_out}, which is not read; write it into the content')
        role, content = turn.get('role', turn.get('from')), turn.get('content', turn.get('value'))
        if not isinstance(role, str) or role.lower() not in _ROLES:
            raise BadRecord(f'turn {i} of {column} has the role {role!r}; known are {", ".join(_ROLES)}')
        if isinstance(content, list) and all(
            isinstance(part, Mapping) and isinstance(part.get('text'), str) for part in content
        ):
            content = ''.join(part['text'] for part in content)
        if not isinstance(content, str) or not content.strip():
            raise BadRecord(f'turn {i} of {column} has no text')
        if turn.get('weight') == 0 and _ROLES[role.lower()] == _ASSISTANT:
            raise BadRecord(f'turn {i} of {column} is an answer of weight 0, and all answers are learned')
        turns.append(Message(_ROLES[role.lower()], content))
    return tuple(turns)


def label_of(value: Any, column: str = 'label') -> bool | int | float | str:
    """Returns a label as bool, number or name; converts numbers and truth values from text. Raises BadRecord."""
    if isinstance(value, str):
        lowered = value.strip().lower()
        if lowered in ('true', 'false'):
            return lowered == 'true'
        for convert in (int, float):
            try:
                value = convert(lowered)
                break
            except ValueError:
                continue
    if isinstance(value, str) and value.strip():
        return value.strip()
    if isinstance(value, bool) or _is_number(value):
        return value
    raise BadRecord(f'{column} is {_short(value)}, where a finite number, a truth value or a class name is needed')


def _checked_preference(
    prompt: PromptText,
    responses: tuple[ResponseText, ...],
    scores: tuple[float, ...] | None,
    columns: dict[str, Any],
    where: str,
) -> Preference:
    for number, response in enumerate(responses, 1):
        _not_blank(response, f'answer {number} of {len(responses)}')
    if scores is not None:
        check_order(scores)
    return Preference(prompt=prompt, responses=responses, scores=scores, columns=columns, where=where)


def _pair_scores(data: Mapping[str, Any]) -> tuple[float, float] | None:
    """Returns UltraFeedback's score_chosen and score_rejected, or scores with the given margin."""
    for better, worse in _SCORES:
        if data.get(better) is not None and data.get(worse) is not None:
            return _number(data[better], better), _number(data[worse], worse)
    return (_number(data['margin'], 'margin'), 0.0) if data.get('margin') is not None else None


def _number(value: Any, column: str) -> float:
    number = label_of(value, column)
    if isinstance(number, str):
        raise BadRecord(f'{column} is {_short(value)}, where a number is needed')
    return float(number)


def _answer(value: Any, column: str) -> ResponseText:
    if isinstance(value, str) and not _holds_turns(value):
        return value
    if not isinstance(_from_json(value), (list, tuple, Mapping)):
        raise BadRecord(f'{column} is {_short(value)}, where text or a list of turns is needed')
    return shorten(messages_of(value, column))


def _with_system(turns: tuple[Message, ...], data: Mapping[str, Any]) -> tuple[Message, ...]:
    system = _system_of(data)
    return (Message('system', system), *turns) if system and turns[0].role != 'system' else turns


def _system_of(data: Mapping[str, Any]) -> str:
    """Returns the first text of `SYSTEM` that is not blank, else ''."""
    given = (data.get(name) for name in SYSTEM)
    return next((text for text in given if isinstance(text, str) and text.strip()), '')


def _input_of(data: Mapping[str, Any]) -> str:
    """Returns the name of the first of `INPUT` with text, else of the first that is there, else ''."""
    given = [name for name in INPUT if data.get(name) is not None]
    texts = [name for name in given if isinstance(data[name], str) and data[name].strip()]
    return next(iter([*texts, *given]), '')


def _check_no_tools(data: Mapping[str, Any]) -> None:
    if isinstance(given := _from_json(data.get('tools')), (list, tuple, Mapping)) and given:
        raise BadRecord('tools is not read beside answers; write the tools into the system message, or drop the column')


def _string(value: Any, column: str) -> str:
    if not isinstance(value, str):
        raise BadRecord(f'{column} is {_short(value)}, where text is needed')
    return value


def _not_blank(value: ResponseText, what: str) -> None:
    if isinstance(value, str) and not value.strip():
        raise BadRecord(f'{what} is empty')


def _holds_turns(value: Any) -> bool:
    """Returns True for a list, or the JSON text of a list of turns; other JSON is a text."""
    given = _from_json(value)
    if isinstance(value, str):
        turns = isinstance(given, list) and bool(given)
        return turns and all(isinstance(t, dict) and ('role' in t or 'from' in t) for t in given)
    return isinstance(given, (list, tuple))


def _from_json(value: Any) -> Any:
    """Returns the list in a csv cell, in JSON text, or in numpy's or Arrow's form."""
    if isinstance(value, str) and value.lstrip().startswith(('[', '{')):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):  # no JSON, a number of thousands of digits, or very deep brackets
            return value
    return value.tolist() if hasattr(value, 'tolist') else value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _first(has: set[str], names: Sequence[str]) -> str | None:
    return next((name for name in names if name in has), None)


def _first_given(data: Mapping[str, Any], names: Sequence[str], missing: str | None = None) -> str:
    key = next((name for name in names if data.get(name) is not None), missing)
    if key is None:
        raise BadRecord(f'none of the columns {", ".join(names)}; columns found: {", ".join(map(repr, data))}')
    return key


def _rest(data: Mapping[str, Any], used: set[str]) -> dict[str, Any]:
    return {key: value for key, value in data.items() if key not in used}


def _short(value: Any) -> str:
    text = ' '.join(repr(value).split())
    name = type(value).__name__
    return f'{"an" if name[0] in "aeiou" else "a"} {name} ({text if len(text) <= 60 else text[:57] + "..."})'
