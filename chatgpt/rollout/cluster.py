"""What the launcher and the rollout workers want of Ray alike: the package itself, and room on a cluster's nodes.

The only file that imports ray, and that when it is asked to.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

INSTALL = "pip install 'ray>=2.10', or from a checkout pip install -r requirements-ray.txt"


def import_ray(who: str) -> Any:
    """The ray package with the parts of it that are used here. Its usage reports are off, unless the environment has
    them on.

    Raises:
        ImportError: it cannot be imported; says that `who` needs it, and the command that installs it.
    """
    os.environ.setdefault('RAY_USAGE_STATS_ENABLED', '0')
    try:
        import ray
        import ray.exceptions
        import ray.util.placement_group
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise ImportError(f'{who} needs Ray, which cannot be imported here ({error}); {INSTALL}') from None
    return ray


def request(number: int, noun: str, each: Mapping[str, float]) -> str:
    """
    >>> request(2, 'worker', {'CPU': 4, 'GPU': 0.5})
    '2 workers with 4 CPU and 0.5 GPU each'
    """
    return (
        f'{number} {noun}{"s" if number > 1 else ""} with '
        f'{" and ".join(f"{n:g} {name}" for name, n in each.items() if n)} each'
    )


def amounts(resources: Mapping[str, float], names: Iterable[str] = ()) -> str:
    """CPU and GPU among the resources, and what else has one of these names."""
    return ', '.join(f'{resources.get(name, 0):g} {name}' for name in dict.fromkeys(('CPU', 'GPU', *names)))


def lack_of_room(ray: Any, number: int, noun: str, each: Mapping[str, float]) -> str | None:
    """Why the nodes of the cluster cannot hold so many of these, each whole on one node, whoever uses the nodes now;
    None if they can."""
    wanted = {name: n for name, n in each.items() if n}
    nodes = [n for n in ray.nodes() if n['Alive']]
    if not wanted:
        return None
    room = sum(min(int(n['Resources'].get(name, 0) / amount + 1e-9) for name, amount in wanted.items()) for n in nodes)
    if room >= number:
        return None
    there = '; '.join(f'node {n["NodeManagerAddress"]}: {amounts(n["Resources"], wanted)}' for n in nodes)
    return f'{request(number, noun, wanted)} do not fit the Ray cluster, which has room for {room} ({there})'
