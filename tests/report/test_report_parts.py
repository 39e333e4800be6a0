"""Parts of a page: findings, failures, starts, samples, improvement, memory and its plan, recorded sequences."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from made_runs import make_run, write_lines, write_sequences
from recorded import recorded_row

from chatgpt.monitor.doctor import Finding
from chatgpt.monitor.report import what_improved, write_report
from chatgpt.monitor.report.parts import part, tiles_of, warm_critic
from chatgpt.monitor.report.rollouts import page_row, phases_for_page, rows_for_page
from chatgpt.monitor.report.runs import read_run, why_ended
from chatgpt.monitor.report.turns import by_turn
from chatgpt.monitor.run_folder import RunFolder, Start


def texts(html: str) -> str:
    return ' '.join(re.sub(r'<[^>]+>', ' ', html).split())


def run(folder: Path):
    return read_run(folder, 'it')


def finding(key: str, level: str, step: int) -> Finding:
    return Finding(
        key=key, step=step, level=level, title=f'{key} & co', evidence='1 < 2', cause='a cause', change='lr to 3e-5'
    )


def test_findings_are_shown_the_worst_first_with_all_they_say(tmp_path, monkeypatch):
    found = [finding('a-note', 'note', 1), finding('late', 'error', 9), finding('soon', 'error', 3)]
    monkeypatch.setattr('chatgpt.monitor.report.runs.diagnose', lambda folder: found)
    html = part('findings', [run(make_run(tmp_path))])
    shown = texts(html)
    order = [shown.index(f'{key} &amp; co') for key in ('Soon', 'Late', 'A-note')]
    assert order == sorted(order)
    assert 'error Soon &amp; co phase 3 1 &lt; 2 Likely cause a cause What to change lr to 3e-5' in shown
    assert 'with sources' not in shown  # a check of the user has no explanation
    assert 'nothing wrong' not in shown


def test_why_a_run_failed_comes_before_everything_else(tmp_path):
    folder = make_run(tmp_path, status='failed', phase=7, error='ValueError: 31 scores for 32 responses')
    html = write_report(folder).read_text()
    shown = texts(html[html.index('<main') :])
    assert shown.startswith('The run failed in phase 8. ValueError: 31 scores for 32 responses Overview')


def test_starts_are_listed_and_of_many_the_first_and_the_last(tmp_path):
    def start(phase: int) -> Start:
        return Start(at=f'2026-11-22T10:{phase:02}:00+00:00', phase=phase, command=['run', f'--n={phase}'])

    make_run(tmp_path, starts=[start(0), start(4)])
    shown = texts(part('origin', [run(tmp_path)]))
    assert 'Started 2026-11-22 10:00 UTC run --n=0' in shown
    assert 'Resumed after phase 4 2026-11-22 10:04 UTC run --n=4' in shown
    assert 'resumed 2026-11-22 10:04 UTC at phase 4' in texts(part('head', [run(tmp_path)], 'title'))
    make_run(tmp_path, starts=[start(i) for i in range(30)])
    shown = texts(part('origin', [run(tmp_path)]))
    assert [int(n) for n in re.findall(r'--n=(\d+)', shown)] == [0, 23, 24, 25, 26, 27, 28, 29]
    assert '8 of 30 starts; all are in run.json' in shown


def test_the_same_prompts_are_side_by_side(tmp_path):
    folder = make_run(tmp_path)
    rows = [
        {'step': s, 'prompt': p, 'response': f'{p} at {s}', 'score': s / 8} for s in range(0, 41, 4) for p in ('x', 'y')
    ]
    write_lines(folder / 'eval_samples.jsonl', rows)
    html = part('samples', [run(folder)], 100)
    cards = html.split('<article')[1:]
    assert len(cards) == 2
    assert re.findall(r'Phase (\d+)', cards[0]) == ['0', '8', '20', '32', '40']
    assert re.findall(r'x at (\d+)', cards[0]) == ['0', '8', '20', '32', '40']
    assert re.findall(r'class="score">([\d.]+)<', cards[1]) == ['0', '1', '2.5', '4', '5']


def test_an_episode_is_shown_turn_by_turn(tmp_path):
    folder = make_run(tmp_path)
    parts = [
        {'turn': '3*5', 'rewards': {'reward': 0.0}},
        {'observation': '\n<7> 15 =22\n'},
        {'turn': '7+15', 'rewards': {'right': 1.0, 'form': 0.1}},
    ]
    row = {'step': 1, 'prompt': '3 5 7 =22', 'response': 'joined', 'score': 1.1, 'ended': True, 'num_tokens': 9}
    rows = [row | {'end': 'terminated', 'success': True, 'parts': parts}]
    rows += [row | {'step': 2, 'end': 'error', 'success': None, 'ended': False, 'parts': parts[:1]}]
    write_lines(folder / 'eval_samples.jsonl', rows)
    html = part('samples', [run(folder)], 100)
    shown = texts(html)
    assert 'turn 1 reward 0 3*5 &lt;7&gt; 15 =22 turn 2 right 1, form 0.1 7+15' in shown and 'joined' not in shown
    assert 'tokens 9, terminated, success' in shown and shown.endswith('turn 1 reward 0 3*5 tokens 9, error')
    assert html.count('class="text turn"') == 3 and html.count('class="text observation"') == 1
    short = texts(part('samples', [run(folder)], 4))
    assert '7+15' not in short and '<7>' not in short


def test_without_evaluations_samples_of_training_are_shown(tmp_path):
    folder = make_run(tmp_path)
    (folder / 'eval_samples.jsonl').unlink()
    assert part('samples', [run(folder)], 100) == ''
    rows = [
        {'step': 1, 'prompt': 'only once', 'response': '', 'score': 1.0, 'kl': 0.5, 'num_tokens': 0, 'ended': True},
        {'step': 1, 'prompt': 'often', 'response': 'a', 'score': 2.0, 'kl': 0.5, 'num_tokens': 3, 'ended': False},
        {'step': 9, 'prompt': 'often', 'response': 'b', 'score': None},
        {'step': 9, 'query': 'of a step-wise trainer, other columns', 'reward': 1.0},
    ]
    write_lines(folder / 'samples.jsonl', rows)
    html = str(part('samples', [run(folder)], 100))
    assert '--validation_file' not in html
    cards = html.split('<article')[1:]
    assert [texts('<' + card) for card in cards] == [
        'Prompt 1 often Phase 1 2 a kl 0.5, tokens 3, cut off Phase 9 b',
        'Prompt 2 only once Phase 1 1 empty kl 0.5, tokens 0',
    ]


def test_why_responses_ended_adds_up_to_one(tmp_path):
    folder = make_run(tmp_path)
    found = run(folder).columns
    ended, cut_off = found['rollout/ended_share'][1], found['rollout/cut_share'][1]
    assert [a + b for a, b in zip(ended, cut_off, strict=True)] == pytest.approx([1.0] * 40)
    lines = (folder / 'metrics.jsonl').read_text().splitlines()
    episodes = [json.dumps(json.loads(line) | {'environment/num_turns_mean': 3.0}) for line in lines]
    (tmp_path / 'episodes').mkdir()
    (tmp_path / 'episodes' / 'metrics.jsonl').write_text('\n'.join(episodes) + '\n')
    assert 'rollout/cut_share' not in run(tmp_path / 'episodes').columns  # episodes have metrics for their ends
    write_sequences(folder, ('a', 'b', 'c', 'd'))
    found = run(folder).columns
    assert found['recorded/stop'] == ([1, 20, 40], [0.25] * 3) and found['recorded/eos'][1] == [0.5] * 3
    assert why_ended([{'phase': 1, 'finish_reason': 'eos'}, {'phase': 1, 'finish_reason': 'length'}]) == {}


# ---------------------------------------------------------------------- what improved


def improved(folder: Path, rows: list[dict], evals: list[dict] = ()) -> str:  # type: ignore[assignment]
    write_lines(folder / 'metrics.jsonl', rows)
    write_lines(folder / 'eval.jsonl', list(evals))
    return what_improved(RunFolder(folder))


def test_what_improved_is_a_line(tmp_path):
    rows = [
        {'step': s, 'rollout/score_mean': s / 10, 'rollout/kl_mean': s / 4, 'ppo/value_loss': 1} for s in range(1, 21)
    ]
    evals = [{'step': 0, 'eval/score_mean': -1.0}, {'step': 20, 'eval/score_mean': 1.5}]
    assert improved(tmp_path, rows, evals) == (
        'score 0.15 → 1.95, eval score -1 → 1.5 in 20 phases, KL 4.88 nats per response'
    )
    assert improved(tmp_path, rows[:1]) == 'score 0.1 in 1 phase, KL 0.25 nats per response'
    sft = [{'step': s, 'sft/loss': 4.0 / s, 'sft/val_loss': 5.0 / s, 'sft/perplexity': 9.0} for s in (1, 2, 4)]
    assert improved(tmp_path, sft) == 'loss 4 → 1, eval loss 5 → 1.25 in 4 phases'
    rm = [{'step': s, 'rm/loss': 1 / s, 'rm/accuracy': 0.5 + s / 10} for s in (1, 2, 3)]
    assert improved(tmp_path, rm) == 'accuracy 0.6 → 0.8 in 3 phases'
    assert improved(tmp_path, [{'step': 3, 'mine/quality': 1.0}]) == '3 phases'


# ---------------------------------------------------------------------- texts and numbers


def row(phase: int, index: int, tokens: int = 2, **more: Any) -> dict[str, Any]:
    given = {'score': 1.23456, 'weighted_scores': [[0.5, 1 / 3]], 'advantages': [0.123456] * tokens}
    return recorded_row(phase, index, ['r'] * tokens, **given | more)


def size(rows: list[dict[str, Any]]) -> int:
    return len(json.dumps(rows, ensure_ascii=False, separators=(',', ':')).encode())


def test_numbers_are_rounded_after_the_log_ratio_was_taken():
    given = row(3, 5, old_logprobs=[-12.34567, -1.0], ref_logprobs=[-12.34512, -3.0], entropy=None, score=math.nan)
    made = page_row(given | {'values': [123456.0, -1e-7], 'rewards': [math.inf, 0.0]})
    assert made['log_ratio'] == [-0.00055, 2.0]
    assert (made['values'], made['rewards'], made['entropy']) == ([123500.0, -1e-7], [None, 0.0], None)
    assert (made['advantages'], made['weighted_scores'], made['score']) == ([0.1235, 0.1235], [[0.5, 0.3333]], None)
    assert (made['mask'], made['token_ids'], made['index']) == ([True, True], [7, 7], 5)
    assert not {'old_logprobs', 'ref_logprobs', 'returns', 'prompt_ids', 'columns'} & set(made)


def test_first_groups_of_all_phases_before_second_ones_and_never_over_the_budget():
    rows = [row(phase, 4 * phase + i) for phase in range(1, 6) for i in range(4)]
    one = size([page_row(rows[0])]) - 1  # with its comma
    assert rows_for_page(rows, 10**9) == [page_row(r) for r in rows]
    # The budget holds three groups of two: of the last phase, the first and the middle one.
    chosen = rows_for_page(rows, 6 * one + 20)
    assert [(r['phase'], r['index']) for r in chosen] == [(1, 4), (1, 5), (3, 12), (3, 13), (5, 20), (5, 21)]
    chosen = rows_for_page(rows, 12 * one + 20)
    assert [r['index'] for r in chosen] == [4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 22, 23]
    for budget in (2, one, 3 * one, 7 * one, 50_000):
        assert size(rows_for_page(rows, budget)) <= max(budget, 2)
    assert rows_for_page(rows, 10) == rows_for_page([], 1000) == []


def test_phases_of_a_page_are_spread():
    assert phases_for_page([], 3) == [] and phases_for_page([1, 2], 3) == [1, 2]
    assert phases_for_page(list(range(1, 10)), 5) == [1, 3, 5, 7, 9]
    assert phases_for_page([1, 2, 3], 1) == [3]


def episode_row(phase: int, index: int, turns: list[tuple[int, int]], values: list[float], returns: list[float]) -> Any:
    episode = {'turns': [{'start': a, 'stop': b, 'rewards': {}} for a, b in turns], 'end': 'terminated'}
    numbers = {'values': values, 'returns': returns, 'episode': json.dumps(episode)}
    return recorded_row(phase, index, ['r'] * len(values), **numbers)


def test_values_and_returns_by_turn_are_those_of_the_first_tokens_of_the_latest_phases():
    old = [episode_row(p, 0, [(0, 1), (1, 2)], [9.0, 9.0], [9.0, 9.0]) for p in (1, 2)]
    long = [episode_row(p, 0, [(0, 2), (3, 5)], [1.0, 7.0, 7.0, 2.0, 7.0], [3.0, 8.0, 8.0, 4.0, 8.0]) for p in (3, 4)]
    short = episode_row(5, 1, [(0, 2)], [4.0, 7.0], [6.0, 8.0])
    short['mask'] = [False, True]
    drawing = by_turn([*old, *long, short])
    assert drawing is not None and drawing.phases == [3, 4, 5]
    assert drawing.turns == [(1, 3, (1.0 + 1.0 + 7.0) / 3, (3.0 + 3.0 + 8.0) / 3), (2, 2, 2.0, 4.0)]
    (x1, value), (x2, _) = drawing.lines['value']
    (_, target), _ = drawing.lines['return']
    assert (x1, x2) == (54, 442) and target < value  # a higher number is drawn higher
    assert [text for _, text in drawing.x_ticks] == ['1', '2'] and drawing.y_ticks[0][1] == '2'


def test_nothing_is_drawn_by_turn_without_a_critic_or_a_second_turn():
    turns = [(0, 1), (1, 2)]
    assert by_turn([episode_row(1, 0, turns, [1.0, 1.0], [1.0, 1.0])]) is not None  # a constant has a scale too
    assert by_turn([episode_row(1, 0, turns, [0.0, 0.0], [1.0, 1.0])]) is None
    assert by_turn([episode_row(1, 0, turns[:1], [1.0, 1.0], [1.0, 1.0])]) is None
    assert by_turn([recorded_row(1, 0)]) is None


def test_the_head_has_the_explained_variance_of_the_first_actor_step(tmp_path):
    folder = make_run(tmp_path, 4)
    assert warm_critic(run(folder)) == []  # the actor did not wait
    rows = [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]
    for row in rows:
        row['ppo/explained_variance'] = 0.1 * row['step']
        if row['step'] < 3:
            del row['ppo/policy_loss']
    write_lines(folder / 'metrics.jsonl', rows)
    assert warm_critic(run(folder)) == ['explained variance 0.3 at the first actor step, phase 3']
    assert 'explained variance 0.3' in texts(part('head', [run(folder)], 'it'))


def test_the_overview_has_the_first_and_last_evaluation(tmp_path):
    write_lines(tmp_path / 'metrics.jsonl', [{'step': i, 'sft/val_loss': 100.0 - i} for i in range(1, 41)])
    assert tiles_of(run(tmp_path)) == [('Eval loss', '60', '99')]


@pytest.mark.parametrize('method', ['orpo', 'rm'])
def test_the_overview_has_loss_and_accuracy_of_any_method(tmp_path, method):
    rows = [{'step': i, f'{method}/loss': 1.0 / i, f'{method}/val_accuracy': 0.5 + i / 10} for i in (1, 2)]
    write_lines(tmp_path / 'metrics.jsonl', rows)
    assert [(label, now) for label, now, _ in tiles_of(run(tmp_path))] == [('Eval accuracy', '0.7'), ('Loss', '0.5')]


def test_settings_are_shown_without_secrets(tmp_path):
    options = {'api_key': 'k-1234', 'turns': 3}
    make_run(tmp_path / 'run', settings={'environment_options': options}, defaults={'environment_options': {}})
    text = texts(write_report([tmp_path / 'run'], tmp_path / 'out.html').read_text())
    assert 'turns' in text and '***' in text and 'k-1234' not in text
