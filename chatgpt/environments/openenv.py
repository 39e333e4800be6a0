"""Environments in an OpenEnv server (the extra `openenv`): one session over WebSocket per episode.

    PPOTrainer(..., environment='openenv:ws://localhost:8000')
    find_environment('openenv:ws://localhost:8000', {'action': 'message', 'observation': 'echoed_message'})

The server limits the number of concurrent sessions (`max_concurrent_envs`) and rejects more: use at most as many
`num_workers` and samples at a time. A class with tools that has its own OpenEnv client, as in TRL's documentation, does
not need this module.

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
        action: the field of the server's action for a turn's text.
        observation: the field of its observation that the model reads; None for the only text field.
        connect_timeout_s, timeout_s: limits of connecting and of an answer.
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
        self._client = client.sync()  # its own thread answers the server's pings while the model generates

    def reset(self, seed: int, **columns: Any) -> str:
        return self._observation(self._request(self._client.reset, seed=seed, **columns).observation)

    def step(self, response: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        answer = self._request(self._client.step, {self.action: response})
        return self._observation(answer.observation), answer.reward or 0.0, bool(answer.done), False, {}

    def close(self) -> None:
        self._client.close()

    def _request(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        from websockets.exceptions import ConnectionClosed

        try:
            return method(*args, **kwargs)
        except ConnectionClosed as error:
            raise ConnectionError(f'the server {self.url} has closed the connection: {error}') from error
        except TimeoutError as error:
            raise TimeoutError(f'the server {self.url} did not answer within {self.timeout_s:g} s') from error

    def _observation(self, observation: Mapping[str, Any]) -> str:
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
    """Returns a factory of sessions. Raises ValueError for a missing client, an invalid address or an unknown
    option."""
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
