"""One chat format: what training sees is what the saved tokenizer's chat template writes, for tokenizers without one
and with their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from chatgpt.data import load_demonstrations, load_preferences, load_prompts
from chatgpt.data.examples import Demonstration, Message
from chatgpt.data.formats import save_tokenizer, shown_format, template_of
from chatgpt.data.tokenize import tokenize_demonstration
from chatgpt.testing import byte_tokenizer

MODELS = Path(__file__).resolve().parents[3] / 'shared' / 'models'
TALK = [
    {'role': 'system', 'content': 'Be brief.'},
    {'role': 'user', 'content': 'Who are you?'},
    {'role': 'assistant', 'content': ' A fox, "Tom".\n'},
    {'role': 'user', 'content': ': and where?  '},
    {'role': 'assistant', 'content': '- In the wood\n\n- at home'},
    {'role': 'user', 'content': 'Good.'},
    {'role': 'assistant', 'content': ': bye 12'},
]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def with_begin():
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single='<bos> $A', special_tokens=[('<bos>', 257)])
    return tokenizer


def chatml():
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({'additional_special_tokens': ['<|im_start|>', '<|im_end|>']})
    tokenizer.chat_template = CHATML
    return tokenizer


def make(name):
    if name in ('stories260K', 'gpt2_tokenizer'):
        if not MODELS.is_dir():
            pytest.skip(f'needs the tokenizers in {MODELS}')
        return AutoTokenizer.from_pretrained(MODELS / name)
    return {'bytes': byte_tokenizer, 'with_begin': with_begin}[name]()


@pytest.mark.parametrize('name', ['bytes', 'with_begin', 'stories260K', 'gpt2_tokenizer'])
def test_the_saved_tokenizer_gives_the_ids_that_training_saw(name, tmp_path):
    tokenizer = make(name)
    assert tokenizer.chat_template is None
    (record,), _ = load_demonstrations([{'messages': TALK}], tokenizer)
    assert tokenizer.chat_template is None  # a user's tokenizer stays as it is
    save_tokenizer(tokenizer, tmp_path)
    saved = AutoTokenizer.from_pretrained(tmp_path)
    seen = record.prompt_ids.tolist() + record.response_ids.tolist()
    assert seen == saved.apply_chat_template(TALK, return_dict=False)
    asked = saved.apply_chat_template(TALK[:2], add_generation_prompt=True, return_dict=False)
    assert record.prompt_ids.tolist() == asked == load_prompts([{'prompt': TALK[:2]}], make(name))[0].ids.tolist()
    later = saved.apply_chat_template(TALK[:4], add_generation_prompt=True, return_dict=False)
    assert seen[: len(later)] == later  # a second question is asked in a chat as it was in training
    learned = [t for t, m in zip(record.response_ids.tolist(), record.response_mask.tolist(), strict=True) if m]
    assert learned.count(tokenizer.eos_token_id) == 3 and learned[-1] == tokenizer.eos_token_id
    # the negative control: plain text of the same words has other ids
    assert seen != saved(''.join(turn['content'] for turn in TALK))['input_ids']


def test_of_preferences_and_instructions_too():
    tokenizer = byte_tokenizer()
    load_preferences([{'instruction': 'i', 'chosen': 'c', 'rejected': 'r'}], tokenizer)
    assert template_of(tokenizer) is not None and tokenizer.chat_template is None
    assert shown_format(tokenizer) == repr('\n\nHuman: QUESTION\n\nAssistant: ANSWER<eos>')


def test_a_tokenizer_keeps_its_own_template_and_plain_text_gives_none():
    tokenizer = chatml()
    train, _ = load_demonstrations([{'messages': TALK}], tokenizer)
    assert tokenizer.chat_template == CHATML and train.has_turns
    plain = byte_tokenizer()
    train, _ = load_demonstrations([{'prompt': 'p', 'response': 'r'}, {'text': 't'}], plain)
    load_prompts([{'prompt': 'p'}], plain)
    load_demonstrations([{'messages': TALK}], plain, apply_chat_template=False)
    assert template_of(plain) is None and not train.has_turns


def test_chatml_with_another_end_token_does_not_train_the_newline():
    """A turn counts up to <|im_end|>; at the very end the tokenizer's end token follows it in the newline's place."""
    tokenizer = chatml()
    turns = (Message('user', 'q'),), (Message('assistant', 'one'), Message('user', 'more'), Message('assistant', 'two'))
    found = tokenize_demonstration(Demonstration(prompt=turns[0], response=turns[1]), tokenizer)
    assert tokenizer.decode(found.response_ids.tolist()) == (
        'one<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|><eos>'
    )
    assert tokenizer.decode(found.response_ids[found.response_mask].tolist()) == 'one<|im_end|>two<|im_end|><eos>'
