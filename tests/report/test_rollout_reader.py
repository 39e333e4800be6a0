"""The reader of recorded sequences in a browser: filters, colours, keyboard, and texts with markup."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

import pytest
from limits import painted
from recorded import recorded_row

from chatgpt.monitor.report.rollouts import page_row
from chatgpt.monitor.run_folder.rollouts import read_rollouts, write_rollouts
from chatgpt.testing import byte_tokenizer
from chatgpt.trainer.callbacks.token_texts import token_texts

ASSETS = Path(__file__).resolve().parents[2] / 'chatgpt' / 'monitor' / 'report' / 'assets'
ORIGIN = 'http://page.test'
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'"
"""content security policy: nothing inline, nothing from other hosts"""
PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Rollouts</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="stylesheet" href="page.css"><link rel="stylesheet" href="rollouts.css"></head>
<body><main><div id="reader"></div></main><script type="module" src="start.js"></script></body></html>"""
START = """import { embeddedSource, fetchSource, mountRollouts } from './rollouts.js';
const given = await (await fetch('given')).json();
const source = given.rows ? embeddedSource(given.rows) : fetchSource('rows', given.phases);
window.reader = mountRollouts(document.getElementById('reader'), source);"""

NASTY = '<b>bold</b> & <script>window.owned = 1</script><img src=x onerror="window.owned=1">'
ARABIC = 'مرحبا 😀'
TEXTS = [NASTY, ARABIC, 'one\ntwo\tthree', 'plain words']


def recorded(folder: Path, texts: list[str] = TEXTS, num_phases: int = 3, group: int = 2) -> list[dict[str, Any]]:
    """Returns rows written to files and read back. Token i has advantage i − 2; other numbers are known too."""
    tokenizer = byte_tokenizer()
    index = 0
    for phase in range(1, num_phases + 1):
        rows = []
        for text in texts:
            ids = [*text.encode(), tokenizer.eos_token_id]
            prompt = f'<i>Prompt</i> {index // group}\nof two lines'
            n = len(ids)
            about = {'group': index // group, 'prompt': prompt, 'response': text, 'score': float(index % len(texts))}
            about |= {'prompt_ids': list(prompt.encode()), 'token_ids': ids, 'mask': [i != 1 for i in range(n)]}
            about |= {'prompt_tokens': token_texts(tokenizer, list(prompt.encode()))}
            numbers = {
                'old_logprobs': [-1.0 - 0.25 * i for i in range(n)],
                'ref_logprobs': [-1.5] * n,
                'values': [0.1 * i for i in range(n)],
                'rewards': [0.0] * (n - 1) + [1.0],
                'advantages': [float(i - 2) for i in range(n)],
                'entropy': [1.0 + i for i in range(n)] if phase > 1 else None,
            }
            rows.append(recorded_row(phase, index, token_texts(tokenizer, ids), **about, **numbers))
            index += 1
        write_rollouts(folder, phase, rows)
    return read_rollouts(folder)


class Reader:
    """A page with the reader, with rows in the page or from a server that filters like ours."""

    def __init__(self, context: Any, rows: list[dict[str, Any]], folder: Path, *, embedded: bool) -> None:
        self.page = context.new_page()
        self.rows, self.folder, self.embedded = rows, folder, embedded
        self.errors: list[str] = []
        self.asked: list[dict[str, str]] = []
        self.broken = False
        self.page.on('pageerror', lambda error: self.errors.append(str(error)))
        self.page.on('console', lambda message: self.errors.append(message.text) if message.type == 'error' else None)
        self.page.route('**/*', self.answer)
        self.page.goto(ORIGIN)
        self.settle()

    def answer(self, route: Any) -> None:
        url = urlparse(route.request.url)
        name = url.path.strip('/')
        if f'{url.scheme}://{url.netloc}' != ORIGIN:
            self.errors.append(f'asked for {route.request.url}')
            route.abort()
        elif name == '':
            route.fulfill(body=PAGE, content_type='text/html', headers={'Content-Security-Policy': POLICY})
        elif name == 'start.js':
            route.fulfill(body=START, content_type='text/javascript')
        elif name == 'given':
            phases = sorted({r['phase'] for r in self.rows})
            given = {'rows': [page_row(r) for r in self.rows]} if self.embedded else {'phases': phases}
            route.fulfill(body=json.dumps(given), content_type='application/json')
        elif name == 'rows':
            q = {key: values[0] for key, values in parse_qs(url.query).items()}
            self.asked.append(q)
            if self.broken:
                route.fulfill(status=500, body='')
                return
            found = read_rollouts(
                self.folder,
                [int(q['phase'])] if 'phase' in q else None,
                prompt=q.get('prompt'),
                text=q.get('text'),
                score=(float(q['min']) if 'min' in q else None, float(q['max']) if 'max' in q else None),
                offset=int(q['offset']),
                limit=int(q['limit']),
            )
            route.fulfill(body=json.dumps([page_row(r) for r in found]), content_type='application/json')
        elif (ASSETS / name).is_file():
            kind = 'text/css' if name.endswith('.css') else 'text/javascript'
            route.fulfill(body=(ASSETS / name).read_text(), content_type=kind)
        else:
            route.fulfill(body='', content_type='text/css' if name.endswith('.css') else 'text/plain')

    def settle(self) -> None:
        self.page.locator('.ro-state').filter(has_not_text='Loading').wait_for()

    def fill(self, label: str, value: str) -> None:
        self.page.get_by_label(label, exact=True).fill(value)
        painted(self.page, 350)  # the page waits for the end of typing
        self.settle()

    def choose(self, label: str, value: str) -> None:
        self.page.get_by_label(label, exact=True).select_option(value)
        painted(self.page, 50)
        self.settle()

    def shown(self) -> list[int]:
        labels = self.page.locator('.ro-response').evaluate_all('all => all.map(x => x.getAttribute("aria-label"))')
        return [int(label.split()[1].strip(',')) for label in labels]

    def tints(self, response: int) -> list[tuple[str, str] | None]:
        return [
            None if kind is None else (kind, strength)
            for kind, strength in self.page.locator('.ro-tokens')
            .nth(response)
            .locator('.ro-token')
            .evaluate_all("all => all.map(x => [x.dataset.tint ?? null, x.style.getPropertyValue('--strength')])")
        ]

    def tip(self) -> dict[str, str]:
        terms = self.page.locator('.ro-tip dt').all_text_contents()
        return dict(zip(terms, self.page.locator('.ro-tip dd').all_text_contents(), strict=True))


@pytest.fixture(scope='module')
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp('rollouts')
    return folder, recorded(folder)


@pytest.fixture
def reader(request: Any, browser: Any, data: Any) -> Iterator[Reader]:
    """Returns a reader on rows in the page, or on the source given by the test's parameter."""
    context = browser.new_context(viewport={'width': 1200, 'height': 900})
    opened = Reader(context, data[1], data[0], embedded=getattr(request, 'param', True))
    yield opened
    context.close()
    assert opened.errors == []


@pytest.mark.parametrize('reader', [True, False], ids=['embedded', 'fetched'], indirect=True)
def test_filters_and_groups(reader):
    assert reader.shown() == [8, 9, 10, 11]  # the last phase first
    assert reader.page.locator('.ro-state').inner_text() == 'Sequences 1 to 4 of 4'
    reader.page.get_by_role('button', name='Phase before').click()
    reader.settle()
    assert reader.shown() == [4, 5, 6, 7]
    reader.choose('Phase', '')
    assert reader.shown() == list(range(12))
    reader.fill('Response contains', 'PLAIN')
    assert reader.shown() == [3, 7, 11]
    reader.fill('Lowest score', '3.5')
    assert reader.shown() == []
    assert reader.page.locator('.ro-state').inner_text() == 'No sequence matches.'
    reader.page.get_by_role('button', name='Clear filters').click()
    reader.settle()
    reader.fill('Lowest score', '1')
    reader.fill('Highest score', '2')
    assert reader.shown() == [1, 2, 5, 6, 9, 10]
    reader.page.get_by_role('button', name='Clear filters').click()
    reader.fill('Prompt contains', 'prompt</i> 3')
    assert reader.shown() == [6, 7]
    reader.page.reload()
    reader.settle()
    assert reader.page.locator('.ro-group').count() == 2
    first, second = (reader.page.locator('.ro-response').nth(i).bounding_box() for i in (0, 1))
    assert first['y'] == second['y'] and first['x'] + first['width'] <= second['x']
    head = reader.page.locator('.ro-head').first.inner_text()
    assert 'phase 3 · group 4 · 2 responses · scores 0 to 1, mean 0.5' in head
    reader.page.get_by_role('button', name='This prompt in all phases').first.click()
    reader.settle()
    assert reader.page.get_by_label('Prompt contains').input_value() == '<i>Prompt</i> 4'
    assert reader.shown() == [8, 9]


def test_markup_is_text_and_line_breaks_and_special_tokens_are_seen(reader):
    bodies = reader.page.locator('.ro-tokens')
    end = byte_tokenizer().eos_token
    assert [bodies.nth(i).evaluate('x => x.textContent') for i in range(4)] == [text + end for text in TEXTS]
    assert reader.page.evaluate('window.owned') is None
    assert reader.page.locator('.ro-tokens b, .ro-tokens img, .ro-tokens script, .ro-prompt i').count() == 0
    assert reader.page.locator('.ro-prompt').first.evaluate('x => x.textContent').startswith('<i>Prompt</i> 4\nof')
    assert bodies.nth(2).locator('.ro-break').count() == 1
    assert bodies.nth(0).locator('.ro-special').all_text_contents() == [end]
    assert bodies.nth(1).evaluate('x => getComputedStyle(x).direction') == 'rtl'
    # Two lines: the second begins below the first.
    tops = bodies.nth(2).locator('.ro-token').evaluate_all('all => all.map(x => x.getBoundingClientRect().top)')
    assert tops[5] > tops[0] + 10


def test_colours_are_those_of_the_numbers(reader):
    # 'plain words' and its end token: advantages −2 .. 9, of which number 1 does not count
    assert reader.page.locator('.ro-legend').inner_text().startswith('Advantage')
    tints = reader.tints(3)
    assert tints[1] is None and tints[0][0] == 'below' and tints[5][0] == 'above'
    shares = {i: float(tints[i][1].rstrip('%')) for i in (0, 2, 3, 11)}
    assert shares[11] > 1 and shares == pytest.approx({i: abs(i - 2) / 9 * shares[11] for i in shares}, abs=0.06)
    reader.choose('Colour tokens by', 'entropy')
    strengths = [float(t[1].rstrip('%')) for t in reader.tints(3) if t]
    assert {t[0] for t in reader.tints(3) if t} == {'amount'} and strengths == sorted(strengths)
    reader.choose('Colour tokens by', 'log_ratio')
    assert [t and t[0] for t in reader.tints(3)[:4]] == ['above', None, 'above', 'below']  # +0.5, +0.25, 0, −0.25
    assert '−' in reader.page.locator('.ro-legend').inner_text()
    reader.choose('Colour tokens by', '')
    assert set(reader.tints(3)) == {None}
    reader.choose('Colour tokens by', 'entropy')
    reader.choose('Phase', '1')
    assert 'Entropy: not recorded' in reader.page.locator('.ro-legend').inner_text()
    assert set(reader.tints(3)) == {None}


def test_the_number_under_the_pointer(reader):
    tokens = reader.page.locator('.ro-tokens').nth(3).locator('.ro-token')
    tokens.nth(3).hover()
    assert reader.tip() == {
        'Advantage': '+1',
        'Log-ratio to the initial model': '−0.25 nats',
        'Value': '0.3',
        'Entropy': '4 nats',
        'Reward': '0',
    }
    assert reader.page.locator('.ro-tip').inner_text().startswith('i')
    assert 'token 4 of 12, id 105' in reader.page.locator('.ro-tip').inner_text()
    tokens.nth(1).hover()
    assert 'does not count' in reader.page.locator('.ro-tip').inner_text()
    reader.page.locator('.ro-state').hover()
    assert not reader.page.locator('.ro-tip').is_visible()
    # 😀 is four tokens, shown as one.
    emoji = reader.page.locator('.ro-tokens').nth(1).locator('.ro-token').filter(has_text='😀')
    emoji.hover()
    assert 'tokens 12 to 15 of 16' in reader.page.locator('.ro-tip').inner_text()
    assert reader.tip()['Advantage'] == '+9 / +10 / +11 / +12'


def test_by_keyboard(reader):
    page = reader.page
    body = page.locator('.ro-tokens').nth(3)
    assert body.locator('[tabindex="0"]').count() == 1
    body.locator('.ro-token').first.focus()
    live = page.locator('[aria-live=polite]')
    assert live.inner_text().startswith('p, token 1 of 12; Advantage −2; ')
    for key, at in (('ArrowRight', 1), ('ArrowRight', 2), ('ArrowLeft', 1), ('End', 11), ('Home', 0), ('ArrowLeft', 0)):
        page.keyboard.press(key)
        assert live.inner_text().split(';')[0].endswith(f'token {at + 1} of 12'), key
    page.keyboard.press('ArrowRight')
    assert live.inner_text().endswith('does not count') and page.locator('.ro-tip').is_visible()
    page.keyboard.press('Escape')
    assert not page.locator('.ro-tip').is_visible()
    assert body.locator('[tabindex="0"]').count() == 1  # one stop for Tab per response
    # In right-to-left text the left arrow moves forward.
    arabic = page.locator('.ro-tokens').nth(1)
    arabic.locator('.ro-token').first.focus()
    page.keyboard.press('ArrowLeft')
    assert 'tokens 3 to 4 of' in live.inner_text()
    # A line down and back up.
    two = page.locator('.ro-tokens').nth(2)
    two.locator('.ro-token').nth(0).focus()
    page.keyboard.press('ArrowDown')
    assert live.inner_text().startswith('t, token 5 of')
    page.keyboard.press('ArrowUp')
    assert live.inner_text().startswith('o, token 1 of')


def test_long_lists_have_pages_of_whole_groups(browser, tmp_path):
    rows = recorded(tmp_path, ['a b'] * 55, num_phases=1, group=5)
    context = browser.new_context()
    reader = Reader(context, rows, tmp_path, embedded=False)
    assert reader.shown() == list(range(20))  # four groups: a fifth would make 25
    assert reader.page.locator('.ro-state').inner_text() == 'Sequences 1 to 20'
    for first, last in ((20, 40), (40, 55)):
        reader.page.get_by_role('button', name='Next page').click()
        reader.page.get_by_label(f'Response {first},').wait_for()
        assert reader.shown() == list(range(first, last))
    assert reader.page.get_by_role('button', name='Next page').is_disabled()
    assert reader.page.locator('.ro-state').inner_text() == 'Sequences 41 to 55 of 55'
    reader.page.get_by_role('button', name='Previous page').click()
    reader.page.get_by_label('Response 20,').wait_for()
    assert reader.errors == []
    context.close()


# ---------------------------------------------------------------------- episodes

TALK = [('3*5<eos>', 0.0), ('\n7 15 =22\n', None), ('7*15<eos>', -0.1), ('\n?\n7 15 =22\n', None), ('7+15<eos>', 1.0)]
"""turns of the policy with a reward, and observations of the environment with None"""


def acted(folder: Path, *, end: str = 'terminated', message: str = '', success: bool | None = True) -> None:
    """Writes phase 1 with one response from an environment and one without."""
    tokenizer = byte_tokenizer()
    end_id, turns, ids, mask = tokenizer.eos_token_id, [], [], []
    for text, reward in TALK:
        part = [*text.removesuffix('<eos>').encode(), *([end_id] if text.endswith('<eos>') else [])]
        if reward is not None:
            turns.append({'start': len(ids), 'stop': len(ids) + len(part), 'rewards': {'reward': reward}})
        ids += part
        mask += [reward is not None] * len(part)
    recorded(folder, ['plain words', 'other words'], num_phases=1)
    plain, other = read_rollouts(folder)
    n = len(ids)
    episode = {'turns': turns, 'end': end, 'message': message, 'success': success}
    acting = plain | {'response': ''.join(text for text, _ in TALK), 'token_ids': ids, 'mask': mask}
    acting |= {'tokens': token_texts(tokenizer, ids), 'episode': json.dumps(episode), 'entropy': None}
    acting |= {
        name: [0.5] * n for name in ('old_logprobs', 'ref_logprobs', 'values', 'rewards', 'advantages', 'returns')
    }
    write_rollouts(folder, 1, [acting, other])


@pytest.mark.parametrize(('scheme', 'width'), [('light', 390), ('dark', 1280)])
def test_turns_and_observations_are_separate(browser, tmp_path, scheme, width):
    acted(tmp_path)
    context = browser.new_context(color_scheme=scheme, viewport={'width': width, 'height': 844})
    reader = Reader(context, read_rollouts(tmp_path), tmp_path, embedded=True)
    page = reader.page
    turns, seen = page.locator('.ro-turn'), page.locator('.ro-seen:not(.ro-key-seen)')
    assert turns.locator('.ro-part').all_text_contents() == ['turn 1reward 0', 'turn 2reward −0.1', 'turn 3reward +1']
    words = "all => all.map(x => [...x.querySelectorAll('.ro-token')].map(t => t.textContent).join(''))"
    assert turns.evaluate_all(words) == ['3*5<eos>', '7*15<eos>', '7+15<eos>']
    assert seen.evaluate_all(words) == ['\n7 15 =22\n', '\n?\n7 15 =22\n']
    facts = page.locator('.ro-facts').all_text_contents()
    assert '3 turns' in facts[0] and 'the task ended' in facts[0] and 'success' in facts[0]
    assert 'turn' not in facts[1] and facts[1].endswith('ended'), 'a response without an environment is as it was'
    assert 'not trained on' in page.locator('.ro-legend').text_content()
    # The policy's tokens are coloured; the environment's are not and have no numbers.
    assert turns.locator('.ro-token[data-tint]').count() == 14 and seen.locator('.ro-token[data-tint]').count() == 0
    seen.locator('.ro-token').nth(2).click()
    assert reader.tip() == {} and 'from the environment' in page.locator('.ro-tip').text_content()
    turns.locator('.ro-token').first.click()
    assert 'Advantage' in reader.tip()
    for _ in range(4):  # 3 * 5 and the end, then the line break of the observation
        page.keyboard.press('ArrowRight')
    assert 'from the environment' in page.locator('.ro-tip').text_content()
    assert page.evaluate('document.documentElement.scrollWidth') <= width
    assert reader.errors == []
    context.close()
