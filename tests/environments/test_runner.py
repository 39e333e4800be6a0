"""Environments that raise, hang, die and return invalid values: their episode ends with a reason, all others continue,
and threads, processes and descriptors are released."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from limits import until
from small_environments import NEVER, Awaited, Closing, Counter, Moody

from chatgpt.environments import EnvironmentSettings, Failure, Runner, Step, find_environment
from chatgpt.environments import runner as runner_module
from chatgpt.environments.host import Host

KINDS = ('threads', 'processes')


MADE: list[Runner] = []


def made(factory=Counter, kind='threads', *, limit=1.0, num_workers=2):
    MADE.append(Runner(factory, EnvironmentSettings(step_timeout_s=limit, workers=kind, num_workers=num_workers)))
    return MADE[-1]


@pytest.fixture(autouse=True)
def _nothing_is_left():
    """Checks that there are no more threads, processes and descriptors than before, after releasing hanging threads."""
    NEVER.clear()
    before = set(children())
    threads, files = threading.active_count(), len(os.listdir('/proc/self/fd'))
    yield
    NEVER.set()
    while MADE:
        MADE.pop().close()  # after a failed test, for the tests that follow

    def now():
        return threading.active_count(), len(os.listdir('/proc/self/fd')), set(children()) - before

    def is_clean():
        active, opened, left = now()
        return active <= threads and opened <= files and not left

    until(is_clean, lambda: f'left: {threading.enumerate()}, {now()}, not {threads, files}')


def children(pid=None):
    pid = pid or os.getpid()
    found = []
    for task in Path(f'/proc/{pid}/task').iterdir():
        with suppress(FileNotFoundError):  # the thread has ended
            found += [int(child) for child in (task / 'children').read_text().split()]
    return found


def is_there(pid):
    try:
        return Path(f'/proc/{pid}/stat').read_text().rsplit(')', 1)[1].split()[0] != 'Z'
    except (FileNotFoundError, ProcessLookupError):  # also if it ends between opening and reading
        return False


def play(runner, key, *responses, seed=7, **columns):
    runner.start(key, seed, columns)
    answers = [runner.result(key)]
    for response in responses:
        runner.act(key, response)
        answers.append(runner.result(key))
    return answers


def texts(answers):
    return [a.observation if isinstance(a, Step) else a.reason for a in answers]


@pytest.mark.parametrize('factory', [Counter, Awaited])
@pytest.mark.parametrize('kind', KINDS)
def test_episodes_run_concurrently(kind, factory):
    runner, keys = made(factory, kind, limit=20), (1, 2, 3)
    for key in keys:
        runner.start(key, key, {})
    assert [runner.result(key).observation for key in keys] == ['at 100\n', 'at 200\n', 'at 300\n']
    for key in keys:
        runner.act(key, 'x')
    for key in keys:
        step = runner.result(key)
        assert step.observation == f'at {key}01 x\n' and step.rewards == {'reward': 1.0} and step.seconds >= 0
        runner.forget(key)
    runner.close()


@pytest.mark.parametrize('kind', KINDS)
def test_errors_and_invalid_results_end_one_episode(kind):
    runner = made(Counter, kind, limit=20, num_workers=1)
    runner.start('other', 7, {})
    expected = {
        'raise': ('error', 'Counter: raised ValueError: two lines, at '),
        'exit': ('error', 'Counter: raised SystemExit: enough, at '),
        'pair': ('invalid', "Counter: step returned ('at', 1.0); return (observation, reward, "),
        'number': ('invalid', "Counter: reward='much' is not a number"),
        'nan': ('invalid', 'Counter: reward=nan is not a finite number'),
        'infinite': ('invalid', 'Counter: b=inf is not a finite number'),
        'role': ('invalid', "Counter: message {'role': 'wizard', 'content': 'at'} has none of the roles system, "),
        'content': ('invalid', "Counter: message {'role': 'user', 'content': 5} has no text as its content"),
        'bytes': ('invalid', "Counter: observation b'at' is neither a text nor a list of messages"),
        'flag': ('invalid', "Counter: terminated='yes' is not a bool"),
        'info': ('invalid', 'Counter: info is a str, not a dict'),
        'success': ('invalid', "Counter: info['success']='very' is not a bool"),
    }
    if kind == 'processes':
        expected['lambda'] = ('invalid', 'Counter: its answer cannot be pickled, and so not leave its process: ')
    for verb, (reason, message) in expected.items():
        failure = play(runner, verb, f'do:{verb}')[-1]
        assert isinstance(failure, Failure) and failure.reason == reason
        assert failure.message.startswith(message) and '\n' not in failure.message
        runner.forget(verb)
    for how, reason in (('raises', 'error'), ('nonsense', 'invalid')):
        assert play(runner, how, reset=how)[0].reason == reason
        runner.forget(how)
    runner.act('other', 'still here')
    assert runner.result('other').observation == 'at 701 still here\n'
    runner.close()


@pytest.mark.parametrize(
    ('factory', 'kind', 'verb'),
    [(Counter, 'threads', 'hang'), (Counter, 'processes', 'spin'), (Awaited, 'threads', 'hang')]
    + [(Awaited, 'processes', 'spin')],
)
def test_a_step_that_hangs_ends_one_episode(factory, kind, verb):
    runner = made(factory, kind, num_workers=1)
    begun = texts(play(runner, 'other', 'a', 'b'))
    failure = play(runner, 'hangs', f'do:{verb}')[-1]
    assert failure.reason == 'timeout' and failure.message == f'{factory.__name__}: took longer than 1 s'
    assert failure.seconds >= 1.0
    runner.forget('hangs')
    runner.act('other', 'c')
    # moved, or rebuilt from its seed and responses
    assert [*begun, runner.result('other').observation] == ['at 700\n', 'at 701 a\n', 'at 702 b\n', 'at 703 c\n']
    assert len(runner.hung) == (1 if kind == 'threads' else 0)
    runner.close()


@pytest.mark.parametrize('kind', KINDS)
def test_waiting_for_a_worker_is_not_in_the_limit(kind):
    runner = made(kind=kind, limit=1.5, num_workers=1)
    for key in range(4):
        runner.start(key, 7, {})
    for key in range(4):
        runner.result(key)
        runner.act(key, 'do:nap')
    assert texts([runner.result(key) for key in range(4)]) == ['at 701 do:nap\n'] * 4, 'two seconds altogether'
    runner.close()


@pytest.mark.parametrize('kind', KINDS)
def test_a_coroutine_over_its_limit_is_cancelled_and_costs_no_worker(kind, monkeypatch):
    monkeypatch.setattr(runner_module, 'GRACE_S', 0.5)
    runner = made(Awaited, kind, num_workers=1)
    play(runner, 'other', 'a')
    assert play(runner, 'sleeps', 'do:sleep')[-1].reason == 'timeout'
    assert not runner.hung
    runner.act('other', 'b')
    assert isinstance(runner.result('other'), Step)
    # A coroutine that ignores its cancellation loses its loop, and the other environment is rebuilt in a new one.
    assert play(runner, 'clings', 'do:cling')[-1].reason == 'timeout'
    runner.act('other', 'c')
    assert runner.result('other').observation == 'at 703 c\n'
    runner.close()


@pytest.mark.parametrize(('verb', 'how'), [('die', 'exit code 3'), ('crash', 'SIGSEGV')])
def test_a_process_that_dies_ends_one_episode(verb, how):
    runner = made(Counter, 'processes', limit=20, num_workers=1)
    play(runner, 'other', 'a')
    failure = play(runner, 'dies', f'do:{verb}')[-1]
    assert failure.reason == 'error' and failure.message == f'Counter: its worker process ended: {how}'
    runner.act('other', 'b')
    assert runner.result('other').observation == 'at 702 b\n'
    runner.close()


def test_an_environment_that_differs_when_rebuilt_is_reported():
    runner = made(Moody, 'processes', limit=20, num_workers=1)
    first = play(runner, 'other', 'a')[1].observation.strip()
    play(runner, 'dies', 'do:die')
    runner.act('other', 'b')
    failure = runner.result('other')
    assert failure.reason == 'invalid'
    assert re.match(
        rf"Moody: built again .* turn 1 differently: observation was '{first}\\n' and is '", failure.message
    )
    runner.close()


def test_too_many_threads_that_hang_end_the_run(monkeypatch):
    monkeypatch.setattr(runner_module, 'MAX_HUNG_THREADS', 1)
    runner = made(limit=0.3)
    assert play(runner, 0, 'do:hang')[-1].reason == 'timeout'
    with pytest.raises(runner_module.EnvironmentsHang, match="Counter: 2 threads hang.*workers='processes'"):
        assert play(runner, 1, reset='hangs')[0].reason == 'timeout'
        play(runner, 2)
    runner.close()


@pytest.mark.parametrize('kind', KINDS)
def test_environments_are_closed(kind, tmp_path):
    runner, file = made(Closing, kind, limit=20), tmp_path / 'closed'
    for key in range(3):
        play(runner, key, file=str(file))
    runner.forget(0)
    runner.close()
    assert file.read_text() == 'closed\n' * 3
    assert texts(play(runner, 'again', file=str(file))) == ['go'], 'a runner begins anew'
    runner.close()


def test_close_does_not_wait_for_what_hangs(monkeypatch):
    monkeypatch.setattr(runner_module, 'CLOSE_S', 0.2)
    runner = made(Counter, 'processes', limit=600, num_workers=2)
    pid = int(play(runner, 'parent', 'do:child')[-1].observation)
    assert is_there(pid)
    play(runner, 'other')
    runner.act('other', 'do:spin')
    runner.close()
    until(lambda: not is_there(pid), lambda: 'what an environment has started ends with its process')


PROGRAM = """
import sys
from small_environments import Counter
from chatgpt.environments import EnvironmentSettings, Runner
runner = Runner(Counter, EnvironmentSettings(workers='processes', num_workers=2))
for key in range(2):
    runner.start(key, key, {})
    runner.result(key)
runner.act(0, 'do:child')
print(runner.result(0).observation, flush=True)
runner.act(1, 'do:spin')
print('torch' in sys.modules or 'numpy' in sys.modules, flush=True)
runner.result(1)
"""


@pytest.mark.parametrize('signum', [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_the_trainer(signum):
    path = [str(Path(__file__).parent), str(Path(runner_module.__file__).parents[2])]
    env = os.environ | {'PYTHONPATH': os.pathsep.join(path)}
    pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.DEVNULL, 'text': True}
    trainer = subprocess.Popen([sys.executable, '-c', PROGRAM], env=env, **pipes)
    grandchild = int(trainer.stdout.readline())
    assert trainer.stdout.readline() == 'False\n', 'environments need no torch, and start without numpy'
    workers = children(trainer.pid)
    assert len(workers) == 2 and all(map(is_there, [*workers, grandchild]))
    trainer.send_signal(signum)
    trainer.wait()
    trainer.stdout.close()
    until(lambda: not any(map(is_there, [*workers, grandchild])))


def local_factory():
    class Inner(Counter):
        pass

    return Inner


def test_what_cannot_go_to_a_process_is_refused_at_once(monkeypatch):
    with pytest.raises(ValueError, match=r"local_factory.<locals>.Inner cannot go to .* cannot be pickled .*'threads'"):
        made(local_factory(), 'processes')
    main = type('Counter', (Counter,), {'__module__': '__main__'})
    monkeypatch.setattr(sys.modules['__main__'], 'Counter', main, raising=False)
    with pytest.raises(ValueError, match='defined in the script that runs, .* move it to a module of its own'):
        made(main, 'processes')
    with pytest.raises(ValueError, match="workers='fibres' is not known; choose 'threads' or 'processes'"):
        EnvironmentSettings(workers='fibres')


def test_a_module_that_a_worker_cannot_import(tmp_path, monkeypatch):
    file = tmp_path / 'only_here_once.py'
    file.write_text(
        'class Tools:\n    def reset(self, **columns):\n        return "use them"\n\n'
        '    def look(self) -> str:\n        "Look."\n        return "nothing"\n'
    )
    runner = made(find_environment(f'{file}:Tools'), 'processes', limit=20)
    assert play(runner, 0)[0].observation == 'use them', 'a file that was named by its path, within what adapts it'
    runner.close()
    for source, why in (('raise RuntimeError("not twice")', 'not twice'), ('import os; os._exit(5)', 'exit code 5')):
        file.write_text(f'{source}\n')
        runner.start(0, 1, {})
        with pytest.raises(runner_module.WorkerError, match=f'cannot import it: .*{why}.*module that can be imported'):
            runner.result(0)
        runner.close()


@pytest.mark.parametrize(
    ('reset', 'shown'),
    [
        (lambda self, **k: 'go', r'reset\(\*\*k\) is called as reset\(seed, answer=...\): too many positional'),
        (lambda self: 'go', r'reset\(\) is called as reset\(seed, answer=...\)'),
        (lambda self, seed, task: 'go', r'reset\(seed, task\) is called as .*; write reset\(self, seed, \*\*columns\)'),
    ],
)
def test_a_reset_that_cannot_be_called_shows_the_call(reset, shown):
    made = type('Mine', (), {'reset': reset, 'step': lambda self, response: ('', 1.0, True)})
    answer = Host(made, 1.0).reset(0, 7, {'answer': '4'})
    assert re.search(shown, answer.message)
