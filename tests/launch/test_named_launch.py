"""A launch with a name of its own under torchrun on one node: a later one of that name goes on."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from launcher_runs import ROOT, command, metrics_of
from limits import until

SCRIPT = str(ROOT / 'examples' / 'train_prompts.py')
QUICK = [
    '--num_episodes=1',
    '--max_timesteps=16',
    '--update_timesteps=1',
    '--experience_batch_size=2',
    '--train_batch_size=2',
    '--max_epochs=1',
    '--max_new_tokens=2',
    '--checkpoint_interval=1',
]


@pytest.mark.system
def test_a_second_launch_of_the_name_goes_on(tmp_path: Path, model_folder: Path):
    """The first is ended by SIGTERM, as by a batch system that queues the job again."""
    flags = ['--run_id=job7', SCRIPT, *QUICK, '--pretrain', str(model_folder), '--save_path', str(tmp_path)]
    first = command(*flags)
    try:
        until(lambda: len(metrics_of(tmp_path)) >= 1)
        first.send_signal(signal.SIGTERM)
        first.communicate()
    finally:
        first.kill()
    done = len(metrics_of(tmp_path))
    assert first.returncode == 128 + signal.SIGTERM and 1 <= done < 16
    second = command(*flags)
    output, _ = second.communicate()
    assert second.returncode == 0, output
    assert [line['step'] for line in metrics_of(tmp_path)] == list(range(1, 17))
    assert f'phase {done + 1}/16' in output and 'phase 1/16' not in output
