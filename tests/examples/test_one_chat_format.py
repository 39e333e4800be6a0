"""From training to chat: the format that train_sft.py prints and saves is the one that inference.py asks in."""

from __future__ import annotations

import io

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


def test_a_chat_asks_as_training_did(tmp_path, monkeypatch, capsys):
    folder = tmp_path
    actor = GPTActor(config=tiny_config('gpt2', vocab_size=259, hidden=16, positions=256))
    actor.save_pretrained(folder / 'base', tokenizer=byte_tokenizer())
    chats = write_rows(folder / 'chats.jsonl', [{'messages': TALK}] * 4)
    given = f'{chats} --pretrain {folder}/base --max_steps=1 --log_interval=1 --save_path {folder}/run'.split()
    script('train_sft', monkeypatch, *given)
    assert repr('\n\nHuman: QUESTION\n\nAssistant: ANSWER<eos>') in capsys.readouterr().out
    trained = folder / 'run' / 'actor'
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
