"""Serves an app on a port of this machine until Ctrl-C, to holders of a token.

It guards against other people on the machine or network (the token); requests of other origins with the cookie
(SameSite=Strict, and Origin must be the Host); DNS rebinding (the Host must be this machine); injected scripts (a
Content-Security-Policy that allows only our own files); large requests (`MAX_BODY`). It does not guard against somebody
who reads the network: plain HTTP is for loopback, with an ssh tunnel from elsewhere.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import socket
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

HOST, PORT, ROLLOUTS_PORT = '127.0.0.1', 8765, 8766
ASSETS = Path(__file__).parent / 'assets'
CLOSING_S = 2
"""seconds that open requests have to end after Ctrl-C"""
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


def need_server(host: str, port: int) -> None:
    """Raises ValueError if a package that serves pages is not installed, or the port cannot be bound."""
    try:
        import jinja2  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ValueError(f"{error.name} is not installed: pip install 'chatgpt-rlhf[compare]'") from None
    bound(host, port).close()


def bound(host: str, port: int) -> socket.socket:
    """Returns a listening socket. Raises ValueError if the port cannot be bound."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ':' in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        raise ValueError(f'cannot serve on {host}, port {port}: {error}; give another --port or --host') from None


def add_server(parser: Any, port: int = PORT) -> None:
    """Adds the flags of `serve`. `port`: default port."""
    parser.add_argument('--host', default=HOST, help=f'where to listen (default: {HOST}, this machine only)')
    parser.add_argument('--port', type=int, default=port, help=f'0: any free one (default: {port})')


def serve(app: Any, *, host: str = HOST, port: int = PORT) -> None:
    """Prints the address, and serves until Ctrl-C."""
    serving = Serving(app, host=host, port=port)
    if not serving.is_local:
        print(
            f'warning: {host} is open to the network, and what is sent can be read on the way; an ssh tunnel is safer',
            file=sys.stderr,
        )
    print(f'open {serving.url}\nCtrl-C ends', flush=True)
    serving.run()


class Serving:
    """A server on a bound port; `run` returns after Ctrl-C, or when `stop` is called in another thread.

    Args:
        app: an ASGI application.
        host: address to listen on; loopback by default, since the pages are plain HTTP.
        port: 0: a free one.

    Raises:
        ValueError: if the port cannot be bound.
    """

    def __init__(self, app: Any, *, host: str = HOST, port: int = PORT) -> None:
        import uvicorn

        self.token = secrets.token_urlsafe(32)
        self._socket = bound(host, port)
        self.is_local = ipaddress.ip_address(self._socket.getsockname()[0]).is_loopback
        shown = socket.gethostname() if host in ('0.0.0.0', '::') else f'[{host}]' if ':' in host else host
        self.origin = f'http://{shown}:{self._socket.getsockname()[1]}'
        self.url = f'{self.origin}/?token={self.token}'
        config = uvicorn.Config(
            Guard(app, self.token, host=host),
            access_log=False,  # it would contain the token
            log_level='warning',
            server_header=False,
            timeout_graceful_shutdown=CLOSING_S,
            ws='none',
        )
        self._server = uvicorn.Server(config)

    def run(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        except KeyboardInterrupt:  # uvicorn raises it again after a clean shutdown
            pass
        finally:
            self._socket.close()

    def stop(self) -> None:
        self._server.should_exit = True


class Guard:
    """An ASGI application that passes permitted requests to another one.

    Args:
        app: the application.
        token: sent once in the address, `/?token=...`, then in a cookie.
        host: address that the server listens on, which is permitted as Host beside the names of this machine.
    """

    def __init__(self, app: Any, token: str, *, host: str = HOST) -> None:
        self.app, self._token = app, token
        self._names = {'localhost', host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()}
        # Cookies are shared by all ports of a host, so each server has a name of its own.
        self.cookie = f'chatgpt_{hashlib.sha256(token.encode()).hexdigest()[:12]}'

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.datastructures import MutableHeaders
        from starlette.requests import Request
        from starlette.responses import PlainTextResponse

        if scope['type'] == 'lifespan':
            await self.app(scope, receive, send)
            return
        request = Request(scope)
        fault = self._fault(request)

        async def send_guarded(message: Any) -> None:
            if message['type'] == 'http.response.start':
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                if fault is None and self._brings_token(request):
                    headers.append('Set-Cookie', f'{self.cookie}={self._token}; Path=/; HttpOnly; SameSite=Strict')
            await send(message)

        app = self.app if fault is None else PlainTextResponse(f'{fault[1]}\n', fault[0])
        await app(scope, receive, send_guarded)

    def _fault(self, request: Any) -> tuple[int, str] | None:
        """Returns status and reason if a request is refused, else None."""
        host, origin, is_post = request.headers.get('host', ''), request.headers.get('origin'), request.method == 'POST'
        length = '' if 'transfer-encoding' in request.headers else request.headers.get('content-length', '')
        is_short = length.isdigit() and len(length) < 19 and int(length) <= MAX_BODY
        kind = request.headers.get('content-type', '').split(';')[0]
        has_token = self._brings_token(request) or self._is_token(request.cookies.get(self.cookie, ''))
        checks = (
            (self._is_ours(host), 421, 'this is no name of the server: take the address as it was printed, or digits'),
            (has_token, 403, 'open the address that the command printed, with its token'),
            (request.method in ('GET', 'HEAD', 'POST'), 405, 'GET or POST'),
            (origin is not None or not is_post, 403, 'a POST says where it comes from, in Origin'),
            (
                origin is None or origin.partition('://')[2].lower() == host.lower(),
                403,
                'this request comes from another page',
            ),
            (kind == 'application/json' or not is_post, 415, 'what is posted is application/json'),
            (is_short or not is_post, 413, f'a request says its length, and has at most {MAX_BODY} bytes'),
        )
        return next(((status, words) for holds, status, words in checks if not holds), None)

    def _brings_token(self, request: Any) -> bool:
        """Returns True if the address of the page, `/`, has the token."""
        is_page = (request.method, request.scope['path']) == ('GET', '/')
        return is_page and self._is_token(request.query_params.get('token', ''))

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())

    def _is_ours(self, host: str) -> bool:
        """Returns True if the Host of a request is this machine, with any port (a tunnel has another). Accepts every
        numeric address, since DNS rebinding needs a name."""
        try:
            name = (urlsplit(f'//{host}').hostname or '').rstrip('.')
            return name in self._names or bool(ipaddress.ip_address(name))
        except ValueError:
            return False
