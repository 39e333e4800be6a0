"""A run that is asked to stop, that meets a full disk, or that finds its folder taken; and what it goes on from
afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from killed_runs import ROOT, SCRIPT, finished, metrics, start
from ppo_on_ids import make, prompts

from chatgpt.nn import GPTActor
from chatgpt.strategies import NaiveStrategy
from chatgpt.strategies.checkpoint import CheckpointError, CheckpointReader
from chatgpt.testing.fakes import tiny_config
from chatgpt.trainer import SFTTrainer
from chatgpt.trainer.callbacks import ProgressBar, SaveCheckpoint
from chatgpt.types import Sequence

PHASES = 30


def wait_for_phases(folder: Path, count: int, process: subprocess.Popen[str]) -> None:
    path = folder / 'metrics.jsonl'
    while not (path.is_file() and path.read_text().count('\n') >= count):
        assert process.poll() is None, 'the run ended too early'
        time.sleep(0.01)


def checkpoints(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / 'checkpoints').iterdir())


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, float]]]:
    """The run without a stop: hash of its weights and optimizer states, and its metrics."""
    folder = tmp_path_factory.mktemp('stopping') / 'straight'
    return finished(folder, PHASES)[0], metrics(folder)


def refused_beside(holder: subprocess.Popen[str], folder: Path) -> None:
    """Another run that wants the folder of a running one is told who holds it, and does nothing."""
    trainer = make(run_dir=folder)
    with pytest.raises(CheckpointError, match=rf'process {holder.pid} on .* is writing here; .*choose another folder'):
        trainer.fit(prompts(), num_episodes=1, max_timesteps=1, update_timesteps=1)
    assert trainer.phase == 0


@pytest.mark.system
def test_stopped_by_signals_and_resumed_to_the_same_bits(undisturbed, tmp_path):
    """SIGTERM, then SIGINT, each in the middle of a run; every time it ends between phases, with the code of the
    signal.

    Meanwhile another run tries to write into the same folder.
    """
    done = 0
    for signum, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        (process,) = start(tmp_path, PHASES)
        wait_for_phases(tmp_path, done + 4, process)
        refused_beside(process, tmp_path)
        process.send_signal(signum)
        output, _ = process.communicate()
        assert 128 + signum == code
        # a script that lets KeyboardInterrupt pass ends by the signal itself, which a shell reports as 130
        assert process.returncode in ((code,) if signum == signal.SIGTERM else (code, -signum)), output
        assert f'{signal.Signals(signum).name}: stopping at the next safe point' in output
        assert 'continue with --resume auto' in output
        assert 'hash' not in output
        done = len(metrics(tmp_path))
        assert 4 <= done < PHASES
        assert checkpoints(tmp_path)[-1] == f'step-{done:08d}'
        CheckpointReader(tmp_path / 'checkpoints' / f'step-{done:08d}')
    assert finished(tmp_path, PHASES) == [undisturbed[0]]
    assert metrics(tmp_path) == undisturbed[1]


def test_a_stop_while_collecting_drops_the_phase(tmp_path):
    class StopInTheMiddle(ProgressBar):
        def on_episode_start(self, trainer, episode):
            if trainer.phase == 1 and episode == 2:
                trainer.request_stop()

    def fit(folder, *callbacks):
        trainer = make(run_dir=folder, callbacks=[SaveCheckpoint(), *(callbacks or [ProgressBar(enabled=False)])])
        trainer.load_checkpoint('auto')
        trainer.fit(prompts(), num_episodes=6, max_timesteps=1, update_timesteps=2)
        return trainer

    straight = fit(tmp_path / 'straight')
    stopped = fit(tmp_path / 'stopped', StopInTheMiddle(enabled=False))
    assert (stopped.phase, stopped.timestep, len(stopped.buffer)) == (1, 2, 0)
    assert stopped.collector.draws.samples_drawn == 32
    resumed = fit(tmp_path / 'stopped')
    assert resumed.phase == straight.phase == 3
    for a, b in zip(straight.actor.parameters(), resumed.actor.parameters(), strict=True):
        assert torch.equal(a, b)
    assert metrics(tmp_path / 'stopped') == metrics(tmp_path / 'straight')


@pytest.mark.system
@pytest.mark.skipif(not hasattr(os, 'fork'), reason='limits the size of files of a child process')
def test_a_disk_that_is_full_for_a_while(undisturbed, tmp_path):
    """Files cannot grow beyond 4 KiB while phases 3 to 5 are saved: warnings, no checkpoint of those, and a run that is
    not changed."""
    full = """
import resource, signal
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
        import os
        print('saved', self.phase, sorted(os.listdir(self.checkpoint_dir)), flush=True)
base.Trainer.save_checkpoint = limited
"""
    command = [sys.executable, '-c', full + SCRIPT, str(tmp_path), str(PHASES), 'NaiveStrategy']
    env = os.environ | {'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1'}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for phase in (3, 4, 5):
        assert f'phase {phase} was not saved, the run goes on' in done.stderr
        assert f"saved {phase} ['step-00000001', 'step-00000002']" in done.stdout
    assert 'phase 6 was not saved' not in done.stderr
    assert checkpoints(tmp_path) == [f'step-{PHASES - 1:08d}', f'step-{PHASES:08d}']
    assert undisturbed[0] in done.stdout
    assert metrics(tmp_path) == undisturbed[1]


def test_a_checkpoint_of_another_method_with_the_same_models_is_refused(tmp_path, monkeypatch):
    token, mask = torch.tensor([3]), torch.tensor([True])
    strategy = NaiveStrategy()
    actor = GPTActor(config=tiny_config('gpt2', vocab_size=16, hidden=16, positions=32))
    actor, optim = strategy.prepare((actor, torch.optim.AdamW(actor.parameters())))
    trainer = SFTTrainer(strategy, actor, optim, [Sequence(prompt_ids=token, response_ids=token, response_mask=mask)])
    trainer.save_checkpoint(tmp_path / 'sft')
    trainer.load_checkpoint(tmp_path / 'sft')
    monkeypatch.setattr(trainer, 'facts', lambda: {'method': 'dpo', 'data': {}})
    with pytest.raises(CheckpointError, match=r'a checkpoint of sft .*, and this run is dpo .*--pretrain'):
        trainer.load_checkpoint(tmp_path / 'sft')


def test_a_checkpoint_of_supervised_training_is_refused_by_ppo(tmp_path):
    token, mask = torch.tensor([3]), torch.tensor([True])
    strategy = NaiveStrategy()
    actor = GPTActor(config=tiny_config('gpt2', vocab_size=16, hidden=16, positions=32))
    actor, optim = strategy.prepare((actor, torch.optim.AdamW(actor.parameters())))
    SFTTrainer(
        strategy, actor, optim, [Sequence(prompt_ids=token, response_ids=token, response_mask=mask)]
    ).save_checkpoint(tmp_path / 'sft')
    trainer = make()
    before = [p.clone() for p in trainer.actor.parameters()]
    with pytest.raises(CheckpointError, match='a checkpoint of sft .it holds actor., and this run is ppo'):
        trainer.load_checkpoint(tmp_path / 'sft')
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.actor.parameters(), strict=True))


def test_a_checkpoint_of_another_architecture_names_the_first_tensors(tmp_path):
    trainer = make(run_dir=tmp_path)
    trainer.set_prompts(prompts())
    path = trainer.save_checkpoint()
    lora = make(lora_rank=2)
    with pytest.raises(CheckpointError, match='lora_'):
        lora.load_checkpoint(path)


@pytest.mark.parametrize(
    'part', ['manifest.json', 'state.json', 'actor', 'actor_optim', 'critic', 'critic_optim', 'rng']
)
def test_every_file_is_guarded(tmp_path, part):
    """A flipped bit, a missing end, a missing file: refused by the file's name, before any weight is touched."""
    trainer = make(run_dir=tmp_path)
    trainer.fit(prompts(), num_episodes=1, max_timesteps=1, update_timesteps=1)
    path = trainer.save_checkpoint()
    victim = next(p for p in sorted(path.iterdir()) if p.name == part or p.name.startswith(f'{part}-rank'))
    whole = victim.read_bytes()
    middle = len(whole) // 2
    fresh = make()
    before = [p.clone() for p in fresh.actor.parameters()]
    for damaged in (whole[:middle] + bytes([whole[middle] ^ 0x10]) + whole[middle + 1 :], whole[:-1], None):
        victim.unlink()
        if damaged is not None:
            victim.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=victim.name):
            fresh.load_checkpoint(path)
        if damaged is None:
            victim.touch()
    assert all(torch.equal(a, b) for a, b in zip(before, fresh.actor.parameters(), strict=True))
    victim.write_bytes(whole)
    assert fresh.load_checkpoint(path)


def test_a_damaged_newest_checkpoint_names_the_newest_whole_one_before_it(tmp_path, capsys):
    trainer = make(run_dir=tmp_path, callbacks=[SaveCheckpoint()])
    trainer.fit(prompts(), num_episodes=1, max_timesteps=4, update_timesteps=1)
    folders = sorted((tmp_path / 'checkpoints').iterdir())
    for damaged in folders[2:]:
        part = next(damaged.glob('actor-*.safetensors'))
        part.write_bytes(part.read_bytes()[:-1])
    hint = f'; the newest whole one before it is taken with --resume {folders[1]}'
    with pytest.raises(CheckpointError, match=rf'{part}: .*truncated.*{hint}$'):
        make(run_dir=tmp_path).load_checkpoint('auto')
    back = make(run_dir=tmp_path)
    back.load_checkpoint(folders[1])
    back.callbacks.callbacks.append(StopAtOnce())
    with pytest.raises(SystemExit):
        back.fit(prompts(), num_episodes=1, max_timesteps=4, update_timesteps=1)
    written = tmp_path / 'checkpoints' / 'step-00000003'
    assert (
        f'stopped after phase 3; continue with --resume {written}\n' in capsys.readouterr().out
    )  # auto would take the damaged fourth


class StopAtOnce(ProgressBar):
    def on_phase_end(self, trainer, step, metrics):
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize('name', ['../outside', '/etc/hostname', 'sub/../../outside'])
def test_paths_out_of_the_folder_are_refused(tmp_path, name):
    trainer = make(run_dir=tmp_path)
    trainer.set_prompts(prompts())
    path = trainer.save_checkpoint()
    content = json.loads((path / 'manifest.json').read_text())
    first = next(iter(content['files']))
    text = json.dumps(content).replace(json.dumps(first), json.dumps(name))
    (path / 'manifest.json').write_text(text)
    with pytest.raises(CheckpointError, match=r'manifest\.json.*' + name.replace('.', r'\.')):
        make().load_checkpoint(path)
