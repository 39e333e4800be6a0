"""Ray utilities shared by the launcher and the rollout workers: the import of ray and the free resources of a cluster.

This is the only file that imports ray, inside `import_ray`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

INSTALL = "pip install 'ray>=2.10', or from a checkout pip install -r requirements-ray.txt"


def import_ray(user: str) -> Any:
    """Imports ray and the submodules that are used here. Usage reports are off unless the environment enables them.

    Raises:
        ImportError: ray cannot be imported; the message contains `user`, which needs it, and the install command.
    """
    os.environ.setdefault('RAY_USAGE_STATS_ENABLED', '0')
    try:
        import ray
        import ray.exceptions
        import ray.util.placement_group
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise ImportError(f'{user} needs Ray, which cannot be imported here ({error}); {INSTALL}') from None
    return ray


def request(number: int, noun: str, each: Mapping[str, float]) -> str:
    """Formats a request for resources.

    >>> request(2, 'worker', {'CPU': 4, 'GPU': 0.5})
    '2 workers with 4 CPU and 0.5 GPU each'
    """
    return (
        f'{number} {noun}{"s" if number > 1 else ""} with '
        f'{" and ".join(f"{n:g} {name}" for name, n in each.items() if n)} each'
    )


def amounts(resources: Mapping[str, float], names: Iterable[str] = ()) -> str:
    """Formats the amounts of CPU, GPU and the named resources."""
    return ', '.join(f'{resources.get(name, 0):g} {name}' for name in dict.fromkeys(('CPU', 'GPU', *names)))


def lack_of_room(ray: Any, number: int, noun: str, each: Mapping[str, float]) -> str | None:
    """Returns why the cluster cannot hold `number` processes with these resources, each on a single node, or None if
    it can. Compares with the total resources of the nodes, whether in use or not."""
    wanted = {name: n for name, n in each.items() if n}
    nodes = [n for n in ray.nodes() if n['Alive']]
    if not wanted:
        return None
    room = sum(min(int(n['Resources'].get(name, 0) / amount + 1e-9) for name, amount in wanted.items()) for n in nodes)
    if room >= number:
        return None
    there = '; '.join(f'node {n["NodeManagerAddress"]}: {amounts(n["Resources"], wanted)}' for n in nodes)
    return f'{request(number, noun, wanted)} do not fit the Ray cluster, which has room for {room} ({there})'
