"""Plain text and models with a chat template: one rule for training, generate, evaluate, compare and chat; the sampling
parameters that these print and use."""

from __future__ import annotations

import argparse
import io
import json
import re
import warnings
from typing import Any

import pytest
import torch
from command_line import call
from transformers import AutoTokenizer, GenerationConfig

import chatgpt
from chatgpt.data.formats import text_choice
from chatgpt.launch.cli.generate import sampling_settings
from chatgpt.monitor.report.rollouts import page_row
from chatgpt.monitor.run_folder import RunRecord
from chatgpt.monitor.run_folder.rollouts import read_rollouts
from chatgpt.nn import GPTActor
from chatgpt.rollout import LocalEngine
from chatgpt.testing import byte_tokenizer, tiny_config

TEMPLATE = (
    "{{ '<s>be brief' }}{% for m in messages %}{{ '<' + m['role'][0] + '>' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<a>' }}{% endif %}"
)
TEXTS = ['hi', 'two and two', 'a colour']
TURNS = [f'<s>be brief<u>{text}<a>' for text in TEXTS]
TINY = (
    *('--num_episodes=1', '--max_timesteps=1', '--update_timesteps=1', '--experience_batch_size=3'),
    *('--num_samples_per_prompt=2', '--train_batch_size=6', '--max_epochs=1', '--max_new_tokens=3'),
)
WARNING = '--apply_chat_template (apply_chat_template=True)'
TURN, AS_IS = '--apply_chat_template', '--no_apply_chat_template'


def save(folder, template):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    torch.manual_seed(0)
    GPTActor(config=tiny_config('gpt2', vocab_size=259, hidden=16, positions=256)).save_pretrained(folder, tokenizer)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp('chat_models')
    save(folder / 'chat', TEMPLATE)
    save(folder / 'plain', None)
    save(folder / 'deaf', '<s>You are a helpful assistant.<a>')
    (folder / 'prompts.jsonl').write_text(''.join(json.dumps({'prompt': text}) + '\n' for text in TEXTS))
    (folder / 'score.py').write_text(
        'import json, pathlib\n\n\ndef score(prompts, responses, **columns):\n'
        "    pathlib.Path(__file__).with_name('seen.json').write_text(json.dumps(sorted(set(prompts))))\n"
        '    return [float(len(r)) for r in responses]\n'
    )
    return folder


def train(monkeypatch, folder, save_path, *flags, method='grpo', model='chat'):
    words = [f'{folder}/prompts.jsonl', f'--pretrain={folder}/{model}', f'--reward_fn={folder}/score.py:score']
    return call(monkeypatch, method, *words, f'--save_path={save_path}', *TINY, *flags)


def num_warnings(recwarn):
    """Returns the number of warnings that name the flag since the last call."""
    number = sum(WARNING in str(warning.message) for warning in recwarn)
    recwarn.clear()
    return number


def seen(folder):
    return json.loads((folder / 'seen.json').read_text())


@pytest.mark.parametrize(('flags', 'texts', 'choice', 'number'), [([], TEXTS, False, 1), ([TURN], TURNS, True, 0)])
def test_a_run_chooses_and_what_follows_it_does_the_same(
    monkeypatch, capsys, recwarn, folder, tmp_path, flags, texts, choice, number
):
    assert train(monkeypatch, folder, tmp_path / 'run', *flags, '--checkpoint_interval=1') == 0
    out, actor = capsys.readouterr().out, str(tmp_path / 'run' / 'actor')
    assert seen(folder) == sorted(texts) and num_warnings(recwarn) == number
    assert f'{"chat" if choice else "generate"} {actor}' in out.splitlines()[-1]
    record = RunRecord.read(tmp_path / 'run')
    assert record.settings['apply_chat_template'] is record.data['apply_chat_template'] is choice
    assert text_choice(AutoTokenizer.from_pretrained(actor)) is choice

    assert call(monkeypatch, 'generate', actor, 'hi', '--max_new_tokens=2', f'--output={tmp_path}/out.jsonl') == 0
    asked = json.loads((tmp_path / 'out.jsonl').read_text())['prompt']
    assert asked == ([{'role': 'user', 'content': 'hi'}] if choice else 'hi')
    scored = [actor, f'{folder}/prompts.jsonl', f'--reward_fn={folder}/score.py:score', '--max_new_tokens=2']
    assert call(monkeypatch, 'evaluate', *scored) == 0 and seen(folder) == sorted(texts)
    drawn: list[str] = []
    generate = LocalEngine.generate
    monkeypatch.setattr('chatgpt.launch.cli.compare.serve', lambda *given, **more: None)

    def noted(self, call):
        drawn.extend(byte_tokenizer().decode(p.ids) for p in call.prompts)
        return generate(self, call)

    monkeypatch.setattr(LocalEngine, 'generate', noted)
    sides = [f'--model={actor}', f'--prompts={folder}/prompts.jsonl', f'--db={tmp_path}/judged.sqlite']
    assert call(monkeypatch, 'compare', *sides, '--max_new_tokens=2') == 0 and set(drawn) == set(texts)
    monkeypatch.setattr(LocalEngine, 'generate', generate)
    other = AS_IS if choice else TURN
    assert call(monkeypatch, 'evaluate', *scored, other) == 0 and seen(folder) == sorted(TEXTS if choice else TURNS)
    assert train(monkeypatch, folder, tmp_path / 'next', f'--pretrain={actor}') == 0 and seen(folder) == sorted(texts)
    again = ('--resume=auto', '--num_episodes=2')
    assert train(monkeypatch, folder, tmp_path / 'run', *again) == 0 and seen(folder) == sorted(texts)
    assert num_warnings(recwarn) == (not flags)  # of the resume, without a flag


@pytest.mark.parametrize(
    ('flags', 'asked'), [([], '<s>be brief<u>hi<a>'), ([TURN], '<s>be brief<u>hi<a>'), ([AS_IS], 'hi')]
)
def test_a_chat_follows_too(monkeypatch, capsys, recwarn, folder, tmp_path, flags, asked):
    """The flag decides, without one the choice saved in the model's folder."""
    import chatgpt.rollout

    given = []
    monkeypatch.setattr(
        chatgpt.rollout, 'stream_tokens', lambda policy, ids, *rest, **more: given.append(ids.tolist()) or iter([97])
    )
    monkeypatch.setattr('sys.stdin', io.StringIO('hi\n'))
    assert call(monkeypatch, 'chat', f'{folder}/chat', '--max_new_tokens=2', *flags) == 0
    assert byte_tokenizer().decode(given[0]) == asked
    assert ('without its chat template' in capsys.readouterr().out) is (flags == [AS_IS])
    assert train(monkeypatch, folder, tmp_path / 'run', *flags) == 0 and num_warnings(recwarn) == (not flags)
    monkeypatch.setattr('sys.stdin', io.StringIO('hi\n'))
    assert call(monkeypatch, 'chat', f'{tmp_path}/run/actor', '--max_new_tokens=2') == 0
    assert byte_tokenizer().decode(given[-1]) == ('<s>be brief<u>hi<a>' if flags == [TURN] else 'hi')


@pytest.mark.parametrize(
    ('command', 'model'),
    [('generate', 'plain'), ('evaluate', 'plain'), ('compare', 'deaf'), ('grpo', 'plain'), ('grpo', 'deaf')],
)
def test_a_template_that_is_not_there_or_ignores_its_messages(monkeypatch, capsys, folder, tmp_path, command, model):
    monkeypatch.setattr('chatgpt.launch.cli.compare.serve', lambda *given, **more: None)
    monkeypatch.setattr('sys.stdin', io.StringIO('hi\n'))
    name, prompts, reward = f'{folder}/{model}', f'{folder}/prompts.jsonl', f'--reward_fn={folder}/score.py:score'
    words = {
        'generate': [name, 'hi'],
        'evaluate': [name, prompts, reward],
        'compare': [f'--model={name}', f'--prompts={prompts}', f'--db={tmp_path}/judged.sqlite'],
        'grpo': [prompts, f'--pretrain={name}', reward, f'--save_path={tmp_path}/run', *TINY],
    }[command]
    assert call(monkeypatch, command, *words, TURN) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert ('no chat template' if model == 'plain' else 'ignores the messages') in last


STORED = {'do_sample': True, 'temperature': 0.6, 'top_k': 20}


@pytest.mark.parametrize(
    ('stored', 'given', 'want', 'source'),
    [
        ({}, {}, {'temperature': 0.7, 'top_k': 0, 'top_p': 0.95}, 'temperature 0.7, top_p 0.95 (defaults'),
        ({}, {'temperature': 1.0}, {'temperature': 1.0, 'top_k': 0, 'top_p': 0.95}, '(flags, defaults'),
        (STORED, {}, {'temperature': 0.6, 'top_k': 20, 'top_p': 1.0}, "top_p 1 (the model's generation_config)"),
        (STORED, {'top_p': 0.5}, {'temperature': 0.6, 'top_k': 20, 'top_p': 0.5}, "(flags, the model's generation_"),
        ({'do_sample': False}, {}, {'do_sample': False}, 'likeliest tokens'),
        (
            {'do_sample': False},
            {'temperature': 0.5},
            {'temperature': 0.5, 'top_k': 0, 'top_p': 0.95},
            'temperature 0.5',
        ),
        ({'do_sample': False}, {'best_of': 4}, {'temperature': 0.7, 'top_k': 0, 'top_p': 0.95}, 'temperature 0.7'),
    ],
)
def test_flags_win_over_what_is_stored_and_that_over_the_defaults(stored, given, want, source):
    unset = {'greedy': False, 'temperature': None, 'top_k': None, 'top_p': None, 'best_of': 1}
    args = argparse.Namespace(**unset | given)
    model = argparse.Namespace(model=argparse.Namespace(generation_config=GenerationConfig(**stored)))
    drawing, line = sampling_settings(args, model)
    assert drawing == want and source in line


def test_tables_show_the_last_turn_and_files_and_pages_have_the_whole(monkeypatch, capsys, folder, tmp_path):
    assert train(monkeypatch, folder, tmp_path / 'run', TURN, f'--validation_file={folder}/prompts.jsonl') == 2
    other = tmp_path / 'eval.jsonl'
    other.write_text(json.dumps({'prompt': 'and now'}) + '\n')
    assert train(monkeypatch, folder, tmp_path / 'run', TURN, f'--validation_file={other}') == 0
    shown = capsys.readouterr().out.split('conversations read')[1].partition('\n')[2]
    assert 'be brief' not in shown and 'and now' in shown and any(text in shown for text in TEXTS)
    row = json.loads((tmp_path / 'run' / 'samples.jsonl').read_text().splitlines()[0])
    assert row['prompt'] == f'<s>be brief<u>{row["last_turn"]}<a>' and row['last_turn'] in TEXTS
    recorded = read_rollouts(tmp_path / 'run')[0]
    assert recorded['prompt'] == f'<s>be brief<u>{recorded["last_turn"]}<a>'
    assert page_row(recorded)['last_turn'] == recorded['last_turn'] in TEXTS
    assert 'last_turn' not in page_row(recorded | {'last_turn': None})
    page = (tmp_path / 'run' / 'report.html').read_text()
    assert '<details><summary class="text prompt" dir="auto">and now</summary>' in page  # opens the conversation
    assert '&lt;s&gt;be brief&lt;u&gt;and now&lt;a&gt;' in page


def test_texts_to_evaluate_on_do_not_choose_for_a_model_trained_on_messages(monkeypatch, capsys, folder, tmp_path):
    rows = [{'prompt': [{'role': 'user', 'content': text}]} for text in TEXTS]
    (tmp_path / 'talks.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    small: dict[str, Any] = dict(
        flag.lstrip('-').split('=') for flag in TINY if not re.search('episodes|timesteps', flag)
    )
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        words = ['grpo', f'{tmp_path}/talks.jsonl', f'--pretrain={folder}/chat', f'--reward_fn={folder}/score.py:score']
        options = [f'--validation_file={folder}/prompts.jsonl', f'--save_path={tmp_path}/run']
        assert call(monkeypatch, *words, *options, *TINY) == 0
        assert f'chatgpt chat {tmp_path}/run/actor' in capsys.readouterr().out
        small |= {'prompts': rows, 'eval_prompts': ['and now'], 'num_timesteps': 1}
        small |= {'save_path': tmp_path / 'actor', 'run_dir': tmp_path / 'second'}
        chatgpt.train(str(folder / 'chat'), reward_fn=lambda prompts, responses: [1.0] * len(prompts), **small)
    for saved in ('run/actor', 'actor'):
        assert text_choice(AutoTokenizer.from_pretrained(tmp_path / saved)) is True
    for run in ('run', 'second'):
        assert RunRecord.read(tmp_path / run).data['apply_chat_template'] is True
