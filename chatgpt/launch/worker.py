"""The worker of a launch on Ray: inspects its node, and runs the script as a child process.

Imports the standard library only: it is sent to other machines by value, before it is known whether they have this
package. See `ray` for the driver.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TAIL_BYTES = 8192
"""bytes at the end of a rank's output that are shown when it fails"""
END = 'end'
"""name of the last chunk of an output"""
_CHUNK = 65536
_SIOCGIFADDR = 0x8915

# Asks the kernel to kill this process when the worker ends, in whatever way, and then executes the script.
_EXEC = """
import os, signal, sys
try:
    import ctypes
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))
except (OSError, AttributeError):
    pass
signal.pthread_sigmask(signal.SIG_SETMASK, [])  # Ray's workers block SIGINT
if os.getppid() != int(sys.argv[1]):
    os._exit(137)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""
_PACKAGES = """
import importlib.util, json, sys
found = {'python': sys.executable, 'missing': [n for n in sys.argv[1:] if importlib.util.find_spec(n) is None]}
if 'chatgpt' not in found['missing']:
    import chatgpt
    found |= {'version': chatgpt.__version__}
print(json.dumps(found))
"""


def digest(path: str) -> str | None:
    """Returns the SHA-256 of a file; None if it cannot be read."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return None


def interface_of(address: str) -> str | None:
    """Returns the network interface with this IPv4 address; None if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack('256s', name.encode()[:15]))
            except OSError:  # an interface without an IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


class Worker:
    """A rank. `run` blocks until the script has ended; the other methods are called from other threads meanwhile."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = False
        self._output: queue.Queue[tuple[str, bytes]] = queue.Queue(maxsize=256)
        self._tail = b''
        self._lock = threading.Lock()

    def inspect_node(
        self, address: str, folder: str, seen: Mapping[str, str], variables: Mapping[str, str]
    ) -> dict[str, Any]:
        """Returns facts about this node for the launcher.

        Args:
            address: address of this node.
            folder: working directory of the launch.
            seen: path → SHA-256 of files that must be the same on this node.

        Returns:
            port (a free one), interface, missing (paths that do not exist or differ), host, packages (python, missing,
            version).
        """
        with socket.socket() as probe:
            probe.bind(('', 0))
            port = probe.getsockname()[1]
        missing = [path for path, expected in seen.items() if digest(path) != expected]
        if not Path(folder).is_dir():
            missing.insert(0, folder)
        found: dict[str, Any] = {
            'port': port,
            'interface': interface_of(address),
            'missing': missing,
            'host': socket.gethostname(),
        }
        done = subprocess.run(
            [sys.executable, '-P', '-c', _PACKAGES, 'chatgpt', 'torch', 'transformers'],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
        )
        found['packages'] = (
            json.loads(done.stdout)
            if done.returncode == 0
            else {'python': sys.executable, 'missing': [], 'error': done.stderr[-1000:]}
        )
        return found

    def run(self, command: Sequence[str], folder: str, variables: Mapping[str, str], stream: bool) -> tuple[int, str]:
        """Runs `python *command` in `folder`. Returns exit code, or minus a signal, and the end of the output.

        Args:
            stream: keep the output for `read`, which must then be called until this method returns.
        """
        with self._lock:
            if self._ended:
                return -int(signal.SIGKILL), ''
            self._process = subprocess.Popen(
                [sys.executable, '-I', '-S', '-c', _EXEC, str(os.getpid()), *command],
                cwd=folder,
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        process = self._process
        pumps = [
            threading.Thread(target=self._pump, args=(name, getattr(process, name), stream), daemon=True)
            for name in ('stdout', 'stderr')
        ]
        for pump in pumps:
            pump.start()
        code = process.wait()
        self._kill_group()  # processes that the script has left running
        for pump in pumps:
            pump.join()
        if stream:
            self._output.put((END, b''))
        return code, self._tail.decode(errors='replace')

    def _pump(self, name: str, source: Any, stream: bool) -> None:
        while chunk := os.read(source.fileno(), _CHUNK):
            with self._lock:
                self._tail = (self._tail + chunk)[-TAIL_BYTES:]
            if stream:
                self._output.put((name, chunk))  # blocks while the queue is full, as a pipe does

    def read(self, timeout_s: float) -> list[tuple[str, bytes]]:
        """Returns (stdout, stderr or END, bytes) since the last call; waits up to `timeout_s` for the first."""
        chunks: list[tuple[str, bytes]] = []
        try:
            chunks.append(self._output.get(timeout=timeout_s))
            while True:
                chunks.append(self._output.get_nowait())
        except queue.Empty:
            return chunks

    def signal(self, number: int) -> None:
        """Sends a signal to the script."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def stop(self) -> None:
        """Kills the script and waits until it has ended."""
        with self._lock:
            self._ended = True
        if self._process is not None:
            self._kill_group()
            self._process.wait()

    def _kill_group(self) -> None:
        assert self._process is not None
        try:
            os.killpg(self._process.pid, signal.SIGKILL)  # the child leads a session of its own
        except (ProcessLookupError, PermissionError):
            pass
