"""Tools of the benchmarks: alternating runs, CPU seconds, child processes, results that resume, and tables in pages.

A page under docs/results is written by hand except for its tables. A script replaces the text between the comments
`<!-- NAME -->` and `<!-- end of NAME -->`.
"""

from __future__ import annotations

import argparse
import json
import math
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
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import MagicMock

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGES = ROOT / 'benchmarks' / 'results', ROOT / 'docs' / 'results'
GIB = 2**30
T = TypeVar('T')
differences: list[str] | None = None
"""None: scripts measure and write results. A list (`quoted.py`): they measure and plot nothing and add a line for each table
that differs; pages are written unless `checking`"""
checking = False
RETURNS = {'MALLOC_TRIM_THRESHOLD_': '0', 'MALLOC_MMAP_THRESHOLD_': '65536', 'MALLOC_ARENA_MAX': '1'}
"""variables that make glibc return freed memory at once, so that resident memory is the memory in use"""


# ---------------------------------------------------------------------- seconds


def cpu_seconds(act: Callable[[], Any]) -> float:
    """Returns the CPU seconds that a call takes, summed over the threads of this process."""
    return timed(act)[1]['cpu_s']


def timed(act: Callable[[], T]) -> tuple[T, dict[str, float]]:
    """Returns the call's result, wall seconds and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    found = act()
    cpu_s = time.process_time() - cpu
    return found, {'wall_s': time.perf_counter() - wall, 'cpu_s': cpu_s}


def wall_seconds(act: Callable[[], Any], device: Any) -> float:
    """Returns the wall seconds that a call takes, until the device has finished."""
    import torch

    synchronize = torch.cuda.synchronize if torch.device(device).type == 'cuda' else lambda: None
    synchronize()
    start = time.perf_counter()
    act()
    synchronize()
    return time.perf_counter() - start


def alternate(ways: Mapping[str, Callable[[int], T]], rounds: int, warmup: int = 1) -> dict[str, list[T]]:
    """Calls the functions in turns, A B C A B C ..., so that other load affects all equally, and returns their results.

    Each is called with the number of the round; the first `warmup` rounds do not count.
    """
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
    """Returns numerator / denominator of each round."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def least_median_greatest(values: Iterable[float], form: str = '.2f') -> str:
    return ' '.join(f'{value:{form}}' for value in spread(values).values())


def mean_and_spread(values: Sequence[float], form: str = '.3f') -> str:
    """Formats values of several seeds as mean (least, greatest)."""
    return f'{statistics.mean(values):{form}} ({min(values):{form}}, {max(values):{form}})'


STUDENT = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78}
"""97.5 % quantiles of Student's t by degrees of freedom"""


def interval(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Formats the mean difference of runs with the same seeds, with its 95 % confidence interval."""
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    mean, n = statistics.mean(differences), len(differences)
    if n < 2:
        return f'{mean:+.3f}'
    half = STUDENT[n - 1] * statistics.stdev(differences) / math.sqrt(n)
    return f'{mean:+.3f} ± {half:.3f}'


# ---------------------------------------------------------------------- models


def gpt2(
    vocab: int = 512, layers: int = 4, width: int = 256, heads: int = 4, positions: int = 128, **fields: Any
) -> Any:
    """Returns a GPT-2 config without dropout or end token; the defaults are the model of most benchmarks."""
    from transformers import GPT2Config

    sizes = {'vocab_size': vocab, 'n_layer': layers, 'n_embd': width, 'n_head': heads, 'n_positions': positions}
    dropout = {'resid_pdrop': 0.0, 'embd_pdrop': 0.0, 'attn_pdrop': 0.0}
    return GPT2Config(**sizes | dropout | {'bos_token_id': 1, 'eos_token_id': None, 'pad_token_id': 0} | fields)


def random_sequence(generator: Any, prompt: int, response: int, vocab: int) -> Any:
    """Returns a sequence of random tokens without special ones; all response tokens count."""
    import torch

    from chatgpt.types import Sequence

    ids = torch.randint(3, vocab, (prompt + response,), generator=generator)
    mask = torch.ones(response, dtype=torch.bool)
    return Sequence(prompt_ids=ids[:prompt], response_ids=ids[prompt:], response_mask=mask)


def generate(model: Any, ids: Any, new: int, mask: Any = None, **settings: Any) -> Any:
    """Calls `model.generate` with the local engine's sampling: temperature 1, whole vocabulary. mask: for padded
    ids."""
    import torch
    from transformers import GenerationConfig

    sampled: dict[str, Any] = {'do_sample': True, 'top_k': 0, 'top_p': 1.0, 'temperature': 1.0}
    how = GenerationConfig(**sampled | {'max_new_tokens': new, 'pad_token_id': 0, 'use_cache': True} | settings)
    with torch.inference_mode():
        return model.generate(ids, attention_mask=torch.ones_like(ids) if mask is None else mask, generation_config=how)


def prepared(strategy: Any, model: Any, optimizer: Callable[[list[Any]], Any]) -> Any:
    """Returns the prepared model and its optimizer, which gets the trainable parameters."""
    return strategy.prepare((model, optimizer([p for p in model.parameters() if p.requires_grad])))


def offline_trainer(
    kind: Any,
    strategy: Any,
    model: Any,
    data: Any,
    *more: Any,
    optimizer: Callable[[list[Any]], Any],
    callbacks: Iterable[Any] = (),
    **settings: Any,
) -> Any:
    """Prepares the model and returns a trainer of that class that prints nothing. more: data to evaluate on."""
    from chatgpt.trainer.callbacks import ProgressBar

    quiet = [*callbacks, ProgressBar(enabled=False)]
    return kind(strategy, *prepared(strategy, model, optimizer), data, *more, callbacks=quiet, **settings)


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
    """Prepares the modules and returns a trainer that prints nothing."""
    from torch.nn import Module

    from chatgpt.trainer import PPOTrainer
    from chatgpt.trainer.callbacks import ProgressBar

    actor, optim = prepared(strategy, actor, optimizer)
    critic_optim = None
    if critic is not None:
        critic, critic_optim = prepared(strategy, critic, critic_optimizer or optimizer)
    reward, initial = (strategy.prepare(m) if isinstance(m, Module) else m for m in (reward, initial))
    frozen, quiet = (reward, initial), [*callbacks, ProgressBar(enabled=False)]
    return PPOTrainer(strategy, actor, critic, *frozen, optim, critic_optim, callbacks=quiet, **settings)


def end_probability(share: float, limit: int) -> float:
    """Returns the end probability at which the mean of min(geometric, limit) is share * limit, by bisection."""
    low, high = 1e-6, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if (1 - (1 - middle) ** limit) / middle > share * limit else (low, middle)
    return low


# ---------------------------------------------------------------------- processes


def environment(*first: Path | str | None, **more: str) -> dict[str, str]:
    """Returns the environment of a process that imports this checkout. first: folders to put first on its path."""
    paths = [str(path) for path in (*first, ROOT, os.environ.get('PYTHONPATH')) if path]
    return os.environ | {'PYTHONPATH': os.pathsep.join(paths)} | more


def child(script: str, *words: str, **variables: str) -> Any:
    """Runs a script of this folder in its own process with one thread; returns its last line, parsed as JSON."""
    env = environment(OMP_NUM_THREADS='1', **variables)
    command = [sys.executable, script, *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=env)
    return json.loads(done.stdout.splitlines()[-1])


class Worker:
    """A process that prints {"ready": {...}} and answers each line with a line of JSON; its stderr goes to `log`."""

    def __init__(self, command: Sequence[str | Path], env: Mapping[str, str], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        pipes: dict[str, Any] = {'stdin': subprocess.PIPE, 'stdout': subprocess.PIPE}
        with log.open('ab') as sink:
            self.process = subprocess.Popen(
                list(map(str, command)), cwd=ROOT, env=env, stderr=sink, start_new_session=True, **pipes
            )
        self._heard = b''

    def receive(self, timeout_s: float = float('inf')) -> dict[str, Any] | None:
        """Returns the next line, or None if none comes in time.

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
        return self.receive(timeout_s)

    def end(self) -> None:
        """Ends the process and everything that it started."""
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
    """Returns bytes of this process by Linux's names (VmHWM: peak resident, RssAnon, VmRSS, VmData), or {}
    elsewhere."""
    status = Path('/proc/self/status')
    text = status.read_text() if status.is_file() else ''
    return {n: int(kib) * 1024 for n, kib in re.findall(r'^(Vm\w+|Rss\w+):\s+(\d+) kB', text, re.MULTILINE)}


def stored_bytes(tensors: Iterable[Any]) -> int:
    """Returns the bytes of the tensors' storages, each counted once."""
    local = (t.to_local() if hasattr(t, 'to_local') else t for t in tensors)
    return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in local)}.values())


def forget_peak() -> None:
    """Resets VmHWM, where the system allows it."""
    with suppress(OSError):
        Path('/proc/self/clear_refs').write_text('5')


def machine(device: Any = None) -> dict[str, Any]:
    """Returns the hardware and software of this process."""
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
    """Describes the machine in a clause for a page."""
    found = machine()
    return f'{found["cpu"]}, {found["cores"]} cores, torch {found["torch"]}, transformers {found["transformers"]}'


def install_wheels(folder: Path, site: Path | str, timeout_s: float = 300.0) -> None:
    """Installs every wheel of the folder into `site`, without dependencies or network.

    Raises:
        ValueError: no wheels there, or pip fails or exceeds the time limit.
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
    """Writes a JSON file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f'.{path.name}.tmp')
    unfinished.write_text(json.dumps(content, indent=1) + '\n')
    unfinished.replace(path)


class Results(dict[str, Any]):
    """A JSON file of results by key, written after each; a key in the file is not measured again.

    path: a plain name is a file of benchmarks/results; None: no file.
    """

    def __init__(self, path: Path | str | None) -> None:
        path = RESULTS / path if isinstance(path, str) else path
        super().__init__(json.loads(path.read_text()) if path and path.is_file() else {})
        self.path = path

    def measure(self, key: str, act: Callable[[], Any], show: Callable[[Any], object] = lambda found: found) -> Any:
        if key not in self:
            if differences is not None:
                raise ValueError(f'{self.path} lacks {key}')
            self[key] = act()
            if self.path:
                write_json(self.path, self)
            print(key, show(self[key]), flush=True)
        return self[key]


# ---------------------------------------------------------------------- pages


def script_parser(doc: str | None, page: str = '') -> argparse.ArgumentParser:
    """Returns the parser of a script with that docstring, with --page if the script fills in a page of docs/results."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if page:
        parser.add_argument('--page', action='store_true', help=f'write the tables into docs/results/{page}')
    return parser


def markdown(head: str | Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns a Markdown table, empty without rows. head: a list, or a string with bars between columns."""
    names = head.split(' | ') if isinstance(head, str) else head
    lines = [f'| {" | ".join(map(str, cells))} |' for cells in rows]
    return '\n'.join([f'| {" | ".join(names)} |', '|---' * len(names) + '|', *lines]) if lines else ''


def write_page(page: Path | str, **tables: str) -> None:
    """Writes tables into a page, or only compares it (`checking`); a plain name is a page of docs/results.

    Raises:
        ValueError: the page lacks the comments of a table.
    """
    page = PAGES / page if isinstance(page, str) else page
    text = page.read_text()
    for name, table in tables.items():
        begin, end = f'<!-- {name} -->', f'<!-- end of {name} -->'
        before, found, rest = text.partition(begin)
        _, ended, after = rest.partition(end)
        if not found or not ended:
            raise ValueError(f'{page} lacks the lines {begin} and {end}')
        has, gives = rest[: -len(end + after)].strip(), table.strip()
        if differences is not None and has != gives:
            old, new = next((old, new) for old, new in zip_longest(has.splitlines(), gives.splitlines()) if old != new)
            differences.append(f'{page.relative_to(ROOT)}, table {name}: has {old!r}, its results give {new!r}')
        text = f'{before}{begin}\n\n{gives}\n\n{end}{after}'
    if checking:
        return
    page.write_text(text)
    print(f'{page} written')


@contextmanager
def figure(name: str, columns: int = 1, *, size: tuple[float, float] = (5.5, 4.0), **options: Any) -> Any:
    """Yields matplotlib axes in a row and saves the figure beside the pages; plots nothing if `differences` is a
    list."""
    if differences is not None:
        yield [MagicMock() for _ in range(columns)]
        return
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    sizes = (size[0] * columns, size[1])
    drawn, axes = plt.subplots(1, columns, figsize=sizes, squeeze=False, constrained_layout=True, **options)
    yield axes[0]
    for axis in axes[0]:
        axis.grid(alpha=0.3)
        if axis.lines and any(not line.get_label().startswith('_') for line in axis.lines):
            axis.legend(loc='best', fontsize=8)
    drawn.savefig(PAGES / name, dpi=100)
    plt.close(drawn)
