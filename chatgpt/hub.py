"""Checks whether a model or data set name can be loaded, before the hub's client, which retries for a minute.

The connection to the hub is tried once per process. If it fails, the process continues as under HF_HUB_OFFLINE=1: what
is in the cache is loaded, and any other name is an error of one line.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from chatgpt.names import near

REACH_S = 3.0
"""longest wait for a connection"""
Kind = Literal['model', 'dataset']


def checked_path(pretrained: Any, hub: Mapping[str, Any] | None = None) -> str:
    """Returns `pretrained` as a string.

    Args:
        hub: options of transformers' loaders, such as `cache_dir`.

    Raises:
        ValueError: it is not a name, a path without a model folder, or a name that `check_name` rejects.
    """
    if not isinstance(pretrained, (str, os.PathLike)):
        raise ValueError(
            f'pretrained: a {type(pretrained).__name__} given; it must be a hub name or a folder (for a model that you '
            'have: Actor(model))'
        )
    name = os.fspath(pretrained)
    if name and Path(name).is_dir():
        return name
    if name and Path(name).exists():
        raise ValueError(f'pretrained={name!r} is a file; give the folder that save_pretrained wrote')
    if name.startswith(('/', '.', '~')) or name.count('/') > 1 or '\\' in name or not name.strip('/'):
        raise ValueError(
            f'pretrained={name!r}: there is no such folder{nearest(name)}, and it cannot be a hub name (name or '
            'owner/name)'
        )
    if hub is None or not hub.get('local_files_only'):
        check_name(name, cache_dir=(hub or {}).get('cache_dir'))
    return name


def check_name(name: str, kind: Kind = 'model', cache_dir: str | os.PathLike[str] | None = None) -> None:
    """Raises ValueError for a hub name that is not in the cache, if the hub is offline."""
    from huggingface_hub import constants

    why = 'the hub is not asked under HF_HUB_OFFLINE=1'
    is_here = is_cached(name, kind, cache_dir)
    if not constants.HF_HUB_OFFLINE:
        from urllib.parse import urlsplit
        from urllib.request import getproxies, proxy_bypass

        endpoint = urlsplit(constants.ENDPOINT)
        proxies = {} if proxy_bypass(endpoint.hostname or '') else getproxies()
        proxy = proxies.get(endpoint.scheme, proxies.get('all', ''))
        address = urlsplit(proxy if '://' in proxy else f'http://{proxy}') if proxy else endpoint
        problem = connect(address.hostname or '', address.port or (80 if address.scheme == 'http' else 443))
        if problem is None:
            return
        why = f'{address.hostname} cannot be reached ({problem})'
        constants.HF_HUB_OFFLINE = True
        os.environ['HF_HUB_OFFLINE'] = '1'  # for modules and processes loaded later
        if 'datasets' in sys.modules:
            sys.modules['datasets'].config.HF_HUB_OFFLINE = True
        if is_here:
            warnings.warn(f'{why}: {name} is taken from the cache, as under HF_HUB_OFFLINE=1', stacklevel=2)
    if not is_here:
        what = 'folder' if kind == 'model' else 'file or folder'
        raise ValueError(
            f'{name!r}: there is no such {what}{nearest(name, kind)}, it is not in the cache of the Hugging Face Hub, '
            f'and {why}'
        )


def is_cached(name: str, kind: Kind, cache_dir: str | os.PathLike[str] | None = None) -> bool:
    """Returns True if any version of it has been downloaded."""
    from huggingface_hub import constants

    places = [Path(cache_dir or constants.HF_HUB_CACHE, f'{kind}s--{name.replace("/", "--")}', 'snapshots')]
    if 'datasets' in sys.modules:  # it has its own cache of prepared data
        places.append(Path(sys.modules['datasets'].config.HF_DATASETS_CACHE, name.replace('/', '___')))
    return any(place.is_dir() and any(place.iterdir()) for place in places)


@cache
def connect(host: str, port: int) -> str | None:
    """Returns the reason why no connection was made within `REACH_S`, DNS lookup included; None on success."""
    found = ['no answer']

    def attempt() -> None:
        try:
            socket.create_connection((host, port), timeout=REACH_S).close()
            found[:] = []
        except OSError as error:
            found[:] = [error.strerror or str(error)]

    thread = threading.Thread(target=attempt, daemon=True)  # a DNS lookup has no timeout of its own
    thread.start()
    thread.join(REACH_S)
    return found[0] if found else None


def nearest(name: str, kind: Kind = 'model') -> str:
    """Returns ' (did you mean outputs/sft/actor?)' if a similar path exists, else ''."""
    path = Path(name).expanduser()
    try:
        there = [entry.name for entry in path.parent.iterdir() if kind == 'dataset' or entry.is_dir()]
    except OSError:
        return ''
    close = near(path.name, there)
    return f' (did you mean {" or ".join(str(path.parent / each) for each in close)}?)' if close else ''
