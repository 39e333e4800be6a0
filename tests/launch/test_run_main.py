"""What surrounds the main of a command: output that nobody reads, and the defaults that a run records."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from chatgpt.launch.arguments import run_main
from chatgpt.launch.recipes import run_defaults
from chatgpt.launch.runs import SFTRun


@pytest.mark.system
@pytest.mark.parametrize('length', [1, 1_000_000])
def test_a_reader_that_has_read_enough_is_no_error(length):
    """As of `| head -1`."""
    reads, writes = os.pipe()
    os.close(reads)
    code = f'from chatgpt.launch.arguments import run_main; run_main(lambda: print("x" * {length}))'
    done = subprocess.run([sys.executable, '-c', code], stdout=writes, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writes)
    assert (done.returncode, done.stderr) == (141, '')


def test_a_pipe_of_the_run_that_breaks_is_an_error():
    def main():
        raise BrokenPipeError('of a worker')

    with pytest.raises(BrokenPipeError, match='of a worker'):
        run_main(main)


def test_the_folder_that_the_command_chose_is_its_default():
    chosen, given = SFTRun(save_path='outputs/sft'), SFTRun(save_path='mine')
    given.said = {'save_path': 'mine'}
    assert run_defaults(chosen)['save_path'] == 'outputs/sft'
    assert run_defaults(given)['save_path'] == 'outputs/train_sft'
