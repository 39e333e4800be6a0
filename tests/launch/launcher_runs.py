"""Launches on real processes, and a cluster of Ray for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Nodes:
    """Three nodes with one core each, on this machine, that require a token. Another process starts them, since Ray
    reads its environment only when it is imported."""

    SCRIPT = """
import os, sys
from ray.cluster_utils import Cluster
options = {'num_cpus': 1, 'object_store_memory': 80 * 2**20}
cluster = Cluster(initialize_head=True, head_node_args={**options, 'include_dashboard': False})
nodes = [cluster.add_node(**options) for _ in range(2)]
raylet = lambda node: node.all_processes['raylet'][0].process.pid
try:
    print(cluster.address, flush=True)
    for line in sys.stdin:
        for node in [n for n in nodes if raylet(n) in map(int, line.split())][:1]:
            print(raylet(node), flush=True)
            nodes.remove(node)
            cluster.remove_node(node, allow_graceful=False)
            nodes.append(cluster.add_node(**options))
finally:
    cluster.shutdown()
"""

    def __init__(self, folder: str) -> None:
        Path(folder, 'token').write_text('a' * 40)
        self.variables = {
            'RAY_TMPDIR': folder,
            'RAY_AUTH_MODE': 'token',
            'RAY_AUTH_TOKEN_PATH': f'{folder}/token',
            'RAY_USAGE_STATS_ENABLED': '0',
        }
        self.process = subprocess.Popen(
            [sys.executable, '-c', self.SCRIPT],
            env=os.environ | self.variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()

    def replace_one_of(self, raylets: Iterable[int]) -> int:
        """Kills a node among these processes, not the first, and adds another. Returns the number of the killed one."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(' '.join(map(str, raylets)) + '\n')
        self.process.stdin.flush()
        return int(self.process.stdout.readline())


def command(*arguments: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, '-m', 'chatgpt.launch', *arguments],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | {'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1'} | variables,
    )


def on(cluster: Nodes, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    return command('--launcher=ray', f'--address={cluster.address}', *arguments, **cluster.variables, **variables)


def launch(cluster: Nodes, folder: Path, text: str, *options: str, args: Sequence[str] = ()) -> tuple[int, str]:
    """Launches `text` as a script. Returns exit code and output."""
    path = folder / 'script.py'
    path.write_text(text)
    process = on(cluster, *options, str(path), *args)
    output, _ = process.communicate()
    return process.returncode, output


def processes(*words: str) -> list[int]:
    """Returns the ids of processes with all of these words in command line and environment."""
    found = []
    for folder in Path('/proc').iterdir():
        try:
            text = (folder / 'cmdline').read_bytes() + b'\0' + (folder / 'environ').read_bytes()
        except (OSError, ValueError):
            continue
        if folder.name.isdigit() and all(w.encode() in text.split(b'\0') for w in words):
            found.append(int(folder.name))
    return found


def parent(pid: int) -> int:
    return int(Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[1])


def metrics_of(folder: Path) -> list[dict[str, float]]:
    lines = (folder / 'metrics.jsonl').read_text().splitlines() if (folder / 'metrics.jsonl').is_file() else []
    return [{k: v for k, v in json.loads(line).items() if 'perf/' not in k} for line in lines]
