"""What the benchmarks share: runs that take turns, CPU seconds, processes of their own, results that are taken up again,
and tables in pages.

A page under docs/results is written by hand but for its tables. A script replaces what stands between the comments
`<!-- NAME -->` and `<!-- end of NAME -->`.
"""

from __future__ import annotations

import json
import os
import platform
import re
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGES = ROOT / 'benchmarks' / 'results', ROOT / 'docs' / 'results'
T = TypeVar('T')
RETURNS = {'MALLOC_TRIM_THRESHOLD_': '0', 'MALLOC_MMAP_THRESHOLD_': '65536', 'MALLOC_ARENA_MAX': '1'}
"""variables with which glibc gives freed memory back at once, so that resident memory is what is in use"""


# ---------------------------------------------------------------------- seconds


def cpu_seconds(act: Callable[[], Any], device: Any = None) -> float:
    """CPU seconds of this process, all threads; wall seconds on a CUDA device, with all its work done."""
    if device is None or device.type == 'cpu':
        start = time.process_time()
        act()
        return time.process_time() - start
    import torch

    torch.cuda.synchronize()
    begin = time.perf_counter()
    act()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def alternate(ways: Mapping[str, Callable[[int], T]], rounds: int, warmup: int = 1) -> dict[str, list[T]]:
    """A B C A B C ...: what each way returned in each round, so that a busy machine disturbs all alike. A way is called
    with the number of the round; the first `warmup` rounds do not count."""
    found: dict[str, list[T]] = {name: [] for name in ways}
    for number in range(rounds + warmup):
        for name, way in ways.items():
            result = way(number)
            if number >= warmup:
                found[name].append(result)
    return found


def spread(values: Iterable[float]) -> dict[str, float]:
    values = list(values)
    return {'min': min(values), 'median': statistics.median(values), 'max': max(values)}


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Of neighbours in time."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def least_median_greatest(values: Iterable[float], form: str = '.2f') -> str:
    return ' '.join(f'{value:{form}}' for value in spread(values).values())


def mean_and_spread(values: Sequence[float], form: str = '.3f') -> str:
    """Of seeds: mean (least, greatest)."""
    return f'{statistics.mean(values):{form}} ({min(values):{form}}, {max(values):{form}})'


# ---------------------------------------------------------------------- models


def gpt2(
    vocab: int = 512, layers: int = 4, width: int = 256, heads: int = 4, positions: int = 128, **fields: Any
) -> Any:
    """A config without dropout; the default is the model of most benchmarks. No response ends by itself."""
    from transformers import GPT2Config

    sizes = {'vocab_size': vocab, 'n_layer': layers, 'n_embd': width, 'n_head': heads, 'n_positions': positions}
    dropout = {'resid_pdrop': 0.0, 'embd_pdrop': 0.0, 'attn_pdrop': 0.0}
    return GPT2Config(**sizes | dropout | {'bos_token_id': 1, 'eos_token_id': None, 'pad_token_id': 0} | fields)


def ppo_trainer(
    strategy: Any,
    actor: Any,
    critic: Any = None,
    reward: Any = None,
    initial: Any = None,
    *,
    optimizer: Callable[[list[Any]], Any],
    critic_optimizer: Callable[[list[Any]], Any] | None = None,
    callbacks: Iterable[Any] = (),
    **settings: Any,
) -> Any:
    """Prepares the modules, and makes a trainer that prints nothing. An optimizer is made of the parameters that a module
    trains."""
    from torch.nn import Module

    from chatgpt.trainer import PPOTrainer
    from chatgpt.trainer.callbacks import ProgressBar

    def trained(model: Any, make: Callable[[list[Any]], Any]) -> Any:
        return strategy.prepare((model, make([p for p in model.parameters() if p.requires_grad])))

    actor, optim = trained(actor, optimizer)
    critic, critic_optim = trained(critic, critic_optimizer or optimizer) if critic is not None else (None, None)
    reward, initial = (strategy.prepare(m) if isinstance(m, Module) else m for m in (reward, initial))
    frozen, quiet = (reward, initial), [*callbacks, ProgressBar(enabled=False)]
    return PPOTrainer(strategy, actor, critic, *frozen, optim, critic_optim, callbacks=quiet, **settings)


def end_probability(share: float, limit: int) -> float:
    """The end probability at which min(geometric, limit) is share * limit on average, by bisection."""
    low, high = 1e-6, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if (1 - (1 - middle) ** limit) / middle > share * limit else (low, middle)
    return low


# ---------------------------------------------------------------------- processes


def child(script: str, *words: str, **variables: str) -> Any:
    """What a script of this folder prints last, as JSON, in a process of its own with one thread."""
    paths = os.pathsep.join(p for p in (str(ROOT), os.environ.get('PYTHONPATH')) if p)
    env = os.environ | {'OMP_NUM_THREADS': '1', 'PYTHONPATH': paths} | variables
    command = [sys.executable, script, *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=env)
    return json.loads(done.stdout.splitlines()[-1])


class Worker:
    """A process that says {"ready": {...}} and answers a line of ours by a line of JSON; its stderr goes to `log`."""

    def __init__(self, command: Sequence[str | Path], env: Mapping[str, str], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        pipes: dict[str, Any] = {'stdin': subprocess.PIPE, 'stdout': subprocess.PIPE}
        with log.open('ab') as sink:
            self.process = subprocess.Popen(
                list(map(str, command)), cwd=ROOT, env=env, stderr=sink, start_new_session=True, **pipes
            )
        self._heard = b''

    def hear(self, timeout_s: float = float('inf')) -> dict[str, Any] | None:
        """The next line; None: none came in time.

        Raises:
            EOFError: the process has ended.
        """
        end = time.monotonic() + timeout_s
        while b'\n' not in self._heard:
            left = end - time.monotonic()
            wait = None if left == float('inf') else left
            if left <= 0 or not select.select([self.process.stdout], [], [], wait)[0]:
                return None
            read = os.read(self.process.stdout.fileno(), 65536)  # type: ignore[union-attr]
            if not read:
                raise EOFError(f'the process ended with {self.process.wait()}')
            self._heard += read
        line, _, self._heard = self._heard.partition(b'\n')
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, line: str, timeout_s: float = float('inf')) -> dict[str, Any] | None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b'\n')
        self.process.stdin.flush()
        return self.hear(timeout_s)

    def end(self) -> None:
        """With everything that it started."""
        for sign in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, sign)
                self.process.wait(2.0)
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(BrokenPipeError):
                pipe.close()  # type: ignore[union-attr]


def process_memory() -> dict[str, int]:
    """Bytes of this process by Linux's names (VmHWM: most resident so far, RssAnon, VmRSS, VmData); empty on other
    systems."""
    status = Path('/proc/self/status')
    text = status.read_text() if status.is_file() else ''
    return {n: int(kib) * 1024 for n, kib in re.findall(r'^(Vm\w+|Rss\w+):\s+(\d+) kB', text, re.MULTILINE)}


def forget_peak() -> None:
    """VmHWM begins anew, where the system allows it."""
    try:
        Path('/proc/self/clear_refs').write_text('5')
    except OSError:
        pass


def machine(device: Any = None) -> dict[str, Any]:
    """What this process runs on."""
    import torch
    import transformers

    on_cuda = device is not None and device.type == 'cuda'
    info = Path('/proc/cpuinfo')
    text = info.read_text() if info.is_file() else ''
    names, flags = re.findall(r'^model name\s*: (.*)$', text, re.M), re.findall(r'^flags\s*: (.*)$', text, re.M)
    cpu = names[0] if names else platform.machine()
    return {
        'device': torch.cuda.get_device_name(device) if on_cuda else cpu,
        'device_type': 'cuda' if on_cuda else 'cpu',
        'device_memory': torch.cuda.get_device_properties(device).total_memory if on_cuda else None,
        'cpu': cpu,
        'cores': os.cpu_count(),
        'threads': torch.get_num_threads(),
        **{name: bool(flags) and name in flags[0].split() for name in ('avx512_bf16', 'amx_bf16')},
        'python': platform.python_version(),
        'torch': torch.__version__,
        'transformers': transformers.__version__,
        'date': time.strftime('%Y-%m-%d'),
    }


def where() -> str:
    """The machine in a clause for a page."""
    found = machine()
    return f'{found["cpu"]}, {found["cores"]} cores, torch {found["torch"]}, transformers {found["transformers"]}'


def install_wheels(folder: Path, site: Path | str, timeout_s: float = 300.0) -> None:
    """Every wheel of the folder into `site`, from the folder alone, without what they ask for.

    Raises:
        ValueError: no wheels there, or pip cannot install them, or not in this time.
    """
    wheels = sorted(map(str, folder.glob('*.whl')))
    if not wheels:
        raise ValueError(f'{folder} holds no wheels (*.whl)')
    pip = [sys.executable, '-m', 'pip', 'install', '--quiet', '--disable-pip-version-check']
    command = [*pip, '--no-index', '--no-deps', '--no-compile', '--target', str(site), *wheels]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise ValueError(f'pip did not install the wheels of {folder} within {timeout_s:.0f} s') from None
    if done.returncode:
        raise ValueError(f'pip could not install the wheels of {folder}: {done.stderr.strip()[-500:]}')


# ---------------------------------------------------------------------- results


def write_json(path: Path, content: Any) -> None:
    """All of it or nothing of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f'.{path.name}.tmp')
    unfinished.write_text(json.dumps(content, indent=1) + '\n')
    unfinished.replace(path)


class Results(dict[str, Any]):
    """A JSON file of results by key, written anew after each; what it holds is not measured again."""

    def __init__(self, path: Path) -> None:
        super().__init__(json.loads(path.read_text()) if path.is_file() else {})
        self.path = path

    def measure(self, key: str, act: Callable[[], Any], show: Callable[[Any], object] = lambda found: found) -> Any:
        if key not in self:
            self[key] = act()
            write_json(self.path, self)
            print(key, show(self[key]), flush=True)
        return self[key]


# ---------------------------------------------------------------------- pages


def markdown(head: str | Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table; `head` may have its columns between bars. Empty without rows."""
    names = head.split(' | ') if isinstance(head, str) else head
    lines = [f'| {" | ".join(map(str, cells))} |' for cells in rows]
    return '\n'.join([f'| {" | ".join(names)} |', '|---' * len(names) + '|', *lines]) if lines else ''


def write_page(page: Path, **tables: str) -> None:
    """Fills a page in.

    Raises:
        ValueError: the page lacks the comments of a table.
    """
    text = page.read_text()
    for name, table in tables.items():
        begin, end = f'<!-- {name} -->', f'<!-- end of {name} -->'
        before, found, rest = text.partition(begin)
        _, ended, after = rest.partition(end)
        if not found or not ended:
            raise ValueError(f'{page} lacks the lines {begin} and {end}')
        text = f'{before}{begin}\n\n{table.strip()}\n\n{end}{after}'
    page.write_text(text)
    print(f'{page} written')


@contextmanager
def figure(
    path: Path, columns: int = 1, *, rows: int = 1, size: tuple[float, float] = (5.5, 4.0), **options: Any
) -> Any:
    """Axes of matplotlib, saved to `path`."""
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    sizes = (size[0] * columns, size[1] * rows)
    drawn, axes = plt.subplots(rows, columns, figsize=sizes, squeeze=False, constrained_layout=True, **options)
    yield axes.flatten()
    for axis in axes.flatten():
        axis.grid(alpha=0.3)
        if axis.lines and any(not line.get_label().startswith('_') for line in axis.lines):
            axis.legend(loc='best', fontsize=8)
    drawn.savefig(path, dpi=100)
    plt.close(drawn)
