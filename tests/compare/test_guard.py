"""Which requests the server accepts, and the headers of its responses."""

from __future__ import annotations

import socket
from functools import partial

import pytest
from serving import filled

from chatgpt.monitor.compare.app import compare_app
from chatgpt.monitor.compare.serving import MAX_BODY, Guard, Serving, need_server

TOKEN = 'the-token'
ORIGIN = 'http://127.0.0.1:8765'


@pytest.fixture
def guarded(tmp_path):
    """Returns a client with the token, one without, and the store."""
    testclient = pytest.importorskip('starlette.testclient', reason='needs the package httpx')
    with filled(tmp_path / 'db', [('a1', 'b1'), ('a2', 'b2')]) as store:
        app = Guard(compare_app(store), TOKEN)
        stranger = testclient.TestClient(app, base_url=ORIGIN, raise_server_exceptions=True)
        friend = testclient.TestClient(app, base_url=ORIGIN, headers={'Origin': ORIGIN})
        assert friend.get(f'/?token={TOKEN}').status_code == 200
        yield friend, stranger, store


def test_nothing_without_the_token(guarded):
    _, stranger, _ = guarded
    for path in '/ /results /assets/compare.js /api/next /nowhere /?token= /?token=the-toke /?token=é'.split():
        assert stranger.get(path).status_code == 403
    assert stranger.get(f'/results?token={TOKEN}').status_code == 403  # only the page itself takes it
    assert stranger.post(f'/api/next?token={TOKEN}', json={}, headers={'Origin': ORIGIN}).status_code == 403
    assert stranger.post(f'/?token={TOKEN}', json={}, headers={'Origin': ORIGIN}).status_code == 403
    for cookie in ('', 'x=y', 'chatgpt_0123456789ab=the-token', '"', '=;=;\x7f'):
        assert stranger.get('/', headers={'Cookie': cookie}).status_code == 403
    assert 'set-cookie' not in stranger.get('/?token=wrong').headers


def test_the_token_becomes_a_cookie_that_only_this_server_is_sent(guarded):
    friend, _, _ = guarded
    response = friend.get(f'/?token={TOKEN}')
    (cookie,) = response.headers.get_list('set-cookie')
    assert cookie.endswith(f'={TOKEN}; Path=/; HttpOnly; SameSite=Strict')
    assert 'set-cookie' not in friend.get('/').headers
    other = Guard(None, 'another')
    assert not cookie.startswith(other.cookie)  # another port of the same machine has another name
    joined = friend.post('/api/join', json={'name': 'Anna'})
    (person,) = joined.headers.get_list('set-cookie')
    assert 'HttpOnly' in person and 'SameSite=strict' in person


@pytest.mark.parametrize(
    'origin', ['http://evil.example', 'null', 'http://127.0.0.1:9999', 'http://localhost:8765', 'http://[', '']
)
def test_no_other_page_may_post(guarded, origin):
    friend, _, store = guarded
    assert friend.post('/api/join', json={'name': 'Eve'}, headers={'Origin': origin}).status_code == 403
    assert friend.get('/', headers={'Origin': origin}).status_code == 403
    assert store.join('Anna') == 1  # nobody was there


def test_a_post_says_where_it_comes_from_and_is_json(guarded):
    friend, _, _ = guarded
    del friend.headers['origin']
    assert friend.post('/api/join', json={'name': 'Eve'}).status_code == 403
    friend.headers['origin'] = ORIGIN
    for kind in ('text/plain', 'application/x-www-form-urlencoded', 'multipart/form-data'):
        assert friend.post('/api/join', content=b'{"name": "Eve"}', headers={'Content-Type': kind}).status_code == 415
    assert friend.put('/api/join', json={'name': 'Eve'}).status_code == 405
    assert friend.post('/api/join', json={'name': 'Anna'}).status_code == 200


@pytest.mark.parametrize(
    'host', ['evil.example', 'evil.example:8765', 'localhost.evil.example', '127.0.0.1.evil.example', '', '[', 'a b']
)
def test_a_name_that_points_here_is_not_enough(guarded, host):
    """DNS rebinding: evil.example resolves to our address, so a browser takes its page for one of our origin."""
    friend, _, _ = guarded
    headers = {'Host': host, 'Origin': f'http://{host}'}
    assert friend.post('/api/join', json={'name': 'Eve'}, headers=headers).status_code == 421
    assert friend.get(f'/?token={TOKEN}', headers=headers).status_code == 421


@pytest.mark.parametrize(
    'host', ['localhost:1234', '127.0.0.1', '[::1]:8765', '192.168.1.7:8765', 'LOCALHOST:80', socket.gethostname()]
)
def test_names_and_addresses_of_this_machine_at_any_port(guarded, host):
    friend, _, _ = guarded
    headers = {'Host': host, 'Origin': f'http://{host}', 'Cookie': f'{Guard(None, TOKEN).cookie}={TOKEN}'}
    assert friend.post('/api/next', json={}, headers=headers).status_code == 200


def test_every_answer_forbids_foreign_code_and_frames(guarded):
    friend, stranger, _ = guarded
    answers = [friend.get('/'), friend.get('/assets/compare.js'), friend.get('/no'), stranger.get('/')]
    answers.append(friend.post('/api/next', json={}))
    for response in answers:
        policy = dict(part.split(' ', 1) for part in response.headers['content-security-policy'].split('; '))
        assert policy['default-src'] == "'none'" and policy['script-src'] == "'self'"
        assert policy['frame-ancestors'] == policy['base-uri'] == "'none'"
        assert response.headers['x-content-type-options'] == 'nosniff'
        assert response.headers['referrer-policy'] == 'no-referrer'
        assert response.headers['cache-control'] == 'no-store'


def test_what_is_too_much_or_no_request_is_refused(guarded):
    friend, _, store = guarded
    friend.post('/api/join', json={'name': 'Anna'})
    json = {'Content-Type': 'application/json'}
    at_most = b'{"name": "Anna"}'.ljust(MAX_BODY)
    assert friend.post('/api/join', content=at_most, headers=json).status_code == 200
    assert friend.post('/api/join', content=at_most + b' ', headers=json).status_code == 413
    assert friend.post('/api/join', content=iter([b' ' * 40000] * 2), headers=json).status_code == 413  # chunked
    pair = friend.post('/api/next', json={}).json()['pair']['id']
    judged = {'pair': pair, 'choice': 'tie', 'comment': ''}
    wrongs = {'comment': ['x' * 4001, None], 'choice': ['best', ['tie']], 'pair': ['1', True, 2**70, -1]}
    for wrong in ({name: value} for name, values in wrongs.items() for value in values):
        response = friend.post('/api/judge', json=judged | wrong)
        assert response.status_code == 400 and 'cannot be read' in response.json()['error'], wrong
    for body in (b'', b'{', b'[]', b'null', b'"x"', b'\xff', b'[' * 30000, b'{"name": "\\ud800"}'):
        assert friend.post('/api/join', content=body, headers=json).status_code == 400, body[:20]
    assert friend.post('/api/drop', json={}).status_code == 400
    assert friend.post('/api/judge', json={'pair': 3 - pair, 'choice': 'tie', 'comment': ''}).status_code == 409
    assert store.judgements() == []
    assert friend.post('/api/judge', json=judged | {'comment': 'x' * 4000}).status_code == 200
    assert len(store.judgements()) == 1


@pytest.mark.parametrize('person', ['0', '2', '-1', 'x', '9' * 30, '١', '1e0'])
def test_an_unknown_person_must_join(guarded, person):
    friend, _, store = guarded
    assert store.join('Anna') == 1
    cookie = f'chatgpt_person_{store.settings["id"]}={person}; {Guard(None, TOKEN).cookie}={TOKEN}'
    answer = friend.post('/api/next', json={}, headers={'Cookie': cookie.encode()})
    assert answer.status_code == 200 and answer.json()['person'] is None
    assert friend.post('/api/undo', json={}, headers={'Cookie': cookie.encode()}).status_code == 401


def test_the_state_does_not_name_the_models(guarded):
    friend, _, store = guarded
    store.update_settings(names=['secret one', 'secret two'])
    friend.post('/api/join', json={'name': 'Anna'})
    state = friend.post('/api/next', json={})
    assert set(state.json()['pair']) == {'id', 'prompt', 'left', 'right', 'comment'} and 'secret' not in state.text
    assert 'secret' not in friend.get('/').text and 'margin' not in state.text


def test_a_full_disk_is_reported_and_the_next_try_succeeds(guarded):
    friend, _, store = guarded
    friend.post('/api/join', json={'name': 'Anna'})
    pair = friend.post('/api/next', json={}).json()['pair']['id']
    body = {'pair': pair, 'choice': 'tie', 'comment': '€' * 4000}
    store._db.execute(f'PRAGMA max_page_count = {store._value("PRAGMA page_count")}')
    for _ in range(2):
        answer = friend.post('/api/judge', json=body)
        assert answer.status_code == 503 and 'cannot be saved: database or disk is full' in answer.json()['error']
        assert store.judgements() == []
    store._db.execute('PRAGMA max_page_count = 100000')
    assert friend.post('/api/judge', json=body).status_code == 200 and len(store.judgements()) == 1


def test_a_port_that_is_taken_is_one_line(tmp_path):
    with socket.create_server(('127.0.0.1', 0)) as taken:
        port = taken.getsockname()[1]
        for served in (partial(Serving, None), need_server):  # `need_server`: before any response is generated
            with pytest.raises(ValueError, match=f'cannot serve on 127.0.0.1, port {port}: .* give another --port'):
                served(host='127.0.0.1', port=port)
    with pytest.raises(ValueError, match='cannot serve on 192.0.2.1'):
        Serving(None, host='192.0.2.1', port=0)


def test_tokens_are_long_and_never_the_same():
    first, second = Serving(None, port=0), Serving(None, port=0)
    assert first.token != second.token and min(len(first.token), len(second.token)) >= 43  # 256 bits
    for serving in (first, second):
        serving._socket.close()
