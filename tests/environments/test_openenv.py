"""Environments in an OpenEnv server: the package's server and client, and failing servers."""

from __future__ import annotations

import json
import socket
import threading
import time

import pytest
import torch
from chat_families import chat_tokenizer
from limits import until
from scripted_engine import NOTHING, ScriptedEngine, played

from chatgpt.environments import find_environment
from chatgpt.types import Prompt

pytest.importorskip('openenv.core', reason='needs openenv-core')
pytestmark = pytest.mark.system


@pytest.fixture
def serve():
    """Starts ASGI programs on free ports."""
    uvicorn = pytest.importorskip('uvicorn')
    started = []

    def start(app):
        listener = socket.socket()
        listener.bind(('127.0.0.1', 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level='error', timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={'sockets': [listener]}, daemon=True)
        thread.start()
        started.append((server, thread))
        until(lambda: server.started)
        return f'ws://127.0.0.1:{listener.getsockname()[1]}'

    yield start
    for server, thread in started:
        server.should_exit = server.force_exit = True
        thread.join(5)


def echo(sessions=8, slow=0.0):
    """Returns a server made with the package."""
    from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

    class Say(Action):
        message: str

    class Heard(Observation):
        text: str
        turns: int = 0

    class Echo(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self):
            super().__init__()
            self.turns = 0

        def reset(self, seed=None, episode_id=None, topic='nothing', **kwargs):
            self.turns, self.seed = 0, seed
            return Heard(text=f'Say something about {topic}, {seed % 100}.')

        def step(self, action, timeout_s=None, **kwargs):
            time.sleep(slow)
            self.turns += 1
            if action.message == 'crash':
                raise RuntimeError('the world has ended')
            done = action.message == 'bye'
            return Heard(text=f'{action.message}!', turns=self.turns, reward=len(action.message) / 10, done=done)

        @property
        def state(self):
            return State(step_count=self.turns)

    return create_fastapi_app(Echo, Say, Heard, max_concurrent_envs=sessions)


def episodes(url, turns, settings=None, prompt=NOTHING, count=1, **options):
    tokenizer = chat_tokenizer('chatml')
    ids = [(tokenizer(turn)['input_ids'], 'length') for turn in turns]
    engine, environment = ScriptedEngine(dict.fromkeys(range(count), ids)), find_environment(f'openenv:{url}', options)
    given = {'prompts': [prompt] * count, 'seed': 4, 'groups': [0] * count, 'max_new_tokens': 200}
    samples = played(engine, environment, tokenizer, settings=settings, **given)
    return samples, [tokenizer.decode(torch.cat([s.prompt_ids, s.response_ids])) for s in samples]


def test_episodes_with_a_server(serve):
    url = serve(echo())
    row = Prompt(ids=NOTHING.ids, columns={'topic': 'tea'})
    samples, texts = episodes(url, ['hm', 'bye'], prompt=row, count=3)
    assert len({t.split(',')[1] for t in texts}) == 1, 'one seed for the samples of a group'
    for sample, text in zip(samples, texts, strict=True):
        assert text.startswith('Say something about tea, ') and text.endswith('.hmhm!bye')
        assert [t.rewards for t in sample.episode.turns] == [{'reward': 0.2}, {'reward': pytest.approx(0.3)}]
        assert sample.episode.end == 'terminated'


def test_failures_have_names(serve):
    url = serve(echo())
    for turn, options, message in (
        ('crash', {}, 'the world has ended'),
        ('x', {'action': 'text'}, 'VALIDATION_ERROR'),
        ('x', {'observation': 'words'}, 'the fields text, turns; name the text'),
    ):
        (sample,), _ = episodes(url, [turn], **options)
        assert sample.episode.end == 'error' and message in sample.episode.message
    samples, _ = episodes(serve(echo(sessions=1)), ['hm', 'bye'], count=2)
    assert sorted(s.episode.end for s in samples) == ['error', 'terminated']
    (message,) = (s.episode.message for s in samples if s.episode.end == 'error')
    assert 'CAPACITY_REACHED' in message or 'closed the connection' in message
    free = socket.socket()
    free.bind(('127.0.0.1', 0))
    nobody = f'ws://127.0.0.1:{free.getsockname()[1]}'
    (sample,), _ = episodes(nobody, ['x'])
    assert sample.episode.end == 'error' and f'Failed to connect to {nobody}/ws' in sample.episode.message


def test_a_slow_server_is_a_timeout(serve):
    (sample,), _ = episodes(serve(echo(slow=3.0)), ['x'], timeout_s=0.3)
    assert sample.episode.failed
    assert 'did not answer within 0.3 s' in sample.episode.message or sample.episode.end == 'timeout'


def test_a_dropped_connection_is_an_error(serve):
    async def drops(scope, receive, send):
        """Answers a reset, and closes the connection at the first step."""
        if scope['type'] != 'websocket':
            return
        await receive()
        await send({'type': 'websocket.accept'})
        await receive()
        message = {'type': 'observation', 'data': {'observation': {'text': 'Hi'}}}
        await send({'type': 'websocket.send', 'text': json.dumps(message)})
        await receive()
        await send({'type': 'websocket.close', 'code': 1011})

    url = serve(drops)
    (sample,), (text,) = episodes(url, ['x'])
    assert text == 'Hix' and sample.episode.end == 'error'
    assert f'the server {url} has closed the connection' in sample.episode.message


def test_mistakes_are_named_before_any_work():
    for name, options, message in (
        ('localhost', {}, ' is no address'),
        ('ws://localhost:1', {'actoin': 1}, ": .*'actoin'"),
    ):
        with pytest.raises(ValueError, match=f'openenv:{name}{message}'):
            find_environment(f'openenv:{name}', options)
