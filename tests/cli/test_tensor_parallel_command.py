"""`--tensor_parallel` on the command line: what does not go with it is one sentence, before anything is loaded."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from command_line import call
from transformers import CodeGenConfig

from chatgpt.nn import AutoActor, AutoRM
from chatgpt.testing import byte_tokenizer
from chatgpt.testing.fakes import tiny_config

NO_PLAN = ' has no plan for it in transformers'


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp('models')
    torch.manual_seed(0)
    llama = tiny_config('llama', heads=4, vocab_size=259, positions=64)
    codegen = CodeGenConfig(vocab_size=259, n_embd=32, n_layer=1, n_head=4, n_positions=64, rotary_dim=4)
    AutoActor(config=codegen).save_pretrained(folder / 'codegen', tokenizer=byte_tokenizer())
    AutoActor(config=llama).save_pretrained(folder / 'llama', tokenizer=byte_tokenizer())
    AutoRM(config=codegen).save_pretrained(folder / 'rm', tokenizer=byte_tokenizer())
    (folder / 'prompts.jsonl').write_text(json.dumps({'prompt': 'one day'}) + '\n')
    (folder / 'own.py').write_text('def score(prompts, responses):\n    return [0.0] * len(responses)\n')
    return folder


@pytest.fixture
def told(monkeypatch, capsys, folder, tmp_path):
    """What `ppo` with these flags says; it must be one line, and nothing may be left of the run."""

    def of(*flags: str, method: str = 'ppo', processes: int = 1) -> str:
        def loaded(*_, **__):
            raise AssertionError('weights were loaded')

        monkeypatch.setenv('WORLD_SIZE', str(processes))
        for name in ('chatgpt.launch.recipes.start_of', 'chatgpt.launch.recipes.strategy_of'):
            monkeypatch.setattr(name, loaded)
        save_path = tmp_path / 'run'
        assert call(monkeypatch, method, *flags, '--tensor_parallel=2', f'--save_path={save_path}') == 2
        assert not save_path.exists()
        (line,) = capsys.readouterr().err.splitlines()
        return line

    return of


def start(folder: Path, model: str = 'llama') -> list[str]:
    return [str(folder / 'prompts.jsonl'), f'--pretrain={folder / model}', f'--reward_fn={folder / "own.py"}:score']


def test_models_that_cannot_be_cut_are_told_before_weights_are_read(told, folder):
    fsdp = '--strategy=fsdp'
    assert NO_PLAN in told(*start(folder, 'codegen'), fsdp, processes=2)
    data, model, _ = start(folder)
    assert NO_PLAN in told(data, model, f'--reward_model={folder / "rm"}', fsdp, processes=2)
    assert NO_PLAN in told(f'--pretrain={folder / "codegen"}', fsdp, method='sft', processes=2)


def test_an_evaluation_in_an_environment(monkeypatch, capsys, folder):
    flags = ['--environment=games:countdown', '--strategy=fsdp', '--tensor_parallel=2']
    assert call(monkeypatch, 'evaluate', str(folder / 'llama'), *flags) == 2
    assert 'error: --environment does not go with --tensor_parallel: leave one of them out' in capsys.readouterr().err


def test_a_chat_is_one_process(monkeypatch, capsys, folder):
    of_two = SimpleNamespace(world_size=1, processes=SimpleNamespace(world_size=2), is_rank_0=True)
    monkeypatch.setattr('chatgpt.launch.cli.generate.strategy_of', lambda args: nullcontext(of_two))
    assert call(monkeypatch, 'chat', str(folder / 'llama'), '--strategy=fsdp', '--tensor_parallel=2') == 2
    told = capsys.readouterr().err.splitlines()
    assert told == ['error: a chat is one process: start it with python, or give --input']
