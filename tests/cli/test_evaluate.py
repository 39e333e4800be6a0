"""evaluate with an environment and with reward functions of several signatures: numbers by hand, output, mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from command_line import call

from chatgpt.nn import GPTActor
from chatgpt.testing import byte_tokenizer
from chatgpt.testing.fakes import tiny_config

OWN = '''
class Three:
    """Three turns, each worth half a point; the second turn of a bad one raises."""

    def __init__(self, bad=False):
        self.bad, self.turns = bad, 0

    def reset(self, seed, word='none', **columns):
        self.won = word != 'none'
        return f'say {word}:'

    def step(self, response):
        self.turns += 1
        if self.bad and self.turns == 2:
            raise RuntimeError('not today')
        over = self.turns == 3
        return f'[{self.turns}]', 0.5, over, False, {'success': over and self.won}
'''

REWARDS = """

def right(prompts, responses, answer, **k):
    return [float(a) for a in answer]

def theirs(completions, answer, **kwargs):
    return [float(a) + (p.startswith('p') and not c.startswith('p')) for c, a, p in
            zip(completions, answer, kwargs['prompts'])]
"""


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp('models')
    torch.manual_seed(0)
    config = tiny_config('gpt2', vocab_size=259, positions=64)
    GPTActor(config=config).save_pretrained(folder / 'actor', tokenizer=byte_tokenizer())
    (folder / 'own.py').write_text(OWN)
    (folder / 'r.py').write_text(REWARDS)
    rows = [{'prompt': f'p{i} ', 'answer': i} for i in range(4)]
    (folder / 'answers.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    rows = [{'prompt': f'p{i} ', 'word': word} for i, word in enumerate(('none', 'a', 'b', 'c'))]
    (folder / 'prompts.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return folder


def numbers_of(out: str) -> dict[str, float]:
    (line,) = [line for line in out.splitlines() if line.startswith('{')]
    return json.loads(line)


def test_episodes_of_an_environment_are_counted(monkeypatch, capsys, folder, tmp_path):
    out = tmp_path / 'out.jsonl'
    own = f'--environment={folder}/own.py:Three'
    more = ['--max_turn_tokens=2', '--max_new_tokens=20', f'--output={out}', '--episodes=5']
    out.write_text('of an earlier call')
    assert call(monkeypatch, 'evaluate', str(folder / 'actor'), own, *more) == 0
    got = numbers_of(capsys.readouterr().out)
    assert (got['score_mean'], got['score_std'], got['num_turns_mean'], got['failed_share']) == (1.5, 0.0, 3.0, 0.0)
    assert got['success_share'] == 0.0 and got['ended'] == 1.0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 5
    for row in rows:
        assert (row['prompt'], row['score'], row['end']) == ('say none:', 1.5, 'terminated')
        assert [part.get('observation') for part in row['parts']] == [None, '[1]', None, '[2]', None]
        assert [part['rewards'] for part in row['parts'] if 'turn' in part] == [{'reward': 0.5}] * 3


def test_with_prompts_and_a_reward_of_another(monkeypatch, capsys, folder, tmp_path):
    words = [str(folder / 'actor'), str(folder / 'prompts.jsonl'), f'--environment={folder}/own.py:Three']
    more = ['--max_turn_tokens=1', '--max_new_tokens=12']
    assert call(monkeypatch, 'evaluate', *words, *more) == 0
    assert numbers_of(capsys.readouterr().out)['success_share'] == 0.75
    (folder / 'score.py').write_text('def twos(prompts, responses, word=()):\n    return [2.0 for _ in word]\n')
    assert call(monkeypatch, 'evaluate', *words, *more, f'--reward_fn={folder}/score.py:twos') == 0
    got = capsys.readouterr()
    assert numbers_of(got.out)['score_mean'] == 2.0
    assert f"scored by {folder}/score.py:twos in place of the environment's rewards" in got.err


def test_failures_and_the_limit_of_turns_are_reported(monkeypatch, capsys, folder):
    words = [str(folder / 'actor'), f'--environment={folder}/own.py:Three', '--episodes=4', '--max_turn_tokens=1']
    assert call(monkeypatch, 'evaluate', *words, '--environment_options={bad: true}') == 0
    got = numbers_of(capsys.readouterr().out)
    assert (got['failed_share'], got['score_mean'], got['num_turns_mean']) == (1.0, 0.5, 2.0)
    assert call(monkeypatch, 'evaluate', *words, '--max_turns=2') == 0
    captured = capsys.readouterr().out
    got = numbers_of(captured)
    assert (got['ended'], got['score_mean'], got['num_turns_mean']) == (0.0, 1.0, 2.0) and ' turns ' in captured


@pytest.mark.parametrize(('name', 'mean'), [('right', 1.5), ('theirs', 2.5)])
def test_columns_and_texts_go_by_name(monkeypatch, capsys, folder, name, mean):
    words = [f'{folder}/actor', f'{folder}/answers.jsonl', '--max_new_tokens=2', f'--reward_fn={folder}/r.py:{name}']
    assert call(monkeypatch, 'evaluate', *words) == 0
    assert f'"score_mean": {mean}' in capsys.readouterr().out


def test_a_file_of_unknown_kind_is_not_taken_for_a_prompt(monkeypatch, capsys, folder, tmp_path):
    path = tmp_path / 'prompts.jsnl'
    path.write_text('{"prompt": "a"}')
    words = [str(folder / 'actor'), str(path), f'--reward_fn={folder}/rewards.py:right', '--max_new_tokens=2']
    assert call(monkeypatch, 'evaluate', *words) == 2
    assert 'unknown kind of file' in capsys.readouterr().err


def test_prompts_in_a_column_of_another_name(monkeypatch, capsys, folder, tmp_path):
    rows = [{'frage': f'p{i} ', 'answer': i} for i in range(4)]
    (tmp_path / 'asked.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    model, asked = str(folder / 'actor'), str(tmp_path / 'asked.jsonl')
    reward = [f'--reward_fn={folder}/r.py:right', '--max_new_tokens=2']
    assert call(monkeypatch, 'evaluate', model, asked, *reward) == 2
    assert 'name the column of the prompt with --prompt_column\n' in capsys.readouterr().err
    assert call(monkeypatch, 'evaluate', model, asked, '--prompt_column=frage', *reward) == 0
    assert numbers_of(capsys.readouterr().out)['score_mean'] == 1.5
    own = ['--prompt_column=frage', '--max_new_tokens=2', f'--output={tmp_path}/out.jsonl']
    assert call(monkeypatch, 'generate', model, asked, *own) == 0
    written = [json.loads(line)['prompt'] for line in (tmp_path / 'out.jsonl').read_text().splitlines()]
    assert written == [row['frage'] for row in rows]
    for words in (['generate', model, 'a prompt'], ['evaluate', model, f'--environment={folder}/own.py:Three']):
        assert call(monkeypatch, *words, '--prompt_column=frage') == 2
        assert '--prompt_column frage is of a file of prompts' in capsys.readouterr().err


def test_conversations_are_written_as_they_were_given(monkeypatch, capsys, folder, tmp_path):
    turns = [{'role': 'user', 'content': 'one day'}]
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path / 'words')
    (tmp_path / 'chats.jsonl').write_text(json.dumps({'prompt': turns, 'answer': 1}) + '\n')
    words = [
        str(folder / 'actor'),
        str(tmp_path / 'chats.jsonl'),
        f'--tokenizer={tmp_path}/words',
        '--max_new_tokens=2',
    ]
    found = []
    for word, *own in (['evaluate', f'--reward_fn={folder}/r.py:right'], ['generate', '--greedy']):
        assert call(monkeypatch, word, *words, *own, f'--output={tmp_path}/out.jsonl') == 0
        found.append(json.loads((tmp_path / 'out.jsonl').read_text()))
    assert found[0]['prompt'] == found[1]['prompt'] == turns and 'last_turn' not in found[0]
    assert found[0]['response'] == found[1]['response']
