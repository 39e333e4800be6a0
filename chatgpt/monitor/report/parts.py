"""Data for the macros of `assets/report.html.j2`; `part` renders a macro."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

from chatgpt.monitor.doctor.diagnosis import explanations
from chatgpt.monitor.report.runs import Run, all_settings
from chatgpt.monitor.report.series import KL, average, nats, number, what_improved
from chatgpt.monitor.report.text import cut, duration, moment_of, plain, script_json, time_text, value_text
from chatgpt.monitor.report.turns import HEIGHT, WIDTH

STATUS = {
    'ended': ('good', 'ended'),
    'stopped': ('warning', 'stopped'),
    'failed': ('error', 'failed'),
    'running': ('note', 'running, or killed'),
}
TILES = (
    ('eval/score_mean', 'Eval score'),
    ('rollout/score_mean', 'Score'),
    (KL, 'KL, nats per response'),
    ('rollout/response_len_mean', 'Response tokens'),
    ('rollout/ended_share', 'Share that ended'),
    ('eval/explained_variance', 'Explained variance'),
    ('*/val_accuracy', 'Eval accuracy'),
    ('*/accuracy', 'Accuracy'),
    ('*/val_loss', 'Eval loss'),
    ('*/loss', 'Loss'),
    ('perf/new_tokens_per_s', 'New tokens per second'),
    ('perf/total_s', 'Seconds per phase'),
    ('perf/peak_memory_gib', 'Memory, GiB'),
)
"""metrics of the overview, where * is the name of a method; the first eight that a run has are shown"""
COLORS = 8
"""number of colours of lines, --series-1 to --series-8 in page.css"""
PHASES_SIDE_BY_SIDE, PROMPTS = 5, 12


@cache
def _macros() -> Any:
    from jinja2 import Environment, FileSystemLoader
    from markupsafe import Markup

    def shown(value: Any) -> Any:
        return plain(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    places = FileSystemLoader(Path(__file__).parent / 'assets')
    environment = Environment(loader=places, autoescape=True, finalize=shown, trim_blocks=True)
    functions: list[Any] = [about_answer, cut, explanations, facts_of, flat, have_other_rewards, metric_id, number]
    functions += [samples_of, settings_of, tiles_of, time_text, turns_of, what_improved]
    environment.globals |= {function.__name__: function for function in functions}
    environment.globals |= {'COLORS': COLORS, 'Markup': Markup, 'STATUS': STATUS, 'shell_words': shlex.join}
    environment.globals['SIZE'] = WIDTH, HEIGHT
    environment.globals['script_json'] = lambda value: Markup(script_json(value))
    return environment.get_template('report.html.j2').module


def part(name: str, *values: Any, **named: Any) -> str:
    """Returns the HTML of a macro."""
    return getattr(_macros(), name)(*values, **named)


def facts_of(run: Run) -> list[str]:
    """Returns method, phases and times, for the line below the title."""
    record, done = run.folder.record, run.folder.phase
    planned = record.num_phases if record is not None else None
    facts = [f'{done} of {planned} phases' if planned and planned != done else f'{done} phase{"s" * (done != 1)}']
    if record is None:
        return facts
    facts.insert(0, record.method)
    facts += warm_critic(run)
    if record.starts:
        first, last = record.starts[0], record.starts[-1]
        facts.append(f'started {time_text(first.at)}')
        if last is not first:
            facts.append(f'resumed {time_text(last.at)} at phase {last.phase}')
        start, end = moment_of(last.at), moment_of(record.ended)
        if start is not None and end is not None:
            facts.append(f'{"ran" if last is first else "ran since then"} {duration((end - start).total_seconds())}')
    return facts


def warm_critic(run: Run) -> list[str]:
    """Returns the explained variance of the critic at the actor's first step, of a run whose actor waited for it."""
    actor, variance = (run.columns.get(f'ppo/{name}', ((), ())) for name in ('policy_loss', 'explained_variance'))
    first = actor[0][0] if actor[0] else None
    values = dict(zip(*variance, strict=True))
    if first is None or min(values, default=first) == first or values.get(first) is None:
        return []
    return [f'explained variance {number(values[first])} at the first actor step, phase {first}']


def have_other_rewards(runs: Sequence[Run]) -> bool:
    """Returns True if two runs name different rewards in their run.json."""
    rewards = [run.folder.record.reward for run in runs if run.folder.record is not None]
    return any(reward != rewards[0] for reward in rewards)


def tiles_of(run: Run) -> list[tuple[str, str, str | None]]:
    """Returns (label, now, at the start) of the metrics of the overview."""
    shown: dict[str, tuple[str, str, str | None]] = {}
    for pattern, label in TILES:
        name = next((name for name in run.columns if fnmatch(name, pattern)), '')
        values = [value for value in run.columns.get(name, ((), ()))[1] if value is not None]
        if not values or label in shown or len(shown) == 8:
            continue
        share = 1 if name.startswith('eval/') or '/val_' in name else max(1, len(values) // 10)
        formatted = nats if name == KL else number
        first = formatted(average(values[:share])) if len(values) > 1 else None
        shown[label] = label, formatted(average(values[-share:])), first
    return list(shown.values())


def samples_of(run: Run) -> dict[str, Any] | None:
    """Returns responses of several phases by prompt. Prompts of most phases come first, since their responses can be
    compared; prompts of one phase are taken from each phase alike."""
    evaluated = run.folder.eval_samples
    rows = [row for row in evaluated or run.folder.samples if 'response' in row]
    if not rows:
        return None
    phases = spread(sorted({int(row['step']) for row in rows}), PHASES_SIDE_BY_SIDE)
    seen: dict[str, set[int]] = {}
    by_prompt: dict[str, dict[int, Mapping[str, Any]]] = {}
    for row in rows:
        prompt, step = str(row.get('prompt', '')), int(row['step'])
        seen.setdefault(prompt, set()).add(step)
        if step in phases:
            by_prompt.setdefault(prompt, {}).setdefault(step, row)
    place: dict[str, int] = {}
    of_phase = dict.fromkeys(phases, 0)
    for prompt, answers in by_prompt.items():
        place[prompt] = of_phase[min(answers)]
        of_phase[min(answers)] += 1
    order = sorted(by_prompt.items(), key=lambda item: (-len(item[1]), place[item[0]]))
    advice = ''
    if len(set().union(*seen.values())) > 1 and all(len(steps) == 1 for steps in seen.values()):
        flag = '--eval_episodes' if any('parts' in row for row in rows) else '--validation_file'
        advice = (
            f' Each phase had other prompts; with evaluation prompts ({flag}) all answer the same ones, side by side.'
        )
    return {
        'what': 'the evaluation prompts' if evaluated else 'training',
        'advice': advice,
        'phases': phases,
        'prompts': sorted(order[:PROMPTS], key=lambda item: (-len(item[1]), min(item[1]))),
        'count': len(order),
    }


def spread(items: Sequence[Any], count: int) -> list[Any]:
    """Returns `count` items at equal distances, the first and the last included."""
    if len(items) <= count:
        return list(items)
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def about_answer(row: Mapping[str, Any]) -> str:
    """Returns the numbers of a response beside its score, and how it ended."""
    facts = [f'kl {nats(float(row["kl"]))}'] if isinstance(row.get('kl'), (int, float)) else []
    facts += [f'tokens {number(float(row["num_tokens"]))}'] if row.get('num_tokens') is not None else []
    if 'end' in row:
        facts.append(f'{row["end"]}' + {True: ', success', False: ', no success', None: ''}[row.get('success')])
    elif row.get('ended') is False:
        facts.append('cut off')
    return ', '.join(facts)


def turns_of(parts: Sequence[Mapping[str, Any]], limit: int) -> Iterator[tuple[str, str, Any]]:
    """Yields the parts of an episode: ('turn', text, (number, rewards)), ('observation', text, None), and ('more', ...)
    if the texts together are longer than `limit`."""
    left, turn = limit, 0
    for one in parts:
        is_turn = one.get('observation') is None
        text = cut((one['turn'] if is_turn else one['observation']).strip('\n'), max(left, 1))
        left -= len(text)
        turn += is_turn
        rewards = ', '.join(f'{n} {number(float(x))}' for n, x in one['rewards'].items()) if is_turn else ''
        yield ('turn', text, (turn, rewards or 'no reward')) if is_turn else ('observation', text, None)
        if left <= 0:
            yield 'more', '', None
            return


def settings_of(runs: Sequence[Run]) -> dict[str, Any] | None:
    """Returns all settings with their values, None if a run does not have one. Settings that differ from their
    defaults, or between the runs, are separate."""
    each = [all_settings(run) for run in runs]
    names = dict.fromkeys(name for one in each for name in one)
    if not names:
        return None
    record = runs[0].folder.record
    heads = [run.name for run in runs]
    if len(runs) > 1:
        marked = {n for n in names if any(n not in one or one[n] != each[0].get(n) for one in each)}
    else:
        marked = set(record.changed_settings()) if record is not None else set()
        each += [record.defaults] if record is not None and record.defaults else []
        heads = ['value', 'default'][: len(each)]
    rows = [(n, [value_text(one[n]) if n in one else None for one in each]) for n in names]
    return {
        'heads': heads,
        'marked': [row for row in rows if row[0] in marked],
        'others': [row for row in rows if row[0] not in marked],
    }


def flat(value: Any) -> str:
    """Formats names and values on one line."""
    if isinstance(value, Mapping):
        return ', '.join(f'{name} {flat(inner)}' for name, inner in value.items() if inner is not None)
    if isinstance(value, (list, tuple)):
        return '; '.join(flat(inner) for inner in value)
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10000:
        return f'{value:,}'.replace(',', ' ')
    return f'{value:.4g}' if isinstance(value, float) else str(value)


def names_of_page(used: Sequence[str], meanings: Mapping[str, Sequence[str]]) -> list[tuple[list[str], str, str]]:
    """Returns (metrics, unit, meaning) of the metrics of the page; metrics with the same meaning share a row."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name in used:
        if name in meanings:
            names.setdefault(tuple(meanings[name]), []).append(name)
    return [(same, unit, meaning) for (unit, meaning), same in names.items()]


def metric_id(name: str) -> str:
    return f'metric-{place_of(name)}'


def place_of(text: str) -> str:
    return ''.join(c if c.isalnum() and c.isascii() else '-' for c in text.lower())
