"""The doctor during a run: printed, written and resumed findings, and the same findings from the folder afterwards."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / 'benchmarks'))
import doctor_faults as faults

from chatgpt.monitor.doctor import Finding, diagnose
from chatgpt.monitor.run_folder.reading import RunFolder
from chatgpt.nn import GPTActor
from chatgpt.strategies import NaiveStrategy
from chatgpt.testing import tiny_config
from chatgpt.trainer import SFTTrainer
from chatgpt.trainer import callbacks as cb
from chatgpt.types import Sequence


def doctor_lines(capsys) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith('doctor, ')]


def keys(run: RunFolder) -> list[tuple[str, int]]:
    return [(row['finding'], row['step']) for row in run.findings]


def sft(
    folder: Path | None, *, lr: float = 1e-9, epochs: int = 9, callbacks=(), resume: Path | None = None, stop_at=None
):
    """Trains on eight random texts, one optimizer step per phase; with this learning rate `nothing-moves` is found at
    phase 8."""
    ids = torch.randint(3, 16, (8, 6), generator=torch.Generator().manual_seed(1))
    data = [Sequence(prompt_ids=i[:1], response_ids=i[1:], response_mask=torch.ones(5, dtype=torch.bool)) for i in ids]
    strategy = NaiveStrategy(seed=0, device='cpu')
    actor = GPTActor(config=tiny_config('gpt2', vocab_size=16, hidden=16, positions=16))
    actor, optim = strategy.prepare((actor, torch.optim.AdamW(actor.parameters(), lr=lr)))
    quiet = [cb.ProgressBar(enabled=False), *callbacks]
    options = {'train_batch_size': 8, 'max_epochs': epochs, 'log_interval': 1, 'run_dir': folder}
    trainer = SFTTrainer(strategy, actor, optim, data, callbacks=quiet, **options)
    if resume is not None:
        trainer.load_checkpoint(resume)
    trainer.fit()
    return trainer


class StopAt(cb.Callback):
    def __init__(self, phase: int) -> None:
        self.phase = phase

    def on_phase_end(self, trainer, step, metrics):
        if step == self.phase:
            trainer.request_stop()


def test_a_finding_is_printed_written_and_found_again_in_the_folder(tmp_path, capsys):
    sft(tmp_path)
    (line,) = doctor_lines(capsys)
    assert line.startswith('doctor, phase 8: warning: nothing moves: in 8 logged phases sft/loss went from ')
    assert 'Likely cause: ' in line and 'Change: raise lr to ' in line
    assert line.endswith('(chatgpt-rlhf doctor --explain nothing-moves)')
    (row,) = RunFolder(tmp_path).findings
    assert row['step'] == 8 and row['finding'] == 'nothing-moves' and row['level'] == 'warning'
    assert Finding(key=row.pop('finding'), **row).line() == line
    assert [f.line() for f in diagnose(RunFolder(tmp_path))] == [line]


@pytest.mark.parametrize('options', [{'lr': 3e-3}, {'callbacks': [cb.Doctor(enabled=False)]}], ids=['good', 'off'])
def test_a_good_run_is_silent_and_the_doctor_can_be_switched_off(tmp_path, capsys, options):
    sft(tmp_path, **options)
    assert doctor_lines(capsys) == [] and not (tmp_path / 'findings.jsonl').exists()


def test_a_resume_before_it_counts_the_phases_before(tmp_path, capsys):
    sft(tmp_path, callbacks=[StopAt(5)])
    assert doctor_lines(capsys) == []
    sft(tmp_path, resume=tmp_path / 'checkpoints')
    assert len(doctor_lines(capsys)) == 1
    assert keys(RunFolder(tmp_path)) == [('nothing-moves', 8)]


def test_a_resume_after_it_is_silent(tmp_path, capsys):
    sft(tmp_path, epochs=12, callbacks=[StopAt(10)])
    assert len(doctor_lines(capsys)) == 1
    sft(tmp_path, epochs=12, resume=tmp_path / 'checkpoints')
    assert doctor_lines(capsys) == []
    run = RunFolder(tmp_path)
    assert run.phase == 12 and keys(run) == [('nothing-moves', 8)] == [(f.key, f.step) for f in diagnose(run)]


def test_findings_of_a_killed_run_are_written_again_but_not_printed_again(tmp_path, capsys):
    """The run was killed at phase 9, with a checkpoint at phase 5."""
    sft(tmp_path, callbacks=[cb.SaveCheckpoint(interval=5)])
    assert len(doctor_lines(capsys)) == 1
    sft(tmp_path, resume=tmp_path / 'checkpoints' / 'step-00000005')
    assert doctor_lines(capsys) == []
    assert keys(RunFolder(tmp_path)) == [('nothing-moves', 8)]


def test_neither_a_second_fit_nor_a_resume_without_a_folder_repeats_findings(tmp_path, capsys):
    trainer = sft(None)
    trainer.save_checkpoint(tmp_path / 'kept')
    assert len(doctor_lines(capsys)) == 1
    trainer.fit()
    assert trainer.phase == 18 and doctor_lines(capsys) == []
    again = sft(None, epochs=20, resume=tmp_path / 'kept')
    assert again.phase == 20 and doctor_lines(capsys) == []


def test_the_other_ranks_are_silent(capsys):
    doctor = cb.Doctor()
    trainer = SimpleNamespace(strategy=SimpleNamespace(is_rank_0=False), phase=0, callbacks=[])
    doctor.on_fit_start(trainer)
    doctor.on_phase_end(trainer, 1, {'rollout/score_mean': 1.0})
    assert doctor_lines(capsys) == [] and doctor.state_dict() == {}


def test_a_ratio_that_is_not_one_is_reported_once(tmp_path, capsys):
    faults.online(tmp_path, phases=2, engine=faults.OtherPolicy(), quiet=False)
    (line,) = doctor_lines(capsys)
    assert line.startswith('doctor, phase 1: error: the ratio right after a rollout is not 1: |ratio - 1| ')
    for cause in ('dropout', 'dtype', 'mask', 'temperature', 'stale', 'train mode'):
        assert cause in line
    assert keys(RunFolder(tmp_path)) == [('ratio-not-one', 1)]


def test_a_doctor_that_fails_costs_a_warning_and_not_the_run(capsys, monkeypatch):
    import chatgpt.monitor.doctor.diagnosis as module

    broken = module.CHECKS['nothing-moves']._replace(look=lambda history: 1 / 0)
    monkeypatch.setitem(module.CHECKS, 'nothing-moves', broken)
    with pytest.warns(UserWarning, match='the doctor failed at phase 1, and looks no further: ZeroDiv') as caught:
        trainer = sft(None)
    assert len(caught) == 1
    assert trainer.phase == 9 and doctor_lines(capsys) == []


def test_a_damaged_file_of_findings_does_not_end_a_resume(tmp_path):
    folder = sft(tmp_path, callbacks=[cb.SaveCheckpoint(interval=4)], epochs=4).save_checkpoint()
    (tmp_path / 'findings.jsonl').write_text('{"step": 1, "fin\n{"step": 1}\n')
    with pytest.warns(
        UserWarning, match='the doctor failed at phase 4, and looks no further: .*findings.jsonl, line 1'
    ):
        trainer = sft(tmp_path, epochs=6, resume=folder)
    assert trainer.phase == 6
    (tmp_path / 'findings.jsonl').write_text('{"step": 1}\n')  # JSON, but no finding
    assert sft(tmp_path, epochs=6, resume=folder).phase == 6
