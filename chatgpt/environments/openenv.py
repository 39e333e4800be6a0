"""Environments that run in an OpenEnv server (the extra `openenv`): one session over WebSocket for every episode.

    PPOTrainer(..., environment='openenv:ws://localhost:8000')
    find_environment('openenv:ws://localhost:8000', {'action': 'message', 'observation': 'echoed_message'})

The server decides how many sessions it takes at once (`max_concurrent_envs`), and refuses more by name: give no more
`num_workers` and no more samples at a time than that. A class with tools that holds an OpenEnv client, as TRL's pages
write it, needs nothing of this.

Protocol: openenv-core 0.3.0, through its own client.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from chatgpt.environments.base import EnvironmentFactory


class OpenEnvEnvironment:
    """One session with an OpenEnv server.

    Args:
        url: ws:// or http:// address of the server.
        action: the field of the server's action that a turn's text goes into.
        observation: the field of its observation that the model reads; None: the only text among them.
        connect_timeout_s, timeout_s: how long to wait for a connection, and for an answer.
    """

    def __init__(
        self,
        url: str,
        action: str = 'message',
        observation: str | None = None,
        connect_timeout_s: float = 10.0,
        timeout_s: float = 60.0,
    ) -> None:
        from openenv.core import GenericEnvClient

        self.url, self.action, self.observation, self.timeout_s = url, action, observation, timeout_s
        client = GenericEnvClient(url, connect_timeout_s=connect_timeout_s, message_timeout_s=timeout_s)
        self._client = client.sync()  # its own thread answers the server's pings while the model thinks

    def reset(self, seed: int, **columns: Any) -> str:
        return self._told(self._asked(self._client.reset, seed=seed, **columns).observation)

    def step(self, response: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        answer = self._asked(self._client.step, {self.action: response})
        return self._told(answer.observation), answer.reward or 0.0, bool(answer.done), False, {}

    def close(self) -> None:
        self._client.close()

    def _asked(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        from websockets.exceptions import ConnectionClosed

        try:
            return method(*args, **kwargs)
        except ConnectionClosed as error:
            raise ConnectionError(f'the server {self.url} has closed the connection: {error}') from error
        except TimeoutError as error:
            raise TimeoutError(f'the server {self.url} did not answer within {self.timeout_s:g} s') from error

    def _told(self, observation: Mapping[str, Any]) -> str:
        texts = {name: value for name, value in observation.items() if isinstance(value, str)}
        if self.observation is None and len(texts) == 1:
            return next(iter(texts.values()))
        if self.observation not in texts:
            raise ValueError(
                f'the observation has the fields {", ".join(observation) or "none"}; name the text to read with '
                'observation='
            )
        return texts[self.observation]


class OpenEnvServer:
    """Makes sessions with one server."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self.url, self.keywords = url, dict(options)
        self.name = self.__qualname__ = f'openenv:{url}'

    def __call__(self) -> OpenEnvEnvironment:
        return OpenEnvEnvironment(self.url, **self.keywords)


def openenv_server(url: str, options: Mapping[str, Any]) -> EnvironmentFactory:
    """Raises ValueError where the client is not installed, the address is none, or an option is not known."""
    if not url.startswith(('ws://', 'wss://', 'http://', 'https://')):
        raise ValueError(f'openenv:{url} is no address of a server; write openenv:ws://host:port')
    try:
        import openenv.core  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"openenv: needs the client of OpenEnv ({error}): pip install 'chatgpt-rlhf[openenv]'"
        ) from None
    try:
        inspect.signature(OpenEnvEnvironment).bind(url, **options)
    except TypeError as error:
        raise ValueError(f'openenv:{url}: {error}') from None
    return OpenEnvServer(url, options)
