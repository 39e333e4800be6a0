"""`run_main`: a closed stdout, characters that stdout cannot encode; recorded defaults; functions by name."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pkgutil import resolve_name

import pytest

from chatgpt.launch.arguments import load_function, run_main
from chatgpt.launch.recipes import run_defaults
from chatgpt.launch.runs import SFTRun
from chatgpt.trainer.callbacks.base import say


@pytest.mark.system
def test_a_reader_that_has_read_enough_is_no_error():
    """As with `| head -1`."""
    reads, writes = os.pipe()
    os.close(reads)
    code = 'from chatgpt.launch.arguments import run_main; run_main(lambda: print("x" * 1_000_000))'
    done = subprocess.run([sys.executable, '-c', code], stdout=writes, stderr=subprocess.PIPE, text=True)
    os.close(writes)
    assert (done.returncode, done.stderr) == (141, '')


def failing(error):
    def main():
        raise error

    return main


def test_a_failed_save_may_be_tried_again_and_a_mistake_may_not(capsys):
    from chatgpt.trainer.saving import SaveError

    for error, code in ((SaveError('no space'), 1), (ValueError('x'), 2)):
        with pytest.raises(SystemExit) as ended:
            run_main(failing(error))
        assert ended.value.code == code
    assert 'error: no space' in capsys.readouterr().err


@pytest.mark.parametrize(
    'name',
    [
        'chatgpt.rollout.remote:WorkersLost',
        'chatgpt.environments.runner:EnvironmentsHang',
        'chatgpt.trainer.selection:EpisodesFailed',
    ],
)
def test_a_failure_of_workers_or_environments_may_be_tried_again(name, capsys):
    kind = resolve_name(name)
    for error in (kind('it is gone'), ValueError(f'rank 0: {kind.__name__}: it is gone')):
        with pytest.raises(SystemExit) as ended:
            run_main(failing(error))
        assert ended.value.code == 1 and f'error: {error}' in capsys.readouterr().err


def test_the_folder_that_the_command_chose_is_its_default():
    chosen, given = SFTRun(save_path='outputs/sft'), SFTRun(save_path='mine')
    given.given = {'save_path': 'mine'}
    assert run_defaults(chosen)['save_path'] == 'outputs/sft'
    assert run_defaults(given)['save_path'] == 'outputs/train_sft'


@pytest.mark.parametrize('encoding', ['latin-1', 'utf-8'])
def test_what_the_encoding_of_stdout_lacks_is_escaped(monkeypatch, encoding):
    """For the command, and for a callback that is used from Python."""
    shown = {'latin-1': r'é \u2192', 'utf-8': 'é →'}[encoding]
    for prints in (lambda: run_main(lambda: print('é → \ud800')), lambda: say('é → \ud800')):
        stdout = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        monkeypatch.setattr(sys, 'stdout', stdout)
        prints()
        stdout.flush()
        assert stdout.buffer.getvalue().decode(encoding) == f'{shown} \\ud800\n'


# ---------------------------------------------------------------------- --reward_fn module:name


FILE = """
class Starts:
    def __call__(self, prompts, responses):
        return [float(r.startswith('a')) for r in responses]

class Needs(Starts):
    def __init__(self, target): ...

class Holds:
    pass
"""


def test_a_class_is_made_and_one_that_cannot_be_is_one_line(tmp_path):
    (tmp_path / 'kinds.py').write_text(FILE)
    (tmp_path / 'leaves.py').write_text('import sys\nsys.exit(0)\n')
    assert load_function(f'{tmp_path}/kinds.py:Starts')([''], ['abc']) == [1.0]
    for name, message in (
        ('kinds.py:Needs', r"Needs is a class with arguments of its own \(missing a required argument: 'target'\)"),
        ('kinds.py:Holds', 'Holds is a class whose objects cannot be called'),
        ('leaves.py:score', r'importing it raised SystemExit: 0$'),
    ):
        with pytest.raises(ValueError, match=message):
            load_function(f'{tmp_path}/{name}')
