"""What a launcher costs: seconds from the command to the first learning phase, and from a SIGKILL to the next one;
equal results.

    python benchmarks/launch.py [--repeats 3] [--out docs/results/launch.md]

examples/train_prompts.py under DDP on two CPU processes, with the small GPT-2 of the embedded world, a checkpoint after
every phase. Phases are counted in metrics.jsonl. One process is killed after phase 3; the next step is the first phase
that had not been there. Every run ends by itself, and its actor is hashed. Ray's cluster is up before the clock starts,
but for the row that says so.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PHASES = 10
KILL_AFTER = 3
FLAGS = [
    '--num_episodes=1',
    f'--max_timesteps={PHASES}',
    '--update_timesteps=1',
    '--experience_batch_size=4',
    '--train_batch_size=4',
    '--max_epochs=1',
    '--max_new_tokens=4',
    '--lr=1e-3',
    '--checkpoint_interval=1',
    '--strategy=ddp',
]
LAUNCH = [sys.executable, '-m', 'chatgpt.launch']
TWO = '--num_workers=2'

TITLE = """# Launchers

`python benchmarks/launch.py`. `examples/train_prompts.py` under DDP on two CPU processes (gloo), the small GPT-2 of the embedded world,
a checkpoint after every phase; median of {repeats} (all values). The first step is the first finished learning phase; most of the time
before it is two processes importing torch and transformers. A killed run goes on by itself. The next step is the first phase that had not
been finished when SIGKILL was sent, so it includes noticing, starting new processes, loading the checkpoint, and a phase.

| launcher | killed | command to first step, s | kill to next step, s | SHA-256 of the actor |
|---|---|---|---|---|
"""


def environment(folder: Path) -> dict[str, str]:
    return os.environ | {
        'PYTHONPATH': str(ROOT),
        'OMP_NUM_THREADS': '1',
        'HF_HUB_OFFLINE': '1',
        'RAY_TMPDIR': str(folder),
        'RAY_AUTH_MODE': 'token',
        'RAY_AUTH_TOKEN_PATH': str(folder / 'token'),
        'RAY_USAGE_STATS_ENABLED': '0',
    }


@contextmanager
def cluster(folder: Path) -> Iterator[str]:
    """Three nodes of one core each on this machine; the address."""
    code = (
        'import sys; from ray.cluster_utils import Cluster\n'
        'options = dict(num_cpus=1, object_store_memory=80 * 2**20)\n'
        'cluster = Cluster(initialize_head=True, head_node_args=dict(options, include_dashboard=False))\n'
        'for _ in range(2): cluster.add_node(**options)\n'
        'print(cluster.address, flush=True); sys.stdin.read(); cluster.shutdown()\n'
    )
    (folder / 'token').write_text(os.urandom(20).hex())
    process = subprocess.Popen(
        [sys.executable, '-c', code],
        env=environment(folder),
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.communicate()


def rank_of(folder: Path, rank: int) -> int:
    """The process that is this rank of the run in `folder`."""
    for entry in Path('/proc').glob('[0-9]*'):
        try:
            words = ((entry / 'cmdline').read_bytes() + b'\0' + (entry / 'environ').read_bytes()).split(b'\0')
        except OSError:
            continue
        if f'RANK={rank}'.encode() in words and f'--save_path={folder}'.encode() in words:
            return int(entry.name)
    raise RuntimeError(f'rank {rank} is not there')


def parent(pid: int) -> int:
    return int(Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[1])


def phases(folder: Path) -> int:
    path = folder / 'metrics.jsonl'
    return path.read_bytes().count(b'\n') if path.is_file() else 0


def wait_until(condition: Callable[[], bool], processes: list[subprocess.Popen[bytes]]) -> float:
    end = time.monotonic() + 300
    while not condition():
        if time.monotonic() > end or any(p.poll() for p in processes):
            raise RuntimeError('the run failed')
        time.sleep(0.01)
    return time.monotonic()


def measure(
    commands: list[list[str]], folder: Path, model: Path, env: dict[str, str], victim: Callable[[int], int] | None
) -> tuple[float, float, str]:
    """Seconds to the first step, from the kill to the next, and the hash of what came out."""
    run = folder / 'run'
    shutil.rmtree(run, ignore_errors=True)
    script = ['examples/train_prompts.py', *FLAGS, f'--pretrain={model}', f'--save_path={run}']
    start = time.monotonic()
    processes = [
        subprocess.Popen([*c, *script], cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for c in commands
    ]
    try:
        first = wait_until(lambda: phases(run) >= 1, processes) - start
        again = float('nan')
        if victim is not None:
            wait_until(lambda: phases(run) >= KILL_AFTER, processes)
            pid = victim(rank_of(run, 1))
            os.kill(pid, signal.SIGKILL)
            killed, seen = time.monotonic(), phases(run)
            again = wait_until(lambda: phases(run) > seen, processes) - killed
        if any(p.wait(timeout=300) for p in processes):
            raise RuntimeError(f'the run failed: {[p.returncode for p in processes]}')
    finally:
        for process in processes:
            process.kill()
    return first, again, hashlib.sha256((run / 'actor' / 'model.safetensors').read_bytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--repeats', type=int, default=3)
    parser.add_argument('--out', type=Path, default=ROOT / 'docs' / 'results' / 'launch.md')
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix='launch-', dir='/tmp'))  # Ray's sockets need a short path
    try:
        with cluster(folder) as address:
            lines = table(args.repeats, folder, address)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    import ray
    import torch

    load = ', '.join(f'{v:.1f}' for v in os.getloadavg())
    where = (
        f'\n{os.cpu_count()} cores of {platform.machine()}, load average at the end {load}, Python '
        f'{platform.python_version()}, torch {torch.__version__}, Ray {ray.__version__}.\n'
    )
    args.out.write_text(TITLE.format(repeats=args.repeats) + '\n'.join(lines) + '\n' + where)
    print(args.out.read_text())


def table(repeats: int, folder: Path, address: str) -> list[str]:
    from chatgpt.dataset import embedded
    from chatgpt.nn import GPTActor

    model = folder / 'model'
    GPTActor(config=embedded.demo_config()).save_pretrained(model, tokenizer=embedded.demo_tokenizer())
    env = environment(folder)
    ray = [*LAUNCH, '--launcher=ray', f'--address={address}', TWO]
    local = [*LAUNCH, '--launcher=ray', '--address=local', TWO]

    def agents(number: int) -> list[list[str]]:
        meet = [
            '--num_nodes=2',
            f'--rdzv_endpoint=127.0.0.2:{29600 + number}',
            f'--run_id=bench-{os.getpid()}-{number}',
        ]
        return [[*LAUNCH, TWO, *meet, f'--local_addr=127.0.0.{n}'] for n in (2, 3)]

    rows: list[tuple[str, str, Callable[[int], list[list[str]]], Callable[[int], int] | None]] = [
        ('torchrun', 'nobody', lambda n: [[*LAUNCH, TWO]], None),
        ('torchrun', 'rank 1', lambda n: [[*LAUNCH, TWO]], int),
        ('torchrun, two agents', 'rank 1', agents, int),
        ('Ray', 'nobody', lambda n: [ray], None),
        ('Ray', "rank 1's script", lambda n: [ray], int),
        ('Ray', "rank 1's worker, with its script", lambda n: [ray], parent),
        ('Ray, starting a cluster of its own', 'nobody', lambda n: [local], None),
    ]
    found: dict[int, list[tuple[float, float, str]]] = {i: [] for i in range(len(rows))}
    for number in range(repeats):
        for i, (name, killed, commands, victim) in enumerate(
            rows
        ):  # in turns, so that what else the machine does meets all
            found[i].append(measure(commands(number), folder, model, env, victim))
            print(name, killed, *found[i][-1], flush=True)
    lines = []
    for i, (name, killed, _, victim) in enumerate(rows):
        first, again, hashes = zip(*found[i], strict=True)
        seconds = [f'{statistics.median(v):.1f} ({", ".join(f"{x:.1f}" for x in v)})' for v in (first, again)]
        names = ' '.join(sorted({h[:16] for h in hashes}))
        lines.append(f'| {name} | {killed} | {seconds[0]} | {seconds[1] if victim else "-"} | {names} |')
    return lines


if __name__ == '__main__':
    main()
