"""The folder of the trained model is checked before training: nothing is replaced; permissions and free space."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from chatgpt.launch import demo_world, destination
from chatgpt.launch.config_file import write_resolved
from chatgpt.launch.destination import check_destination, check_resume
from chatgpt.launch.runs import SFTRun
from chatgpt.monitor.run_folder.record import RunRecord

Usage = namedtuple('Usage', 'total used free')


def run(folder: Path, **settings: str) -> SFTRun:
    return SFTRun(save_path=str(folder / 'run'), **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize('file', ['config.json', 'model.safetensors', 'adapter_config.json', 'pytorch_model.bin'])
def test_a_model_at_model_path_is_not_replaced(tmp_path, file):
    (tmp_path / 'model').mkdir()
    (tmp_path / 'model' / file).touch()
    with pytest.raises(
        ValueError, match=rf'--model_path {tmp_path}/model holds a model already \({file}\): choose another'
    ):
        check_resume(run(tmp_path, model_path=str(tmp_path / 'model')))
    with pytest.raises(ValueError, match='holds a model already'):  # without a checkpoint it is not this run's
        check_resume(run(tmp_path, model_path=str(tmp_path / 'model'), resume='auto'))
    (tmp_path / 'empty').mkdir()
    check_resume(run(tmp_path, model_path=str(tmp_path / 'empty')))


def test_a_resumed_run_replaces_only_its_own_model(tmp_path, monkeypatch):
    for folder in ('run/actor', 'model', 'other'):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / 'config.json').touch()
    own = run(tmp_path, model_path=str(tmp_path / 'model'), resume='auto')
    with pytest.raises(ValueError, match='run holds the trained model of an earlier run, actor/'):
        check_resume(run(tmp_path, resume='auto'))  # without checkpoints
    monkeypatch.setattr(destination, 'latest', lambda folder: tmp_path / 'run' / 'checkpoints' / 'step-00000001')
    write_resolved(own, own.save_path)
    check_resume(own)
    for path in (str(tmp_path / 'other'), None):
        with pytest.raises(ValueError, match='holds a model already|holds the trained model of an earlier run'):
            check_resume(run(tmp_path, model_path=path, resume='auto'))


@pytest.mark.parametrize('resume', [None, 'auto'])
@pytest.mark.parametrize('flag', ['pretrain', 'tokenizer'])
def test_what_a_run_starts_from_is_never_replaced(tmp_path, flag, resume):
    (tmp_path / 'base').mkdir()
    (tmp_path / 'link').symlink_to(tmp_path / 'base')
    with pytest.raises(ValueError, match=rf'the trained model would replace --{flag} {tmp_path}/base'):
        check_resume(run(tmp_path, model_path=str(tmp_path / 'link'), resume=resume, **{flag: str(tmp_path / 'base')}))
    shutil.move(tmp_path / 'base', tmp_path / 'run' / 'actor')
    with pytest.raises(ValueError, match=f'the trained model would replace --{flag}'):
        check_resume(run(tmp_path, resume='auto', **{flag: str(tmp_path / 'run' / 'actor')}))


def test_a_destination_is_tried_and_nothing_is_left_there(tmp_path):
    check_destination(run(tmp_path, model_path=str(tmp_path / 'a' / 'b')), demo_world.demo_config(), 'actor')
    assert not list(tmp_path.iterdir())
    (tmp_path / 'file').touch()
    for path, reason in ((tmp_path / 'file', 'it is a file'), (tmp_path / 'file' / 'x', 'Not a directory')):
        with pytest.raises(ValueError, match=f'cannot write the trained model to {path}: {reason}'):
            check_destination(run(tmp_path, model_path=str(path)), demo_world.demo_config(), 'actor')
    (tmp_path / 'run').mkdir()
    (tmp_path / 'run' / 'actor').touch()
    with pytest.raises(ValueError, match=f'cannot write the trained model to {tmp_path}/run/actor: it is a file'):
        check_destination(run(tmp_path), demo_world.demo_config(), 'actor')


def test_room_for_the_whole_model(tmp_path, monkeypatch):
    from chatgpt.nn import GPTActor

    config = demo_world.demo_config()
    needed = sum(4 * p.numel() for p in GPTActor(config=config).parameters())  # fp32, tied weights once
    check = run(tmp_path, model_path=str(tmp_path / 'model'))
    monkeypatch.setattr(destination.shutil, 'disk_usage', lambda path: Usage(0, 0, needed))
    check_destination(check, config, 'actor')
    monkeypatch.setattr(destination.shutil, 'disk_usage', lambda path: Usage(0, 0, needed - 1))
    check_destination(run(tmp_path, model_path=str(tmp_path / 'model'), save_dtype='bf16'), config, 'actor')
    with pytest.raises(
        ValueError,
        match=rf'the trained model takes [0-9.]+ MiB, and {tmp_path}/model has [0-9.]+ MiB free; free some, or',
    ):
        check_destination(check, config, 'actor')


def test_only_rank_0_looks(tmp_path, monkeypatch):
    (tmp_path / 'file').touch()
    monkeypatch.setenv('RANK', '1')
    check_destination(run(tmp_path, model_path=str(tmp_path / 'file')), demo_world.demo_config(), 'actor')


@pytest.mark.parametrize(
    ('status', 'model', 'said'),
    [
        ('ended', True, 'run holds a complete run: give the model in it as --pretrain'),
        ('ended', False, 'holds checkpoints of an earlier run, up to step-00000001: go on with --resume auto'),
        ('stopped', True, 'holds checkpoints of an earlier run'),
        ('{', True, 'holds checkpoints of an earlier run'),
    ],
)
def test_a_complete_run_is_told_from_one_to_go_on_with(tmp_path, monkeypatch, status, model, said):
    (tmp_path / 'run' / 'actor').mkdir(parents=True)
    if model:
        (tmp_path / 'run' / 'actor' / 'config.json').touch()
    record = RunRecord(method='sft', trainer='SFTTrainer', status=status)  # type: ignore[arg-type]
    record.write(tmp_path / 'run')
    if status == '{':
        (tmp_path / 'run' / 'run.json').write_text('{')
    monkeypatch.setattr(destination, 'latest', lambda folder: tmp_path / 'run' / 'checkpoints' / 'step-00000001')
    with pytest.raises(ValueError, match=said):
        check_resume(run(tmp_path))
