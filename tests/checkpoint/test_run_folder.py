"""The run folder: names, retention, files of killed processes, the lock."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from limits import until

from chatgpt.strategies.checkpoint import (
    CheckpointError,
    CheckpointReader,
    Piece,
    claim_folder,
    latest,
    list_checkpoints,
    pieces_of,
    prune,
    recover,
    step_folder,
    step_of,
    write_checkpoint,
)
from chatgpt.strategies.checkpoint.folder import backup_of, score_of, temporary_of


def write(root, step, **meta):
    write_checkpoint(step_folder(root, step), {'': pieces_of({'x': torch.tensor([float(step)])})}, meta=meta)
    return step_folder(root, step)


def test_names(tmp_path):
    assert step_folder('runs/a', 12) == Path('runs/a/step-00000012')
    assert step_of('runs/a/step-00000012') == 12
    assert step_of('runs/step-12') is step_of('.step-00000012.tmp') is None
    assert step_of(step_folder('x', 123456789)) == 123456789
    with pytest.raises(ValueError, match='step=-1'):
        step_folder('runs', -1)
    assert latest(tmp_path / 'none') is None and list_checkpoints(tmp_path) == []


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, 'No locks available')

    monkeypatch.setattr(fcntl, 'flock', refuse)
    with pytest.warns(UserWarning, match=f'{tmp_path}: it cannot be locked .*No locks'), claim_folder(tmp_path):
        pass


def test_latest_counts_only_finished_checkpoints(tmp_path):
    for step in (3, 10, 7):
        write(tmp_path, step)
    (tmp_path / 'step-00000099').mkdir()  # no manifest
    (tmp_path / 'step-00000050').write_text('a file')
    assert [step_of(p) for p in list_checkpoints(tmp_path)] == [3, 7, 10]
    assert latest(tmp_path) == tmp_path / 'step-00000010'


def steps(root):
    return [step_of(p) for p in list_checkpoints(root)]


def test_retention(tmp_path):
    for step, score in ((1, 5.0), (2, 9.0), (3, None), (4, 9.0), (5, 1.0), (6, 2.0)):
        write(tmp_path, step, score=score)
    assert score_of(tmp_path / 'step-00000002') == 9.0 and score_of(tmp_path / 'step-00000003') is None
    assert prune(tmp_path) == [] and steps(tmp_path) == [1, 2, 3, 4, 5, 6]
    # the last two, and the best two of all: of equal scores, 9.0, the later first
    assert [step_of(p) for p in prune(tmp_path, keep_last=2, keep_best=2)] == [1, 3]
    assert steps(tmp_path) == [2, 4, 5, 6]
    prune(tmp_path, keep_last=1, keep_best=1)
    assert steps(tmp_path) == [4, 6]
    prune(tmp_path, keep_last=1)
    assert steps(tmp_path) == [6]
    assert sorted(p.name for p in tmp_path.iterdir()) == ['step-00000006']
    for wrong in ({'keep_last': 0}, {'keep_last': 1, 'keep_best': -1}):
        with pytest.raises(ValueError, match='keep_last'):
            prune(tmp_path, **wrong)


def test_recover(tmp_path):
    """A process was killed while writing 5, while pruning 1, and between the two renames of replacing 3."""
    for step in (1, 3, 4):
        write(tmp_path, step)
    os.rename(step_folder(tmp_path, 1), temporary_of(step_folder(tmp_path, 1)))
    os.rename(step_folder(tmp_path, 3), backup_of(step_folder(tmp_path, 3)))
    temporary_of(step_folder(tmp_path, 5)).mkdir()
    os.rename(write(tmp_path, 6), backup_of(step_folder(tmp_path, 4)))  # replaced, with the old one not yet removed
    (tmp_path / '.hidden.txt').write_text('mine')
    removed = recover(tmp_path)
    assert sorted(p.name for p in removed) == ['.step-00000001.tmp', '.step-00000004.old', '.step-00000005.tmp']
    assert steps(tmp_path) == [3, 4]
    assert CheckpointReader(step_folder(tmp_path, 4)).read('x', 0, 1).item() == 4
    assert sorted(p.name for p in tmp_path.iterdir()) == ['.hidden.txt', 'step-00000003', 'step-00000004']


def test_a_write_puts_an_old_folder_back_before_it_begins(tmp_path):
    """A process was killed between the two renames, and nothing recovered the folder since."""
    folder = write(tmp_path, 3)
    os.rename(folder, backup_of(folder))
    short = Piece('x', (3,), 0, 3, torch.zeros(2))
    with pytest.raises(CheckpointError, match='the earlier checkpoint there is untouched'):
        write_checkpoint(folder, {'': iter([short])})
    assert CheckpointReader(folder).read('x', 0, 1).item() == 3
    os.rename(folder, backup_of(folder))
    write_checkpoint(folder, {'': pieces_of({'x': torch.tensor([4.0])})})
    assert CheckpointReader(folder).read('x', 0, 1).item() == 4
    assert [p.name for p in tmp_path.iterdir()] == [folder.name]


def test_two_runs_cannot_write_one_folder(tmp_path):
    with claim_folder(tmp_path / 'run'):
        message = rf'run: process {os.getpid()} on .* is writing here; .*choose another folder'
        with pytest.raises(CheckpointError, match=message):
            claim_folder(tmp_path / 'run')
    claim_folder(tmp_path / 'run').close()


def save_for_ever(root: Path, ready: Any) -> None:
    with claim_folder(root):
        recover(root)
        last = latest(root)
        step = 0 if last is None else step_of(last)
        ready.set()
        while True:
            step += 1
            tensors = {f't{i}': torch.full((300,), float(step)) for i in range(5)}
            for _ in range(2):  # the second write replaces the first
                write_checkpoint(step_folder(root, step), {'': pieces_of(tensors)}, max_file_bytes=2000)
            prune(root, keep_last=2)


def test_killed_at_random_moments(tmp_path):
    """After every SIGKILL each listed checkpoint is complete, and at most the one being written is lost. The lock of
    the folder ends with its process."""
    rng = random.Random()
    before = 0
    fork = multiprocessing.get_context('fork')
    for _ in range(3):
        ready = fork.Event()
        saver = fork.Process(target=save_for_ever, args=(tmp_path, ready), daemon=True)
        saver.start()
        until(ready.is_set)
        with pytest.raises(CheckpointError, match=f'process {saver.pid} on'):
            claim_folder(tmp_path)
        until(lambda last=before: (steps(tmp_path) or [0])[-1] >= last + 2)
        time.sleep(0.2 * rng.random())
        saver.kill()
        saver.join()
        with claim_folder(tmp_path):
            recover(tmp_path)
            found = list_checkpoints(tmp_path)
            assert found and step_of(found[-1]) >= before
            for folder in found:
                reader = CheckpointReader(folder)
                for name in (f't{i}' for i in range(5)):
                    assert set(reader.read(name, 0, 300).tolist()) == {float(step_of(folder))}
            assert {p.name for p in tmp_path.iterdir()} == {'.lock', *(p.name for p in found)}
        before = step_of(found[-1])
    assert before > 3
