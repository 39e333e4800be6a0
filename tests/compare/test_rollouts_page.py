"""The page of recorded sequences: responses of the server, and the reader in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from recorded import recorded_row
from serving import running

from chatgpt.launch.cli import compare, rollouts
from chatgpt.monitor.compare.app import rollouts_app
from chatgpt.monitor.compare.serving import Guard
from chatgpt.monitor.run_folder.rollouts import write_rollouts

ORIGIN = 'http://127.0.0.1:8765'
MARKUP = '<img src=x onerror="window.hacked = 1">'


def row(phase: int, index: int, prompt: str, response: str, score: float, group: int) -> dict[str, Any]:
    tokens = [f'{word} ' for word in response.split()]
    numbers = [0.25 * (at + 1) for at in range(len(tokens))]
    more = {'old_logprobs': numbers, 'ref_logprobs': [0.0] * len(tokens), 'advantages': numbers, 'group': group}
    return recorded_row(phase, index, tokens, prompt=prompt, response=response, score=score, **more)


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Two runs: `first` with phases 1 and 3 of four sequences each, `second` with one sequence."""
    for phase in (1, 3):
        rows = [
            row(
                phase,
                10 * phase + i,
                f'about {animal}',
                f'phase {phase} says {i} {MARKUP}',
                i - 1.0,
                10 * phase + i // 2,
            )
            for i, animal in enumerate(('fox', 'fox', 'cat', 'cat'))
        ]
        write_rollouts(tmp_path / 'first' / 'rollouts', phase, rows)
    write_rollouts(tmp_path / 'second' / 'rollouts', 7, [row(7, 0, 'alone', 'שלום one', float('nan'), 0)])
    return [tmp_path / 'first', tmp_path / 'second']


@pytest.fixture
def client(runs):
    testclient = pytest.importorskip('starlette.testclient', reason='needs the package httpx')
    client = testclient.TestClient(Guard(rollouts_app(runs), 'token'), base_url=ORIGIN)
    assert client.get('/api/runs').status_code == 403
    assert client.get('/?token=token').status_code == 200
    return client


def test_requests_return_matching_rows(client):
    every = [10, 11, 12, 13, 30, 31, 32, 33]
    found = {'': every, 'phase=3': every[4:], 'phase=2': [], 'prompt=FOX': [10, 11, 30, 31], 'text=says%202': [12, 32]}
    found |= {'min=1': [12, 13, 32, 33], 'min=0&max=1': [11, 12, 31, 32], 'phase=1&prompt=cat&max=1': [12]}
    found |= {'offset=3&limit=2': [13, 30], 'limit=100000': every}
    for asked, indices in found.items():
        assert [r['index'] for r in client.get(f'/api/rollouts?run=0&{asked}').json()] == indices


def test_runs_are_distinguished_and_numbers_are_json(client):
    assert client.get('/api/runs').json() == [{'name': 'first', 'phases': [1, 3]}, {'name': 'second', 'phases': [7]}]
    (alone,) = client.get('/api/rollouts?run=1').json()
    assert alone['response'] == 'שלום one' and alone['score'] is None
    assert alone['log_ratio'] == [0.25, 0.5]
    for wrong in ('run=2', 'run=-1', 'phase=1.5', 'min=low', 'limit=-1'):
        answer = client.get(f'/api/rollouts?{wrong}')
        assert answer.status_code == 400 and 'cannot be read' in answer.json()['error']


def test_it_has_another_default_port():
    assert rollouts.parser().parse_args(['run']).port == 8766
    assert compare.parser().parse_args(['--db', 'judged.sqlite']).port == 8765


def test_the_reader_filters_and_changes_the_run(browser, runs):
    with running(rollouts_app(runs)) as serving:
        page = browser.new_context().new_page()
        faults: list[str] = []
        page.on('console', lambda message: faults.append(message.text) if message.type == 'error' else None)
        page.on('pageerror', lambda error: faults.append(str(error)))
        page.goto(serving.url)
        page.get_by_text('phase 3 says 0').first.wait_for()
        assert 'phase 3 · group 30 · 2 responses' in page.locator('.ro-head').first.inner_text()
        page.get_by_label('Response contains').fill('says 2')
        page.get_by_text('phase 3 says 0').first.wait_for(state='detached')
        assert page.get_by_text('phase 3 says 2').count() >= 1
        assert MARKUP in page.locator('#reader').inner_text() and page.evaluate('window.hacked') is None
        page.get_by_label('Run', exact=True).select_option(label='second')
        page.get_by_text('שלום').first.wait_for()
        assert page.locator('.ro-head').inner_text() == 'phase 7'  # one response is no group
        assert faults == [] and page.url == f'{serving.origin}/'
