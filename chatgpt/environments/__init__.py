"""Environments for episodes of several turns: the interface, the runner, games, tools."""

from typing import TYPE_CHECKING

from chatgpt import on_demand

if TYPE_CHECKING:
    from chatgpt.environments.base import Environment as Environment
    from chatgpt.environments.base import EnvironmentSettings as EnvironmentSettings
    from chatgpt.environments.base import Failure as Failure
    from chatgpt.environments.base import Observation as Observation
    from chatgpt.environments.base import Step as Step
    from chatgpt.environments.base import seed_of as seed_of
    from chatgpt.environments.python_tool import Limits as Limits
    from chatgpt.environments.python_tool import PythonTool as PythonTool
    from chatgpt.environments.python_tool import python_block as python_block
    from chatgpt.environments.python_tool import run_python as run_python
    from chatgpt.environments.registry import ENVIRONMENTS as ENVIRONMENTS
    from chatgpt.environments.registry import find_environment as find_environment
    from chatgpt.environments.registry import make_environment as make_environment
    from chatgpt.environments.runner import Runner as Runner

__getattr__, __dir__ = on_demand(__name__)
