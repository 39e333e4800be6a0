"""The randomwalks task: the graph and walks as they are defined, and a short run of each kind."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / 'benchmarks'))
import randomwalks
import randomwalks_task as rw


@pytest.mark.parametrize('seed', [1000, 1002, 1004])
def test_graph_and_walks(seed):
    task = rw.make_task(seed)
    rng = np.random.RandomState(seed)
    for _ in itertools.count():
        edges = rng.rand(21, 21) > 0.9
        for i in range(21):
            edges[i, i] = False
        if all(edges[i].any() for i in range(21)):
            break
    assert (task.edges[1:] == edges[1:]).all()
    assert task.edges[0].tolist() == [True] + [False] * 20
    assert len(task.walks) == 1000
    for walk in task.walks:
        assert 2 <= len(walk) <= 10
        assert walk[0] != 'a'
        assert 'a' not in walk[:-1]
        assert all(task.edges[rw.LETTERS.index(x), rw.LETTERS.index(y)] for x, y in itertools.pairwise(walk))
        assert walk[-1] == 'a' or len(walk) == 10


def test_shortest_ways_by_floyd():
    task = rw.make_task(1000)
    distance = np.where(task.edges, 1.0, np.inf)
    np.fill_diagonal(distance, 0.0)
    for k, i, j in itertools.product(range(21), repeat=3):
        distance[i, j] = min(distance[i, j], distance[i, k] + distance[k, j])
    assert task.shortest == {rw.LETTERS[i]: int(min(distance[i, 0] + 1, 10)) for i in range(1, 21)}


def test_optimality():
    task = rw.make_task(1000)
    start = next(walk for walk in task.walks if len(walk) == task.shortest[walk[0]] and walk[-1] == 'a')
    assert task.optimality(start) == 1.0
    assert task.optimality(start + 'aaa') == 1.0  # what follows the goal does not count
    assert task.optimality(start[0]) == 0.0
    assert task.optimality(start[:-1] + '?a') == 0.0
    far = next(x for x in rw.LETTERS[1:] if not task.edges[rw.LETTERS.index(start[0]), rw.LETTERS.index(x)])
    assert task.optimality(start[0] + far + 'a') == 0.0  # a move that is no edge
    longer = max((w for w in task.walks if w[-1] == 'a'), key=len)
    assert task.optimality(longer) == (10 - len(longer)) / (10 - task.shortest[longer[0]])


def test_graphs_without_a_way_are_refused():
    far = [seed for seed in range(1000, 1004) if seed not in (1000, 1002)]
    with pytest.raises(ValueError, match="'a' is too far from"):
        for seed in far:
            rw.make_task(seed)


def test_records_are_the_walks():
    tokenizer = rw.tokenizer()
    task = rw.make_task(1000)
    for walk, record in zip(task.walks[:20], rw.sequences(task.walks[:20]), strict=True):
        assert (
            tokenizer.decode(record.prompt_ids) + tokenizer.decode(record.response_ids, skip_special_tokens=True)
            == walk
        )
        assert record.prompt_ids.tolist() == tokenizer(walk[0])['input_ids']


@pytest.mark.parametrize('method', ['ilql', 'ppo', 'grpo'])
def test_short_runs(monkeypatch, tmp_path, method):
    import json

    for name, value in (('NUM_SAMPLES', 1), ('BATCH', 20), ('SFT_STEPS', 1), ('STEPS', 2)):
        monkeypatch.setattr(randomwalks, name, value)
    monkeypatch.setattr(rw, 'NUM_WALKS', 20)
    monkeypatch.setattr(randomwalks.run_ilql, '__kwdefaults__', {'every': 10})
    monkeypatch.setattr(randomwalks.run_online, '__kwdefaults__', {'every': 1})
    for seed in (1, 2):
        randomwalks.run(method, 1000, seed, 1, tmp_path / f'{seed}.json')
    content = json.loads((tmp_path / '1.json').read_text())
    assert len(content['optimality']) == 3
    assert content['cpu_s'] > 0
    randomwalks.report(tmp_path, tmp_path / 'report.md')
    page = (tmp_path / 'report.md').read_text()
    assert f'| {method} | 1000 | 2 |' in page
    chosen = {json.loads((tmp_path / f'{seed}.json').read_text()).get('beta') for seed in (1, 2)}
    assert ('evaluations, which is' in page) == (method == 'ilql')
    assert ('in all 2 files' in page) == (method == 'ilql' and len(chosen) == 1)
    assert (tmp_path / 'report.png').stat().st_size > 1000


def test_the_page_says_which_beta_the_files_have():
    assert (
        randomwalks.betas_chosen([[{'beta': '100'}] * 6, [{'beta': '100'}] * 3, [{}]])
        == ', which is 100 in all 9 files'
    )
    assert (
        randomwalks.betas_chosen([[{'beta': '100'}, {'beta': '1'}, {'beta': '100'}]])
        == ', which is 1 in 1, 100 in 2 files'
    )
    assert randomwalks.betas_chosen([[{}]]) == ''
