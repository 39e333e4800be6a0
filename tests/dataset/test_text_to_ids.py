"""Text to ids: the boundary of prompt and response, end tokens, masks of turns, truncation, packing. Expected ids are
written by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from chatgpt.data import load_demonstrations, load_preferences, load_prompts
from chatgpt.data.examples import BadRecord, Demonstration, Instruction, Message, Preference, PromptExample
from chatgpt.data.formats import plain_prompt, prompt_turns, render, save_tokenizer, shown_format, template_of
from chatgpt.data.tokenize import (
    TokenizerOptions,
    pack,
    tokenize_demonstration,
    tokenize_preference,
    tokenize_prompt,
)
from chatgpt.testing import byte_tokenizer
from chatgpt.types import Sequence

BOS, EOS = 257, 258
U, A, S = (lambda text, role=role: Message(role, text) for role in ('user', 'assistant', 'system'))
CHAT = (
    '{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% if m.role == "assistant" %}<eos>{% endif '
    '%}{{ "\\n" }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}'
)
MODELS = Path(__file__).resolve().parents[3] / 'shared' / 'models'


@pytest.fixture(scope='module')
def plain():
    return byte_tokenizer()


@pytest.fixture(scope='module')
def chat():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT
    return tokenizer


@pytest.fixture
def with_begin():
    return beginning()


def beginning():
    """Returns a tokenizer that adds the begin token itself, like Llama's."""
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single='<bos> $A', special_tokens=[('<bos>', BOS)])
    return tokenizer


def merging_tokenizer():
    """Returns a tokenizer with byte-pair merges 'ab' = 3 and 'bc' = 4 over letters a, b, c = 0, 1, 2, so that a
    response can change the prompt's last token."""
    vocab = {'a': 0, 'b': 1, 'c': 2, 'ab': 3, 'bc': 4, '<eos>': 5}
    model = models.BPE(vocab=vocab, merges=[('a', 'b'), ('b', 'c')])
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), eos_token='<eos>')


def ids(text):
    return list(text.encode())


def trained(sequence):
    """Returns the bytes that count as text, with the end token as $."""
    return ''.join('$' if i == EOS else chr(i) for i in sequence.response_ids[sequence.response_mask].tolist())


def whole(sequence):
    every = sequence.prompt_ids.tolist() + sequence.response_ids.tolist()
    return ''.join({BOS: '^', EOS: '$'}.get(i) or chr(i) for i in every)


def test_prompt_response_and_end_token(plain):
    found = tokenize_demonstration(Demonstration(prompt='ab', response=' cd'), plain)
    assert found.prompt_ids.tolist() == ids('ab') and found.response_ids.tolist() == [*ids(' cd'), EOS]
    assert found.response_mask.dtype == torch.bool and found.response_mask.tolist() == [True] * 4
    assert found.prompt_ids.dtype == found.response_ids.dtype == torch.int64
    # an end token in the text is not doubled
    assert whole(tokenize_demonstration(Demonstration(prompt='ab', response='c<eos>'), plain)) == 'abc$'


def test_a_begin_token_is_where_the_tokenizer_puts_one(with_begin):
    assert whole(tokenize_demonstration(Demonstration(prompt='ab', response='c'), with_begin)) == '^abc$'
    assert tokenize_prompt(PromptExample(prompt='ab'), with_begin).ids.tolist() == [BOS, *ids('ab')]


def test_the_edge_of_the_prompt_is_an_edge_between_tokens():
    """'a' + 'b' as one text is the token 'ab', but after 'a' a model can only generate 'b'."""
    tokenizer = merging_tokenizer()
    assert tokenizer('ab')['input_ids'] == [3]
    found = tokenize_demonstration(Demonstration(prompt='a', response='bc'), tokenizer)
    assert found.prompt_ids.tolist() == tokenize_prompt(PromptExample(prompt='a'), tokenizer).ids.tolist() == [0]
    assert found.response_ids.tolist() == [4, 5]
    assert tokenize_demonstration(Demonstration(prompt='c', response='ab'), tokenizer).response_ids.tolist() == [3, 5]


def test_text_without_a_prompt_starts_from_the_begin_token_or_its_first(plain):
    assert whole(tokenize_demonstration(Demonstration(prompt='', response='abc'), plain)) == '^abc$'
    found = tokenize_demonstration(Demonstration(prompt='', response='abc'), merging_tokenizer())
    assert found.prompt_ids.tolist() == [3] and found.response_ids.tolist() == [2, 5]


TALK = Demonstration(prompt=(S('s'), U('q')), response=(A('one'), U('more'), A('two')))


def test_only_the_assistant_counts_in_plain_turns(plain):
    found = tokenize_demonstration(TALK, plain)
    assert whole(found) == 's\n\nHuman: q\n\nAssistant: one$\n\nHuman: more\n\nAssistant: two$'
    assert trained(found) == ' one$ two$'  # each turn trains its end token
    without = tokenize_demonstration(TALK, plain, TokenizerOptions(apply_chat_template=False))
    assert without.response_ids.tolist() == found.response_ids.tolist() and trained(without) == ' one$ two$'
    assert found.prompt_ids.tolist() == ids('s\n\nHuman: q\n\nAssistant:')


def test_only_the_assistant_counts_in_a_chat_template(chat):
    found = tokenize_demonstration(TALK, chat)
    # the last newline, after the end token, is dropped
    assert whole(found) == '<s>s\n<u>q\n<a>one$\n<u>more\n<a>two$'
    assert trained(found) == 'one$two$'  # the newline after the first end token does not count
    assert found.prompt_ids.tolist() == ids('<s>s\n<u>q\n<a>')


def test_instructions_without_and_with_template(plain, chat):
    given = Demonstration(prompt=Instruction('do', 'this'), response='done')
    options = TokenizerOptions(apply_chat_template=False)
    alpaca = '### Instruction:\ndo\n\n### Input:\nthis\n\n### Response:\ndone$'
    assert whole(tokenize_demonstration(given, plain, options)) == alpaca
    assert whole(tokenize_demonstration(given, chat, options)) == alpaca
    assert whole(tokenize_demonstration(given, plain)) == '\n\nHuman: do\n\nthis\n\nAssistant: done$'
    assert whole(tokenize_demonstration(given, chat)) == '<u>do\n\nthis\n<a>done$'
    assert plain_prompt(Instruction('do')) == '### Instruction:\ndo\n\n### Response:\n'


def test_plain_text_goes_through_the_template_only_when_asked(plain, chat):
    for prompt, tokenizer, apply, text in (
        ('hi', chat, None, 'hi'),
        ('hi', chat, True, '<u>hi\n<a>'),
        ((U('hi'),), chat, None, '<u>hi\n<a>'),
        ((U('hi'),), chat, False, '\n\nHuman: hi\n\nAssistant:'),
        ('hi', plain, True, '\n\nHuman: hi\n\nAssistant:'),
    ):
        assert tokenize_prompt(PromptExample(prompt=prompt), tokenizer, apply_chat_template=apply).text == text


HH = '\n\nHuman: hi\n\nAssistant: yes\n\nand?\n\nHuman: what\n\nAssistant:'


def test_a_dialogue_in_one_text_is_its_turns_in_a_template(plain, chat):
    turns = (U('hi'), A('yes\n\nand?'), U('what'))
    assert prompt_turns(HH) == turns == prompt_turns(HH.removeprefix('\n\n') + ' ')
    assert prompt_turns('\n\nHuman: hi\n\nHuman: you\n\nAssistant:') == (U('hi\n\nyou'),)
    others = ('hi', f'x{HH}', f'\n\nAssistant: hi{HH}', HH.removesuffix('\n\nAssistant:'), f'{HH} so')
    for other in (*others, '\n\nHuman: \n\nAssistant:'):
        assert prompt_turns(other) == (U(other),)
    options = TokenizerOptions(apply_chat_template=True)
    given = Demonstration(prompt=HH, response=' good')
    assert whole(tokenize_demonstration(given, chat, options)) == '<u>hi\n<a>yes\n\nand?$\n<u>what\n<a>good$'
    assert whole(tokenize_demonstration(given, chat)) == f'{HH} good$'  # without a choice text stays text
    assert whole(tokenize_demonstration(given, plain)) == f'{HH} good$'


def test_a_template_that_refuses_or_rewrites_turns_is_a_bad_record():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('only\ntwo') }}"
    with pytest.raises(BadRecord, match='chat template refuses messages of user: only two'):
        tokenize_prompt(PromptExample(prompt=(U('hi'),)), tokenizer)
    tokenizer.chat_template = '{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}'
    with pytest.raises(BadRecord, match='rewrites earlier turns when turn 2 is added|begins answers with something'):
        render((U('a'),), 'b', tokenizer)


# An answer's reasoning is dropped: in all turns, or in all but the last.
THINKS = (
    "{% for m in messages %}{% if m.role == 'user' %}<u>{{ m.content }}\n{% else %}"
    "<a>{{ m.content.split('</think>')[-1] if KEPT else m.content }}<eos>\n{% endif %}{% endfor %}"
    '{% if add_generation_prompt %}<a>{% endif %}'
)


def test_a_template_that_drops_a_part_of_the_answer_is_a_bad_record():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = THINKS.replace('KEPT', 'true')
    with pytest.raises(BadRecord, match='leaves out a part of the answer; .*--tokenizer'):
        render((U('a'),), '<think>why</think>b', tokenizer)
    assert render((U('a'),), 'b', tokenizer)[1] == ('b<eos>\n', True)


def test_of_a_template_that_rewrites_earlier_turns_the_last_answer_is_learned():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = THINKS.replace('KEPT', 'not loop.last')
    answers = (A('<think>x</think>b'), U('c'), A('<think>y</think>d'))
    with pytest.warns(UserWarning, match='only the last answer is learned'):
        pieces = render((U('a'),), answers, tokenizer)
    assert pieces == [('<u>a\n<a>b<eos>\n<u>c\n<a>', False), ('<think>y</think>d<eos>\n', True)]
    other = (A('<think>z</think>b'), U('other'), A('d'))
    with pytest.warns(UserWarning), pytest.raises(BadRecord, match='have no prompt in common'):
        tokenize_preference(Preference(prompt=(U('a'),), responses=(answers, other)), tokenizer)


def test_a_template_that_escapes_answers_keeps_them():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = '{% for m in messages %}[{{ m.content | e }}]{% endfor %}'
    assert render((U('a'),), 'x < y', tokenizer)[1] == ('[x &lt; y]', True)


def test_special_tokens_that_a_text_holds_are_not_added_again(with_begin):
    text = tokenize_demonstration(Demonstration(prompt='', response='<bos>ab<eos>'), with_begin)
    assert whole(text) == '^ab$'
    assert tokenize_prompt(PromptExample(prompt='<bos>ab'), with_begin).ids.tolist() == [BOS, *ids('ab')]


def test_preferences_share_the_prompt(plain, chat):
    found = tokenize_preference(Preference(prompt='p', responses=('a', 'bc', 'd'), scores=(3.0, 2.0, 1.0)), plain)
    assert [whole(s) for s in found.sequences()] == ['pa$', 'pbc$', 'pd$'] and found.scores == (3.0, 2.0, 1.0)
    assert found.num_tokens == 3 + 4 + 3
    found = tokenize_preference(Preference(prompt=(U('q'),), responses=('a', (A('b'), U('c'), A('d')))), chat)
    assert [trained(s) for s in found.sequences()] == ['a$', 'b$d$']
    found = tokenize_preference(Preference(prompt='', responses=('good', 'bad')), plain)
    assert [whole(s) for s in found.sequences()] == ['^good$', '^bad$']
    found = tokenize_preference(Preference(prompt='', responses=('a', 'b')), merging_tokenizer())
    assert found.prompt_ids.tolist() == [5] and [r.tolist() for r in found.responses] == [[0, 5], [1, 5]]


@pytest.mark.parametrize(
    ('max_length', 'expected'),
    [
        (10, 'abcdef|ghi$'),
        (9, 'bcdef|ghi$'),
        (8, 'cdef|ghi$'),
        (7, 'def|ghi$'),  # half of 7 is 3
        (6, 'def|ghi'),
        (5, 'ef|ghi'),
        (2, 'f|g'),
    ],
)
def test_cutting(plain, max_length, expected):
    given = Demonstration(prompt='abcdef', response='ghi')
    found = tokenize_demonstration(given, plain, TokenizerOptions(max_length=max_length))
    prompt, response = expected.split('|')
    assert whole(found) == prompt + response and len(found.prompt_ids) == len(prompt)
    if max_length < 10:
        with pytest.raises(BadRecord, match=f'6 tokens of prompt and 4 of response, .* max_length={max_length}'):
            tokenize_demonstration(given, plain, TokenizerOptions(max_length=max_length, overflow='refuse'))


def test_cutting_keeps_the_begin_token_and_short_prompts(with_begin, plain):
    given = Demonstration(prompt='abcdef', response='ghi')
    assert whole(tokenize_demonstration(given, with_begin, TokenizerOptions(max_length=8))) == '^defghi$'
    found = tokenize_demonstration(Demonstration(prompt='a', response='ghijkl'), plain, TokenizerOptions(max_length=5))
    assert whole(found) == 'aghij'
    prompt = tokenize_prompt(PromptExample(prompt='abcdef'), with_begin, max_tokens=3, overflow='truncate')
    assert prompt.ids.tolist() == [BOS, *ids('ef')]
    with pytest.raises(BadRecord, match='the prompt has 7 tokens, and there is room for 3'):
        tokenize_prompt(PromptExample(prompt='abcdef'), with_begin, max_tokens=3)


def test_preferences_are_cut_at_the_same_place(plain):
    given = Preference(prompt='abcdef', responses=('gh', 'ijklm'))
    found = tokenize_preference(given, plain, TokenizerOptions(max_length=8))
    assert [whole(s) for s in found.sequences()] == ['cdefgh$', 'cdefijkl']


def test_options_that_make_no_sense():
    endless = byte_tokenizer()
    endless.eos_token = None
    with pytest.raises(ValueError, match='the tokenizer has no end token'):
        tokenize_demonstration(Demonstration(prompt='a', response='b'), endless)
    with pytest.raises(ValueError, match='max_length=1; give at least 2'):
        TokenizerOptions(max_length=1)
    with pytest.raises(ValueError, match="overflow='drop'; give 'truncate' or 'refuse'"):
        TokenizerOptions(overflow='drop')  # type: ignore[arg-type]


def document(prompt, response):
    mask = torch.ones(len(response), dtype=torch.bool)
    return Sequence(prompt_ids=torch.tensor(prompt), response_ids=torch.tensor(response), response_mask=mask)


@pytest.mark.parametrize('length', [2, 3, 5, 7, 100])
def test_packing_learns_every_token_that_counts_once(length):
    sizes = {10: 1, 20: 5, 30: 3, 40: 4}
    documents = [document([i, i + 1], list(range(i + 2, i + 2 + n))) for i, n in sizes.items()]
    blocks = pack(documents, length)
    targets = sorted(t for b in blocks for t in b.response_ids[b.response_mask].tolist())
    assert targets == sorted(t for d in documents for t in d.response_ids.tolist())
    assert all(b.num_tokens <= length and len(b.prompt_ids) == 1 and b.response_mask.any() for b in blocks)


def test_packing_leaves_out_blocks_where_nothing_counts():
    assert len(pack([document(list(range(20)), [99])], 4)) == 1
    with pytest.raises(ValueError, match='pack: no documents given'):
        pack([], 4)
    with pytest.raises(ValueError, match='block_length=1; give at least 2'):
        pack([document([1], [2])], 1)


FOX = [S('Be brief.'), U('Who are you?'), A(' A fox, "Tom".\n'), U(': and where?  '), A('- In the wood\n\n- at home')]
TURNS = [{'role': m.role, 'content': m.content} for m in (*FOX, U('Good.'), A(': bye 12'))]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def chatml():
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({'additional_special_tokens': ['<|im_start|>', '<|im_end|>']})
    tokenizer.chat_template = CHATML
    return tokenizer


def make(name):
    if name == 'stories260K':
        if not MODELS.is_dir():
            pytest.skip(f'needs the tokenizers in {MODELS}')
        return AutoTokenizer.from_pretrained(MODELS / name)
    return beginning() if name == 'beginning' else byte_tokenizer()


@pytest.mark.parametrize('name', ['bytes', 'beginning', 'stories260K'])
def test_the_saved_tokenizer_gives_the_ids_that_training_saw(name, tmp_path):
    tokenizer = make(name)
    assert tokenizer.chat_template is None
    (record,), _ = load_demonstrations([{'messages': TURNS}], tokenizer)
    assert tokenizer.chat_template is None  # the user's tokenizer is unchanged
    save_tokenizer(tokenizer, tmp_path)
    saved = AutoTokenizer.from_pretrained(tmp_path)
    seen = record.prompt_ids.tolist() + record.response_ids.tolist()
    assert seen == saved.apply_chat_template(TURNS, return_dict=False)
    rendered = saved.apply_chat_template(TURNS[:2], add_generation_prompt=True, return_dict=False)
    assert record.prompt_ids.tolist() == rendered == load_prompts([{'prompt': TURNS[:2]}], make(name))[0].ids.tolist()
    later = saved.apply_chat_template(TURNS[:4], add_generation_prompt=True, return_dict=False)
    assert seen[: len(later)] == later  # a chat formats the second question as in training
    learned = [t for t, m in zip(record.response_ids.tolist(), record.response_mask.tolist(), strict=True) if m]
    assert learned.count(tokenizer.eos_token_id) == 3 and learned[-1] == tokenizer.eos_token_id
    # negative control: plain text with the same words has other ids
    assert seen != saved(''.join(turn['content'] for turn in TURNS))['input_ids']


def test_a_tokenizer_keeps_its_own_template_and_plain_text_gives_none():
    tokenizer = chatml()
    train, _ = load_demonstrations([{'messages': TURNS}], tokenizer)
    assert tokenizer.chat_template == CHATML and train.has_turns
    noted = byte_tokenizer()
    load_preferences([{'instruction': 'i', 'chosen': 'c', 'rejected': 'r'}], noted)
    assert template_of(noted) is not None and noted.chat_template is None
    assert shown_format(noted) == repr('\n\nHuman: QUESTION\n\nAssistant: ANSWER<eos>')
    plain = byte_tokenizer()
    train, _ = load_demonstrations([{'prompt': 'p', 'response': 'r'}, {'text': 't'}], plain)
    load_prompts([{'prompt': 'p'}], plain)
    load_demonstrations([{'messages': TURNS}], plain, apply_chat_template=False)
    assert template_of(plain) is None and not train.has_turns


def test_chatml_with_another_end_token_does_not_train_the_newline():
    """A turn counts up to <|im_end|>; the last is followed by the tokenizer's end token and not the newline."""
    tokenizer = chatml()
    talk = Demonstration(prompt=(U('q'),), response=(A('one'), U('more'), A('two')))
    found = tokenize_demonstration(talk, tokenizer)
    more = '\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n'
    assert tokenizer.decode(found.response_ids.tolist()) == f'one<|im_end|>{more}two<|im_end|><eos>'
    assert tokenizer.decode(found.response_ids[found.response_mask].tolist()) == 'one<|im_end|>two<|im_end|><eos>'
