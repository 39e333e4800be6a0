"""Who is let in: whoever has the token, from a page of this very server, under a name of this machine.

It guards against other people on the machine or network (the token); pages of other origins that send requests with the
browser's cookie (SameSite=Strict, and Origin must be the Host); DNS rebinding (the Host must be this machine); text
that would become code (a policy that runs nothing but our own files); requests that fill the memory (`MAX_BODY`). It
does not guard against somebody who reads the network: plain HTTP belongs on loopback, with an ssh tunnel from
elsewhere.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import socket
from typing import Any
from urllib.parse import urlsplit

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

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.datastructures import MutableHeaders
        from starlette.requests import Request
        from starlette.responses import PlainTextResponse

        if scope['type'] == 'lifespan':
            await self.app(scope, receive, send)
            return
        request = Request(scope)
        fault = self._fault(request)
        sets_cookie = fault is None and self._brings_token(request)
        if fault is None and request.method == 'POST':
            body = await _body(receive)
            fault = (413, f'a request has at most {MAX_BODY} bytes') if body is None else None
            waiting, rest = [{'type': 'http.request', 'body': body, 'more_body': False}], receive

            async def receive() -> Any:
                return waiting.pop() if waiting else await rest()

        async def send_guarded(message: Any) -> None:
            if message['type'] == 'http.response.start':
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                if sets_cookie:
                    headers.append(
                        'Set-Cookie', f'{self.cookie}={self._token.decode()}; Path=/; HttpOnly; SameSite=Strict'
                    )
            await send(message)

        app = self.app if fault is None else PlainTextResponse(f'{fault[1]}\n', fault[0])
        await app(scope, receive, send_guarded)

    def _fault(self, request: Any) -> tuple[int, str] | None:
        """Why a request is refused, as status and words."""
        host, origin = request.headers.get('host', ''), request.headers.get('origin')
        if not self._is_ours(host):
            return 421, 'this is no name of the server: take the address as it was printed, or in digits'
        if not self._brings_token(request) and not self._is_token(request.cookies.get(self.cookie, '')):
            return 403, 'open the address that the command printed, with its token'
        if request.method not in ('GET', 'HEAD', 'POST'):
            return 405, 'GET or POST'
        if origin is None and request.method == 'POST':
            return 403, 'a POST says where it comes from, in Origin'
        if origin is not None and origin.partition('://')[2].lower() != host.lower():
            return 403, 'this request comes from another page'
        kind = request.headers.get('content-type', '').split(';')[0]
        if request.method == 'POST' and kind != 'application/json':
            return 415, 'what is posted is application/json'
        return None

    def _brings_token(self, request: Any) -> bool:
        """In its address, which only the page itself takes."""
        is_page = (request.method, request.scope['path']) == ('GET', '/')
        return is_page and self._is_token(request.query_params.get('token', ''))

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


async def _body(receive: Any) -> bytes | None:
    """The body of a request; None where it is too large, or the client has gone."""
    body = b''
    while True:
        message = await receive()
        body += message.get('body', b'')
        if message['type'] != 'http.request' or len(body) > MAX_BODY:
            return None
        if not message.get('more_body'):
            return body
