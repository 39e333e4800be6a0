"""The largest model that trains under a cap on memory, per strategy and option, and the limit that stops the next one.

    python benchmarks/capacity.py --memory 24GiB --host_memory 64GiB --ladder gpt --json gpt-24GiB.json
    python benchmarks/capacity.py --memory 512MiB --ladder tiny --prompt_length 16 --max_length 32 \\
        --json benchmarks/results/capacity/cpu-512MiB.json --page

A rung passes if one PPO phase of two epochs completes: rollout, scoring, and optimizer steps with states, gradients and
activations in memory at once. Each rung runs in its own process and the cap is enforced, so that a large GPU can act as
a consumer one and running out of memory ends one rung and not the sweep. The sweep starts at the rung that
`chatgpt.plan` proposes and goes up until a rung fails, or down until one trains. Rungs that are planned at more than
--hopeless times the cap are not tried; the result lists where the planner and the measurement disagree.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import dummy
import ladders
import torch
from dummy import DummyRun, phase_sizes, plan_for
from harness import RETURNS, environment, markdown, process_memory, spread, write_json, write_page

from chatgpt.launch.arguments import Parser, run_main
from chatgpt.plan import parse_bytes, show_bytes
from chatgpt.strategies.registry import STRATEGIES

OPTIONS: dict[str, dict[str, Any]] = {
    'full': {},
    'micro': {'gradient_checkpointing': True, 'max_tokens_per_batch': 1},
    'lora': {'gradient_checkpointing': True, 'max_tokens_per_batch': 1, 'lora_rank': 16},
    'hydra': {'gradient_checkpointing': True, 'max_tokens_per_batch': 1, 'num_layers_unfrozen': 2, 'critic': 'shared'},
    'lean': {
        'gradient_checkpointing': True,
        'max_tokens_per_batch': 1,
        'lora_rank': 16,
        'critic': 'shared',
        'reward': 'function',
    },
}
"""settings that each option changes; a max_tokens_per_batch of 1 means one sequence"""
ON_CUDA = (
    'naive',
    'fsdp_cpu',
    'colossalai_zero2',
    'colossalai_zero2_cpu',
    'colossalai_gemini',
    'colossalai_gemini_cpu',
)
ON_CPU = ('naive', 'fsdp', 'colossalai_zero2', 'colossalai_gemini')  # offloading to a host needs a device
ON_CPU_ALONE = RETURNS | {'CUDA_VISIBLE_DEVICES': '', 'ONEDNN_PRIMITIVE_CACHE_CAPACITY': '0'}
"""environment of a child on a CPU, so that its resident memory is the memory in use"""
TELLS = 3000
"""characters of a failed child's output that are kept"""


@dataclass
class Cap:
    """The memory limits of the sweep."""

    memory: int
    host_memory: int | None
    on_cuda: bool
    hopeless: float
    timeout_s: float


@dataclass
class Row:
    """One strategy with one option."""

    strategy: str
    option: str
    tried: dict[str, dict[str, Any]] = field(default_factory=dict)
    """rung -> outcome, with `planned` and `planner_fits`"""
    rung: str | None = None
    parameters: int = 0
    """number of parameters of the actor"""
    limit: str | None = None
    """limit that stopped the next rung"""
    limit_at: str | None = None

    def disagreements(self) -> list[str]:
        """Returns a sentence for each rung where the plan differs from the outcome."""
        found = []
        for rung, outcome in self.tried.items():
            says, came = outcome['planner_fits'], outcome['trained']
            if says is not None and says != came and (came or outcome['limit'] is not None):
                verdict = 'trained and was not to fit' if came else 'was to fit and did not'
                found.append(f'{rung} {verdict} (planned {show_bytes(outcome["planned"])})')
        return found


def one_phase(precision: Any, batch_size: int, prompt_length: int, max_length: int) -> DummyRun:
    """Returns the settings of the phase that a rung must complete."""
    short = {'num_episodes': 1, 'max_timesteps': 1, 'update_timesteps': 1, 'max_epochs': 2, 'ignore_phases': 0}
    sizes = {'train_batch_size': batch_size, 'experience_batch_size': batch_size}
    return DummyRun(precision=precision, prompt_length=prompt_length, max_length=max_length, **short, **sizes)


class Sweep:
    """The rungs of one ladder under one cap."""

    def __init__(self, base: DummyRun, ladder: str, cap: Cap) -> None:
        self.base, self.ladder, self.cap = base, ladder, cap
        self.rungs = [rung for rung in ladders.FAMILIES[ladder][1] if rung != 'tiny']

    def settings(self, strategy: str, option: str) -> DummyRun:
        changed = dict(OPTIONS[option])
        if 'max_tokens_per_batch' in changed:
            changed['max_tokens_per_batch'] = self.base.max_length
        return replace(self.base, strategy=strategy, **changed)

    def plan(self, settings: DummyRun, rung: str) -> tuple[int | None, bool | None]:
        """Returns the planned bytes of the capped memory and True if they fit; None where the planner cannot tell."""
        config = ladders.config(self.ladder, rung, settings.max_length)
        # a strategy that can stream blocks does so when a full copy would take most of the device
        streams = self.cap.on_cuda and settings.strategy in ('fsdp_cpu', 'colossalai_gemini_cpu')
        device, fits = 0, False
        for stream in (False, True) if streams else (False,):
            try:
                plan = plan_for(settings, config, 1, self.cap.on_cuda, stream_blocks=stream)
            except ValueError:
                return None, None
            device = max(phase_sizes(plan, self.cap.on_cuda).values())
            fits = device <= self.cap.memory
            if self.cap.on_cuda and self.cap.host_memory is not None:
                fits = fits and plan.host_peak <= self.cap.host_memory
            if fits:
                break
        return device, fits

    def measure(self, settings: DummyRun, rung: str) -> dict[str, Any]:
        """Trains the rung in a child process and returns its outcome."""
        with tempfile.TemporaryDirectory(prefix='capacity-') as folder:
            out = Path(folder, 'outcome.json')
            spec = {'settings': asdict(settings), 'ladder': self.ladder, 'rung': rung, 'out': str(out)}
            spec |= {'memory': self.cap.memory, 'host_memory': self.cap.host_memory}
            try:
                child = subprocess.run(
                    [sys.executable, __file__, '--child', json.dumps(spec)],
                    env=environment() if self.cap.on_cuda else environment(**ON_CPU_ALONE),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    timeout=self.cap.timeout_s,
                    stdin=subprocess.DEVNULL,
                )
            except subprocess.TimeoutExpired:
                return {'trained': False, 'limit': 'time', 'message': f'it took longer than {self.cap.timeout_s:g} s'}
            if out.is_file():
                return json.loads(out.read_text())
            # SIGKILL: the system is out of memory; SIGABRT: an allocation in C++ failed; SIGSEGV: under a tight cap on
            # a CPU, oneDNN has no memory for the code that it generates
            signals = (-9, -6) if self.cap.on_cuda else (-9, -6, -11)
            limit = ('host memory' if self.cap.on_cuda else 'memory') if child.returncode in signals else None
            return {'trained': False, 'limit': limit, 'message': f'exit {child.returncode}: {child.stdout[-TELLS:]}'}

    def row(self, strategy: str, option: str) -> Row:
        """Returns the row with the largest rung that trains with this strategy and option."""
        row, settings = Row(strategy, option), self.settings(strategy, option)
        plans: dict[str, tuple[int | None, bool | None]] = {}
        for rung in self.rungs:
            plans[rung] = self.plan(settings, rung)
            if not plans[rung][1]:
                break
        start = max((i for i, rung in enumerate(self.rungs) if plans.get(rung, (0, False))[1]), default=0)
        number, step = start, 0
        while 0 <= number < len(self.rungs):
            rung = self.rungs[number]
            if rung not in plans:
                plans[rung] = self.plan(settings, rung)
            planned, fits = plans[rung]
            if step > 0 and planned is not None and planned > self.cap.hopeless * self.cap.memory:
                row.limit, row.limit_at = f'planned {show_bytes(planned)}', rung
                break
            outcome = row.tried[rung] = self.measure(settings, rung) | {'planned': planned, 'planner_fits': fits}
            print_outcome(row, rung, outcome)
            if outcome['trained']:
                row.rung, row.parameters = rung, outcome['parameters']['actor']
                if step < 0:
                    break
                step = 1
            else:
                row.limit, row.limit_at = outcome['limit'] or 'error', rung
                if step > 0 or outcome['limit'] is None:
                    break
                step = -1
            number += step
        return row


def print_outcome(row: Row, rung: str, outcome: dict[str, Any]) -> None:
    if outcome['trained']:
        text = f'trains, peak {show_bytes(outcome["peak"])}'
    else:
        text = outcome['limit'] or outcome['message'].strip().splitlines()[-1]
    planned = f' (planned {show_bytes(outcome["planned"])})' if outcome['planned'] is not None else ''
    print(f'{row.strategy} {row.option} {rung}: {text}{planned}', flush=True)


# ---------------------------------------------------------------------- the child


def cap_process(extra: int) -> None:
    """Limits this process to `extra` bytes of private memory more than it has now."""
    limit = process_memory().get('VmData', 0) + extra
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def cap_allocator(memory: int, device: Any) -> None:
    """Limits torch's allocator to `memory` bytes of the device, and reports that limit as the device's memory."""
    total = torch.cuda.get_device_properties(device).total_memory
    if memory > total:
        raise ValueError(f'memory={memory} is more than the {total} bytes that the device has')
    torch.cuda.set_per_process_memory_fraction(memory / total, device)

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        return max(memory - torch.cuda.memory_reserved(device), 0), memory

    torch.cuda.mem_get_info = mem_get_info  # strategies read it to decide what to stream and offload


def cap_cuda(memory: int, device: Any) -> None:
    """Makes the device look and behave like one with `memory` bytes."""
    cap_allocator(memory, device)
    try:
        from colossalai.legacy.utils.memory import colo_set_process_memory_fraction
    except ImportError:
        return
    total = torch.cuda.get_device_properties(device).total_memory
    colo_set_process_memory_fraction(memory / total)  # Gemini keeps its own limit


def outcome_of(error: BaseException, on_cuda: bool) -> dict[str, Any]:
    """Returns the limit that caused an exception; `limit` is None if it is not about memory."""
    text = ' '.join(str(error).split())
    words = text.lower()
    # the last two messages are oneDNN's
    host_words = (
        "can't allocate memory",
        'cannot allocate memory',
        'bad_alloc',
        'not enough memory',
        'could not create a memory object',
        'could not create a primitive',
    )
    if isinstance(error, torch.OutOfMemoryError) or 'cuda out of memory' in words:
        limit = 'device memory'
    elif isinstance(error, MemoryError) or any(w in words for w in host_words) or getattr(error, 'errno', None) == 12:
        limit = 'host memory' if on_cuda else 'memory'
    else:
        limit = None
    return {'trained': False, 'limit': limit, 'message': f'{type(error).__name__}: {text}'[:400]}


def attempt(spec: dict[str, Any]) -> dict[str, Any]:
    on_cuda = torch.cuda.is_available()

    def ready(strategy: Any) -> None:
        if on_cuda:
            cap_cuda(spec['memory'], strategy.device)
            if spec['host_memory'] is not None:
                cap_process(spec['host_memory'])
        else:
            cap_process(spec['memory'])

    try:
        result = dummy.run(DummyRun(**spec['settings']), spec['ladder'], spec['rung'], ready=ready)
    except Exception as error:
        return outcome_of(error, on_cuda)
    memory = result['memory']
    host = memory['host_peak_over_start'] + memory.get('host_pinned', 0)
    outcome = {
        'trained': True,
        'limit': None,
        'peak': memory['peak'],
        'reserved': memory.get('reserved'),
        'host': host,
        'parameters': result['parameters'],
        'seconds': result['wall_s'],
        'machine': result['machine'],
        'precision': result['settings']['precision'],
    }
    if on_cuda and spec['host_memory'] is not None and host > spec['host_memory']:
        return outcome | {
            'trained': False,
            'limit': 'host memory',
            'message': f'it took {host} bytes of host memory, pinned ones counted',
        }
    return outcome


def child(spec: dict[str, Any]) -> None:
    """Trains one PPO phase of a rung under a memory cap; a process that is killed writes no outcome.

    On CUDA the device's cap limits torch's allocator, so memory outside it (the CUDA context, NCCL's buffers) is not
    counted, and the device reports the cap as its memory. The host's cap is RLIMIT_DATA; pinned memory, which it
    does not cover, is added afterwards. On a CPU the only cap is RLIMIT_DATA, above what the process holds before any
    model exists.
    """
    done = attempt(spec)
    resource.setrlimit(resource.RLIMIT_DATA, (resource.getrlimit(resource.RLIMIT_DATA)[1],) * 2)
    write_json(Path(spec['out']), done)
    os._exit(0)  # teardown can crash after a failed allocation


# ---------------------------------------------------------------------- tables


def table(rows: list[dict[str, Any]]) -> str:
    """Returns a row per strategy and option; the ratio is to the first row that trained a rung."""
    base = next((r['parameters'] for r in rows if r['parameters']), 0)
    found = []
    for r in rows:
        best = r['tried'].get(r['rung']) if r['rung'] else None
        sizes = [f'{r["parameters"] / 1e6:.1f} M', f'{r["parameters"] / base:.1f}'] if r['parameters'] else ['', '']
        peaks = [show_bytes(best[name]) if best and best[name] else '' for name in ('peak', 'planned')]
        stopped = [r['limit_at'] or 'end of the ladder', r['limit'] or '']
        found.append([r['strategy'], r['option'], r['rung'] or 'none', *sizes, *peaks, *stopped])
    head = 'strategy | option | largest | parameters | x first | peak | planned | next rung | stopped by'
    return markdown(head, found)


def planner_table(rows: list[dict[str, Any]]) -> str:
    """Returns planned / measured - 1 of the peaks of trained rungs, and the rungs whose fit was predicted wrongly."""
    found = []
    for strategy in dict.fromkeys(r['strategy'] for r in rows):
        outcomes = [o for r in rows if r['strategy'] == strategy for o in r['tried'].values() if o['trained']]
        errors = [o['planned'] / o['peak'] - 1 for o in outcomes if o['planned'] is not None and o['peak'] > 0]
        if errors:
            found.append([strategy, len(errors), *(f'{error:+.0%}' for error in spread(errors).values())])
    wrong = [f'- {r["strategy"]}, {r["option"]}: {"; ".join(r["disagreements"])}' for r in rows if r['disagreements']]
    notes = ['Where planner and measurement disagree on whether a rung fits:', '', *wrong] if wrong else []
    return '\n'.join([markdown('strategy | rungs | least | median | greatest', found), '', *notes])


def parse_args() -> Any:
    parser = Parser(description=__doc__)
    parser.add_argument('--memory', type=parse_bytes, default='24GiB', help='memory of the device, such as 24GiB')
    parser.add_argument(
        '--host_memory', type=parse_bytes, help='memory of the host, such as 64GiB; on a CPU only --memory counts'
    )
    parser.add_argument('--device', choices=('auto', 'cuda', 'cpu'), default='auto')
    parser.add_argument('--ladder', choices=tuple(ladders.FAMILIES), default='gpt')
    parser.add_argument(
        '--strategies',
        nargs='+',
        choices=STRATEGIES,
        help='default: strategies of one process that differ on the device',
    )
    parser.add_argument('--options', nargs='+', choices=tuple(OPTIONS), default=list(OPTIONS))
    parser.add_argument('--precision', choices=('auto', 'fp32', 'bf16', 'fp16'), default='auto')
    parser.add_argument('--batch_size', type=int, default=8, help='sequences of the phase and of a train batch')
    parser.add_argument('--prompt_length', type=int, default=400)
    parser.add_argument('--max_length', type=int, default=512)
    parser.add_argument(
        '--hopeless', type=float, default=1.5, help='rungs planned at more than this many times the cap are not tried'
    )
    parser.add_argument('--timeout_s', type=float, default=600.0, help='time limit of a rung')
    parser.add_argument(
        '--json', type=Path, metavar='FILE', help='results; rows that the file holds are not measured again'
    )
    parser.add_argument('--page', action='store_true', help='write the tables into docs/results/capacity.md')
    parser.add_argument('--child', type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.child:
        child(args.child)
    on_cuda = args.device != 'cpu' and torch.cuda.is_available()
    if args.device == 'cuda' and not on_cuda:
        raise ValueError('--device cuda: torch sees none')
    base = one_phase(args.precision, args.batch_size, args.prompt_length, args.max_length)
    base.check(1)
    sweep = Sweep(base, args.ladder, Cap(args.memory, args.host_memory, on_cuda, args.hopeless, args.timeout_s))
    asked = {'memory': args.memory, 'host_memory': args.host_memory, 'ladder': args.ladder, 'settings': asdict(base)}
    content: dict[str, Any] = asked | {'device_type': 'cuda' if on_cuda else 'cpu', 'rows': []}
    if args.json and args.json.is_file():
        content = json.loads(args.json.read_text())
        if any(content[name] != value for name, value in asked.items()):
            raise ValueError(f'--json {args.json} is of another sweep; give another file')
    done = {(r['strategy'], r['option']) for r in content['rows']}
    for strategy in args.strategies or (ON_CUDA if on_cuda else ON_CPU):
        for option in args.options:
            if (strategy, option) not in done:
                row = sweep.row(strategy, option)
                content['rows'].append(asdict(row) | {'disagreements': row.disagreements()})
                if args.json:  # after every row, so that an interrupted sweep keeps its results
                    write_json(args.json, content)
    rows = content['rows']
    print(f'\n{table(rows)}\n\n{planner_table(rows)}')
    if args.page:
        write_page('capacity.md', capacity=table(rows), planner=planner_table(rows))


if __name__ == '__main__':
    run_main(main)
