"""Prompts from data, the order they are drawn in, and whether tokenizer and model fit."""

from __future__ import annotations

import pytest
import torch

from chatgpt.data.prompts import PromptOrder, PromptSet, as_prompts, load_prompts
from chatgpt.data.tokenize import check_tokenizer
from chatgpt.testing import byte_tokenizer, tiny_config
from chatgpt.types import Prompt


@pytest.fixture(scope='module')
def tokenizer():
    return byte_tokenizer()


def texts(prompts):
    return [p.text for p in prompts]


def test_prompts_of_a_csv_with_their_columns(tmp_path, tokenizer):
    path = tmp_path / 'a.csv'
    path.write_text('act,prompt\nx,one\ny,"two\nlines"\n')
    found = load_prompts(str(path), tokenizer)
    assert texts(found) == ['one', 'two\nlines'] and [p.columns for p in found] == [{'act': 'x'}, {'act': 'y'}]
    assert found[0].ids.tolist() == list(b'one') and found[0].ids.dtype == torch.int64 and found.num_skipped == 0
    assert texts(load_prompts(path, tokenizer, column='act')) == ['x', 'y']
    assert texts(load_prompts(path, tokenizer, max_prompts=1)) == ['one']


def test_prompts_of_other_shapes(tmp_path, tokenizer):
    found = load_prompts([{'question': 'q', 'answer': 'a'}], tokenizer)
    assert texts(found) == ['q'] and found[0].columns == {'answer': 'a'}
    found = load_prompts([{'instruction': 'i', 'input': 'x', 'output': 'o'}], tokenizer)
    assert texts(found) == ['\n\nHuman: i\n\nx\n\nAssistant:'] and found[0].columns == {'output': 'o'}
    talk = [{'role': 'user', 'content': 'hi'}]
    assert texts(load_prompts([{'messages': talk}, {'prompt': talk}], tokenizer)) == ['\n\nHuman: hi\n\nAssistant:'] * 2
    assert texts(load_prompts(['a', 'b'], tokenizer)) == ['a', 'b']
    (tmp_path / 'a.txt').write_text('one\n\ntwo\n')
    assert texts(load_prompts(tmp_path / 'a.txt', tokenizer)) == ['one', 'two']
    chosen = {'prompt': 'p', 'chosen': 'c', 'rejected': 'r'}
    assert load_prompts([chosen], tokenizer)[0].columns == {'chosen': 'c', 'rejected': 'r'}


@pytest.mark.parametrize(
    ('text', 'reason'),
    [
        ('act,text\nx,y\n', "a.csv, line 2: there is no column 'prompt' for the prompt; the columns are 'act', 'text'"),
        ('act,prompt\nx,y\nx,"  "\n', 'a.csv, line 3: the prompt is empty'),
        ('prompt\nhello\n' + 'x' * 9, 'a.csv, line 3: the prompt has 9 tokens, more than 5; shorten it, or allow'),
    ],
)
def test_bad_prompt_files(tmp_path, tokenizer, text, reason):
    (tmp_path / 'a.csv').write_text(text)
    with pytest.raises(ValueError, match=reason) as error:
        load_prompts(tmp_path / 'a.csv', tokenizer, max_prompt_tokens=5, overflow='refuse')
    assert '\n' not in str(error.value)


def test_bad_prompts_can_be_skipped(tmp_path, tokenizer):
    rows = ('{"prompt": "one"}', '{"prompt": ""}', 'nonsense', '{"prompt": null}', '{"text": "x"}', '{"prompt": "two"}')
    (tmp_path / 'a.jsonl').write_text('\n'.join(rows))
    found = load_prompts(tmp_path / 'a.jsonl', tokenizer, skip_bad_records=True)
    assert texts(found) == ['one', 'two'] and found.num_skipped == 4
    (tmp_path / 'b.csv').write_text('act\nx\ny\n')
    with pytest.raises(ValueError, match='none of 2 records has a usable prompt; the first: .*b.csv, line 2: there is'):
        load_prompts(tmp_path / 'b.csv', tokenizer, skip_bad_records=True)


def test_long_prompts_lose_their_left_end(tokenizer):
    assert load_prompts(['abcdef'], tokenizer, max_prompt_tokens=4)[0].ids.tolist() == list(b'cdef')
    with pytest.raises(ValueError, match='max_prompt_tokens=0; give at least 1'):
        load_prompts(['a'], tokenizer, max_prompt_tokens=0)
    with pytest.raises(ValueError, match="overflow='cut'; give 'truncate' or 'refuse'"):
        load_prompts(['a'], tokenizer, overflow='cut')


def test_as_prompts(tokenizer):
    given = [Prompt(ids=torch.tensor([1, 2])), torch.tensor([3]), torch.tensor([[4, 5]])]
    assert [p.ids.tolist() for p in as_prompts(given)] == [[1, 2], [3], [4, 5]]
    assert texts(as_prompts(['a', {'prompt': 'b'}], tokenizer)) == ['a', 'b']
    refused = [
        ([], 'there are no prompts'),
        (['a'], 'need a tokenizer'),
        ([3], 'prompt 0 is a int'),
        ([torch.tensor([])], 'is empty'),
    ]
    for given, reason in refused:
        with pytest.raises(ValueError, match=reason):
            as_prompts(given)


def test_fingerprint_follows_the_ids(tokenizer):
    found = [load_prompts(given, tokenizer).fingerprint() for given in (['ab', 'c'], ['ab', 'c'], ['a', 'bc'])]
    assert found[0] == found[1] != found[2]


def test_order_is_without_replacement_and_depends_on_seed_and_epoch_only():
    draws = [PromptOrder(50, seed=3)[i] for i in range(150)]
    for epoch in range(3):
        assert sorted(draws[50 * epoch : 50 * epoch + 50]) == list(range(50))
    assert PromptOrder(1, seed=3)[7] == 0
    order = PromptOrder(50, seed=3)
    assert [order[i] for i in reversed(range(150))] == draws[::-1]  # no state but the draw's number
    assert draws[:50] != draws[50:100] and draws[:50] != [PromptOrder(50, seed=4)[i] for i in range(50)]
    assert draws[:50] != list(range(50))


def test_check_tokenizer(tokenizer):
    check_tokenizer(tokenizer, tiny_config(vocab_size=259))
    check_tokenizer(tokenizer, tiny_config(vocab_size=320))  # a vocabulary rounded up is usual
    with pytest.raises(ValueError, match='its token .* has id 258, but the model has a vocabulary of 64'):
        check_tokenizer(tokenizer, tiny_config(vocab_size=64))
    config = tiny_config(vocab_size=1000)
    config.eos_token_id = 900
    with pytest.raises(ValueError, match="the model's end token has id 900, but the tokenizer has 259 tokens"):
        check_tokenizer(tokenizer, config)
    config.eos_token_id = [900, 258]
    check_tokenizer(tokenizer, config)
    config.eos_token_id = 50256  # a family's default, beyond this small model's vocabulary: says nothing
    check_tokenizer(tokenizer, config)
    endless = byte_tokenizer()
    endless.eos_token = None
    with pytest.raises(ValueError, match='the tokenizer has no end token'):
        check_tokenizer(endless, tiny_config(vocab_size=259))


def test_tasks_without_text_are_no_prompts_to_tell_of():
    """An environment says its tasks itself: one empty prompt is neither a small data set nor a repetition."""
    nothing = Prompt(ids=torch.zeros(0, dtype=torch.int64))
    assert PromptSet([nothing, nothing]).facts() == {}
    assert PromptSet([nothing, Prompt(ids=torch.tensor([3]))]).facts()['prompts'] == 2
