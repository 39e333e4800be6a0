"""`compare`: responses are generated once and kept, differing settings are named, the export can be trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from command_line import call

from chatgpt.data import load_preferences
from chatgpt.launch import demo_world
from chatgpt.monitor.compare.store import Store
from chatgpt.nn import GPTRM, GPTActor


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp('models')
    for seed, name in enumerate(('first', 'second')):
        torch.manual_seed(seed)
        GPTActor(config=demo_world.demo_config()).save_pretrained(folder / name, tokenizer=demo_world.demo_tokenizer())
    GPTRM(config=demo_world.demo_config()).save_pretrained(folder / 'rm', tokenizer=demo_world.demo_tokenizer())
    rows = [{'prompt': f'one day a {animal}', 'bonus': 1} for animal in ('fox', 'cat', 'dog', 'duck', 'bear')]
    write(folder / 'prompts.jsonl', rows)
    return folder


@pytest.fixture
def compare(monkeypatch, folder, tmp_path):
    """Runs the command on tmp_path/judged.sqlite in the folder of the models, without anyone using the page."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr('chatgpt.launch.cli.compare.serve', lambda app, host, port: None)
    return lambda *words: call(monkeypatch, 'compare', f'--db={tmp_path}/judged.sqlite', *words)


def write(path: Path, rows: list[dict]) -> str:
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return str(path)


def answers(tmp_path: Path) -> list[tuple[str, str]]:
    with Store(tmp_path / 'judged.sqlite', create=False) as store:
        return list(zip(store.answers('a'), store.answers('b'), strict=True))


def judge(tmp_path: Path, best, people: int = 1) -> None:
    """Every person prefers the response with the higher `best`."""
    with Store(tmp_path / 'judged.sqlite', create=False) as store:
        for number in range(people):
            person = store.join(f'person {number}')
            while (pair := store.next_pair(person)) is not None:
                store.judge(person, pair.id, 'left' if best(pair.left) > best(pair.right) else 'right')


TWO = ['--model=first', '--model=second', '--prompts=prompts.jsonl', '--max_new_tokens=6']


def test_two_models_answer_as_generate_does(compare, monkeypatch, capsys, folder, tmp_path):
    assert compare(*TWO, '--seed=3') == 0
    assert '0 of 5 judgements, of 0 pairs by nobody' in capsys.readouterr().out
    theirs = []
    for model, seed in (('first', 3), ('second', 4)):
        out = tmp_path / f'{model}.jsonl'
        words = [model, 'prompts.jsonl', '--max_new_tokens=6', f'--seed={seed}', f'--output={out}']
        assert call(monkeypatch, 'generate', *words) == 0
        theirs.append([json.loads(line)['response'] for line in out.read_text().splitlines()])
    made = answers(tmp_path)
    assert made == list(zip(*theirs, strict=True)) and all(a != b for a, b in made)
    with Store(tmp_path / 'judged.sqlite') as store:
        assert store.settings['names'] == ['first', 'second']
        assert store.records()[0] == {'prompt': 'one day a fox'}
    write(folder / 'fewer.jsonl', [{'prompt': 'one day a fox'}])
    write(folder / 'made.jsonl', [{'prompt': 'one day a fox', 'response1': 'a', 'response2': 'b'}])
    for words, complaint in (  # other settings for the same file
        (['--model=second', *TWO[1:]], "was made with models ['first', 'second'], and now it is ['second', 'second']"),
        ([*TWO[:2], '--prompts=fewer.jsonl', TWO[3]], 'was made with prompts 5 with sha256 '),
        ([*TWO, '--temperature=0.5'], 'was made with temperature 0.7, and now it is 0.5: give another --db'),
        (['--answers=made.jsonl'], 'was made with answers None, and now it is 1 with sha256 '),
    ):
        assert compare(*words, '--seed=3') == 2 and complaint in capsys.readouterr().err
    (tmp_path / 'judged.sqlite').unlink()
    assert compare(*TWO[:1], *TWO[2:]) == 0  # two samples of one model
    assert sum(a != b for a, b in answers(tmp_path)) >= 4


def test_prompts_of_a_text_file_are_its_lines(compare, folder, tmp_path):
    (folder / 'prompts.TXT').write_bytes('\ufeffone day a fox\n\none day a cat\n'.encode())
    assert compare(*TWO[:2], '--prompts=prompts.TXT', TWO[3]) == 0
    with Store(tmp_path / 'judged.sqlite') as store:
        assert store.records() == [{'prompt': 'one day a fox'}, {'prompt': 'one day a cat'}]


def test_prompts_have_other_columns_of_any_kind_and_a_name_that_is_given(compare, folder, tmp_path):
    write(folder / 'asked.jsonl', [{'question': 'one day a fox', 'answer': 7}, {'question': 'a cat', 'answer': 8}])
    for words in ([], ['--prompt_column=question']):
        assert compare(*TWO[:2], '--prompts=asked.jsonl', TWO[3], *words) == 0
        with Store(tmp_path / 'judged.sqlite') as store:
            assert store.records() == [{'prompt': 'one day a fox'}, {'prompt': 'a cat'}]


def test_answers_are_made_once(compare, monkeypatch, tmp_path):
    """A start after an interruption between the models generates only the second; a third generates nothing."""
    from chatgpt.launch.cli import compare as word

    made, generate = [], word._generate

    def counted(args, side, records):
        if side == 1 and len(made) == 1:
            made.append('cut')
            raise KeyboardInterrupt
        made.append(side)
        return generate(args, side, records)

    monkeypatch.setattr(word, '_generate', counted)
    assert compare(*TWO) == 130
    assert compare() == 2  # a file without all answers needs the models again
    assert compare(*TWO) == 0
    first = answers(tmp_path)
    assert compare(*TWO) == compare() == compare('--annotators_per_pair=3') == 0
    assert made == [0, 'cut', 1] and answers(tmp_path) == first
    with Store(tmp_path / 'judged.sqlite') as store:
        assert store.annotators_per_pair == 3


@pytest.mark.parametrize(
    ('words', 'complaint'),
    [
        ([], 'judged.sqlite yet: give --model and --prompts, or --answers'),
        (['--model=first'], '--model and --prompts belong together'),
        (['--model=first', '--prompts=prompts.jsonl', '--greedy'], '--greedy gives one and the same answer twice'),
        ([*TWO, '--annotators_per_pair=0'], '--annotators_per_pair 0 must be at least 1'),
        ([*TWO, '--answers=x'], '--answers has prompts and answers'),
        ([*TWO[:2], '--prompts=nothing.txt'], '--prompts nothing.txt: there is no such file'),
        (['--export=out.jsonl'], 'there is no database'),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(compare, capsys, tmp_path, words, complaint):
    assert compare(*words) == 2
    err = capsys.readouterr().err
    assert complaint in err and err.count('\n') == 1
    assert list(tmp_path.iterdir()) == []


def test_answers_that_are_made_already(compare, capsys, folder, tmp_path):
    prompts = [
        {'prompt': 'say hi'},
        {'messages': [{'role': 'user', 'content': 'count'}]},
        {'instruction': 'add', 'input': '1 2'},
    ]
    left = write(tmp_path / 'left.jsonl', [p | {'response': f'l{i}'} for i, p in enumerate(prompts)])
    right = write(tmp_path / 'right.jsonl', [p | {'response': f'r{i}'} for i, p in enumerate(prompts)])
    assert compare(f'--answers={left}', f'--answers={right}') == 0
    assert answers(tmp_path) == [('l0', 'r0'), ('l1', 'r1'), ('l2', 'r2')]
    with Store(tmp_path / 'judged.sqlite') as store:
        assert store.records() == [{'prompt': 'say hi'}, {'prompt': [{'role': 'user', 'content': 'count'}]}, prompts[2]]
        assert [row[0] for row in store._db.execute('SELECT shown FROM pairs')] == ['say hi', 'count', 'add\n\n1 2']
    assert compare(f'--answers={right}', f'--answers={left}') == 2
    assert 'was made with answers' in capsys.readouterr().err


def test_answers_that_do_not_go_together(compare, capsys, tmp_path):
    row = {'prompt': 'p', 'response': 'x'}
    for files, complaint in (
        ([[row]], 'line 1: response1 is missing, or no text'),
        ([[row], [{'prompt': 'q', 'response': 'y'}]], 'have different prompts'),
        ([[{'prompt': 'p', 'response1': 'x', 'response2': 'x'}]], 'are equal for every prompt'),
    ):
        paths = [write(tmp_path / f'{i}.jsonl', rows) for i, rows in enumerate(files)]
        assert compare(*(f'--answers={path}' for path in paths)) == 2 and complaint in capsys.readouterr().err


def test_the_reward_models_margins_are_those_of_its_training(compare, folder, tmp_path):
    from transformers import AutoModelForSequenceClassification

    assert compare(*TWO, '--reward_model=rm') == 0
    model = AutoModelForSequenceClassification.from_pretrained(folder / 'rm').eval()
    tokenizer = demo_world.demo_tokenizer()
    with Store(tmp_path / 'judged.sqlite') as store:
        margins = [row[0] for row in store._db.execute('SELECT margin FROM pairs ORDER BY id')]
        compared = 0
        for record, a, b, margin in zip(store.records(), store.answers('a'), store.answers('b'), margins, strict=True):
            if not (a.strip() and b.strip()):
                assert margin is None
                continue
            scores = []
            for text in (a, b):
                ids = tokenizer(f'{record["prompt"]} {text}')['input_ids'] + [tokenizer.eos_token_id]
                scores.append(float(model(torch.tensor([ids])).logits.detach()))
            assert margin == pytest.approx(scores[0] - scores[1], abs=1e-5)
            compared += 1
        assert compared >= 3
        person = store.join('Anna')
        known = [(abs(margin), number) for number, margin in enumerate(margins, 1) if margin is not None]
        assert store.next_pair(person).id == min(known)[1]


def test_what_is_exported_is_what_training_loads(compare, monkeypatch, capsys, tmp_path):
    assert compare(*TWO, '--annotators_per_pair=2') == 0
    out = tmp_path / 'preferences.jsonl'
    assert compare(f'--export={out}') == 2
    assert 'has no pair on which people prefer one answer: 0 were judged' in capsys.readouterr().err
    judge(tmp_path, lambda text: (len(text), text), people=2)
    assert compare(f'--export={out}') == 0
    assert f'{out}: 5 preferences' in capsys.readouterr().out
    (db,) = tmp_path.glob('*.sqlite')
    before = db.read_bytes()
    assert compare(f'--export={db}') == 2 and db.read_bytes() == before  # it holds the judgements
    assert 'is the file of --db' in capsys.readouterr().err
    tokenizer = demo_world.demo_tokenizer()
    found, _ = load_preferences(str(out), tokenizer)
    by_prompt = {
        f'one day a {animal}': pair
        for animal, pair in zip(('fox', 'cat', 'dog', 'duck', 'bear'), answers(tmp_path), strict=True)
    }
    assert len(found) == 5
    for pair in found:
        prompt = tokenizer.decode(pair.prompt_ids, skip_special_tokens=True)
        responses = [tokenizer.decode(ids, skip_special_tokens=True) for ids in pair.responses]
        assert set(responses) == {text.strip() for text in by_prompt[prompt]}
        assert (len(responses[0]), responses[0]) > (len(responses[1]), responses[1])
    for method, save in (('reward-model', 'reward_model'), ('dpo', 'actor')):
        words = [str(out), '--pretrain=first', '--max_steps=1', f'--save_path={tmp_path}/{method}']
        assert call(monkeypatch, method, *words) == 0
        assert (tmp_path / method / save / 'config.json').is_file()


def test_conversations_are_exported_as_conversations(compare, tmp_path):
    """So training formats them with the template with which the responses were generated."""
    rows = [{'prompt': 'one day a fox'}, {'messages': [{'role': 'user', 'content': 'one day a cat'}]}]
    prompts = write(tmp_path / 'chats.jsonl', rows)
    tokenizer = demo_world.demo_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    GPTActor(config=demo_world.demo_config()).save_pretrained(tmp_path / 'chat', tokenizer=tokenizer)
    assert compare('--model=first', f'--prompts={prompts}', '--apply_chat_template') == 2  # it has no template
    assert compare(f'--model={tmp_path}/chat', f'--prompts={prompts}', '--apply_chat_template') == 0
    judge(tmp_path, hash)
    out = tmp_path / 'preferences.jsonl'
    assert compare(f'--export={out}') == 0
    exported = [json.loads(line)['prompt'] for line in out.read_text().splitlines()]
    assert exported == [[{'role': 'user', 'content': f'one day a {animal}'}] for animal in ('fox', 'cat')]
    assert len(load_preferences(str(out), demo_world.demo_tokenizer())[0]) == 2
