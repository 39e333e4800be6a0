"""The parts of a page that are words and tables: its head, the findings, samples, settings, starts and names."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from chatgpt.report.figures import COLORS, metric_id
from chatgpt.report.runs import Run, settings_of
from chatgpt.report.series import average, nats, number
from chatgpt.report.summary import KL, what_improved
from chatgpt.report.text import cut, duration, moment_of, safe, script_json, time_text, value_text

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
    ('rm/val_accuracy', 'Eval accuracy'),
    ('rm/accuracy', 'Accuracy'),
    ('dpo/val_accuracy', 'Eval accuracy'),
    ('dpo/accuracy', 'Accuracy'),
    ('sft/val_loss', 'Eval loss'),
    ('sft/loss', 'Loss'),
    ('rm/loss', 'Loss'),
    ('dpo/loss', 'Loss'),
    ('ilql/loss', 'Loss'),
    ('perf/new_tokens_per_s', 'New tokens per second'),
    ('perf/total_s', 'Seconds per phase'),
    ('perf/peak_memory_gib', 'Memory, GiB'),
)
"""at a glance: the first eight that a run has"""
PHASES_SIDE_BY_SIDE = 5
PROMPTS = 12
STARTS = 8
LONG = 400
"""characters of a text that may have to be scrolled"""


# ---------------------------------------------------------------------- head


def status_pill(run: Run) -> str:
    if run.status not in STATUS:
        return ''
    level, word = STATUS[run.status]
    return f'<span class="pill {level}">{word}</span>'


def head(runs: Sequence[Run], title: str) -> str:
    if len(runs) > 1:
        rows = ''.join(
            f'<tr><th scope="row"><span class="swatch s{i % COLORS + 1}{" dashed" * (i >= COLORS)}"></span>'
            f'{safe(run.name)}</th>'
            f'<td>{safe(_method(run))}</td><td>{status_pill(run)}</td><td>{safe(what_improved(run.folder))}</td></tr>'
            for i, run in enumerate(runs)
        )
        return (
            f'<h1>{safe(title)}</h1><div class="scroll"><table class="runs"><thead><tr><th scope="col">run</th>'
            f'<th scope="col">method</th><th scope="col">status</th><th scope="col">what improved</th></tr></thead>'
            f'<tbody>{rows}</tbody></table></div>'
        )
    (run,) = runs
    facts = [_method(run), _phases(run), *_when(run)]
    return (
        f'<h1>{safe(title)} {status_pill(run)}</h1><p class="lead">{safe(what_improved(run.folder))}</p>'
        f'<p class="muted">{" · ".join(safe(fact) for fact in facts if fact)}</p>'
    )


def _method(run: Run) -> str:
    record = run.folder.record
    return record.method if record is not None else ''


def _phases(run: Run) -> str:
    record, done = run.folder.record, run.folder.phase
    planned = record.num_phases if record is not None else None
    return f'{done} of {planned} phases' if planned and planned != done else f'{done} phase{"s" * (done != 1)}'


def _when(run: Run) -> list[str]:
    record = run.folder.record
    if record is None or not record.starts:
        return []
    first, last = record.starts[0], record.starts[-1]
    told = [f'started {time_text(first.at)}']
    if last is not first:
        told.append(f'resumed {time_text(last.at)} at phase {last.phase}')
    start, end = moment_of(last.at), moment_of(record.ended)
    if start is not None and end is not None:
        told.append(f'{"ran" if last is first else "ran since then"} {duration((end - start).total_seconds())}')
    return told


def failures(runs: Sequence[Run]) -> str:
    """Why runs failed, on top of everything."""
    parts = []
    for run in runs:
        record = run.folder.record
        if record is None or record.status != 'failed':
            continue
        which = f'{safe(run.name)}: ' if len(runs) > 1 else ''
        why = safe(cut(record.error or 'no reason known', 4000))
        parts.append(
            f'<section class="card failure" aria-label="Why the run failed"><p><b>{which}The run failed in phase '
            f'{record.phase + 1}.</b></p><pre class="text" dir="auto">{why}</pre></section>'
        )
    return ''.join(parts)


def tiles(run: Run) -> str:
    shown: list[str] = []
    labels: set[str] = set()
    for name, label in TILES:
        if name not in run.columns or label in labels or len(shown) == 8:
            continue
        values = [value for value in run.columns[name][1] if value is not None]
        if not values:
            continue
        labels.add(label)
        share = 1 if name.startswith('eval/') else max(1, len(values) // 10)
        first, last = average(values[:share]), average(values[-share:])
        told = nats if name == KL else number
        from_ = f'<div class="from">from {told(first)}</div>' if len(values) > 1 else ''
        shown.append(f'<div class="tile"><dt>{label}</dt><dd>{told(last)}{from_}</dd></div>')
    if not shown:
        return ''
    note = '<p class="muted small">Training numbers are means of the last and of the first tenth of the phases.</p>'
    return f'<section id="glance"><h2>At a glance</h2><dl class="tiles">{"".join(shown)}</dl>{note}</section>'


# ---------------------------------------------------------------------- findings


def findings(runs: Sequence[Run]) -> str:
    parts = ['<section id="findings"><h2>Findings</h2>']
    for run in runs:
        if len(runs) > 1:
            parts.append(f'<h3 class="of-run">{safe(run.name)}</h3>')
        if run.doctor_error:
            parts.append(f'<p>The doctor could not read this run: {safe(run.doctor_error)}</p>')
        elif not run.findings:
            parts.append('<p>The doctor has found nothing wrong.</p>')
        level = 'h4' if len(runs) > 1 else 'h3'
        parts += [
            f'<article class="card finding {f.level}"><{level}><span class="pill '
            f'{f.level}">{safe(f.level)}</span> {safe(f.title[:1].upper() + f.title[1:])} '
            f'<span class="since">phase {f.step}</span></{level}><p class="evidence">{safe(f.evidence)}</p>'
            f'<dl><dt>Likely cause</dt><dd>{safe(f.cause)}</dd><dt>What to change</dt><dd>{safe(f.change)}</dd></dl>'
            f'<p class="muted small">More, with sources: <code>{safe(f.link)}</code></p></article>'
            for f in run.findings
        ]
    return ''.join([*parts, '</section>'])


# ---------------------------------------------------------------------- samples


def samples(runs: Sequence[Run], limit: int) -> str:
    """Responses of several phases, side by side where they are to the same prompts. Texts are cut at `limit`
    characters."""
    parts = []
    for run in runs:
        rows, same = run.folder.eval_samples, True
        if not rows:
            rows, same = run.folder.samples, False
        rows = [row for row in rows if 'response' in row]
        if not rows:
            continue
        if len(runs) > 1:
            parts.append(f'<h3 class="of-run">{safe(run.name)}</h3>')
        what = 'the evaluation prompts' if same else 'training'
        told = f'Of {what}, by phase; the number beside the phase is the score.'
        if not _any_again(rows):
            told += (
                f' Each phase had other prompts; with evaluation prompts ({_evaluated_by(rows)}) all answer the same '
                'ones, side by side.'
            )
        parts.append(f'<p class="muted">{safe(told)}</p>')
        cards = _side_by_side(rows, limit, 'h4' if len(runs) > 1 else 'h3')
        parts.append(f'<div class="samples">{"".join(cards)}</div>')
    return f'<section id="samples"><h2>Samples</h2>{"".join(parts)}</section>' if parts else ''


def _evaluated_by(rows: Sequence[Mapping[str, Any]]) -> str:
    return '--eval_episodes' if any('parts' in row for row in rows) else '--validation_file'


def spread(items: Sequence[Any], count: int) -> list[Any]:
    """`count` of them at equal distances, the first and the last included."""
    if len(items) <= count:
        return list(items)
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)] if count > 1 else [items[-1]]


def _any_again(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a prompt was answered in several phases, or there is but one phase."""
    phases: dict[str, set[int]] = {}
    for row in rows:
        phases.setdefault(str(row.get('prompt', '')), set()).add(int(row['step']))
    return len(set().union(*phases.values())) == 1 or any(len(seen) > 1 for seen in phases.values())


def _side_by_side(rows: Sequence[Mapping[str, Any]], limit: int, level: str) -> Iterable[str]:
    phases = spread(sorted({int(row['step']) for row in rows}), PHASES_SIDE_BY_SIDE)
    by_prompt: dict[str, dict[int, Mapping[str, Any]]] = {}
    for row in rows:
        if row['step'] in phases:
            by_prompt.setdefault(str(row.get('prompt', '')), {}).setdefault(int(row['step']), row)
    # Prompts seen in most phases first: they are the ones to compare. Of those seen once, as many of each phase.
    place: dict[str, int] = {}
    of_phase = dict.fromkeys(phases, 0)
    for prompt, answers in by_prompt.items():
        place[prompt] = of_phase[min(answers)]
        of_phase[min(answers)] += 1
    order = sorted(by_prompt.items(), key=lambda item: (-len(item[1]), place[item[0]]))
    shown = sorted(order[:PROMPTS], key=lambda item: (-len(item[1]), min(item[1])))
    for i, (prompt, answers) in enumerate(shown, 1):
        cells = ''.join(_answer(phase, answers[phase], limit) for phase in phases if phase in answers)
        yield (
            f'<article class="card sample"><{level}><span class="muted">Prompt {i}</span></{level}>'
            f'{_scrolling(cut(prompt, limit), "prompt")}<div class="answers">{cells}</div></article>'
        )
    if len(order) > PROMPTS:
        yield f'<p class="muted small">{PROMPTS} of {len(order)} prompts; all are in the run folder.</p>'


def _scrolling(text: str, kind: str) -> str:
    reach = ' tabindex="0"' if len(text) > LONG else ''  # the keyboard scrolls what it can reach
    return f'<p class="text long {kind}" dir="auto"{reach}>{safe(text)}</p>'


def _answer(phase: int, row: Mapping[str, Any], limit: int) -> str:
    score = row.get('score', row.get('reward'))
    told = number(float(score)) if isinstance(score, (int, float)) else ''
    more = [
        f'{name} {(nats if name == "kl" else number)(float(value)) if isinstance(value, (int, float)) else value}'
        for name, value in row.items()
        if name in ('kl', 'num_tokens') and value is not None
    ]
    if 'end' in row:
        more.append(f'{row["end"]}' + {True: ', success', False: ', no success', None: ''}[row.get('success')])
    elif row.get('ended') is False:
        more.append('cut off')
    extra = f'<p class="muted small">{safe(", ".join(more).replace("num_tokens", "tokens"))}</p>' if more else ''
    shown = f' <b class="score">{told}</b>' if told else ''
    text = cut(row['response'], limit)
    said = _scrolling(text, '') if text.strip() else '<p class="muted"><i>empty</i></p>'
    said = _turns(row['parts'], limit) if row.get('parts') else said
    return f'<div class="answer"><p class="of"><span>Phase {phase}</span>{shown}</p>{said}{extra}</div>'


def _turns(parts: Sequence[Mapping[str, Any]], limit: int) -> str:
    """An episode: turns with their rewards, and what the environment said between them; together cut at `limit`."""
    out, room, turn = [], limit, 0
    for part in parts:
        told = part.get('observation')
        text = cut((part['turn'] if told is None else told).strip('\n'), max(room, 1))
        room -= len(text)
        if told is None:
            turn += 1
            rewards = ', '.join(f'{name} {number(float(x))}' for name, x in part['rewards'].items()) or 'no reward'
            out.append(f'<p class="part"><span>turn {turn}</span><span>{safe(rewards)}</span></p>')
        out.append(f'<p class="text {"turn" if told is None else "told"}" dir="auto">{safe(text)}</p>')
        if room <= 0:
            out.append('<p class="muted small">…</p>')
            break
    return f'<div class="long" tabindex="0">{"".join(out)}</div>'


def rollouts(runs: Sequence[Run], rows: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    """Recorded sequences, for the reader of rollouts.js, which embedded_rollouts.js puts there."""
    parts = []
    for run, of_run in zip(runs, rows, strict=False):
        if not of_run:
            continue
        if len(runs) > 1:
            parts.append(f'<h3 class="of-run">{safe(run.name)}</h3>')
        phases = len({row['phase'] for row in of_run})
        parts.append(
            f'<p class="muted">{len(of_run)} recorded responses of {phases} phases, token by token; all that was '
            f'recorded is in the folder <code>rollouts</code> of the run.</p><div class="reader"></div>'
            f'<script type="application/json" class="rows">{script_json(of_run)}</script>'
        )
    return f'<section id="rollouts"><h2>Rollouts</h2>{"".join(parts)}</section>' if parts else ''


# ---------------------------------------------------------------------- settings, starts, names


def settings(runs: Sequence[Run]) -> str:
    """All settings, those that differ from their defaults, or between the runs, first and marked."""
    each = [settings_of(run) for run in runs]
    names = list(dict.fromkeys(name for one in each for name in one))
    if not names:
        return ''
    if len(runs) > 1:
        differs = {n: [one.get(n, _ABSENT) for one in each] for n in names}
        marked = [n for n in names if any(value != differs[n][0] for value in differs[n])]
        heads = [*(run.name for run in runs)]
        cells = {n: [_setting(value) for value in differs[n]] for n in names}
        note = 'Rows that differ between the runs come first and are marked.'
    else:
        record = runs[0].folder.record
        changed = record.changed_settings() if record is not None else {}
        marked = [n for n in names if n in changed]
        defaults = record.defaults if record is not None else {}
        heads = ['value', 'default'] if defaults else ['value']
        cells = {n: [_setting(each[0][n])] for n in names}
        if defaults:
            for n in names:
                cells[n].append(_setting(defaults.get(n, _ABSENT)))
        note = 'What differs from the defaults comes first and is marked.' if defaults else ''
    rows = [n for n in names if n in marked], [n for n in names if n not in marked]
    title = 'differs' if len(runs) > 1 else 'changed'
    parts = [f'<section id="settings"><h2>Settings</h2><p class="muted">{note}</p>']
    if rows[0]:
        parts.append(_settings_table(rows[0], heads, cells, title))
    elif note:
        parts.append(f'<p>{"The runs have the same settings." if len(runs) > 1 else "All are the defaults."}</p>')
    if rows[1]:
        what = f'{len(rows[1])} other settings' if rows[0] else f'All {len(rows[1])} settings'
        parts.append(f'<details><summary>{what}</summary>{_settings_table(rows[1], heads, cells, "")}</details>')
    return ''.join([*parts, '</section>'])


_ABSENT = object()


def _setting(value: Any) -> str:
    return '' if value is _ABSENT else f'<code>{safe(cut(value_text(value), 500))}</code>'


def _settings_table(names: Sequence[str], heads: Sequence[str], cells: Mapping[str, Sequence[str]], mark: str) -> str:
    head_ = ''.join(f'<th scope="col">{safe(h)}</th>' for h in heads)
    told = f' <span class="pill warning">{mark}</span>' if mark else ''
    body = ''.join(
        f'<tr{" class=changed" if mark else ""}><th scope="row"><code>{safe(n)}</code>{told}</th>'
        + ''.join(f'<td>{cell}</td>' for cell in cells[n])
        + '</tr>'
        for n in names
    )
    return (
        f'<div class="scroll"><table class="settings"><thead><tr><th scope="col">setting</th>{head_}</tr></thead>'
        f'<tbody>{body}</tbody></table></div>'
    )


def origin(runs: Sequence[Run]) -> str:
    """What was trained, on what, and how each start was made."""
    parts = []
    for run in runs:
        record = run.folder.record
        if len(runs) > 1:
            parts.append(f'<h3 class="of-run">{safe(run.name)}</h3>')
        if record is None:
            parts.append('<p class="muted">This folder has no run.json, so nothing is known of its origin.</p>')
            continue
        level = 'h4' if len(runs) > 1 else 'h3'
        facts = {
            'models': record.models,
            'optimizers': record.optimizers,
            'reward': record.reward,
            'data': record.data,
            'strategy': record.strategy,
            'planned memory': record.plan,
        }
        rows = ''.join(
            f'<tr><th scope="row">{name}</th><td>{_facts(value)}</td></tr>' for name, value in facts.items() if value
        )
        parts.append(f'<{level}>Model and data</{level}><div class="scroll"><table><tbody>{rows}</tbody></table></div>')
        shown = record.starts[:1] + record.starts[1:][1 - STARTS :]
        if len(shown) < len(record.starts):
            parts.append(f'<p class="muted">{len(shown)} of {len(record.starts)} starts; all are in run.json.</p>')
        for start in shown:
            what = f'Resumed after phase {start.phase}' if start is not record.starts[0] else 'Started'
            git = start.git or {}
            commit = (
                f'{git["commit"]}{", with changes that are not committed" if git.get("dirty") else ""}' if git else ''
            )
            about = {'commit': commit, 'versions': start.versions, 'machine': start.machine}
            rows = ''.join(
                f'<tr><th scope="row">{name}</th><td>{_facts(value)}</td></tr>'
                for name, value in about.items()
                if value
            )
            words = shlex.join(start.command)
            parts.append(
                f'<{level}>{what} {safe(time_text(start.at))}</{level}>'
                f'<pre class="command">{safe(cut(words, 4000))}</pre>'
                f'<div class="scroll"><table><tbody>{rows}</tbody></table></div>'
            )
    return f'<section id="origin"><h2>Origin</h2>{"".join(parts)}</section>'


def _facts(value: Any) -> str:
    """A value, or names and values in lines."""
    if isinstance(value, Mapping) and value:
        return ''.join(
            f'<div><span class="muted">{safe(name)}</span> {safe(cut(_flat(inner), 600))}</div>'
            for name, inner in value.items()
            if inner is not None and inner != []
        )
    return safe(cut(_flat(value), 600))


def _flat(value: Any) -> str:
    if isinstance(value, Mapping):
        return ', '.join(f'{name} {_flat(inner)}' for name, inner in value.items() if inner is not None)
    if isinstance(value, (list, tuple)):
        return '; '.join(_flat(inner) for inner in value)
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10000:
        return f'{value:,}'.replace(',', ' ')
    if isinstance(value, float):
        return f'{value:.4g}'
    return str(value)


def names(used: Sequence[str], meanings: Mapping[str, Sequence[str]]) -> str:
    """What the metrics of the page mean, as docs/metrics.md says."""
    told: dict[tuple[str, ...], list[str]] = {}
    for name in used:
        if name in meanings:
            told.setdefault(tuple(meanings[name]), []).append(name)
    rows = ''.join(
        f'<tr><th scope="row">{"<br>".join(_named(name) for name in same)}</th><td>{safe(unit)}</td>'
        f'<td>{safe(meaning)}</td></tr>'
        for (unit, meaning), same in told.items()
    )
    if not rows:
        return ''
    return (
        '<section id="names"><h2>What the names mean</h2><p class="muted">As in docs/metrics.md. π is the policy that '
        'learns, π_old the one that collected, ref the initial model, ρ = π/π_old, β the KL coefficient, R returns, V '
        'values, A advantages.</p><div class="scroll"><table class="meanings"><thead><tr><th scope="col">metric</th>'
        f'<th scope="col">unit</th><th scope="col">meaning</th></tr></thead><tbody>{rows}</tbody></table>'
        '</div></section>'
    )


def _named(name: str) -> str:
    return f'<code id="{metric_id(name)}">{safe(name)}</code>'
