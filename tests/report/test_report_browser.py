"""report.html in a real browser without a network: charts, pointer, keyboard and print."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from limits import painted
from made_runs import HOSTILE, make_run, write_lines, write_sequences
from recorded import recorded_row

from chatgpt.monitor.report import write_report
from chatgpt.monitor.run_folder.rollouts import FOLDER, write_rollouts


class Opened:
    """An open page, with its console messages and requests."""

    def __init__(self, browser: Any, file: Path, awaited: str = '.chart .u-over', **look: Any) -> None:
        look = {'viewport': {'width': 1280, 'height': 900}, 'color_scheme': 'light'} | look
        self.context = browser.new_context(**look)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self.page.on('console', lambda m: self.complaints.append(f'{m.type}: {m.text}'))
        self.page.on('pageerror', lambda e: self.complaints.append(str(e)))
        self.page.on('request', lambda r: self.asked.append(r.url))
        self.page.goto(file.as_uri())
        self.page.wait_for_selector(awaited)

    def chart(self, key: str) -> Any:
        """Opens the section of a chart, scrolls to it and returns the drawn figure."""
        figure = self.page.locator(f'#chart-{key}')
        figure.evaluate("chart => { chart.closest('.fold > details').open = true; }")
        figure.scroll_into_view_if_needed()
        figure.locator('.u-over').wait_for()
        return figure

    def legend(self, key: str) -> str:
        return ' '.join(self.page.locator(f'#chart-{key} .legend').inner_text().split())

    def point_at(self, key: str, share: float) -> None:
        """Moves the pointer to this share of the width of the axes."""
        self.chart(key)
        box = self.page.locator(f'#chart-{key} .u-over').bounding_box()
        self.page.mouse.move(box['x'] + share * box['width'], box['y'] + box['height'] / 2)


@pytest.fixture
def opened(browser: Any) -> Iterator[Any]:
    pages: list[Opened] = []

    def open_(folder: Path, **look: Any) -> Opened:
        if not (folder / 'report.html').is_file():
            write_report(folder)
        pages.append(Opened(browser, folder / 'report.html', **look))
        return pages[-1]

    yield open_
    for one in pages:
        one.context.close()
        assert one.complaints == []
        assert len(one.asked) == 1 and one.asked[0].startswith('file://')


@pytest.fixture(scope='module')
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a run of 101 phases with the phase as score, and recorded sequences."""
    folder = make_run(tmp_path_factory.mktemp('runs') / 'words', 101)
    rows = [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]
    for row in rows:
        row |= {'rollout/score_mean': float(row['step']), 'rollout/kl_coef': row['step'] / 1000}
    rows[49]['rollout/kl_coef'] = None
    write_lines(folder / 'metrics.jsonl', rows)
    return folder


PIXELS = """canvas => {
    const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext('2d', {willReadFrequently: true});
    copy.drawImage(canvas, 0, 0);
    const {data, width} = copy.getImageData(0, 0, canvas.width, canvas.height);
    const places = {};
    for (let i = 0; i < data.length; i += 4) {
        if (data[i + 3] < 255) continue;
        (places[data.slice(i, i + 3).join()] ??= []).push([(i / 4) % width, Math.floor(i / 4 / width)]);
    }
    return places;
}"""
BLUE, ORANGE, PALE_BLUE = '10,92,184', '183,80,0', '108,176,255'
"""--series-1, --series-2, and --series-1 of the dark theme, in page.css"""


def drawn_in(chart: Any) -> dict[str, list[list[int]]]:
    """Returns the pixels (x, y) of each opaque colour of the chart's canvas."""
    return chart.locator('canvas').evaluate(PIXELS)


def test_curves_are_where_the_values_are_and_those_under_the_pointer_show_in_every_chart(opened, words):
    page = opened(words)
    page.chart('score')
    assert page.legend('score').startswith('phase 101 score mean 101 ')
    page.chart('kl-coef')
    page.point_at('score', 0.25)  # of 0 to 101, since there is an evaluation at 0
    assert page.legend('score').startswith('phase 25 score mean 25 ')
    assert page.legend('kl-coef') == 'phase 25 kl coef 0.025'
    page.point_at('score', 50.1 / 101)
    assert page.legend('kl-coef') == 'phase 50 kl coef none'
    page.point_at('eval-score', 0.3)  # evaluated at 0, 20, 40, ..
    assert page.legend('eval-score') == 'phase 40 score mean -0.0119'
    assert page.legend('score').startswith('phase 30 ')
    # the coefficient rises linearly, so its line runs from the lower left to the upper right
    (left, low), (right, high) = (of(drawn_in(page.chart('kl-coef'))[BLUE]) for of in (min, max))
    assert right - left > 300 and low - high > 80
    # a stack shows the parts and not their sums
    chart = page.chart('time')
    page.point_at('time', 0.5)
    values = [float(v) for v in re.findall(r' s (\d\.\d+)', page.legend('time'))]
    assert len(values) == 3 and 1.2 <= values[0] <= 1.3 and 0.4 <= values[1] <= 0.45 and 2.1 <= values[2] <= 2.3
    assert len(drawn_in(chart)) > 3


def test_dragging_zooms_all_charts_a_double_click_shows_all_lines_hide_and_are_smoothed(opened, words):
    page = opened(words)
    page.chart('kl-coef')
    page.point_at('score', 20 / 101)
    page.page.mouse.down()
    page.point_at('score', 30 / 101)
    page.point_at('score', 40 / 101)
    page.page.mouse.up()
    assert page.page.locator('#zoom-range').inner_text() in ('phases 20 to 40', 'phases 20 to 39')
    page.point_at('kl-coef', 0.5)
    assert page.legend('score').startswith('phase 30 score mean 30 ')
    page.page.mouse.dblclick(*centre(page, 'kl-coef'))
    assert page.page.locator('#zoom-range').inner_text() == ''
    page.point_at('kl-coef', 0.8)
    assert page.legend('score').startswith('phase 81 ')
    chart = page.chart('values')
    assert {BLUE, ORANGE} <= drawn_in(chart).keys()
    chart.get_by_role('button', name='return mean').click()
    assert chart.get_by_role('button', name='return mean').get_attribute('aria-pressed') == 'false'
    assert ORANGE not in drawn_in(chart)
    # smoothing, of 1, 2, 3, ...: after n steps with weight w, sum of w^(n-k) k over sum of w^(n-k), here n = 3
    page.page.locator('#smoothing').fill('0.5')
    painted(page.page)
    page.point_at('score', 3 / 101)
    expected = (0.25 * 1 + 0.5 * 2 + 3) / 1.75
    assert page.legend('score').startswith(f'phase 3 score mean 3 (smoothed {expected:.3g})')
    page.page.locator('#smoothing').fill('0')
    painted(page.page)
    assert page.legend('score').startswith('phase 3 score mean 3 score min ')


def centre(page: Opened, key: str) -> tuple[float, float]:
    box = page.page.locator(f'#chart-{key} .u-over').bounding_box()
    return box['x'] + box['width'] / 2, box['y'] + box['height'] / 2


def test_the_keyboard_reaches_every_chart_and_names_lead_to_their_meaning(opened, words):
    page = opened(words)
    page.chart('score')
    plot = page.page.locator('#chart-score .plot')
    plot.focus()
    assert plot.get_attribute('role') == 'application'
    assert plot.get_attribute('aria-label').startswith('Score, score min, score max, score mean, over phases 1 to 101')
    status = page.page.locator('#status')
    assert status.get_attribute('aria-live') == 'polite'
    for key, phase in (('Home', 1), ('ArrowRight', 2), ('Shift+ArrowRight', 12), ('ArrowLeft', 11), ('End', 101)):
        page.page.keyboard.press(key)
        assert status.inner_text().startswith(f'Phase {phase}: score mean {phase}, score min ')
        assert page.legend('score').startswith(f'phase {phase} ')
    page.page.keyboard.press('Home')
    page.page.keyboard.press('+')
    assert page.page.locator('#zoom-range').inner_text().startswith('phases 0 to ')
    page.page.keyboard.press('0')
    assert page.page.locator('#zoom-range').inner_text() == ''
    seen = set()
    page.page.evaluate("document.querySelectorAll('.fold > details').forEach(part => { part.open = true; })")
    for _ in range(400):  # Tab goes from chart to chart
        page.page.keyboard.press('Tab')
        at = page.page.evaluate("document.activeElement.closest('.chart, #samples')?.id ?? ''")
        if at == 'samples':
            break
        seen.add(at.removeprefix('chart-'))
    keys = page.page.eval_on_selector_all('.chart', 'all => all.map(c => c.dataset.chart)')
    assert set(keys[keys.index('score') + 1 :]) <= seen
    levels = page.page.eval_on_selector_all('h1, h2, h3, h4', 'all => all.map(h => Number(h.tagName[1]))')
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(b - a <= 1 for a, b in zip(levels, levels[1:], strict=False))
    page.page.locator('#chart-score').get_by_role('link', name='rollout/score_mean').click()
    target = page.page.locator('tr:has(:target)')
    assert 'mean over responses of the score' in target.inner_text()
    assert page.page.evaluate('document.documentElement.lang') == 'en'
    unnamed = page.page.eval_on_selector_all(
        'button, input, summary',
        'all => all.filter(e => !(e.textContent.trim() || e.ariaLabel || e.labels?.length)).length',
    )
    assert unnamed == 0


def luminance(color: str) -> float:
    channels = [int(v) / 255 for v in re.findall(r'\d+', color)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize('scheme', ['light', 'dark'])
def test_every_text_has_enough_contrast(opened, words, scheme):
    """WCAG 2.2 AA: 4.5 to 1, and 3 to 1 for lines of curves."""
    page = opened(words, color_scheme=scheme)
    page.page.evaluate('document.querySelectorAll("details").forEach(d => { d.open = true; })')
    pairs = page.page.evaluate(
        """() => {
            const ground = (e) => {
                for (; e; e = e.parentElement) {
                    const color = getComputedStyle(e).backgroundColor;
                    if (!color.endsWith(', 0)')) return color;
                }
                return 'rgb(255, 255, 255)';
            };
            const path = '//body//text()[normalize-space() and not(ancestor::script)]';
            const texts = document.evaluate(path, document, null, 7);
            const pairs = new Map();
            for (let i = 0; i < texts.snapshotLength; i++) {
                const e = texts.snapshotItem(i).parentElement;
                if (e.closest(':disabled, .reader')) continue;
                pairs.set([getComputedStyle(e).color, ground(e)].join('|'), e.outerHTML.slice(0, 80));
            }
            return [...pairs];
        }"""
    )
    assert len(pairs) > 5
    for pair, where in pairs:
        a, b = sorted((luminance(c) for c in pair.split('|')), reverse=True)
        assert (a + 0.05) / (b + 0.05) >= 4.5, (pair, where)
    surface = page.page.eval_on_selector('.chart', 'c => getComputedStyle(c).backgroundColor')
    for i in range(1, 9):
        line = page.page.evaluate(
            f"""() => {{ const e = document.createElement('i'); e.className = 's{i}'; document.body.append(e);
                         return getComputedStyle(e).backgroundColor; }}"""
        )
        a, b = sorted((luminance(line), luminance(surface)), reverse=True)
        assert (a + 0.05) / (b + 0.05) >= 3, i


WIDE = """() => {
    const sheet = new CSSStyleSheet();
    sheet.replaceSync('* { font-family: monospace !important; letter-spacing: .3em !important; }');
    document.adoptedStyleSheets = [sheet];
}"""


def test_a_phone_scrolls_one_way_only(opened, words):
    width = 320
    page = opened(words, viewport={'width': width, 'height': 800}, has_touch=True, is_mobile=True)
    page.page.evaluate('document.querySelectorAll("details").forEach(d => { d.open = true; })')
    assert page.page.evaluate('document.documentElement.scrollWidth') <= width
    page.chart('score')
    page.page.touchscreen.tap(*centre(page, 'score'))
    assert re.match(r'phase 5[01] score mean 5[01] ', page.legend('score'))
    target = page.page.locator('#chart-score .chip').first.bounding_box()
    assert target['height'] >= 24  # WCAG 2.2, 2.5.8
    page.page.evaluate(WIDE)  # also with the widest fonts
    assert page.page.evaluate('document.documentElement.scrollWidth') <= width


def test_printed_everything_is_there_except_controls(opened, words, tmp_path):
    page = opened(words, color_scheme='dark')
    assert page.page.locator('.chart canvas').count() < page.page.locator('.chart').count()
    page.page.evaluate("addEventListener('beforeprint', () => { window.before = true; })")
    pdf = page.page.pdf(path=str(tmp_path / 'page.pdf'), format='A4')
    assert pdf.startswith(b'%PDF') and len(pdf) > 100_000
    assert page.page.evaluate('window.before')
    assert page.page.locator('.chart canvas').count() == page.page.locator('.chart').count()
    page.page.emulate_media(media='print', color_scheme='dark')
    page.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.page.locator('details:not([open])').count() == 0
    assert not page.page.locator('.controls').is_visible() and not page.page.locator('nav.places').is_visible()
    assert page.page.evaluate('getComputedStyle(document.body).color') == 'rgb(0, 0, 0)'
    assert BLUE in drawn_in(page.page.locator('#chart-kl-coef'))
    page.page.emulate_media(media='screen', color_scheme='dark')
    page.page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.page.locator('details:not([open])').count() > 20
    assert PALE_BLUE in drawn_in(page.page.locator('#chart-kl-coef'))


@pytest.mark.parametrize(('width', 'height'), [(1280, 900), (390, 844)])
def test_the_overview_fits_one_screen_and_parts_open(opened, words, width, height):
    page = opened(words, viewport={'width': width, 'height': height})
    box = page.page.locator('#overview').bounding_box()
    assert box['y'] + box['height'] <= height
    assert page.page.locator('#overview .sample').count() == 3
    first, second = page.page.locator('.curves > .fold').all()[:2]
    assert first.locator('.chart canvas').count() == first.locator('.chart').count() > 0  # without scrolling
    assert second.locator('canvas').count() == 0
    page.page.get_by_role('navigation').get_by_role('link', name='Reward').click()
    second.locator('.chart .u-over').last.wait_for()
    assert second.locator('.chart canvas').count() == second.locator('.chart').count() > 0
    for summary in page.page.locator('.curves > .fold > details[open] > summary').all()[::-1]:
        summary.click()
    assert not page.page.locator('.controls').is_visible()


def test_values_and_returns_by_turn_are_drawn_between_their_axes(opened, tmp_path):
    folder = make_run(tmp_path)
    turns = {'turns': [{'start': k, 'stop': k + 1, 'rewards': {}} for k in range(3)], 'end': 'terminated'}
    numbers = {'values': [0.0, 1.0, 2.0], 'returns': [2.0, 1.0, 0.0], 'episode': json.dumps(turns)}
    write_rollouts(folder / FOLDER, 1, [recorded_row(1, 0, ['r'] * 3, **numbers)])
    page = opened(folder)
    page.page.locator('#critic > details > summary').click()
    figure = page.page.locator('#chart-values-by-turn')
    figure.scroll_into_view_if_needed()
    area = figure.locator('svg').bounding_box()
    lines = [[c.bounding_box() for c in figure.locator(f'.line-{k} circle').all()] for k in (1, 2)]
    for boxes, falls in zip(lines, (False, True), strict=True):
        assert len(boxes) == 3 and all(area['x'] <= b['x'] <= area['x'] + area['width'] for b in boxes)
        assert (boxes[0]['y'] < boxes[2]['y']) == falls
    assert lines[0][1] == lines[1][1]  # they cross at the second turn
    assert figure.locator('.u-over').count() == 0 and 'value return' in ' '.join(figure.inner_text().split())


def test_without_scripts_the_numbers_are_readable(opened, words, browser):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto((words / 'report.html').as_uri())
    page.locator('#reward > details > summary').click()
    page.locator('#chart-score summary').click()
    assert page.locator('#chart-score table tbody tr').count() == 24
    assert page.locator('#chart-score table tbody tr').last.inner_text().split()[:2] == ['101', '101']
    context.close()


def test_hostile_texts_and_recorded_sequences_do_nothing(opened, tmp_path):
    folder = make_run(tmp_path, texts=HOSTILE, method=HOSTILE[1], status='failed', error=HOSTILE[0])
    write_sequences(folder, HOSTILE[:4])
    page = opened(folder)
    page.page.locator('#rollouts > details > summary').click()
    reader = page.page.locator('.reader')
    reader.scroll_into_view_if_needed()
    assert reader.get_by_role('search').count() == 1 and HOSTILE[0] in reader.inner_text()
    assert page.page.locator('#chart-recorded-ends').count() == 1
    assert page.page.evaluate('window.hacked') is None
    assert page.page.locator('img').count() == 0
    assert page.page.get_by_text(HOSTILE[0]).count() > 1
    assert page.page.evaluate('document.documentElement.scrollWidth') <= 1280


def test_the_page_runs_and_loads_only_its_own_content(opened, words):
    page = opened(words)
    tried = page.page.evaluate(
        """async () => {
            const script = document.createElement('script');
            script.textContent = 'window.hacked = 3';
            document.body.append(script);
            const image = new Image();
            image.src = 'http://127.0.0.1:9/pixel.png';
            const loaded = await new Promise((done) => {
                image.onload = () => done("loaded");
                image.onerror = () => done("blocked");
            });
            const asked = await fetch('http://127.0.0.1:9/').then(() => 'asked', () => 'blocked');
            const evaluated = await new Promise((done) => setTimeout(() => {
                try { done(window.eval('1 + 1')); } catch (error) { done(error.name); }
            }));
            return [window.hacked ?? 'blocked', loaded, asked, evaluated];
        }"""
    )
    assert tried == ['blocked', 'blocked', 'blocked', 'EvalError']
    assert len(page.complaints) == 4 and all('Content Security Policy' in message for message in page.complaints)
    page.complaints.clear()
    del page.asked[1:]  # this request was blocked
