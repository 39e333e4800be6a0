"""Runs that are stopped or killed, have a full disk or a folder in use; and their resumes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tiny_runs
import torch
from killed_runs import ENVIRONMENT, SCRIPT, finished, metrics, start
from limits import until
from ppo_on_ids import fit, make, prompts
from tiny_runs import weights

from chatgpt.strategies import DDPStrategy
from chatgpt.strategies.checkpoint import CheckpointError, CheckpointReader, claim_folder, latest
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer.callbacks import Callback, SaveCheckpoint

PHASES = 20


def checkpoints(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / 'checkpoints').iterdir())


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, float]]]:
    """The run without a stop: hash of its weights and optimizer states, and its metrics."""
    folder = tmp_path_factory.mktemp('stopping') / 'straight'
    return finished(folder, PHASES)[0], metrics(folder)


def check_folder_in_use(holder: subprocess.Popen[str], folder: Path) -> None:
    """Another run in the folder of a running one is refused with the name of the holder."""
    trainer = make(run_dir=folder)
    with pytest.raises(CheckpointError, match=rf'process {holder.pid} on .* is writing here; .*choose another folder'):
        fit(trainer, 1)
    assert trainer.phase == 0


@pytest.mark.system
def test_stopped_by_signals_and_resumed_to_the_same_bits(undisturbed, tmp_path):
    """SIGTERM, then SIGINT, each in the middle of a run, which ends between phases with the code of the signal.
    Meanwhile another run tries to use the folder."""
    done, path = 0, tmp_path / 'metrics.jsonl'
    for signum, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        (process,) = start(tmp_path, PHASES)
        until(lambda done=done: path.is_file() and path.read_text().count('\n') >= done + 2)
        # paused, so that it does not end before the other run is refused
        process.send_signal(signal.SIGSTOP)
        check_folder_in_use(process, tmp_path)
        process.send_signal(signum)
        process.send_signal(signal.SIGCONT)
        output, _ = process.communicate()
        # a script that lets KeyboardInterrupt pass ends by the signal itself, which a shell reports as 130
        assert process.returncode in ((code,) if signum == signal.SIGTERM else (code, -signum)), output
        assert f'{signal.Signals(signum).name}: stopping at the next safe point' in output
        assert 'continue with --resume auto' in output and 'hash' not in output
        before, done = done, len(metrics(tmp_path))
        assert before + 2 <= done < PHASES
        assert checkpoints(tmp_path)[-1] == f'step-{done:08d}'
        CheckpointReader(tmp_path / 'checkpoints' / f'step-{done:08d}')
    assert finished(tmp_path, PHASES) == [undisturbed[0]]
    assert metrics(tmp_path) == undisturbed[1]


def test_a_stop_while_collecting_drops_the_phase(tmp_path):
    class StopInTheMiddle(Callback):
        def on_episode_start(self, trainer, episode):
            if trainer.phase == 1 and episode == 2:
                trainer.request_stop()

    def run(folder, *callbacks):
        trainer = make(run_dir=folder, callbacks=[SaveCheckpoint(), *callbacks])
        trainer.load_checkpoint('auto')
        trainer.fit(prompts(), num_episodes=6, max_timesteps=1, update_timesteps=2)
        return trainer

    straight = run(tmp_path / 'straight')
    stopped = run(tmp_path / 'stopped', StopInTheMiddle())
    assert (stopped.phase, stopped.timestep, len(stopped.buffer)) == (1, 2, 0)
    assert stopped.collector.draws.samples_drawn == 32
    resumed = run(tmp_path / 'stopped')
    assert resumed.phase == straight.phase == 3
    assert torch.equal(weights(straight), weights(resumed))
    assert metrics(tmp_path / 'stopped') == metrics(tmp_path / 'straight')


@pytest.mark.system
@pytest.mark.skipif(not hasattr(os, 'fork'), reason='limits the size of files of a child process')
def test_a_disk_that_is_full_for_a_while(undisturbed, tmp_path):
    """Files cannot exceed 4 KiB while phases 3 to 5 are saved: warnings, no checkpoints of those phases, an unchanged
    run."""
    full = """
import os, resource, signal
from chatgpt.trainer import base
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
save = base.Trainer.save_checkpoint
def limited(self, *args, **kw):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096 if 3 <= self.phase <= 5 else soft, hard))
    try:
        return save(self, *args, **kw)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        print('saved', self.phase, sorted(os.listdir(self.checkpoint_dir)), flush=True)
base.Trainer.save_checkpoint = limited
"""
    command = [sys.executable, '-c', full + SCRIPT, str(tmp_path), str(PHASES), 'NaiveStrategy']
    env = os.environ | {name: text for name, text in ENVIRONMENT.items() if name != 'PYTHONWARNINGS'}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for phase in (3, 4, 5):
        assert f'phase {phase} was not saved, the run goes on' in done.stderr
        assert f"saved {phase} ['step-00000001', 'step-00000002']" in done.stdout
    assert 'phase 6 was not saved' not in done.stderr
    assert checkpoints(tmp_path) == [f'step-{PHASES - 1:08d}', f'step-{PHASES:08d}']
    assert undisturbed[0] in done.stdout
    assert metrics(tmp_path) == undisturbed[1]


def test_a_checkpoint_of_another_method_or_model_is_refused(tmp_path, monkeypatch):
    trained = tiny_runs.sft()
    path = trained.save_checkpoint(tmp_path / 'sft')
    trained.load_checkpoint(path)
    monkeypatch.setattr(trained, 'facts', lambda: {'method': 'dpo', 'data': {}})
    with pytest.raises(CheckpointError, match=r'a checkpoint of sft .*, and this run is dpo .*--pretrain'):
        trained.load_checkpoint(path)
    trainer, adapted = make(), make(lora_rank=2)
    before = weights(trainer)
    with pytest.raises(CheckpointError, match='a checkpoint of sft .it holds actor., and this run is ppo'):
        trainer.load_checkpoint(path)
    assert torch.equal(before, weights(trainer))
    trainer.set_prompts(prompts())
    with pytest.raises(CheckpointError, match='lora_'):
        adapted.load_checkpoint(trainer.save_checkpoint(tmp_path / 'ppo'))


def test_damage_to_any_file_is_detected(tmp_path):
    """A flipped bit, a truncated or a missing file is refused by the file's name, before any weight changes."""
    path = fit(make(run_dir=tmp_path), 1).save_checkpoint()
    files = sorted(p for p in path.iterdir() if p.is_file())
    kinds = {p.name.split('-rank')[0].split('.')[0] for p in files}
    assert kinds >= {'manifest', 'state', 'actor', 'actor_optim', 'critic', 'critic_optim', 'rng'}
    fresh = make()
    before = weights(fresh)
    for victim in files:
        whole = victim.read_bytes()
        middle = len(whole) // 2
        for damaged in (whole[:middle] + bytes([whole[middle] ^ 0x10]) + whole[middle + 1 :], whole[:-1], None):
            victim.unlink()
            if damaged is not None:
                victim.write_bytes(damaged)
            with pytest.raises(CheckpointError, match=victim.name):
                fresh.load_checkpoint(path)
            if damaged is None:
                victim.touch()
        victim.write_bytes(whole)
    assert torch.equal(before, weights(fresh))
    assert fresh.load_checkpoint(path)


class StopAtOnce(Callback):
    def on_phase_end(self, trainer, step, metrics):
        signal.raise_signal(signal.SIGTERM)


def test_a_damaged_newest_checkpoint_names_the_newest_whole_one_before_it(tmp_path, capsys):
    fit(make(run_dir=tmp_path, callbacks=[SaveCheckpoint()]), 4)
    folders = sorted((tmp_path / 'checkpoints').iterdir())
    for damaged in folders[2:]:
        part = next(damaged.glob('actor-*.safetensors'))
        part.write_bytes(part.read_bytes()[:-1])
    hint = f'; the newest whole one before it is taken with --resume {folders[1]}'
    with pytest.raises(CheckpointError, match=rf'{part}: .*truncated.*{hint}$'):
        make(run_dir=tmp_path).load_checkpoint('auto')
    back = make(run_dir=tmp_path, callbacks=[StopAtOnce()])
    back.load_checkpoint(folders[1])
    with pytest.raises(SystemExit):
        fit(back, 4)
    written = tmp_path / 'checkpoints' / 'step-00000003'  # the damaged fourth is set aside
    assert f'stopped after phase 3; continue with --resume auto or --resume {written}\n' in capsys.readouterr().out


def done_phases(folder: Path) -> int:
    path = folder / 'metrics.jsonl'
    return path.read_text().count('\n') if path.is_file() else 0


def killed_many_times(
    folder: Path, kills: int, phases: int, seed: int, kind: str = 'NaiveStrategy', ranks: int = 1
) -> None:
    """Kills all ranks of a run at random moments of its saves and phases; every restart continues from the newest whole
    checkpoint. Kills after the run's end do not count."""
    rng = random.Random(seed)
    undisturbed = finished(folder / 'straight', phases, kind, ranks)
    run, interrupted, resumed_from = folder / 'killed', 0, 0
    for _ in range(2 * kills):
        processes = start(run, phases, kind, ranks)
        output = processes[0].stdout
        assert output is not None
        assert next(line for line in output if line.startswith('ready')).strip() == f'ready {resumed_from}'
        enough = resumed_from + rng.randrange(phases // kills)
        while done_phases(run) < enough and processes[0].poll() is None:
            time.sleep(0.002)
        time.sleep(rng.uniform(0.0, 0.1))
        for process in processes:
            process.kill()
        for process in processes:
            process.communicate()
        interrupted += all(process.returncode == -signal.SIGKILL for process in processes)
        newest = latest(run / 'checkpoints')
        resumed_from = 0 if newest is None else CheckpointReader(newest).meta['phase']
        if interrupted == kills:
            break
    assert interrupted == kills
    assert finished(run, phases, kind, ranks) == undisturbed
    assert metrics(run) == metrics(folder / 'straight')
    assert [row['step'] for row in metrics(run)] == list(range(1, phases + 1))


@pytest.mark.system
def test_five_kills(tmp_path):
    killed_many_times(tmp_path, kills=5, phases=30, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('kills', 'phases', 'kind', 'ranks'), [(20, 120, 'NaiveStrategy', 1), (5, 20, 'FSDPStrategy', 2)]
)
def test_many_kills(tmp_path, kills, phases, kind, ranks):
    killed_many_times(tmp_path, kills, phases, seed=1, kind=kind, ranks=ranks)


def _signalled(folder: str) -> str:
    strategy = DDPStrategy(seed=3)

    class Evicted(Callback):
        def on_phase_end(self, trainer: Any, step: int, metrics: Any) -> None:
            if step == 1 and strategy.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    try:
        fit(make(strategy=strategy, run_dir=folder, callbacks=[Evicted()]), 4)
    except SystemExit as stop:
        return f'exit {stop.code}'
    return 'ended'


def test_a_signal_to_one_rank_ends_all(tmp_path):
    assert run_distributed(_signalled, 2, str(tmp_path)) == ['exit 143'] * 2
    assert len(checkpoints(tmp_path)) == 1


def test_resume_auto_leaves_a_checkpoint_that_another_run_is_writing(tmp_path):
    unfinished = tmp_path / 'checkpoints' / '.step-00000009.tmp'
    unfinished.mkdir(parents=True)
    with claim_folder(tmp_path), pytest.raises(CheckpointError, match='is writing here'):
        make(run_dir=tmp_path).load_checkpoint('auto')
    assert unfinished.is_dir()
    assert not make(run_dir=tmp_path).load_checkpoint('auto') and not unfinished.exists()
