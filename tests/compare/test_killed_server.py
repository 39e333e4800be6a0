"""The command in its own process: after a kill every confirmed judgement is on disk; Ctrl-C ends it."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from serving import filled

from chatgpt.monitor.compare.store import Store

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.system


def started(db: Path) -> tuple[subprocess.Popen, str, str]:
    """Starts the command on a database; returns process, origin and token once it serves."""
    words = [sys.executable, '-m', 'chatgpt', 'compare', '--db', str(db), '--port', '0']
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    shown = process.stdout.readline()
    found = re.match(r'open http://(127\.0\.0\.1:\d+)/\?token=(\S+)', shown)
    assert found, shown + process.stdout.read()
    return process, found[1], found[2]


class Client:
    """A client that sends the requests of a person's browser."""

    def __init__(self, address: str, token: str, name: str) -> None:
        self.address, self.cookies = address, {}
        self.ask('GET', f'/?token={token}')
        self.state = self.ask('POST', '/api/join', {'name': name})

    def ask(self, method: str, path: str, body: dict | None = None) -> dict:
        connection = http.client.HTTPConnection(self.address)
        cookie = '; '.join(f'{key}={value}' for key, value in self.cookies.items())
        headers = {'Origin': f'http://{self.address}', 'Content-Type': 'application/json', 'Cookie': cookie}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        text = response.read()
        for value in response.headers.get_all('set-cookie') or []:
            key, _, rest = value.partition('=')
            self.cookies[key] = rest.split(';')[0]
        connection.close()
        assert response.status == 200, text
        return json.loads(text) if method == 'POST' else {}

    def judge(self, choice: str) -> int:
        pair = self.state['pair']['id']
        self.state = self.ask('POST', '/api/judge', {'pair': pair, 'choice': choice, 'comment': f'{choice} of {pair}'})
        return pair


def test_a_kill_loses_nothing_and_the_command_resumes(tmp_path):
    db = tmp_path / 'judged.sqlite'
    filled(db, [(f'a{i}', f'b{i}') for i in range(2000)], annotators_per_pair=2).close()
    kept: dict[str, dict[int, str]] = {'Anna': {}, 'Ben': {}}
    for wait in (0.3, 0.7):
        process, address, token = started(db)
        before = sum(map(len, kept.values()))

        def judge(name: str, address: str = address, token: str = token) -> None:
            client = Client(address, token, name)
            try:
                for turn in range(10**6):
                    choice = ('left', 'right', 'tie', 'both_bad')[turn % 4]
                    pair = client.judge(choice)
                    kept[name][pair] = choice  # the server has confirmed it
            except (OSError, http.client.HTTPException):
                return

        people = [threading.Thread(target=judge, args=[name]) for name in kept]
        for person in people:
            person.start()
        while sum(map(len, kept.values())) < before + 10:
            time.sleep(0.01)
        time.sleep(wait)
        process.kill()  # SIGKILL
        assert process.wait() == -signal.SIGKILL
        for person in people:
            person.join()
        assert sum(map(len, kept.values())) >= before + 10
        with Store(db, create=False) as store:
            assert store._value('PRAGMA integrity_check') == 'ok'
            found = {(j.person, j.pair): j for j in store.judgements()}
            for name, choices in kept.items():
                for pair, choice in choices.items():
                    judgement = found[name, pair]
                    assert judgement.comment == f'{choice} of {pair}'
                    side = {'left': 'ba'[judgement.a_is_left], 'right': 'ab'[judgement.a_is_left]}
                    assert judgement.verdict == side.get(choice, choice)
            # What was on its way when the server died may be there too, one of each person and start at most.
            assert len(found) <= sum(map(len, kept.values())) + 4


def test_ctrl_c_ends_it_with_what_came_out(tmp_path):
    db = tmp_path / 'judged.sqlite'
    filled(db, [('a', 'b'), ('c', 'd')]).close()
    process, address, token = started(db)
    client = Client(address, token, 'Anna')
    client.judge('tie')
    process.send_signal(signal.SIGINT)
    shown, _ = process.communicate()
    assert process.returncode == 0, shown
    assert 'Traceback' not in shown and '1 of 2 judgements, of 1 pair by Anna (1)' in shown
    assert f'kept in {db}; export it with --export FILE.jsonl' in shown
    assert sorted(p.name for p in tmp_path.iterdir()) == ['judged.sqlite']  # the log is in the file
