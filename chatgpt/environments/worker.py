"""A process that runs environments for a `Runner`: pickled commands in, pickled answers out, over one socket.

    first message: (factory, files of its modules, limit)     answer: None, or the text of what importing it raised
    then:          ('reset', number, seed, columns) | ('step', number, response) | ('close', number) | ('end',)

It is a new interpreter that imports this package's environments and the user's, and no torch. It ends with the
trainer, however that ends: at the end of the socket it kills its process group, with everything that environments have
started in it.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from chatgpt.environments.host import Host, failure
from chatgpt.registry import load_module


def main(descriptor: int) -> None:
    # A scheduler may tell every process of a job to stop; the trainer decides when. A handler is not handed on to what
    # environments start, as 'ignored' would be.
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda *_: None)
    connection = Connection(descriptor)
    found = _found(connection.recv())
    if isinstance(found, str):
        connection.send(found)
        os._exit(1)
    factory, limit_s = found
    connection.send(None)
    host = Host(factory, limit_s)
    commands: SimpleQueue[tuple[Any, ...]] = SimpleQueue()
    threading.Thread(target=_read, args=(connection, commands), daemon=True).start()
    while True:
        verb, *arguments = commands.get()
        if verb == 'end':
            host.end()
            os.killpg(0, signal.SIGKILL)  # this process too
        _send(connection, host, getattr(host, verb)(*arguments))


def _found(first: tuple[bytes, dict[str, str], float]) -> tuple[Any, float] | str:
    """The factory and the limit, or why there is none."""
    pickled, files, limit_s = first
    try:
        while True:
            try:
                return pickle.loads(pickled), limit_s
            except ModuleNotFoundError as error:
                file = files.pop(error.name or '', None)
                if file is None or error.name is None:
                    raise
                # A file that was given by its path; there it may have another name than here.
                sys.modules.setdefault(error.name, load_module(file, file))
    except BaseException as error:
        return f'{type(error).__name__}: {error}'


def _read(connection: Connection, commands: SimpleQueue[tuple[Any, ...]]) -> None:
    try:
        while True:
            commands.put(connection.recv())
    except (EOFError, OSError):  # the trainer has ended
        os.killpg(0, signal.SIGKILL)


def _send(connection: Connection, host: Host, answer: Any) -> None:
    try:
        pickled = pickle.dumps(answer)
    except Exception as error:
        told = f'{host.name}: its answer cannot be pickled, and so not leave its process: {error}'
        pickled = pickle.dumps(failure('invalid', told))
    connection.send_bytes(pickled)
