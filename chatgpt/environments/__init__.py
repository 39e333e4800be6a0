"""What a policy acts in over several turns: the contract, the runner, games, tools."""

from chatgpt.environments.base import Environment, EnvironmentSettings, Failure, Observation, Step, seed_of
from chatgpt.environments.registry import ENVIRONMENTS, find_environment, make_environment
from chatgpt.environments.runner import Runner

__all__ = [
    'ENVIRONMENTS',
    'Environment',
    'EnvironmentSettings',
    'Failure',
    'Observation',
    'Runner',
    'Step',
    'find_environment',
    'make_environment',
    'seed_of',
]
