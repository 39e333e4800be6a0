"""Runs that upload their model, by command, config file, `chatgpt.train` and trainer: errors before the run, and files
after a failed upload."""

from __future__ import annotations

import json
import os
import re
import shlex
import warnings
from pathlib import Path
from typing import Any

import pytest
from fake_hub import READ, use

import chatgpt
from chatgpt.launch.arguments import run_main
from chatgpt.launch.config_file import parse_run
from chatgpt.launch.recipes import execute
from chatgpt.launch.runs import run_class
from chatgpt.monitor.publish import PushError


def content(place: Path) -> dict[str, bytes]:
    return {str(p.relative_to(place)): p.read_bytes() for p in place.rglob('*') if p.is_file()}


def command(method: str, *flags: str) -> int:
    """Runs a command and returns its exit code."""
    cls = run_class(method)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            run_main(lambda: execute(parse_run(cls, description=None, argv=list(flags), method=method)))
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


SHORT = ('--max_steps', '1', '--train_batch_size', '4')


def test_a_run_of_the_command_uploads_its_model(hub, tmp_path, capsys):
    run = tmp_path / 'tales'
    flags = ('--save_path', str(run), '--push_to_hub', 'tales', '--hub_private', 'true', *SHORT)
    assert command('sft', *flags) == 0
    assert hub.files('me/tales') == content(run / 'actor') and hub.repos['me/tales']['private']
    names = set(hub.files('me/tales'))
    assert {'README.md', 'config.json', 'model.safetensors', 'tokenizer.json'} <= names
    assert not names & {'run.json', 'metrics.jsonl', 'config.yaml'}
    card = hub.files('me/tales')['README.md'].decode()
    assert "name = 'me/tales'" in card and str(tmp_path) not in card
    assert f'actor uploaded to {hub.address}/me/tales\n' in capsys.readouterr().out
    assert hub.asked.count('GET /api/whoami-v2') == 1 and hub.asked.index('GET /api/whoami-v2') == 0


def test_a_token_that_may_only_read_stops_a_run_before_it_begins(hub, tmp_path, monkeypatch, capsys):
    use(hub.address, monkeypatch, tmp_path, token=READ)
    assert command('dpo', '--save_path', str(tmp_path / 'run'), '--push_to_hub', 'tales', *SHORT) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: push_to_hub='tales'") and 'this token may not write' in error
    assert error.count('\n') == 1 and not (tmp_path / 'run').exists() and hub.repos == {}


def test_a_folder_with_other_files_is_not_uploaded(hub, tmp_path, capsys):
    place = tmp_path / 'place'
    place.mkdir()
    (place / 'README.md').write_text('# mine\n')
    (place / '.env').write_text('PASSWORD=1\n')
    flags = ('--save_path', str(tmp_path / 'run'), '--model_path', str(place), '--push_to_hub', 'tales', *SHORT)
    assert command('sft', *flags) == 2
    assert f'{place} holds .env: give a new folder' in capsys.readouterr().err and hub.asked == []
    own = tmp_path / 'run' / 'actor'  # the default of --model_path
    own.mkdir(parents=True)
    (own / 'notes.txt').write_text('x')
    assert command('sft', '--save_path', str(tmp_path / 'run'), '--push_to_hub', 'tales', *SHORT) == 2
    assert f'{own} holds notes.txt: give a new folder' in capsys.readouterr().err and hub.asked == []
    (place / '.env').unlink()
    assert command('sft', *flags) == 0
    assert hub.files('me/tales')['README.md'] == b'# mine\n'


def test_an_upload_that_fails_leaves_the_model_and_says_how(hub, tmp_path, capsys):
    run = tmp_path / 'tales'
    hub.dies_at = '/lfs/'
    assert command('sft', '--save_path', str(run), '--push_to_hub', 'me/tales', *SHORT) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    found = re.search(r'this uploads it later: (hf upload .*)$', error)
    assert error.startswith('error: the model could not be uploaded to me/tales (') and found is not None
    assert shlex.split(found[1]) == ['hf', 'upload', 'me/tales', str(run / 'actor'), '.']
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(run / 'actor')
    assert json.loads((run / 'run.json').read_text())['status'] == 'ended'


# ---------------------------------------------------------------- Python


def train(model_folder: Path, **options: Any) -> Any:
    samples = [(f'one day {i}', ' a fox .') for i in range(4)]
    return chatgpt.train(str(model_folder), samples=samples, max_epochs=1, train_batch_size=4, **options)


def test_train_uploads_without_a_folder(hub, tmp_path, model_folder, monkeypatch):
    monkeypatch.setenv('TMPDIR', str(tmp_path / 'tmp'))
    monkeypatch.setattr('tempfile.tempdir', None)
    (tmp_path / 'tmp').mkdir()
    train(model_folder, push_to_hub='tales')
    assert 'model.safetensors' in hub.files('me/tales') and b'# tales\n' in hub.files('me/tales')['README.md']
    assert list((tmp_path / 'tmp').iterdir()) == []
    hub.dies_at = '/lfs/'
    with pytest.raises(PushError, match='this uploads it later') as caught:
        train(model_folder, push_to_hub='tales')
    words = shlex.split(str(caught.value).partition('later: ')[2])
    assert (Path(words[3]) / 'model.safetensors').is_file() and Path(words[3]).is_relative_to(tmp_path / 'tmp')


def test_a_trainer_uploads_on_two_ranks(hub, tmp_path, model_folder):
    """Both ranks call it; one of them checks, writes and uploads."""
    from chatgpt.testing.processes import run_distributed

    answers = run_distributed(on_ranks, 2, str(model_folder), str(tmp_path), hub.address, init_group=True)
    assert answers[0] == answers[1]
    assert answers[0]['address'] == f'{hub.address}/me/tales' and answers[0]['left'] == []
    assert 'you' in answers[0]['error']
    assert hub.asked.count('GET /api/whoami-v2') == 2  # one for each call
    assert hub.files('me/tales', 'draft').keys() == answers[0]['files']
    assert hub.repos['me/tales']['messages'] == ['from two']


def on_ranks(model: str, folder: str, address: str) -> dict[str, Any]:
    from huggingface_hub import constants

    from chatgpt.nn import Actor
    from chatgpt.nn.loading import load_tokenizer
    from chatgpt.strategies import DDPStrategy
    from chatgpt.testing.tiny import tiny_sequences
    from chatgpt.trainer import SFTTrainer

    constants.ENDPOINT, constants.HF_HUB_OFFLINE, constants.HF_HUB_DISABLE_XET = address, False, True
    os.environ['HF_TOKEN'] = 'hf_write'
    import torch

    strategy = DDPStrategy(seed=1)
    actor = Actor.from_pretrained(model)
    actor, optimizer = strategy.prepare((actor, torch.optim.SGD(actor.parameters(), 0.1)))
    options: dict[str, Any] = {'tokenizer': load_tokenizer(model), 'run_dir': Path(folder, 'run'), 'max_epochs': 1}
    trainer = SFTTrainer(strategy, actor, optimizer, tiny_sequences(4), train_batch_size=4, **options)
    trainer.fit()
    uploaded = trainer.push_to_hub('tales', commit_message='from two', revision='draft')
    try:
        trainer.push_to_hub('you/tales')
        error = ''
    except ValueError as refused:
        error = str(refused)
    trainer.save_pretrained(Path(folder, 'again'))
    left = sorted(p.name for p in Path(folder, 'run').iterdir() if p.name.startswith('upload-'))
    return {'address': uploaded, 'error': error, 'left': left, 'files': set(content(Path(folder, 'again')))}
