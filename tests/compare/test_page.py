"""The page in a real browser: two people at once, hostile and foreign text, keyboard only, undo."""

from __future__ import annotations

import threading
from collections import Counter
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
from serving import filled, served

from chatgpt.monitor.compare.serving import Guard

MARKUP = '<script>window.hacked = 1</script> & `code` <img src=x onerror="window.hacked = 1"> {{ 7 * 7 }}'
HEBREW = 'שלום עולם, this is mixed.\nמה שלומך?'
ARABIC = 'مرحبا بالعالم 123 (نص)'
EMOJI = '👩‍👩‍👧‍👦 🏳️‍🌈 🇯🇵 👍🏽 \U0001f9d1‍\U0001f680'
ANSWERS = [(MARKUP, HEBREW), (ARABIC, EMOJI), ('plain  two spaces\n\tand a tab', 'x' * 400), ('', 'one word')]


def joined(browser, serving, name: str, **options):
    """Returns a page of a new context after joining under a name, and a list that collects its errors."""
    page = browser.new_context(**options).new_page()
    faults: list[str] = []
    page.on('console', lambda message: faults.append(message.text) if message.type == 'error' else None)
    page.on('pageerror', lambda error: faults.append(str(error)))
    page.goto(serving.url)
    page.get_by_label('Your name').fill(name)
    page.keyboard.press('Enter')
    page.locator('#prompt:visible, #done:visible').first.wait_for()
    return page, faults


def progress(page) -> str:
    return page.locator('#counts').inner_text()


def press(page, key: str, then: str) -> None:
    """Presses a key and waits for the page's status."""
    page.keyboard.press(key)
    page.get_by_role('status').filter(has_text=then).wait_for()


def test_two_people_at_once_see_each_pair_once_each(browser, tmp_path):
    store = filled(tmp_path / 'judged.sqlite', ANSWERS, annotators_per_pair=2)
    with served(store) as serving:
        (anna, faults_a), (ben, faults_b) = joined(browser, serving, 'Anna'), joined(browser, serving, 'Ben ✌ <b>')
        seen: dict[str, list[str]] = {'Anna': [], 'Ben': []}
        for key in ('1', '2', 't', 'b'):
            for name, page in (('Anna', anna), ('Ben', ben)):
                prompt = page.locator('#prompt').inner_text()
                seen[name].append(prompt)
                choice = {'1': '1 is better', '2': '2 is better', 't': 'a tie', 'b': 'both bad'}[key]
                press(page, key, f'Saved: {choice}.')
        for name, page in (('Anna', anna), ('Ben', ben)):
            assert sorted(seen[name]) == [f'prompt {number}' for number in range(1, 5)]
            page.get_by_text('All done. Thank you!').wait_for()
        assert progress(ben) == '8 of 8 judgements, 4 by you'
        ben.get_by_role('link', name='Results').click()
        ben.get_by_role('heading', name='Results of the comparison').wait_for()
        assert 'Ben ✌ <b> (4)' in ben.locator('main').inner_text()
        assert faults_a == faults_b == []
        found = store.judgements()
        assert Counter(j.person for j in found) == {'Anna': 4, 'Ben ✌ <b>': 4}
        assert set(Counter(j.pair for j in found).values()) == {2}


def test_any_text_is_shown_as_it_is_and_runs_nothing(browser, tmp_path):
    store = filled(tmp_path / 'judged.sqlite', ANSWERS)
    with served(store) as serving:
        page, faults = joined(browser, serving, 'Anna')
        shown: dict[str, set[str]] = {}
        for _ in ANSWERS:
            texts = {page.locator(f'#{side}').evaluate('e => e.textContent') for side in ('left', 'right')}
            shown[page.locator('#prompt').inner_text()] = texts
            press(page, 's', 'Saved: skipped.')
            page.get_by_role('status').evaluate('e => { e.textContent = "" }')
        assert shown == {f'prompt {number}': set(pair) for number, pair in enumerate(ANSWERS, 1)}
        assert page.evaluate('window.hacked') is None and faults == []
        assert page.url == f'{serving.origin}/'  # the token does not stay in the address


def test_keys_alone_suffice_with_a_comment_and_taking_back(browser, tmp_path):
    store = filled(tmp_path / 'judged.sqlite', [('a one', 'b one'), ('a two', 'b two')])
    with served(store) as serving:
        page, faults = joined(browser, serving, 'Anna')
        first = page.locator('#prompt').inner_text()
        left = page.locator('#left').inner_text()
        page.keyboard.press('c')
        page.keyboard.type('stub: 1 tbs ends well 🙂')  # keys of choices, typed
        assert store.judgements() == []
        page.keyboard.press('Escape')
        press(page, 'ArrowLeft', 'Saved: 1 is better.')
        (judgement,) = store.judgements()
        assert judgement.comment == 'stub: 1 tbs ends well 🙂'
        assert left.startswith(judgement.verdict)  # 'a' was on the left where it was chosen, and 'b' likewise
        assert page.locator('#comment').input_value() == '' and page.locator('#prompt').inner_text() != first
        press(page, 'u', 'Taken back.')
        assert store.judgements() == []
        assert page.locator('#prompt').inner_text() == first and page.locator('#left').inner_text() == left
        assert page.locator('#comment').input_value() == 'stub: 1 tbs ends well 🙂'
        press(page, 'ArrowRight', 'Saved: 2 is better.')
        assert [j.verdict for j in store.judgements()] == ['b' if left.startswith('a') else 'a']
        press(page, 'b', 'Saved: both bad.')
        page.get_by_text('All done. Thank you!').wait_for()
        press(page, 'u', 'Taken back.')
        press(page, 't', 'Saved: a tie.')
        assert store.judgements()[-1].verdict == 'tie' and faults == []


def test_a_page_of_another_port_of_this_machine_cannot_post(browser, monkeypatch, tmp_path):
    """A browser counts it as the same site and sends the cookies; the check of Origin refuses the requests."""
    foreign = ThreadingHTTPServer(('127.0.0.1', 0), SimpleHTTPRequestHandler)
    thread = threading.Thread(target=foreign.serve_forever, daemon=True)
    thread.start()
    store = filled(tmp_path / 'judged.sqlite', [('a', 'b')])
    refused, judge = [], Guard._fault

    def noted(self, request):
        fault = judge(self, request)
        if fault is not None:
            refused.append((request.method, 'cookie' in request.headers, *fault))
        return fault

    monkeypatch.setattr(Guard, '_fault', noted)
    with served(store) as serving:
        page, _ = joined(browser, serving, 'Anna')
        evil = page.context.new_page()
        evil.goto(f'http://127.0.0.1:{foreign.server_address[1]}/')
        post = """([url, mode, kind]) => fetch(url, {method: 'POST', mode, credentials: 'include',
            headers: {'Content-Type': kind}, body: '{"pair": 1, "choice": "left", "comment": ""}'}).catch(() => null)"""
        evil.evaluate(post, [f'{serving.origin}/api/judge', 'no-cors', 'text/plain'])
        assert refused == [('POST', True, 403, 'this request comes from another page')]
        assert evil.evaluate(post, [f'{serving.origin}/api/judge', 'cors', 'application/json']) is None
        assert store.judgements() == []
        page.keyboard.press('t')
        page.get_by_text('All done. Thank you!').wait_for()
    foreign.shutdown()
    thread.join(20)
    foreign.server_close()


@pytest.mark.parametrize(('scheme', 'width'), [('dark', 1280), ('light', 390)])
def test_it_fits_a_phone_and_both_schemes(browser, tmp_path, scheme, width):
    store = filled(tmp_path / 'judged.sqlite', ANSWERS)
    with served(store) as serving:
        options = {'viewport': {'width': width, 'height': 844}, 'color_scheme': scheme}
        page, faults = joined(browser, serving, 'Anna', **options)
        for _ in ANSWERS:
            assert page.evaluate('document.documentElement.scrollWidth') <= width
            buttons = page.locator('.choices button').all()
            assert len(buttons) == 6 and len({button.bounding_box()['y'] for button in buttons}) == 1
            press(page, 's', 'skipped')
            page.get_by_role('status').evaluate('e => { e.textContent = "" }')
        ground, ink = (
            page.evaluate(f'getComputedStyle(document.documentElement).{name}') for name in ('backgroundColor', 'color')
        )
        light = [sum(int(part) for part in colour[4:-1].split(',')) for colour in (ground, ink)]
        assert (light[0] > light[1]) == (scheme == 'light') and faults == []
