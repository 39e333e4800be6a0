"""Trials in their order and side by side: results, failures, pruning, stopping and going on, on a program that trains
nothing."""

from __future__ import annotations

import json
import os
import signal
import threading
import time

import pytest
from fake_trials import loss_of, table
from limits import until

pytest.importorskip('optuna', reason='sweeps need optuna: make dev')

from chatgpt.launch.search.sweep import run_sweep
from chatgpt.strategies.checkpoint import CheckpointError, claim_folder


def signal_when(condition, number: int = signal.SIGINT) -> threading.Thread:
    """Send this process a signal once `condition` holds."""

    def wait() -> None:
        until(condition)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def test_a_sweep_leaves_a_table_a_plot_and_the_best(sweep_of, capsys):
    sweep = sweep_of({'plot': True}, trials=12)
    assert run_sweep(sweep) == 0
    rows = table(sweep.save_path)
    assert [row['number'] for row in rows] == [str(n) for n in range(12)]
    for row in rows:
        assert row['state'] == 'complete' and row['step'] == '4' and 1e-4 <= float(row['lr']) <= 1e-1
        assert float(row['value']) == pytest.approx(loss_of(float(row['lr'])))
    values = [float(row['value']) for row in rows]
    best = values.index(min(values))
    said = capsys.readouterr().out.splitlines()
    assert said[-2].startswith(f'best: trial {best} with sft/loss {min(values):.6g}: lr=')
    assert said[-1] == f'its settings: {sweep.save_path}/trial-{best:04d}/config.yaml'
    header = next(i for i, line in enumerate(said) if line.startswith('number'))
    assert said[header].split() == ['number', 'state', 'sft/loss', 'step', 'lr', 'seconds']
    assert [line.split()[0] for line in said[header + 2 : header + 14]] == [
        str(n) for n in sorted(range(12), key=lambda n: values[n])
    ]
    assert (sweep.save_path / 'curves.png').read_bytes().startswith(b'\x89PNG')
    assert min(values[6:]) < sorted(values[:6])[2]  # it has learned where to look


def test_the_same_seed_is_the_same_sweep_and_another_is_not(sweep_of, tmp_path):
    found = []
    for name, seed in (('a', 3), ('b', 3), ('c', 4)):
        sweep = sweep_of(seed=seed, sampler='random', save_path=str(tmp_path / name))
        run_sweep(sweep)
        found.append([row['lr'] for row in table(sweep.save_path)])
    assert found[0] == found[1] != found[2] and len(set(found[0])) == 4


# ---------------------------------------------------------------------- failures


def test_a_crash_is_one_failed_trial_with_its_last_words(sweep_of, capsys):
    sweep = sweep_of({'crash': [1], 'killed': [2], 'lost': [3, 4]}, trials=5)
    assert run_sweep(sweep) == 0
    rows = table(sweep.save_path)
    assert [row['state'] for row in rows] == ['complete', 'failed', 'failed', 'failed', 'complete']
    assert rows[1]['error'] == f'it broke at {float(rows[1]["lr"]):.3g}' and rows[1]['value'] == ''
    assert rows[2]['error'] == 'ended by SIGKILL'
    assert rows[3]['error'] == 'sft/loss is not finite at step 4'
    said = capsys.readouterr().out
    assert f'trial 1 failed: {rows[1]["error"]} (output.log in its folder)' in said and 'error' in said


def test_a_sweep_without_a_complete_trial_fails(sweep_of):
    """As where a metric is measured now and then, and never was."""
    sweep = sweep_of(metric='eval/score_mean', trials=1)
    assert run_sweep(sweep) == 1
    assert table(sweep.save_path)[0]['error'] == 'it logged no eval/score_mean'


def test_an_evaluation_after_the_last_phase_counts(sweep_of):
    """It is in eval.jsonl alone; step 0 is before training."""
    sweep = sweep_of({'evaluated': [0, 4]}, metric='eval/score_mean', trials=1)
    assert run_sweep(sweep) == 0
    assert float(table(sweep.save_path)[0]['value']) == 0.4


def test_a_metric_that_runs_do_not_have_ends_the_sweep_and_names_the_nearest(sweep_of):
    sweep = sweep_of({'pause': {'1': 20}}, metric='sft/lss')
    with pytest.raises(ValueError, match="there is no metric 'sft/lss' in this run; did you mean sft/loss"):
        run_sweep(sweep, jobs=2)
    claim_folder(sweep.save_path / 'trial-0000').close()  # nobody runs any more


# ---------------------------------------------------------------------- pruning


@pytest.mark.parametrize(('warmup', 'step'), [(2, '2'), (9, '4')])
def test_a_bad_trial_is_stopped(sweep_of, warmup, step):
    """By hand: the median pruner ends a trial at the first step after `n_warmup_steps` at which its best loss so far is
    above the median of the complete trials. At every step trial 1 is above trial 0; trial 2 is below; the median of
    these two, at step 1 (1.49 + 1) / 2 = 1.24 and 0.74, 0.58, 0.49 after it, is above trial 3 with 1.09, 0.59, 0.42,
    0.34."""
    pruner = {'name': 'median', 'n_startup_trials': 1, 'n_warmup_steps': warmup}
    sweep = sweep_of(sampler='grid', parameters={'lr': [0.05, 0.1, 0.01, 0.02]}, pruner=pruner)
    assert run_sweep(sweep) == 0
    rows = table(sweep.save_path)
    second = 'complete' if warmup == 9 else 'pruned'
    assert [row['state'] for row in rows] == ['complete', second, 'complete', 'complete']
    assert [row['step'] for row in rows] == ['4', step, '4', '4']
    assert float(rows[1]['value']) == pytest.approx(loss_of(0.1, int(step)))


# ---------------------------------------------------------------------- several at once, stopping, going on


def test_jobs_run_side_by_side(sweep_of):
    sweep = sweep_of({'pause': {'1': 1.0}, 'steps': 1}, trials=4)
    assert run_sweep(sweep, jobs=2) == 0
    said = [(sweep.save_path / f'trial-{n:04d}' / 'output.log').read_text().split() for n in range(4)]
    times = [(float(words[words.index('at') + 1]), float(words[-1])) for words in said]
    running = [sum(begin <= at < end for begin, end in times) for at, _ in times]
    assert max(running) == 2, 'two at a time, and never more'


def test_a_signal_stops_all_and_the_next_call_continues(sweep_of, tmp_path, capsys):
    number = signal.SIGTERM
    whole = sweep_of({}, save_path=str(tmp_path / 'whole'))
    run_sweep(whole)
    sweep = sweep_of({'pause': {'3': 20}}, save_path=str(tmp_path / 'parts'))
    first = sweep.save_path / 'trial-0000' / 'metrics.jsonl'
    waiting = signal_when(lambda: first.is_file() and len(first.read_text().splitlines()) == 3, number)
    assert run_sweep(sweep) == 128 + number
    waiting.join()
    said = capsys.readouterr().out
    assert f'{signal.Signals(number).name}: passed on to 1 trials' in said
    assert said.splitlines()[-1] == 'stopped; the same command goes on with trial 0'
    assert table(sweep.save_path)[0]['state'] == 'unfinished'
    assert json.loads((sweep.save_path / 'trial-0000' / 'state.json').read_text()) == 3  # it has saved
    sweep = sweep_of({}, save_path=str(tmp_path / 'parts'))
    assert run_sweep(sweep) == 0
    assert 'trial 0 goes on: lr=' in capsys.readouterr().out
    assert table(sweep.save_path) == table(whole.save_path)
    assert [json.loads(line)['step'] for line in first.read_text().splitlines()] == [1, 2, 3, 4]


def test_a_second_signal_ends_trials_that_do_not_leave(sweep_of, capsys):
    sweep = sweep_of({'pause': {'1': 3600}, 'stubborn': True})
    log = sweep.save_path / 'trial-0001' / 'metrics.jsonl'
    first = signal_when(log.is_file)
    second = signal_when(lambda: not first.is_alive() and time.sleep(0.5) is None)
    assert run_sweep(sweep, jobs=2) == 130
    second.join()
    assert capsys.readouterr().out.splitlines()[-1] == 'stopped; the same command goes on with trial 0, 1'
    for number in (0, 1):
        claim_folder(sweep.save_path / f'trial-000{number}').close()


def test_a_pruned_trial_that_does_not_leave_is_killed(sweep_of, monkeypatch):
    monkeypatch.setattr('chatgpt.launch.search.sweep.STOP_S', 0.3)
    pruner = {'name': 'median', 'n_startup_trials': 1}
    behaviour = {'pause': {'1': 0.1, '1.2': 3600}, 'stubborn': True}
    sweep = sweep_of(behaviour, sampler='grid', parameters={'lr': [0.01, 0.1]}, pruner=pruner)
    assert run_sweep(sweep) == 0
    assert [row['state'] for row in table(sweep.save_path)] == ['complete', 'pruned']


def test_a_second_call_does_nothing_and_a_longer_sweep_continues(sweep_of, tmp_path, capsys):
    sweep = sweep_of(trials=3)
    run_sweep(sweep)
    capsys.readouterr()
    assert run_sweep(sweep) == 0
    assert 'starts' not in capsys.readouterr().out
    longer = sweep_of(trials=5)
    assert run_sweep(longer) == 0
    assert capsys.readouterr().out.count('starts') == 2
    whole = sweep_of(trials=5, save_path=str(tmp_path / 'whole'))
    run_sweep(whole)
    assert table(longer.save_path) == table(whole.save_path)


def test_what_a_killed_sweep_leaves_of_its_journal_is_mended(sweep_of):
    sweep = sweep_of(trials=2)
    run_sweep(sweep)
    journal = sweep.save_path / 'journal.log'
    before = journal.read_text()
    journal.write_text(before + '{"op_code": 5, "tri')
    (sweep.save_path / 'journal.log.lock').symlink_to('nobody')
    assert run_sweep(sweep_of(trials=3)) == 0
    assert journal.read_text().startswith(before) and len(table(sweep.save_path)) == 3


@pytest.mark.parametrize('sampler', ['tpe', 'grid'])
def test_a_sweep_killed_at_any_line_of_its_journal_ends_the_same(sweep_of, tmp_path, sampler):
    """The journal is cut after each of its first lines, in the middle of asking and telling."""
    changes = {'sampler': sampler, 'parameters': {'lr': [1e-3, 1e-2], 'warmup_steps': [0, 1]}, 'trials': 2}
    whole = sweep_of({'steps': 1}, save_path=str(tmp_path / 'whole'), **changes)
    run_sweep(whole)
    journal = (whole.save_path / 'journal.log').read_text().splitlines(keepends=True)
    for cut in range(1, len(journal)):
        sweep = sweep_of({'steps': 1}, save_path=str(tmp_path / f'cut-{cut}'), **changes)
        sweep.save_path.mkdir()
        (sweep.save_path / 'journal.log').write_text(''.join(journal[:cut]))
        assert run_sweep(sweep) == 0
        assert table(sweep.save_path) == table(whole.save_path)


def test_two_sweeps_in_one_folder_at_once(sweep_of):
    sweep = sweep_of()
    with (
        claim_folder(sweep.save_path),
        pytest.raises(CheckpointError, match=rf'process {os.getpid()} on .* is writing'),
    ):
        run_sweep(sweep)
    assert not list(sweep.save_path.glob('trial-*'))


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'metric': 'sft/accuracy'}, 'a sweep whose metric is "sft/loss", not "sft/accuracy"; give another save_path'),
        ({'parameters': {'lr': [0.1, 0.2]}}, 'a sweep whose parameters is'),
        ({'config': {'max_steps': 7}}, r'a sweep whose config is \{\}, not \{"max_steps": 7\}'),
    ],
)
def test_another_sweep_in_the_same_folder_is_refused(sweep_of, changes, message):
    run_sweep(sweep_of(trials=1))
    with pytest.raises(ValueError, match=message):
        run_sweep(sweep_of(**changes))
