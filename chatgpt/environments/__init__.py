"""Environments for episodes of several turns: the interface, the runner, games, tools."""

from typing import TYPE_CHECKING

from chatgpt import on_demand

if TYPE_CHECKING:
    from chatgpt.environments.base import Environment, EnvironmentSettings, Failure, Observation, Step, seed_of
    from chatgpt.environments.python_tool import Limits, PythonTool, python_block, run_python
    from chatgpt.environments.registry import ENVIRONMENTS, find_environment, make_environment
    from chatgpt.environments.runner import Runner

__getattr__, __dir__ = on_demand(__name__)

__all__ = [
    'ENVIRONMENTS',
    'Environment',
    'EnvironmentSettings',
    'Failure',
    'Limits',
    'Observation',
    'PythonTool',
    'Runner',
    'Step',
    'find_environment',
    'make_environment',
    'python_block',
    'run_python',
    'seed_of',
]
