"""Chat templates continued by appending: sampled ids do not change, and the text is what the template would have
rendered; templates that do not allow this are errors."""

from __future__ import annotations

import random
import re

import pytest
import torch
from chat_families import FAMILIES, chat_tokenizer
from scripted_engine import NOTHING, ScriptedEngine, played

from chatgpt.environments import Environment, EnvironmentSettings, seed_of
from chatgpt.environments.base import InvalidStep, joined
from chatgpt.environments.calls import checked_calls, reader
from chatgpt.environments.transcript import ChatTemplate, PlainText
from chatgpt.types import Prompt

PARAMETERS = {'type': 'object', 'properties': {'a': {'type': 'integer', 'description': 'one'}}}
TOOLS = [{'type': 'function', 'function': {'name': 'add', 'description': 'Adds.', 'parameters': PARAMETERS}}]
SYSTEM = {'role': 'system', 'content': 'Be brief.'}
THOUGHT = '<think>\nLet me see.\n</think>\n\n'


def user(text):
    return {'role': 'user', 'content': text}


def result(text):
    return {'role': 'tool', 'name': 'add', 'tool_call_id': '123456789', 'content': text}


def prompt(*messages):
    return Prompt(ids=torch.tensor([0]), messages=list(messages))


def refusal(family, tools=None, options=None, system=False):
    """Returns the error of a family, or ''."""
    row = prompt(*([SYSTEM] if system else []), user('Hello'))
    try:
        ChatTemplate(chat_tokenizer(family), tools, options).first(row, '')
    except ValueError as error:
        assert '\n' not in str(error)
        return str(error)
    return ''


@pytest.mark.parametrize(
    ('family', 'tools', 'options', 'system', 'words'),
    [
        ('chatml', False, {}, True, ''),
        ('chatml', True, {}, False, "shows no tools: it leaves out 'add'"),
        ('qwen2.5', False, {}, True, ''),
        ('qwen2.5', True, {}, True, ''),
        # earlier thinking is dropped after the next message of the user, and kept between calls of tools
        ('qwen3', False, {}, False, r'a message of user follows: .*<think>\\nLet me see.* becomes .*assistant\\nYes'),
        ('qwen3', True, {}, True, ''),
        ('qwen3', False, {'enable_thinking': False}, False, r'a message of user follows: .*<think>\\n\\n</think>'),
        ('qwen3', True, {'enable_thinking': False}, False, r'a message of tool follows: .*<think>\\n\\n</think>'),
        ('llama3', False, {}, True, ''),
        ('llama3', True, {}, True, ''),
        ('mistral', False, {}, False, ''),
        ('mistral', True, {}, False, ''),
        ('mistral', False, {}, True, r'a message of user follows: .*\[INST\] Be brief.* becomes .*\[INST\] Is it so'),
        ('mistral', True, {}, True, 'a message of tool follows'),
        ('gemma', False, {}, False, ''),
        ('gemma', False, {}, True, 'refuses messages of system, user.*System role not supported'),
        ('gemma', True, {}, False, 'shows no tools'),
        ('r1', False, {}, False, r"a message of user follows: .*<think>\\n' becomes"),
    ],
)
def test_families_are_taken_or_refused_by_name(family, tools, options, system, words):
    error = refusal(family, TOOLS if tools else None, options, system)
    assert re.search(words, error) if words else error == '', error


TAKEN = [(family, False) for family in ('chatml', 'qwen2.5', 'llama3', 'mistral', 'gemma')]
TAKEN += [(family, True) for family in ('qwen2.5', 'qwen3', 'llama3', 'mistral')]


@pytest.mark.parametrize(('family', 'tools'), TAKEN)
@pytest.mark.parametrize('ended', ['eos', 'length', 'stop'])
def test_appended_text_is_the_rendered_text(family, tools, ended):
    """Three rounds of turns in the template's form, compared with `apply_chat_template`."""
    tokenizer = chat_tokenizer(family)
    thought = '' if tools and family in ('llama3', 'mistral') else THOUGHT
    transcript = ChatTemplate(tokenizer, TOOLS if tools else None)
    start = [user('How much is 3 and 4?')]
    ids = transcript.first(prompt(*start), '')
    messages = list(start)
    for number in range(3):
        answer = {'role': 'assistant', 'content': thought + ('' if tools else f'It is {number}, "I" think')}
        if tools:
            function = {'name': 'add', 'arguments': {'a': number}}
            answer['tool_calls'] = [{'type': 'function', 'id': '123456789', 'function': function}]
        follows = [result(f'{number} 12')] if tools else [user(f'Sure?\n{number}')]
        form = {'tools': TOOLS if tools else None, 'tokenize': False, 'add_generation_prompt': True}
        before = tokenizer.apply_chat_template(messages, **form)
        whole = tokenizer.apply_chat_template([*messages, answer, *follows], **form)
        ending = FAMILIES[family][1]
        turn_text = whole[len(before) : whole.index(ending, len(before))]
        turn = tokenizer(turn_text + (ending if ended == 'eos' else ''), add_special_tokens=False)['input_ids']
        ids += turn + transcript.after(turn, ended, follows)
        messages += [answer, *follows]
    assert tokenizer.decode(ids) == whole


def test_what_is_appended_by_hand():
    tokenizer = chat_tokenizer('chatml')
    transcript = ChatTemplate(tokenizer)
    end, start = tokenizer.convert_tokens_to_ids(['<|im_end|>', '<|im_start|>'])

    def ids(text):
        return tokenizer(text, add_special_tokens=False)['input_ids']

    newline, answer = ids('\n'), [start, *ids('assistant\n')]
    follows = [*newline, start, *ids('user\nGo on'), end, *newline, *answer]
    assert transcript.after([5, end], 'eos', 'Go on') == follows
    assert transcript.after([5, 6], 'length', 'Go on') == [end, *follows]
    assert transcript.after([5, 6], 'stop', [user('Go on')]) == [end, *follows]
    # another end token replaces the template's
    assert transcript.after([5, tokenizer.pad_token_id], 'eos', 'Go on') == follows
    assert transcript.first(NOTHING, 'Hi') == [start, *ids('user\nHi'), end, *newline, *answer]
    row = prompt(SYSTEM, user('Hello'))
    assert tokenizer.decode(transcript.first(row, ' there')).count('<|im_start|>user\nHello there<|im_end|>') == 1
    assert tokenizer.decode(transcript.first(row, [user('Else')])).count('Hello') == 0
    with pytest.raises(InvalidStep, match='without messages'):
        transcript.after([5, end], 'eos', [])
    text = Prompt(ids=torch.tensor([3]), text='Hello')
    assert '<|im_start|>user\nHello<|im_end|>' in tokenizer.decode(transcript.first(text, ''))
    with pytest.raises(ValueError, match='given as ids'):
        transcript.first(Prompt(ids=torch.tensor([3])), '')


class Dialogue(Environment):
    """Messages of three lengths; the third turn is the last."""

    def reset(self, seed, **columns):
        self.turn = 0
        return [user('Tell me of 12 adventures.')]

    def step(self, response):
        self.turn += 1
        return [user('the adventure ' * self.turn)], 0.0, self.turn == 3, False, {}


def test_sampled_ids_stay_bit_for_bit():
    """Random tokens, which decoding and tokenizing would change."""
    tokenizer = chat_tokenizer('chatml')
    draw, end = random.Random(0), tokenizer.eos_token_id
    ordinary = [i for i in range(len(tokenizer)) if i not in tokenizer.added_tokens_decoder]

    def turn(number):
        ids = [draw.choice(ordinary) for _ in range(draw.randint(1, 9))]
        reason = ('eos', 'length', 'stop')[number % 3]
        return ids + [end] if reason == 'eos' else ids, reason

    scripts = {index: [turn(index + number) for number in range(3)] for index in range(6)}
    transcript = ChatTemplate(tokenizer)
    samples = played(ScriptedEngine(scripts), Dialogue, tokenizer, prompts=[NOTHING] * 6)
    changed = 0
    for sample in samples:
        expected, mask = [], []
        for number, (ids, reason) in enumerate(scripts[sample.index]):
            expected, mask = expected + ids, mask + [True] * len(ids)
            if number < 2:
                added = transcript.after(ids, reason, 'the adventure ' * (number + 1))
                expected, mask = expected + added, mask + [False] * len(added)
        assert sample.prompt_ids.tolist() == transcript.first(NOTHING, 'Tell me of 12 adventures.')
        assert sample.response_ids.tolist() == expected
        assert sample.response_mask.tolist() == mask
        turns = [sample.response_ids[t.start : t.stop].tolist() for t in sample.episode.turns]
        assert turns == [ids for ids, _ in scripts[sample.index]]
        again = tokenizer(tokenizer.decode(sample.response_ids), add_special_tokens=False)['input_ids']
        changed += again != expected
    assert changed, 'the negative control: tokenized again, the ids are others'


def test_text_is_plain_unless_the_settings_say_so_and_messages_never_are():
    tokenizer = chat_tokenizer('chatml')

    class Says(Environment):
        def reset(self, seed, **columns):
            return 'Well?'

        def step(self, response):
            return 'So?', 1.0, False, False, {}

    def text(environment, **settings):
        turns = {0: [(tokenizer('Yes')['input_ids'], 'length'), (tokenizer('No')['input_ids'], 'length')]}
        settings = EnvironmentSettings(max_turns=2, **settings)
        (sample,) = played(ScriptedEngine(turns), environment, tokenizer, settings=settings)
        return tokenizer.decode(torch.cat([sample.prompt_ids, sample.response_ids]))

    assert text(Says) == 'Well?YesSo?No'
    turn = '<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}'
    chat = turn.format('Well?', 'Yes<|im_end|>\n') + turn.format('So?', 'No')
    assert text(Says, apply_chat_template=True) == chat

    class Starts(Says):
        def reset(self, seed, **columns):
            return [user('Well?')]

    assert text(Starts) == chat
    tokenizer.chat_template = None
    for environment, settings in ((Starts, {}), (Says, {'apply_chat_template': True})):
        with pytest.raises(ValueError, match='no chat template'):
            text(environment, **settings)
    with pytest.raises(ValueError, match='messages, which need a tokenizer with a chat template'):
        PlainText(tokenizer).after([1], 'eos', [user('x')])


class Asks(Environment):
    def reset(self, seed, **columns):
        return ' Well?'

    def step(self, response):
        return 'So?', 1.0, False, False, {}


def transcript_of(tokenizer, row, **settings):
    turns = {0: [(tokenizer(text)['input_ids'], 'length') for text in ('Yes', 'No')]}
    settings = EnvironmentSettings(max_turns=2, **settings)
    (sample,) = played(ScriptedEngine(turns), Asks, tokenizer, prompts=[row], settings=settings)
    return tokenizer.decode(torch.cat([sample.prompt_ids, sample.response_ids]))


def test_a_prompt_of_messages_goes_through_the_template_in_an_environment_of_text():
    tokenizer = chat_tokenizer('chatml')
    row = Prompt(ids=torch.tensor(tokenizer('Hello')['input_ids']), messages=[SYSTEM, user('Hello')])
    turn = '<|im_start|>{}\n{}<|im_end|>\n'
    chat = turn.format('system', 'Be brief.') + turn.format('user', 'Hello Well?') + turn.format('assistant', 'Yes')
    chat += turn.format('user', 'So?') + '<|im_start|>assistant\nNo'
    assert transcript_of(tokenizer, row) == chat
    plain = 'Hello Well?YesSo?No'
    assert transcript_of(chat_tokenizer('chatml'), row, apply_chat_template=False) == plain
    tokenizer = chat_tokenizer('chatml')
    tokenizer.chat_template = None
    assert transcript_of(tokenizer, row) == plain


def test_no_text_is_no_turn():
    for messages in ([user('a')], [user('a'), {'role': 'assistant', 'content': 'b'}], [user('a'), result('7')]):
        assert joined(messages, '') == messages
    assert joined([user('a')], 'b') == [user('ab')] and joined([SYSTEM], 'b') == [SYSTEM, user('b')]
    assert joined([], 'b') == [user('b')]


class Opens(Environment):
    """Returns messages that Gemma's template rejects: in the second sample's reset, and in a step of the first."""

    texts = ()

    def reset(self, seed, **columns):
        return [user(text) for text in (self.texts if seed == seed_of(0, 1) else ['a'])]

    def step(self, response):
        return [user('b'), user('c')], 0.0, False, False, {}


@pytest.mark.parametrize(('texts', 'why'), [([], 'nothing to answer'), (['b', 'c'], 'must alternate')])
def test_messages_that_a_template_refuses_end_their_own_episode(monkeypatch, texts, why):
    monkeypatch.setattr(Opens, 'texts', texts)
    script = {0: [([5], 'length')], 1: [([5], 'length')]}
    samples = played(ScriptedEngine(script), Opens, chat_tokenizer('gemma'), prompts=[NOTHING] * 2)
    assert [s.episode.end for s in samples] == ['invalid', 'invalid']
    assert [len(s.episode.turns) for s in samples] == [1, 0]
    assert 'must alternate' in samples[0].episode.message and why in samples[1].episode.message


def test_a_template_that_rewrites_stops_a_run_before_anything_is_sampled():
    engine = ScriptedEngine({0: []})
    with pytest.raises(ValueError, match='rewrites what came before'):
        played(engine, Dialogue, chat_tokenizer('qwen3'))
    assert engine.prompts == []


def calls_of(template, text):
    message = reader(template)(text)
    return message['content'], [tuple(c['function'].values()) for c in message.get('tool_calls', [])]


ADD = ('add', {'a': 1})


@pytest.mark.parametrize(
    ('family', 'text', 'content', 'calls'),
    [
        ('qwen2.5', 'So:\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', 'So:', [ADD]),
        ('qwen2.5', '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>' * 2, '', [ADD, ADD]),
        ('qwen2.5', '<tool_call>{"name": "add"}</tool_call>', '', [('add', {})]),
        ('qwen2.5', '<tool_call>{"name": 3}</tool_call>', None, []),
        ('qwen2.5', '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', None, []),
        ('qwen2.5', '<tool_call>[1]</tool_call>', None, []),
        ('llama3', '{"name": "add", "parameters": {"a": 1}}', '', [ADD]),
        ('llama3', '<|python_tag|>{"name": "add", "arguments": {"a": 1}}; {"name": "b", "parameters": {}}', '', None),
        ('llama3', 'Use {"name": "add", "parameters": {"a": 1}}', None, []),
        ('llama3', '{"name": "add", "parameters": {"a": 1}} done', None, []),
        ('llama3', '{"name": "add", "parameters": {"a": 1}} 42', None, []),
        ('llama3', '{"name": "add", "parameters": {"a": 1}}; null', None, []),
        ('llama3', '{"name":' * 5000, None, []),
        ('llama3', f'{{"name": "add", "parameters": {{"a": {"[" * 600}{"]" * 600}}}}}', None, []),
        ('qwen2.5', f'<tool_call>{"[" * 5000}</tool_call>', None, []),
        ('mistral', f'[TOOL_CALLS]{"[" * 5000}', None, []),
        ('llama3', '{"name": "Tom"}', None, []),
        ('llama3', '{"name": ', None, []),
        ('mistral', '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "abc123456"}]', '', [ADD]),
        ('mistral', 'Well[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add[ARGS]{"a": 1}', 'Well', [ADD, ADD]),
        ('mistral', '[TOOL_CALLS] add', None, []),
        ('mistral', 'add', None, []),
    ],
)
def test_calls_are_read_in_the_templates_form(family, text, content, calls):
    found = calls_of(FAMILIES[family][0], text)
    assert found[0] == (text if content is None else content)
    assert found[1] == (calls if calls is not None else [ADD, ('b', {})])


def test_thinking_is_no_call_and_ids_are_kept():
    read = reader(FAMILIES['qwen3'][0])
    quoted = '<tool_call>{"name": "add"}</tool_call>'
    message = read(f'<think>\nI could {quoted}.\n</think>\n\nNo.')
    assert 'tool_calls' not in message and message['reasoning_content'] == f'I could {quoted}.'
    (call,) = reader(FAMILIES['mistral'][0])('[TOOL_CALLS] [{"name": "add", "id": "abc123456"}]')['tool_calls']
    assert call['id'] == 'abc123456'
    assert reader('<tool_call> <function=x>') is None and reader(FAMILIES['chatml'][0]) is None
    with pytest.raises(ValueError, match='no call'):
        checked_calls([{'name': None}])


def test_the_tokenizers_own_response_parsing_comes_first():
    tokenizer = chat_tokenizer('qwen2.5')
    form = {'open': '<tool_call>', 'close': '</tool_call>', 'repeats': True, 'content': 'json'}
    calls = form | {'transform': {'type': 'function', 'function': '{content}'}}
    fields = {'tool_calls': calls, 'content': {'close': '<|im_end|>', 'content': 'text'}}
    begins = {'defaults': {'role': 'assistant'}, 'start_anchor': '<|im_start|>assistant\n'}
    tokenizer.response_template = begins | {'fields': fields}
    transcript = ChatTemplate(tokenizer, TOOLS)
    assert transcript._read is None
    before = tokenizer('<|im_start|>assistant\n')['input_ids']
    ids = tokenizer('Hm <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>')['input_ids']
    message = transcript.message(ids, 'eos', before)
    assert message['content'] == 'Hm' and message['tool_calls'][0]['function'] == {'name': 'add', 'arguments': {'a': 1}}
    broken = tokenizer('<tool_call>{"name"</tool_call><|im_end|>')['input_ids']
    assert 'tool_calls' not in transcript.message(broken, 'eos', before)
    assert 'truncated' not in message and transcript.message(ids[:3], 'length', before)['truncated']
    tokenizer.response_template = {'start_anchor': 'x', 'fields': {'content': {}}}
    with pytest.raises(ValueError, match='not understood; set tokenizer.response_template'):
        ChatTemplate(tokenizer, TOOLS)


def test_a_template_with_an_unknown_form_of_calls_is_refused():
    tokenizer = chat_tokenizer('qwen2.5')
    tokenizer.chat_template = re.sub('(</?)tool_call>', r'\1call>', tokenizer.chat_template)
    with pytest.raises(ValueError, match='writes calls of tools as .*<call>.* not understood'):
        ChatTemplate(tokenizer, TOOLS)
