"""The benchmark of environments: its tool, its warm-up, what it calls a collapse, and a short run of all of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / 'benchmarks'))
import environments as benchmark
import environments_page as page_of
import environments_runs as plan


def test_the_archive():
    archive = plan.Archive(files=3, size=30, times=5)
    assert archive.reset(7) == f'file {archive.asked}\n' and archive.asked in 'abc'
    for name in 'abc':
        observation, reward, terminated, truncated, _ = archive.step(f'read {name}')
        assert observation[0] == observation[-1] == '\n' and len(observation) == 32
        assert [c for c in observation if c.isdigit()] == [archive.digits[name]] * 5
        assert (reward, terminated, truncated) == (0.0, False, False)
    assert archive.step('read d') == archive.step('hm') == ('\n?\n', 0.0, False, False, {'success': False})
    right = int(archive.digits[archive.asked])
    assert archive.step(f'={right}') == ('', 1.0, True, False, {'success': True})
    assert archive.step(f'={(right + 1) % 10}') == ('', 0.0, True, False, {'success': False})
    other = plan.Archive(files=3, size=30, times=5)
    other.reset(7)
    assert other.texts == archive.texts


@pytest.mark.parametrize('name', plan.TASKS)
def test_the_warm_up_learns_turns_and_no_observations(name):
    words, task = benchmark.tokenizer(), plan.TASKS[name]
    right = []
    for seed in range(60):
        episode = benchmark.taught_episode(task, seed, words)
        environment = task.make()
        assert words.decode(episode.prompt_ids) == environment.reset(seed)
        tokens = zip(episode.response_ids.tolist(), episode.response_mask.tolist(), strict=True)
        said = ''.join(words.decode([token]) if mine else ' ' for token, mine in tokens)
        turns = [turn.strip() for turn in said.split(benchmark.EOS) if turn.strip()]
        assert len(turns) <= task.settings.max_turns and bool(episode.response_mask[-1])
        ends = [environment.step(turn)[2:] for turn in turns]
        assert [terminated or truncated for terminated, truncated, _ in ends] == [False] * (len(turns) - 1) + [True]
        right.append(ends[-1][-1]['success'])
        assert len(episode.response_ids) <= task.max_new_tokens
    assert 0.1 < sum(right) / len(right) < 0.9, 'a teacher who leaves something to learn'


def run_of(success: list[float], entropy: float = 1.0, **changes):
    rows = [[64 * i, float(i), s, s, entropy, 0.5] for i, s in enumerate(success, 1)]
    return {'rows': rows, 'non_finite': '', **changes}


def test_what_a_collapse_is():
    assert page_of.collapse(run_of([0.2] * 5 + [0.8] * 5)) == ''
    assert page_of.collapse(run_of([0.8] * 5 + [0.41] * 5)) == ''
    assert page_of.collapse(run_of([0.8] * 5 + [0.39] * 5)) == 'fell'
    assert page_of.collapse(run_of([0.8] * 5 + [0.1] * 5 + [0.7] * 5)) == 'fell and came back'
    assert page_of.collapse(run_of([0.4] * 10, entropy=0.001)) == 'stuck'
    assert page_of.collapse(run_of([0.9] * 10, entropy=0.001)) == ''
    assert page_of.collapse(run_of([0.9], non_finite='the loss')) == 'not finite'


def test_averages_and_intervals_by_hand():
    assert page_of.averaged(run_of([1, 0, 0, 1, 0, 0]))[-2:] == [2 / 5, 1 / 5]
    mean, low, high = page_of.interval([0.1, 0.2, 0.3, 0.4, 0.5])
    # standard deviation 0.1581, over the root of 5 is 0.0707, times 2.776
    assert (mean, low, high) == pytest.approx((0.3, 0.3 - 0.1963, 0.3 + 0.1963), abs=1e-4)
    run = run_of([0.0, 0.5, 1.0])
    for i, cpu in enumerate((1.0, 3.0, 4.0)):
        run['rows'][i][1] = cpu
    assert page_of.on_the_way(run, 0, 128) == pytest.approx(0.25)
    assert page_of.on_the_way(run, 1, 3.5) == pytest.approx((0.0 * 1 + 0.5 * 2 + 1.0 * 0.5) / 3.5)
    assert plan.late_success(run_of([0.0, 0.0, 0.6, 0.8]), 4.0) == pytest.approx(0.7)


def test_equal_effort():
    runs = list(plan.tuning(plan.Budget()))
    tried = {(task, method): [r[2] for r in runs if r[:2] == (task, method)] for task, method, _, _ in runs}
    assert len(tried) == 2 * 5
    for settings in tried.values():
        assert len(settings) == 4 and all(settings.count(setting) == 1 for setting in settings)
    assert not set(plan.Budget().seeds) & {seed for _, _, _, seed in runs}


def test_the_best_setting_is_taken():
    budget = plan.Budget(tune_cpu_s=4.0, tune_seeds=(1, 2))
    runs = [(name, m, s, seed) for name, m, s, seed in plan.tuning(budget) if (name, m) == ('archive', 'GRPO')]
    late = {1e-3: (0.5, 0.1), 3e-3: (0.3, 0.4)}
    records = [
        run_of([0.9, 0.9, 0.9, late[s['lr']][seed - 1] - 0.01 * s['num_samples_per_prompt']])
        | {'task': name, 'method': m, 'setting': s, 'seed': seed, 'compared': False}
        for name, m, s, seed in runs
    ]
    for r in records:
        r['rows'] = [[64, float(cpu), *row[2:]] for cpu, row in zip((1, 2, 2.5, 4), r['rows'], strict=True)]
    scored = plan.tuned(records, 'archive', 'GRPO', budget)
    assert scored[0][1] == {'lr': 3e-3, 'num_samples_per_prompt': 4}
    assert scored[0][0] == pytest.approx(0.35 - 0.04)
    with pytest.raises(ValueError, match='GRPO on archive is not tuned yet'):
        plan.tuned(records[:-1], 'archive', 'GRPO', budget)


def test_a_quick_run_of_all_of_it(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(plan, 'METHODS', {m: plan.METHODS[m] for m in ('PPO, turn credit', 'GRPO')})
    monkeypatch.setattr(plan, 'TASKS', {'archive': plan.TASKS['archive']})
    monkeypatch.setattr(plan, 'FIRST', 'PPO, turn credit')
    monkeypatch.setattr(benchmark, 'ROOT', tmp_path)
    monkeypatch.setattr(sys, 'argv', ['environments.py', '--quick'])
    benchmark.main()
    folder = tmp_path / 'outputs' / 'environments_quick'
    records = [json.loads(line) for line in (folder / 'runs.jsonl').read_text().splitlines()]
    assert [r['compared'] for r in records] == [False] * 2 + [True] * 4
    for r in records[2:]:
        assert set(r['success']) == {'episodes', 'cpu_s'} and 0 <= r['start'] <= 1
        assert r['rows'][-1][0] == 32 and r['rows'][-1][1] > 0
    page = (folder / 'environments.md').read_text()
    assert page.count('| PPO, turn credit |') == 2, 'in the table of the task and in that of the tuning'
    assert page.count('| GRPO |') == 3, 'and in that of differences'
    assert '{' not in page
    assert (folder / 'environments.png').stat().st_size > 1000
    capsys.readouterr()
    benchmark.main()
    assert not capsys.readouterr().out, 'what the file holds is not run again'
