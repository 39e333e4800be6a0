"""Adapters for environments of other systems: GEM, SkyRL-Gym, Gymnasium, and TRL's classes with tools.

`adapted` recognises a class by its methods. A function that makes environments must be wrapped, as
`Adapter(GymEnvironment, make)` or `ToolFactory(make)`. Names choose adapters too: `gem:...`, `gymnasium:...` and
`skyrl:...` are made by that package's registry; `tools:package.module:Class` is a class with tools, one of them named
`step`; `openenv:ws://host:8000` is a server (`chatgpt.environments.openenv`).

Signatures as in gem-llm 0.1.0, skyrl-gym 0.4.0, Gymnasium 1.4.0.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from chatgpt.environments.base import Environment, EnvironmentFactory
from chatgpt.environments.host import name_of
from chatgpt.environments.openenv import openenv_server
from chatgpt.environments.tools import ToolFactory
from chatgpt.registry import load_object


class Adapter:
    """A factory that makes `wrapper(make)` for every episode.

    `messages`: True if observations are messages, which need a chat template that is tested before the run.
    `keeps_stop`: True if environments read a turn with its stop string.
    """

    def __init__(self, wrapper: Callable[[Callable[..., Any]], Any], make: Callable[..., Any]) -> None:
        self.wrapper, self.make = wrapper, make
        self.messages, self.keeps_stop = (bool(getattr(wrapper, name, False)) for name in ('messages', 'keeps_stop'))
        self.name = self.__qualname__ = name_of(make)

    def __call__(self) -> Any:
        return self.wrapper(self.make)


class GymEnvironment:
    """Gymnasium's interface, over text: reset(seed) returns (observation, info), step(action) five values."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.environment = make()

    def reset(self, seed: int, **columns: Any) -> str:
        return self._observation(*self.environment.reset(seed=seed))

    def step(self, response: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.environment.step(response)
        return self._observation(observation, info), reward, terminated, truncated, _success(info)

    def close(self) -> None:
        if hasattr(self.environment, 'close'):
            self.environment.close()

    def _observation(self, observation: Any, info: Mapping[str, Any]) -> str:
        if not isinstance(observation, str):
            raise TypeError(f'observes {type(observation).__name__}, and a model reads text; wrap it')
        return observation


class GemEnvironment(GymEnvironment):
    """GEM: as Gymnasium; `info` may contain a prefix and a suffix of the observation."""

    def _observation(self, observation: Any, info: Mapping[str, Any]) -> str:
        return str(info.get('prefix', '')) + super()._observation(observation, info) + str(info.get('suffix', ''))


class SkyRLEnvironment:
    """SkyRL-Gym: made for a data row, with its other columns as `extras`; init(prompt) returns the conversation, and
    step(action) a dict with observations, reward, done and metadata."""

    messages = True
    keeps_stop = True  # these environments search for text that ends with it, as in <search>...</search>

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make
        self.environment: Any = None

    def reset(self, seed: int, prompt: Any = (), **columns: Any) -> list[dict[str, Any]]:
        wanted = inspect.signature(self.make).parameters
        takes = 'extras' in wanted or any(p.kind is p.VAR_KEYWORD for p in wanted.values())
        self.environment = self.make(**({'extras': columns} if takes else {}))
        messages, _ = self.environment.init([dict(message) for message in prompt])
        return [dict(message) for message in messages]

    def step(self, response: str) -> tuple[list[dict[str, Any]], float, bool, bool, dict[str, Any]]:
        answer = self.environment.step(response)
        if answer.get('postprocessed_action') not in (None, response):
            raise ValueError(
                'returned a postprocessed_action, other text than the model wrote, which nothing can be learned from; '
                'end a turn with stop strings'
            )
        messages = [dict(message) for message in answer['observations']]
        return messages, answer['reward'], bool(answer['done']), False, _success(answer.get('metadata') or {})

    def close(self) -> None:
        if self.environment is not None and hasattr(self.environment, 'close'):
            self.environment.close()


def adapted(factory: EnvironmentFactory) -> EnvironmentFactory:
    """Returns a factory for a class of another system; anything else unchanged.

    - `step` and `init`, no `reset`: SkyRL-Gym;
    - `step` and a `reset` with `options`: Gymnasium;
    - `step` and a `reset` with an optional `seed`, without further columns: GEM;
    - `reset`, no `step`, but other methods: a class with tools.
    """
    inner: Any = factory.func if isinstance(factory, partial) else factory
    is_class = isinstance(inner, type)
    if not is_class or issubclass(inner, Environment):
        return factory
    methods = {name for name in dir(inner) if not name.startswith('_') and callable(getattr(inner, name))}
    if {'step', 'init'} <= methods and 'reset' not in methods:
        return Adapter(SkyRLEnvironment, factory)
    if 'step' not in methods and 'reset' in methods and methods - {'reset', 'close'}:
        return ToolFactory(factory)
    if not {'step', 'reset'} <= methods:
        return factory
    parameters = inspect.signature(inner.reset).parameters
    if 'options' in parameters:
        return Adapter(GymEnvironment, factory)
    columns = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if 'seed' in parameters and parameters['seed'].default is None and not columns:
        return Adapter(GemEnvironment, factory)
    return factory


def _registered(wrapper: Any, module: str, package: str, name: str, options: Mapping[str, Any]) -> EnvironmentFactory:
    """Returns a factory that calls `make` of a package's registry for one name."""
    try:
        registry = importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f'the environment {name!r} is one of {package}, which is not installed ({error})') from None
    return Adapter(wrapper, partial(registry.make, name, **options))


def _gymnasium(name: str, options: Mapping[str, Any]) -> EnvironmentFactory:
    factory = _registered(GymEnvironment, 'gymnasium', 'gymnasium', name, options)
    example = factory().environment
    for space in (example.observation_space, example.action_space):
        if type(space).__name__ != 'Text':
            raise ValueError(f'gymnasium:{name} has a space {space!r:.60}, and a model reads and writes text; wrap it')
    example.close()
    return factory


def _tools(name: str, options: Mapping[str, Any]) -> EnvironmentFactory:
    made = load_object(name)
    return ToolFactory(partial(made, **options) if options else made)


ADAPTERS: dict[str, Callable[[str, Mapping[str, Any]], EnvironmentFactory]] = {
    'gem': partial(_registered, GemEnvironment, 'gem', 'gem-llm'),
    'skyrl': partial(_registered, SkyRLEnvironment, 'skyrl_gym', 'skyrl-gym'),
    'gymnasium': _gymnasium,
    'tools': _tools,
    'openenv': openenv_server,
}
"""prefixes of names, each with a function that returns a factory for the rest of the name"""


def _success(info: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of another system's `info` that are used here."""
    return {'success': bool(info['success'])} if isinstance(info.get('success'), bool) else {}
