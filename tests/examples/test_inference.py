"""examples/inference.py and train_dummy.py from the command line, and a chat in the format of training."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import torch
from example_script import error_of, script, torchrun, write_rows
from transformers import AutoTokenizer

import chatgpt.rollout
from chatgpt.launch import demo_world
from chatgpt.nn import GPTActor
from chatgpt.nn.peft_format import export_peft
from chatgpt.testing import byte_tokenizer, tiny_config


def chat_with(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], data: Path, typed: str, *flags: str
) -> list[str]:
    monkeypatch.setattr(sys, 'stdin', io.StringIO(typed))
    script('inference', monkeypatch, '--pretrain', str(data / 'base'), '--seed=3', *flags)
    return capsys.readouterr().out.split('> ')[1:]


def test_control_c_ends_an_answer_and_not_the_chat(monkeypatch, capsys, data):
    whole, _ = chat_with(monkeypatch, capsys, data, 'one day a fox\n', '--max_new_tokens=12')
    stream = chatgpt.rollout.stream_tokens

    def interrupted(*args, **kw):
        for number, token in enumerate(stream(*args, **kw)):
            if kw['index'] == 0 and number == 3:
                raise KeyboardInterrupt
            yield token

    monkeypatch.setattr(chatgpt.rollout, 'stream_tokens', interrupted)
    cut, second, _ = chat_with(monkeypatch, capsys, data, 'one day a fox\none day a bear\n', '--max_new_tokens=12')
    assert whole.startswith(cut.rstrip('\n'))
    assert 0 < len(cut.strip()) < len(whole.strip())
    assert second.strip()


def test_a_chat_template_sees_the_whole_dialogue(monkeypatch, capsys, data, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(data / 'base')
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    seen = []
    monkeypatch.setattr(
        type(tokenizer), '__call__', lambda self, text, **kw: seen.append((text, kw)) or {'input_ids': [3, 4]}
    )
    first, _, _ = chat_with(
        monkeypatch, capsys, data, 'a fox\na bear\n', '--tokenizer', str(tmp_path), '--max_new_tokens=4'
    )
    assert [kw['add_special_tokens'] for _, kw in seen] == [False, False]
    assert seen[0][0] == 'user a fox '
    assert seen[1][0] == f'user a fox assistant {first[:-1]} user a bear '


def test_an_adapter(monkeypatch, capsys, data, tmp_path):
    adapted = GPTActor(pretrained=data / 'base', lora_rank=2)
    for name, parameter in adapted.named_parameters():
        if 'lora_B' in name:
            torch.nn.init.normal_(parameter, std=10.0)
    export_peft(adapted, tmp_path / 'adapter')
    flags = ['--pretrain', str(data / 'base'), '--input', 'one day a fox', '--greedy', '--max_new_tokens=6']
    outputs = []
    for extra in ([], ['--weights', str(tmp_path / 'adapter')]):
        script('inference', monkeypatch, *flags, *extra)
        outputs.append(capsys.readouterr().out)
    assert outputs[0] != outputs[1]


@pytest.mark.parametrize(
    ('flags', 'message'),
    [
        ('--input=x --best_of=4', '--best_of above 1 and --reward_model belong together'),
        ('--input=in.txt --output=file/out.jsonl', 'cannot write --output file/out.jsonl: File exists'),
        ('--input=in.txt --output=in.txt', '--output in.txt is the file of --input: give another'),
        ('--input=in.txt --max_lenght=20', "unknown argument '--max_lenght'; did you mean --max_length"),
    ],
)
def test_mistakes(monkeypatch, capsys, tmp_path, data, flags, message):
    """A mistake ends the run before anything is generated."""

    def generate(self, *args, **options):
        raise AssertionError('it generated before the mistake was found')

    monkeypatch.setattr(chatgpt.rollout.LocalEngine, 'generate', generate)
    (tmp_path / 'in.txt').write_text('one day\n')
    (tmp_path / 'file').touch()
    monkeypatch.chdir(tmp_path)
    assert message in error_of('inference', monkeypatch, capsys, '--pretrain', str(data / 'base'), *flags.split())
    assert (tmp_path / 'in.txt').read_text() == 'one day\n'


@pytest.mark.system
def test_inference_under_torchrun(monkeypatch, capsys, data, tmp_path):
    path = tmp_path / 'in.txt'
    path.write_text('\n'.join(row['prompt'] for row in demo_world.demo_prompts(5)))
    flags = ['--pretrain', str(data / 'base'), '--input', str(path), '--max_new_tokens=6']
    flags += ['--best_of=2', '--reward_model', str(data / 'rm')]
    script('inference', monkeypatch, *flags, '--output', str(tmp_path / 'one.jsonl'))
    done = torchrun('inference', *flags, '--strategy=fsdp', '--output', str(tmp_path / 'two.jsonl'))
    assert done.returncode == 0, done.stderr
    one, two = (
        [json.loads(line) for line in (tmp_path / f'{n}.jsonl').read_text().splitlines()] for n in ('one', 'two')
    )
    assert [(r['prompt'], r['response']) for r in one] == [(r['prompt'], r['response']) for r in two]
    assert done.stdout.count('5 responses written to') == 1


def test_dummy_runs(monkeypatch, capsys):
    small = ['--num_episodes=1', '--max_timesteps=2', '--update_timesteps=1', '--prompt_tokens=4', '--max_new_tokens=4']
    script('train_dummy', monkeypatch, *small, '--lora_rank=2', '--precision=bf16')
    assert '16 samples in ' in capsys.readouterr().out


TALK = [
    {'role': 'user', 'content': 'hi'},
    {'role': 'assistant', 'content': 'yes'},
    {'role': 'user', 'content': 'and'},
    {'role': 'assistant', 'content': 'no'},
]


def test_a_chat_uses_the_format_of_training(tmp_path, monkeypatch, capsys):
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
