"""Who is let in: whoever has the token, from a page of this very server, under a name of this machine.

Against what: other people on the machine or network (the token); pages of other origins that send requests with the
browser's cookie (SameSite=Strict, and Origin must be the Host); a name that its owner points to this address, DNS
rebinding (the Host must be this machine); text that would become code (a policy that runs nothing but our own files);
requests that fill the memory (`MAX_BODY`). Not against somebody who reads the network: plain HTTP belongs on loopback,
with an ssh tunnel from elsewhere.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qs, urlsplit

MAX_BODY = 65536
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
POLICY += "form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
HEADERS = {
    'Content-Security-Policy': POLICY,
    'X-Content-Type-Options': 'nosniff',
    'Referrer-Policy': 'no-referrer',
    'Cross-Origin-Opener-Policy': 'same-origin',
    'Cross-Origin-Resource-Policy': 'same-origin',
    'Cache-Control': 'no-store',
}

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Guard:
    """An ASGI application around another one.

    Args:
        app: answers what is let in.
        token: comes once in the address, `/?token=...`, and then in a cookie.
        host: what the server was asked to listen on; a name of this machine beside those that every machine has.
    """

    def __init__(self, app: Any, token: str, *, host: str = '127.0.0.1') -> None:
        self.app = app
        self._token = token.encode()
        self._names = {'localhost', host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()}
        # Cookies do not know ports: two servers of one machine need two names.
        self.cookie = f'chatgpt_{hashlib.sha256(self._token).hexdigest()[:12]}'

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope['type'] == 'lifespan':
            await self.app(scope, receive, send)
            return
        if scope['type'] != 'http':
            raise ValueError(f'{scope["type"]} is not served')
        fault, brings_token = self._fault(scope)
        if fault is None and scope['method'] == 'POST':
            body = await _body(receive)
            if body is None:
                fault = (413, f'a request has at most {MAX_BODY} bytes')
            else:
                receive = _replay(body, receive)

        async def send_guarded(message: Message) -> None:
            if message['type'] == 'http.response.start':
                added = HEADERS | ({'Set-Cookie': self._new_cookie()} if brings_token and fault is None else {})
                message['headers'] = [*message.get('headers', []), *_raw(added)]
            await send(message)

        if fault is None:
            await self.app(scope, receive, send_guarded)
            return
        await send_guarded({'type': 'http.response.start', 'status': fault[0], 'headers': _raw(PLAIN)})
        await send_guarded({'type': 'http.response.body', 'body': f'{fault[1]}\n'.encode()})

    def _fault(self, scope: Message) -> tuple[tuple[int, str] | None, bool]:
        """Why a request is refused, as status and words, and whether its token is in its address."""
        headers = {name.decode('latin-1').lower(): value.decode('latin-1') for name, value in scope['headers']}
        host = headers.get('host', '')
        if not self._is_ours(host):
            return (421, 'this is no name of the server: take the address as it was printed, or in digits'), False
        asked = parse_qs(scope['query_string'].decode('latin-1')).get('token', [''])[0]
        in_address = scope['path'] == '/' and scope['method'] == 'GET' and self._is_token(asked)
        if not in_address and not self._is_token(_cookie(headers.get('cookie', ''), self.cookie)):
            return (403, 'open the address that the command printed, with its token'), False
        if scope['method'] not in ('GET', 'HEAD', 'POST'):
            return (405, 'GET or POST'), False
        origin = headers.get('origin')
        if origin is None and scope['method'] == 'POST':
            return (403, 'a POST says where it comes from, in Origin'), False
        if origin is not None and origin.partition('://')[2].lower() != host.lower():
            return (403, 'this request comes from another page'), False
        if scope['method'] == 'POST' and headers.get('content-type', '').split(';')[0] != 'application/json':
            return (415, 'what is posted is application/json'), False
        return None, in_address

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token)

    def _is_ours(self, host: str) -> bool:
        """Whether the Host of a request is this machine, whatever the port (a tunnel has its own). Only a name can be
        pointed elsewhere by somebody else, so any address in digits is."""
        try:
            name = (urlsplit(f'//{host}').hostname or '').rstrip('.')
        except ValueError:
            return False
        try:
            ipaddress.ip_address(name)
            return True
        except ValueError:
            return name in self._names

    def _new_cookie(self) -> str:
        return f'{self.cookie}={self._token.decode()}; Path=/; HttpOnly; SameSite=Strict'


PLAIN = {'Content-Type': 'text/plain; charset=utf-8'}


def _raw(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode(), value.encode('latin-1')) for name, value in headers.items()]


def _cookie(header: str, name: str) -> str:
    """Read by hand: `http.cookies` gives up at what another server of this machine may have written beside it."""
    pairs = (part.strip().partition('=') for part in header.split(';'))
    return next((value for key, _, value in pairs if key == name), '')


async def _body(receive: Receive) -> bytes | None:
    """What a request brings; None where that is too much, or the client has gone."""
    body = b''
    while True:
        message = await receive()
        body += message.get('body', b'')
        if message['type'] != 'http.request' or len(body) > MAX_BODY:
            return None
        if not message.get('more_body'):
            return body


def _replay(body: bytes, receive: Receive) -> Receive:
    waiting = [{'type': 'http.request', 'body': body, 'more_body': False}]

    async def replay() -> Message:
        return waiting.pop() if waiting else await receive()

    return replay
