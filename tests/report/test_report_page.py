"""The text of report.html: all data of a run, in at most 3 MB, for any content of the folder."""

from __future__ import annotations

import json
import math
import random
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import metric_names
import pytest
from made_runs import HOSTILE, make_offline_run, make_run, ppo_row, record, write_lines

from chatgpt.monitor.report import page, write_report
from chatgpt.monitor.report.charts import choose
from chatgpt.monitor.report.series import number
from chatgpt.monitor.report.text import cut
from chatgpt.monitor.run_folder import Start

ROOT = Path(__file__).resolve().parents[2]
VOID = {'meta', 'link', 'br', 'input', 'img', 'hr'}


class Page(HTMLParser):
    """The elements of a page, with their texts; fails if they are not nested properly."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None], list[str]]] = []
        self._inside: list[list[str]] = []
        self.source = path.read_text(encoding='utf-8')
        self.feed(self.source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        texts: list[str] = []
        self.found.append((tag, dict(attrs), texts))
        if tag not in VOID:
            self.open.append(tag)
            self._inside.append(texts)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        self._inside.pop()
        if tag in ('td', 'th', 'p', 'code', 'dt', 'dd', 'li', 'h3'):  # these elements are separate on the page
            self.handle_data(' ')

    def handle_data(self, data):
        for texts in self._inside:
            texts.append(data)

    def texts(self, tag: str, **attributes: str) -> list[str]:
        """Returns the texts of elements with these attributes; `class_` may be one of several classes."""
        chosen = []
        for name, has, texts in self.found:
            wanted = {k.rstrip('_'): v for k, v in attributes.items()}
            if name == tag and all(v in (has.get(k) or '').split() for k, v in wanted.items()):
                chosen.append(' '.join(''.join(texts).split()))
        return chosen

    def curves(self) -> dict:
        return json.loads(
            next(''.join(t) for tag, has, t in self.found if tag == 'script' and has.get('id') == 'curves')
        )


def read(*folders: Path, **more) -> Page:
    return Page(write_report(list(folders), out=folders[0] / 'page.html', **more))


def metrics_drawn(found: Page) -> set[str]:
    return {name for text in found.texts('figcaption') for name in re.findall(r'[a-z]+/[a-z0-9_/]+', text)}


def test_a_page_has_everything_of_its_run(tmp_path):
    folder = make_run(tmp_path / 'words')
    path = write_report(folder)
    assert path == folder / 'report.html'
    found = Page(path)
    assert found.texts('h1') == ['words ended']
    logged = {n for row in (folder / 'metrics.jsonl').read_text().splitlines() for n in json.loads(row)} - {'step'}
    assert metrics_drawn(found) == logged
    assert found.texts('section', id='samples')[0].count('Phase 40') == 3
    origin = found.texts('section', id='origin')[0]
    for fact in ("'my prompts.jsonl' --lr 3e-4", 'b281334d7cde2c8d', 'not committed', 'torch 2.13.0', '209 408'):
        assert fact in origin
    assert 'distinct 180' in origin and 'peak_gib 0.9' in origin
    changed = ['lr changed 0.0003 1e-05', 'critic_lr changed 0.001 1e-05', 'train_batch_size changed 32 8']
    assert found.texts('tr', class_='changed') == changed and 'gamma 1 1' in found.texts('tr')


def test_every_metric_is_in_one_chart_and_unknown_ones_are_in_other():
    names = [*ppo_row(1, 2, random.Random(0)), 'eval/x', 'eval/x_best', 'mine/a', 'mine/val_a']
    groups = choose(names)
    drawn = [n for charts in groups.values() for d in charts for n in [*d.lines, *d.band]]
    assert sorted(drawn) == sorted(names)
    other = [d.lines for d in groups['Other']]
    assert ['mine/a', 'mine/val_a'] in other and ['custom/repetition'] in other
    assert 'Other' not in choose(['ppo/num_updates', 'perf/total_s', 'rm/epoch', 'sft/grad_norm', 'sft/grad_norm_max'])
    assert [d.lines for d in groups['Evaluation']] == [['eval/x', 'eval/x_best']]


def test_the_meanings_are_those_of_the_page(tmp_path):
    """After a change of a page of metrics: python tests/report/metric_names.py"""
    text = metric_names.text_of(metric_names.read_names())
    assert (ROOT / 'chatgpt' / 'monitor' / 'report' / 'assets' / 'metrics.json').read_text() == text
    found = read(make_run(tmp_path))
    assert 'as above' not in text
    assert page.meanings()['dpo/grad_norm'] == ['', 'global L2 norm of the gradient before clipping']
    names = found.texts('section', id='names')[0]
    assert 'mean over responses of the score as the scorer gave it' in names
    ids = {has['id'] for _, has, _ in found.found if has.get('id')}
    links = [has['href'] for tag, has, _ in found.found if tag == 'a']
    assert len(links) > 40 and {link[1:] for link in links} <= ids


# ---------------------------------------------------------------------- texts


def test_texts_that_try_to_be_markup_stay_texts(tmp_path):
    command = Start(
        at='2026-11-22T10:00:00+00:00', phase=0, command=['run', HOSTILE[0]], machine={'gpus': [HOSTILE[1]]}
    )
    folder = make_run(
        tmp_path / '<img src=x>', texts=HOSTILE, settings={'a': HOSTILE[0]}, starts=[command], method=HOSTILE[1],
        status='failed', error=HOSTILE[0],
    )  # fmt: skip
    rows = [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]
    write_lines(folder / 'metrics.jsonl', [{**row, '</script><img src=x>/a': 1.0} for row in rows])
    found = read(folder, title=HOSTILE[2])
    kinds = {(tag, has.get('type')) for tag, has, _ in found.found if tag == 'script'}
    assert len([1 for tag, *_ in found.found if tag == 'script']) == 3
    assert kinds == {('script', 'application/json'), ('script', None)}
    assert not [1 for tag, *_ in found.found if tag == 'img']
    assert not [name for _, has, _ in found.found for name in has if name.startswith('on') or name == 'style']
    shown = found.texts('p', class_='text')
    assert '</script><script>window.hacked = 1</script>' in shown and HOSTILE[5] in shown
    assert any(text.startswith('ends ␀ with ␛[31m control') and 'a lone ? surrogate' in text for text in shown)
    assert found.texts('section', class_='failure')[0].startswith('The run failed in phase 41.')


# ---------------------------------------------------------------------- sizes


def test_a_run_of_a_hundred_thousand_phases_keeps_its_spikes(tmp_path):
    rows = [{'step': s, 'rollout/score_mean': float(s % 7), 'ppo/lr': 1e-5} for s in range(1, 100_001)]
    rows[56_788]['rollout/score_mean'] = 1e6
    rows[77_776]['rollout/score_mean'] = -1e6
    rows[12_344]['rollout/score_mean'] = None
    write_lines(tmp_path / 'metrics.jsonl', rows)
    found = read(tmp_path)
    assert len(found.source) < 400_000
    data = found.curves()
    (line,) = {c['key']: c for c in data['charts']}['score']['lines']
    drawn = dict(zip(data['phases'][line['x']], line['y'], strict=True))
    assert 600 < len(drawn) <= 1100
    assert drawn[56_789] == 1e6 and drawn[77_777] == -1e6 and drawn[12_345] is None
    assert {1, 100_000} < drawn.keys()
    assert all(y == (p % 7) for p, y in drawn.items() if p not in (56_789, 77_777, 12_345))


@pytest.mark.parametrize(('phases', 'metrics', 'runs'), [(1200, 30, 6), (2, 6000, 1)])
def test_a_page_is_at_most_three_megabytes(tmp_path, phases, metrics, runs):
    folders = []
    for i in range(runs):
        folder = tmp_path / f'run-{i}'
        folder.mkdir()
        rows = [{'step': s} | {f'm/{n}': s * 1.2345678 + n for n in range(metrics)} for s in range(1, phases + 1)]
        write_lines(folder / 'metrics.jsonl', rows)
        texts = [
            {'step': s, 'prompt': f'{n} {"<" * 9000}', 'response': '&' * 9000}
            for s in (1, 9, phases)
            for n in range(40)
        ]
        write_lines(folder / 'samples.jsonl', texts)
        folders.append(folder)
    path = write_report(folders, out=tmp_path / 'page.html')
    assert path.stat().st_size <= 3_000_000
    found = Page(path)
    assert len(found.curves()['charts']) == min(metrics, 1000)
    assert ('1000 of 6000 charts' in found.source) == (metrics == 6000)
    assert found.texts('section', id='samples')


# ---------------------------------------------------------------------- folders that lack something


def test_values_that_are_no_numbers_are_gaps_and_a_folder_without_a_record_is_read_too(tmp_path):
    rows = [{'step': 1, 'sft/loss': 3.0}, {'step': 2, 'sft/loss': None}, {'step': 3}, {'step': 4, 'sft/loss': 1.0}]
    write_lines(tmp_path / 'metrics.jsonl', rows)
    with open(tmp_path / 'metrics.jsonl', 'a') as file:
        file.write('{"step": 5, "sft/lo')  # a killed run's last line
    (tmp_path / 'eval.jsonl').write_text('{"step": 0, "eval/x": NaN, "eval/note": "text", "eval/yes": true}\n')
    found = read(tmp_path)
    data = found.curves()
    by_key = {c['key']: c['lines'][0] for c in data['charts']}
    assert (data['phases'][by_key['loss']['x']], by_key['loss']['y']) == ([1, 2, 4], [3.0, None, 1.0])
    assert by_key['eval-x']['y'] == [None] and set(by_key) == {'loss', 'eval-x'}
    assert ['1 3', '2 none', '4 1'] == [t for t in found.texts('tr') if re.match(r'\d', t)][-3:]
    assert 'no run.json' in found.texts('section', id='origin')[0] and found.texts('section', id='settings') == []


def test_a_run_that_failed_before_its_first_phase_and_a_doctor_that_fails_have_a_page(tmp_path, monkeypatch):
    def broken(run):
        raise RuntimeError('what <b>')

    monkeypatch.setattr('chatgpt.monitor.report.runs.diagnose', broken)
    record(status='failed', phase=0, error='RuntimeError: out of memory', num_phases=9).write(tmp_path)
    found = read(tmp_path)
    assert found.texts('section', class_='failure') == ['The run failed in phase 1. RuntimeError: out of memory']
    assert found.texts('figure') == [] and 'no learning phase was finished' in found.texts('p', class_='lead')
    assert 'The doctor could not read this run: RuntimeError: what <b>' in found.texts('section', id='findings')[0]


# ---------------------------------------------------------------------- several runs


def test_several_runs_share_their_charts(tmp_path):
    runs = [make_run(tmp_path / 'one' / 'ppo', 40, settings={'lr': 1e-3, 'gamma': 1.0})]
    runs.append(make_run(tmp_path / 'two' / 'ppo', 20, seed=1, settings={'lr': 1e-4, 'gamma': 1.0}))
    sft = make_offline_run(tmp_path / 'sft', 10)
    found = read(*runs, sft, title='three of them')
    assert found.texts('h1') == ['three of them']
    assert found.texts('th', scope='row')[:3] == ['one/ppo', 'two/ppo', f'{tmp_path.name}/sft']
    charts = {c['key']: c for c in found.curves()['charts']}
    assert [line['label'] for line in charts['rollout-score-mean']['lines']] == ['one/ppo', 'two/ppo']
    assert [line['color'] for line in charts['rollout-score-mean']['lines']] == [1, 2]
    assert [(line['label'], line['color']) for line in charts['sft-loss']['lines']] == [(f'{tmp_path.name}/sft', 3)]
    assert found.texts('h3', class_='of-run').count('one/ppo') == 3  # findings, samples, origin
    assert read(*runs).texts('tr', class_='changed') == ['lr differs 0.001 0.0001']


def test_different_rewards_are_named_and_the_area_only_where_there_is_one(tmp_path):
    runs = [make_run(tmp_path / name, 20) for name in ('one', 'two')]
    note = 'The runs have different rewards: their scores cannot be compared.'
    assert note not in read(*runs).source and '(the area)' not in read(*runs).source
    assert '(the area)' in read(runs[0]).source
    found = json.loads((runs[1] / 'run.json').read_text())
    (runs[1] / 'run.json').write_text(json.dumps(found | {'reward': 'rewards.py:other'}))
    assert note in read(*runs).texts('p')


def test_marks_of_direction_do_not_reach_the_note_on_a_cut_text():
    assert cut('ab\u202ecd', 3) == '\u2068ab\u202e\u2069 … (cut: 3 of 5 characters)'
    assert cut('abcd', 3) == 'abc … (cut: 3 of 4 characters)'


# ---------------------------------------------------------------------- columns and numbers


def test_numbers_are_short():
    shown = {0.0: '0', 1.0: '1', -1.444: '-1.44', 123.4: '123', 12345.6: '12 346', 1e-5: '1e-5', 0.00012345: '1.23e-4'}
    shown |= {2.5e7: '2.5e7', None: 'none', 0.999999: '1', 99.96: '100', math.inf: 'inf'}
    assert {value: number(value) for value in shown} == shown and number(-0.0) == '0'


# ---------------------------------------------------------------------- the word, and the installed package


def test_the_command_writes_a_page_without_torch(tmp_path):
    a, b = make_run(tmp_path / 'a'), make_run(tmp_path / 'b')
    calls = [['report', str(a)], ['report', str(a), str(b), '--out', str(tmp_path / 'both.html')]]
    code = (
        f'import sys; from chatgpt.launch.cli.command import run; [run(words) for words in {calls!r}]; '
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [str(a / 'report.html'), str(tmp_path / 'both.html'), 'False']
    assert '2 runs' in (tmp_path / 'both.html').read_text()
