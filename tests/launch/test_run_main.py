"""What surrounds the main of a command: output that nobody reads, and the defaults that a run records."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

from chatgpt.launch.arguments import run_main
from chatgpt.launch.recipes import run_defaults
from chatgpt.launch.runs import SFTRun
from chatgpt.trainer.callbacks.base import say


@pytest.mark.system
@pytest.mark.parametrize('length', [1, 1_000_000])
def test_a_reader_that_has_read_enough_is_no_error(length):
    """As of `| head -1`."""
    reads, writes = os.pipe()
    os.close(reads)
    code = f'from chatgpt.launch.arguments import run_main; run_main(lambda: print("x" * {length}))'
    done = subprocess.run([sys.executable, '-c', code], stdout=writes, stderr=subprocess.PIPE, text=True)
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


@pytest.mark.parametrize('encoding', ['ascii', 'latin-1', 'utf-8'])
def test_what_the_encoding_of_stdout_lacks_is_escaped(monkeypatch, encoding):
    """Of the command, and of a callback that is used from Python."""
    shown = {'ascii': r'\xe9 \u2192', 'latin-1': r'é \u2192', 'utf-8': 'é →'}[encoding]
    for prints in (lambda: run_main(lambda: print('é → \ud800')), lambda: say('é → \ud800')):
        stdout = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        monkeypatch.setattr(sys, 'stdout', stdout)
        prints()
        stdout.flush()
        assert stdout.buffer.getvalue().decode(encoding) == f'{shown} \\ud800\n'
