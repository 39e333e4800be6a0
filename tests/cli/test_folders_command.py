"""The commands over folders of several kinds: the same text from each, and the same line where one is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from command_line import call
from safetensors.torch import load

from chatgpt.launch import demo_world, quickstart
from chatgpt.nn import GPTActor
from chatgpt.plan.__main__ import main as planner


@pytest.fixture(scope='module')
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One GPT-2 in several folders, and some that are wrong."""
    root = tmp_path_factory.mktemp('folders')
    torch.manual_seed(0)
    actor = GPTActor(config=demo_world.demo_config())
    with torch.no_grad():  # numbers that 16 bits hold
        for parameter in actor.parameters():
            parameter.copy_(parameter.bfloat16())
    actor.save_pretrained(root / 'plain', tokenizer=demo_world.demo_tokenizer())
    actor.save_pretrained(root / 'bf16', tokenizer=demo_world.demo_tokenizer(), dtype=torch.bfloat16)
    for name in ('pickled', 'quantized', 'code', 'empty'):
        shutil.copytree(root / 'plain', root / name)
    weights = root / 'pickled' / 'model.safetensors'
    torch.save(load(weights.read_bytes()), root / 'pickled' / 'pytorch_model.bin')
    weights.unlink()
    (root / 'empty' / 'model.safetensors').unlink()
    for name, settings in (
        ('quantized', {'quantization_config': {'quant_method': 'gptq', 'bits': 4}}),
        ('code', {'model_type': 'own_model', 'auto_map': {'AutoConfig': 'own.Config'}}),
    ):
        path = root / name / 'config.json'
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    (root / 'prompts.jsonl').write_text('{"prompt": "one day a fox"}\n')
    (root / 'examples.jsonl').write_text('{"prompt": "one day", "response": " a fox"}\n' * 4)
    (root / 'score.py').write_text('def words(prompts, responses, **columns):\n    return [1.0 for _ in responses]\n')
    return root


@pytest.mark.parametrize('name', ['bf16', 'pickled'])
def test_each_folder_writes_the_same_text(name, monkeypatch, capsys, folders):
    told = []
    for folder in ('plain', name):
        assert (
            call(monkeypatch, 'generate', str(folders / folder), 'one day a fox', '--seed=1', '--max_new_tokens=8') == 0
        )
        told.append(capsys.readouterr().out)
    assert told[0] == told[1] and told[0].startswith('> one day a fox\n')


SAID = {
    'quantized': 'holds quantized weights (gptq)',
    'code': 'brings code of its own (auto_map in config.json)',
    'empty': 'it holds no weights: neither model.safetensors nor pytorch_model.bin',
}


@pytest.mark.parametrize(
    ('word', 'name'), [('generate', 'quantized'), ('generate', 'code'), ('evaluate', 'empty'), ('sft', 'quantized')]
)
def test_each_command_refuses_in_the_same_words(word, name, monkeypatch, capsys, folders, tmp_path):
    words = {
        'generate': [str(folders / name), 'one day'],
        'evaluate': [str(folders / name), f'{folders}/prompts.jsonl', f'--reward_fn={folders}/score.py:words'],
        'sft': [f'{folders}/examples.jsonl', f'--pretrain={folders / name}', f'--save_path={tmp_path}/run'],
    }[word]
    assert call(monkeypatch, word, *words) != 0
    lines = [line for line in capsys.readouterr().err.splitlines() if SAID[name] in line]
    assert len(lines) == 1


def test_the_planner_and_one_call_in_python(capsys, folders):
    assert planner([str(folders / 'quantized'), '--cpu', '--host_memory=1GiB']) == 2
    assert SAID['quantized'] in capsys.readouterr().err
    assert planner([str(folders / 'empty'), '--cpu', '--host_memory=8GiB']) == 0  # it needs no weights
    with pytest.raises(ValueError, match='holds quantized weights'):
        quickstart.train(model=str(folders / 'quantized'), samples=['one day a fox'] * 4)
