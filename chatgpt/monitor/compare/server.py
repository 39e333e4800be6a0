"""An app on a port of this machine, behind a token, until Ctrl-C."""

from __future__ import annotations

import ipaddress
import secrets
import socket
import sys
from pathlib import Path
from typing import Any

from chatgpt.monitor.compare.guard import Guard

HOST, PORT = '127.0.0.1', 8765
ASSETS = Path(__file__).parent / 'assets'
CLOSING_S = 2
"""seconds that open requests have to end after Ctrl-C"""


def need_server() -> None:
    """Raises ValueError where a package that serves pages is missing, by name."""
    try:
        import jinja2  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ValueError(f"{error.name} is not installed: pip install 'chatgpt-rlhf[compare]'") from None


def asset_routes() -> list[Any]:
    """Our files, and the report's: what every page looks like, and the reader of sequences."""
    from starlette.routing import Mount
    from starlette.staticfiles import StaticFiles

    from chatgpt.monitor.report.page import ASSETS as REPORT_ASSETS

    folders = {'/assets': ASSETS, '/report': REPORT_ASSETS}
    return [Mount(path, StaticFiles(directory=folder)) for path, folder in folders.items()]


def add_server(parser: Any) -> None:
    """The flags of `serve`."""
    parser.add_argument('--host', default=HOST, help=f'where to listen (default: {HOST}, this machine only)')
    parser.add_argument('--port', type=int, default=PORT, help=f'0: any free one (default: {PORT})')


class Serving:
    """A bound port and the server behind it; `run` returns after Ctrl-C, or when `stop` was called in another thread.

    Args:
        app: an ASGI application.
        host: loopback unless asked: the pages are plain HTTP.
        port: 0 takes a free one.

    Raises:
        ValueError: the port is taken, or is no port of this machine.
    """

    def __init__(self, app: Any, *, host: str = HOST, port: int = PORT) -> None:
        import uvicorn

        self.token = secrets.token_urlsafe(32)
        try:
            family = socket.AF_INET6 if ':' in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family)
        except (OSError, OverflowError) as error:
            raise ValueError(f'cannot serve on {host}, port {port}: {error}; give another --port or --host') from None
        self.host, self.port = host, self._socket.getsockname()[1]
        shown = socket.gethostname() if host in ('0.0.0.0', '::') else f'[{host}]' if ':' in host else host
        self.origin = f'http://{shown}:{self.port}'
        self.url = f'{self.origin}/?token={self.token}'
        config = uvicorn.Config(
            Guard(app, self.token, host=host),
            access_log=False,  # it would write the token
            log_level='warning',
            server_header=False,
            timeout_graceful_shutdown=CLOSING_S,
            ws='none',
        )
        self._server = uvicorn.Server(config)

    def run(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        except KeyboardInterrupt:  # what the server raises once it has ended in good order
            pass
        finally:
            self._socket.close()

    def stop(self) -> None:
        self._server.should_exit = True


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == 'localhost'


def serve(app: Any, *, host: str = HOST, port: int = PORT) -> None:
    """Print the address, and serve until Ctrl-C."""
    serving = Serving(app, host=host, port=port)
    if not is_loopback(host):
        print(
            f'warning: {host} is open to the network, and what is sent can be read on the way; an ssh tunnel is safer',
            file=sys.stderr,
        )
    print(f'open {serving.url}\nCtrl-C ends', flush=True)
    serving.run()
