"""examples/inference.py and train_dummy.py as their users run them."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from example_script import script

from chatgpt.launch import demo_world
from chatgpt.nn import GPTRM, GPTActor
from chatgpt.nn.peft_format import export_peft
from chatgpt.testing.processes import free_port

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp('models')
    tokenizer = demo_world.demo_tokenizer()
    torch.manual_seed(0)
    GPTActor(config=demo_world.demo_config()).save_pretrained(folder / 'actor', tokenizer=tokenizer)
    GPTRM(config=demo_world.demo_config()).save_pretrained(folder / 'rm', tokenizer=tokenizer)
    return folder


def test_one_prompt(monkeypatch, capsys, folder):
    flags = ['--pretrain', str(folder / 'actor'), '--input', 'one day a fox', '--max_new_tokens=5']
    script('inference', monkeypatch, *flags, '--seed=1')
    first = capsys.readouterr().out
    assert first.startswith('> one day a fox\n')
    assert len(first.splitlines()[1].split()) >= 3
    script('inference', monkeypatch, *flags, '--seed=1')
    assert capsys.readouterr().out == first
    script('inference', monkeypatch, *flags, '--seed=2')
    assert capsys.readouterr().out != first


@pytest.mark.parametrize(
    ('name', 'flags'), [('inference', ['--pretrain', 'm', '--trust_remote_code']), ('train_dummy', [])]
)
def test_the_strategy_is_that_of_the_flags(monkeypatch, name, flags):
    from chatgpt.launch import arguments
    from chatgpt.nn import loading

    def seen(strategy, **options):
        raise ValueError(f'{strategy} {options}')

    monkeypatch.setattr(arguments, 'make_strategy', seen)
    monkeypatch.setattr(loading, 'load_tokenizer', lambda *_, **__: None)
    monkeypatch.setenv('CHATGPT_TRACEBACK', '1')
    with pytest.raises(ValueError) as told:
        script(name, monkeypatch, *flags, '--strategy=ddp', '--seed=3', '--precision=bf16', '--rank_timeout_s=5')
    options = {'seed': 3, 'precision': 'bf16', 'remote_code': bool(flags), 'timeout_s': 5.0, 'tensor_parallel': 1}
    assert str(told.value) == f'ddp {options}'


@pytest.mark.parametrize('ending', ['jsonl', 'txt', 'csv'])
def test_a_file_of_prompts(monkeypatch, capsys, folder, tmp_path, ending):
    prompts = [row['prompt'] for row in demo_world.demo_prompts(5)]
    text = {
        'jsonl': '\n'.join(json.dumps({'prompt': p}) for p in prompts),
        'txt': '\n'.join(prompts),
        'csv': '\n'.join(['prompt', *prompts]),
    }
    (tmp_path / f'in.{ending}').write_text(text[ending] + '\n')
    out = tmp_path / 'deep' / 'out.jsonl'
    script(
        'inference',
        monkeypatch,
        '--pretrain',
        str(folder / 'actor'),
        '--input',
        str(tmp_path / f'in.{ending}'),
        '--output',
        str(out),
    )
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row['prompt'] for row in rows] == prompts
    assert sum(bool(row['response']) for row in rows) >= 3  # a model without training may end at once
    assert '5 responses written to' in capsys.readouterr().out


def test_the_best_of_several(monkeypatch, folder, tmp_path):
    def mean(n: int) -> float:
        out = tmp_path / f'{n}.jsonl'
        rm = ['--reward_model', str(folder / 'rm'), f'--best_of={n}'] if n > 1 else []
        path = tmp_path / 'in.txt'
        path.write_text('\n'.join(row['prompt'] for row in demo_world.demo_prompts(12)))
        script(
            'inference',
            monkeypatch,
            '--pretrain',
            str(folder / 'actor'),
            '--input',
            str(path),
            '--output',
            str(out),
            *rm,
        )
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        return sum(row['score'] for row in rows) / len(rows)

    assert mean(8) > mean(2) + 0.02


def test_a_chat(monkeypatch, capsys, folder):
    monkeypatch.setattr(sys, 'stdin', io.StringIO('one day a fox\n\n/new\none day a bear\n'))
    script('inference', monkeypatch, '--pretrain', str(folder / 'actor'), '--max_new_tokens=4')
    out = capsys.readouterr().out
    assert out.startswith('chatting with ')
    assert out.count('> ') == 5  # two questions, an empty line, /new, and the end


def chat_with(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path, said: str, *flags: str
) -> list[str]:
    monkeypatch.setattr(sys, 'stdin', io.StringIO(said))
    script('inference', monkeypatch, '--pretrain', str(folder / 'actor'), '--seed=3', *flags)
    return capsys.readouterr().out.split('> ')[1:]


def test_control_c_ends_an_answer_and_not_the_chat(monkeypatch, capsys, folder):
    import chatgpt.rollout

    whole, _ = chat_with(monkeypatch, capsys, folder, 'one day a fox\n', '--max_new_tokens=12')
    stream = chatgpt.rollout.stream_tokens

    def interrupted(*args, **kw):
        for number, token in enumerate(stream(*args, **kw)):
            if kw['index'] == 0 and number == 3:
                raise KeyboardInterrupt
            yield token

    monkeypatch.setattr(chatgpt.rollout, 'stream_tokens', interrupted)
    cut, second, _ = chat_with(monkeypatch, capsys, folder, 'one day a fox\none day a bear\n', '--max_new_tokens=12')
    assert whole.startswith(cut.rstrip('\n'))
    assert 0 < len(cut.strip()) < len(whole.strip())
    assert second.strip()


def test_a_stop_string_is_not_shown(monkeypatch, capsys, folder):
    whole, _ = chat_with(monkeypatch, capsys, folder, 'one day a fox\n', '--max_new_tokens=16')
    word = whole.split()[2]
    cut, _ = chat_with(monkeypatch, capsys, folder, 'one day a fox\n', '--max_new_tokens=16', '--stop_string', word)
    assert cut.rstrip('\n') == whole[: whole.index(word)]


def test_a_chat_template_sees_the_whole_dialogue(monkeypatch, capsys, folder, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / 'actor')
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    seen = []
    monkeypatch.setattr(
        type(tokenizer), '__call__', lambda self, text, **kw: seen.append((text, kw)) or {'input_ids': [3, 4]}
    )
    first, _, _ = chat_with(
        monkeypatch, capsys, folder, 'a fox\na bear\n', '--tokenizer', str(tmp_path), '--max_new_tokens=4'
    )
    assert [kw['add_special_tokens'] for _, kw in seen] == [False, False]
    assert seen[0][0] == 'user a fox '
    assert seen[1][0] == f'user a fox assistant {first[:-1]} user a bear '


def test_a_chat_past_the_context_is_one_line(monkeypatch, capsys, folder):
    with pytest.raises(SystemExit) as stop:
        chat_with(monkeypatch, capsys, folder, 'a fox\n', '--max_new_tokens=100000')
    assert stop.value.code == 2
    assert 'positions' in capsys.readouterr().err


def test_weights_and_adapters(monkeypatch, capsys, folder, tmp_path):
    other = GPTActor(pretrained=folder / 'actor')
    with torch.no_grad():
        other.model.transformer.ln_f.weight.neg_()
    torch.save(other.state_dict(), tmp_path / 'other.pt')
    adapted = GPTActor(pretrained=folder / 'actor', lora_rank=2)
    for name, parameter in adapted.named_parameters():
        if 'lora_B' in name:
            torch.nn.init.normal_(parameter, std=10.0)
    export_peft(adapted, tmp_path / 'adapter')
    flags = ['--pretrain', str(folder / 'actor'), '--input', 'one day a fox', '--greedy', '--max_new_tokens=6']
    outputs = []
    for extra in ([], ['--model_path', str(tmp_path / 'other.pt')], ['--model_path', str(tmp_path / 'adapter')]):
        script('inference', monkeypatch, *flags, *extra)
        outputs.append(capsys.readouterr().out)
    assert len(set(outputs)) == 3


@pytest.mark.parametrize(
    ('flags', 'sentence'),
    [
        (['--input', 'x', '--best_of=4'], '--best_of above 1 and --reward_model belong together'),
        (['--output', 'x.jsonl'], '--output needs --input'),
        (['--input', 'nowhere.jsonl'], 'nowhere.jsonl'),
    ],
)
def test_mistakes(monkeypatch, capsys, folder, flags, sentence):
    with pytest.raises(SystemExit) as stop:
        script('inference', monkeypatch, '--pretrain', str(folder / 'actor'), *flags)
    assert stop.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert sentence in lines[0]


@pytest.mark.system
def test_inference_under_torchrun(monkeypatch, capsys, folder, tmp_path):
    path = tmp_path / 'in.txt'
    path.write_text('\n'.join(row['prompt'] for row in demo_world.demo_prompts(5)))
    flags = ['--pretrain', str(folder / 'actor'), '--input', str(path), '--max_new_tokens=6']
    flags += ['--best_of=2', '--reward_model', str(folder / 'rm')]
    script('inference', monkeypatch, *flags, '--output', str(tmp_path / 'one.jsonl'))
    command = [
        sys.executable,
        '-m',
        'torch.distributed.run',
        '--nproc-per-node=2',
        f'--master-port={free_port()}',
        str(ROOT / 'examples' / 'inference.py'),
        *flags,
        '--strategy=fsdp',
        '--output',
        str(tmp_path / 'two.jsonl'),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    one, two = (
        [json.loads(line) for line in (tmp_path / f'{n}.jsonl').read_text().splitlines()] for n in ('one', 'two')
    )
    assert [(r['prompt'], r['response']) for r in one] == [(r['prompt'], r['response']) for r in two]
    assert done.stdout.count('5 responses written to') == 1


@pytest.mark.parametrize('flags', [[], ['--lora_rank=2'], ['--strategy=naive', '--precision=bf16']])
def test_dummy_runs(monkeypatch, capsys, flags):
    small = ['--num_episodes=1', '--max_timesteps=2', '--update_timesteps=1', '--prompt_tokens=4', '--max_new_tokens=4']
    script('train_dummy', monkeypatch, *small, *flags)
    assert '16 samples in ' in capsys.readouterr().out


@pytest.mark.system
def test_dummy_under_torchrun():
    command = [
        sys.executable,
        '-m',
        'torch.distributed.run',
        '--nproc-per-node=2',
        f'--master-port={free_port()}',
        str(ROOT / 'examples' / 'train_dummy.py'),
        '--strategy=fsdp',
        '--num_episodes=1',
        '--max_timesteps=1',
        '--update_timesteps=1',
        '--prompt_tokens=4',
        '--max_new_tokens=4',
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert '8 samples in ' in done.stdout
    assert 'on 2 process(es)' in done.stdout
