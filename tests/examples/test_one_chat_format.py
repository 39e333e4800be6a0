"""From training to chat: the format that train_sft.py prints and saves is the one that inference.py asks in."""

from __future__ import annotations

import io
import json

import pytest
from example_script import script, write_rows
from transformers import AutoTokenizer

import chatgpt.rollout
from chatgpt.nn import GPTActor
from chatgpt.testing import byte_tokenizer, tiny_config

TALK = [
    {'role': 'user', 'content': 'hi'},
    {'role': 'assistant', 'content': 'yes'},
    {'role': 'user', 'content': 'and'},
    {'role': 'assistant', 'content': 'no'},
]


@pytest.fixture
def trained(tmp_path_factory, monkeypatch, capsys):
    folder = tmp_path_factory.mktemp('chat')
    actor = GPTActor(config=tiny_config('gpt2', vocab_size=259, hidden=16, positions=256))
    actor.save_pretrained(folder / 'base', tokenizer=byte_tokenizer())
    chats = write_rows(folder / 'chats.jsonl', [{'messages': TALK}] * 4)
    given = f'{chats} --pretrain {folder}/base --max_steps=1 --log_interval=1 --save_path {folder}/run'.split()
    script('train_sft', monkeypatch, *given)
    assert repr('\n\nHuman: QUESTION\n\nAssistant: ANSWER<eos>') in capsys.readouterr().out
    return folder / 'run' / 'actor'


def test_a_chat_asks_as_training_did(trained, monkeypatch, capsys):
    tokenizer = AutoTokenizer.from_pretrained(trained)
    asked = []

    def stream(policy, ids, *args, **kw):
        asked.append(ids.tolist())
        yield from tokenizer('yes')['input_ids']

    monkeypatch.setattr(chatgpt.rollout, 'stream_tokens', stream)
    monkeypatch.setattr('sys.stdin', io.StringIO('hi\nand\n'))
    script('inference', monkeypatch, '--pretrain', str(trained), '--max_new_tokens=8')
    want = [tokenizer.apply_chat_template(TALK[:n], add_generation_prompt=True, return_dict=False) for n in (1, 3)]
    assert asked == want
    assert tokenizer.decode(want[1]) == '\n\nHuman: hi\n\nAssistant: yes<eos>\n\nHuman: and\n\nAssistant:'
    assert repr('\n\nHuman: QUESTION\n\nAssistant: ANSWER<eos>') in capsys.readouterr().out


@pytest.mark.parametrize('flag', [[], ['--apply_chat_template'], ['--no_apply_chat_template']])
def test_a_prompt_in_text_is_a_turn_as_in_training(trained, monkeypatch, capsys, tmp_path, flag):
    words = ['--pretrain', str(trained), '--input=hi', '--max_new_tokens=2', *flag]
    script('inference', monkeypatch, *words)
    assert capsys.readouterr().out.startswith('> hi\n')
    script('inference', monkeypatch, *words, f'--output={tmp_path}/out.jsonl')
    asked = json.loads((tmp_path / 'out.jsonl').read_text())['prompt']
    assert asked == ('hi' if flag == ['--no_apply_chat_template'] else [{'role': 'user', 'content': 'hi'}])
