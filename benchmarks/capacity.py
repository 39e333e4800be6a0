"""The largest model that trains under a cap on memory, per strategy and option, and the limit that stops the next one.

    python benchmarks/capacity.py --memory 24GiB --host_memory 64GiB --ladder gpt --json gpt-24GiB.json
    python benchmarks/capacity.py --memory 512MiB --ladder tiny --prompt_length 32 --max_length 64 \\
        --page docs/results/capacity.md

A rung counts when one PPO phase of two passes ends: rollout, scoring, and optimizer steps with states, gradients and
activations in memory at once. Every rung is a process of its own (capacity_rung.py), and the cap is enforced, so that a
large GPU stands in for a consumer one and running out of memory ends one rung and not the sweep. `chatgpt.plan` says
where to begin; from there the sweep goes up until a rung fails, or down until one trains. Rungs that the planner holds
for hopeless (--hopeless times the cap) are not tried; where it and the measurement disagree is part of the result.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import capacity_page
import ladders
from dummy import DummyRun, plan_for
from dummy_numbers import write_json

from chatgpt.launch.arguments import Parser, run_main
from chatgpt.plan import parse_bytes, show_bytes
from chatgpt.trainer.strategies.registry import STRATEGIES

HERE = Path(__file__).resolve().parent
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
"""what each changes in a run; a max_tokens_per_batch of 1 stands for one sequence"""
ON_CUDA = (
    'naive',
    'fsdp_cpu',
    'colossalai_zero2',
    'colossalai_zero2_cpu',
    'colossalai_gemini',
    'colossalai_gemini_cpu',
)
ON_CPU = ('naive', 'fsdp', 'colossalai_zero2', 'colossalai_gemini')  # offloading has nowhere to go
TELLS = 3000
"""characters of a child's output that are kept where it fails"""


@dataclass
class Cap:
    """What the sweep allows."""

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
    """rung -> outcome of capacity_rung.py, with `planned` and `planner_fits`"""
    rung: str | None = None
    parameters: int = 0
    """of the actor"""
    limit: str | None = None
    """what stopped the next rung"""
    limit_at: str | None = None

    def disagreements(self) -> list[str]:
        """Rungs of which the planner said something else than what came out, as sentences."""
        found = []
        for rung, outcome in self.tried.items():
            says, came = outcome['planner_fits'], outcome['trained']
            if says is not None and says != came and (came or outcome['limit'] is not None):
                verdict = 'trained and was not to fit' if came else 'was to fit and did not'
                found.append(f'{rung} {verdict} (planned {show_bytes(outcome["planned"])})')
        return found


class Sweep:
    """The rungs of one ladder under one cap."""

    def __init__(self, base: DummyRun, ladder: str, rungs: list[str], cap: Cap) -> None:
        self.base, self.ladder, self.rungs, self.cap = base, ladder, rungs, cap

    def settings(self, strategy: str, option: str) -> DummyRun:
        changed = dict(OPTIONS[option])
        if 'max_tokens_per_batch' in changed:
            changed['max_tokens_per_batch'] = self.base.max_length
        return replace(self.base, strategy=strategy, **changed)

    def plan(self, settings: DummyRun, rung: str) -> tuple[int | None, bool | None]:
        """The planner's bytes of what the cap is on, and whether they fit; None where it cannot say."""
        precision = settings.precision
        if precision == 'auto':
            precision = 'bf16' if self.cap.on_cuda or settings.is_gemini else 'fp32'
        config = ladders.config(self.ladder, rung, settings.max_length)
        best: tuple[int | None, bool | None] = (None, None)
        # a strategy that can stream blocks does so when a full copy would take most of the device
        for stream in (
            (False, True)
            if self.cap.on_cuda and settings.strategy in ('fsdp_cpu', 'colossalai_gemini_cpu')
            else (False,)
        ):
            try:
                plan = plan_for(settings, config, 1, self.cap.on_cuda, precision, stream_blocks=stream)
            except ValueError:
                return None, None
            device = max(
                sum(m.device.values()) + (0 if self.cap.on_cuda else sum(m.host.values())) for m in plan.phases.values()
            )
            fits = device <= self.cap.memory
            if self.cap.on_cuda and self.cap.host_memory is not None:
                fits = fits and plan.host_peak <= self.cap.host_memory
            best = (device, fits)
            if fits:
                break
        return best

    def measure(self, settings: DummyRun, rung: str) -> dict[str, Any]:
        """Let a child train the rung."""
        with tempfile.TemporaryDirectory(prefix='capacity-') as folder:
            out = Path(folder, 'outcome.json')
            spec = {
                'settings': asdict(settings),
                'ladder': self.ladder,
                'rung': rung,
                'memory': self.cap.memory,
                'host_memory': self.cap.host_memory,
                'out': str(out),
            }
            try:
                child = subprocess.run(
                    [sys.executable, str(HERE / 'capacity_rung.py'), json.dumps(spec)],
                    env=child_environment(self.cap.on_cuda),
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
            # SIGKILL is the system out of memory; SIGABRT an allocation in C++ that nothing could answer; SIGSEGV,
            # under a tight cap on a CPU, is oneDNN without room for the code that it makes
            signals = (-9, -6) if self.cap.on_cuda else (-9, -6, -11)
            limit = ('host memory' if self.cap.on_cuda else 'memory') if child.returncode in signals else None
            return {'trained': False, 'limit': limit, 'message': f'exit {child.returncode}: {child.stdout[-TELLS:]}'}

    def planned_row(self, strategy: str, option: str) -> Row:
        """The largest rung that the planner says fits; nothing is run."""
        row, settings = Row(strategy, option), self.settings(strategy, option)
        for rung in self.rungs:
            planned, fits = self.plan(settings, rung)
            if not fits:
                short = (
                    f'planned {show_bytes(planned)}'
                    if planned is not None and planned > self.cap.memory
                    else 'host memory, planned'
                )
                row.limit, row.limit_at = 'no plan' if planned is None else short, rung
                return row
            row.rung, row.parameters = rung, num_parameters(ladders.config(self.ladder, rung))
        return row

    def row(self, strategy: str, option: str) -> Row:
        """The largest rung that trains with this strategy and option."""
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
            tell(row, rung, outcome)
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


def planned_anew(content: dict[str, Any]) -> dict[str, Any]:
    """What was measured, beside what the planner says of it now."""
    base, cap = DummyRun(**content['settings']), Cap(content['memory'], content['host_memory'], False, 1.5, 0.0)
    cap.on_cuda = content['device_type'] == 'cuda'
    sweep, rows = Sweep(base, content['ladder'], [], cap), []
    for row in content['rows']:
        settings = sweep.settings(row['strategy'], row['option'])
        for rung, outcome in row['tried'].items():
            outcome['planned'], outcome['planner_fits'] = sweep.plan(settings, rung)
        if row['limit'] is not None and 'planned' in row['limit']:
            planned, fits = sweep.plan(settings, row['limit_at'])
            row['limit'] = ('not tried, ' if fits else '') + f'planned {show_bytes(planned or 0)}'
        known = Row(**{k: v for k, v in row.items() if k != 'disagreements'})
        rows.append(row | {'disagreements': known.disagreements()})
    return content | {'rows': rows}


def num_parameters(config: Any) -> int:
    """Of a language model by its config."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device('meta'):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())


def child_environment(on_cuda: bool) -> dict[str, str]:
    """The child's variables. On a CPU every freed tensor goes back to the kernel there and then, so that its resident
    memory is what it holds and not what glibc keeps for later."""
    path = os.pathsep.join(p for p in (str(HERE.parent), os.environ.get('PYTHONPATH', '')) if p)
    if on_cuda:
        return {**os.environ, 'PYTHONPATH': path}
    returns = {
        'MALLOC_TRIM_THRESHOLD_': '0',
        'MALLOC_MMAP_THRESHOLD_': '65536',
        'MALLOC_ARENA_MAX': '1',
        'ONEDNN_PRIMITIVE_CACHE_CAPACITY': '0',
    }
    return {**os.environ, 'PYTHONPATH': path, 'CUDA_VISIBLE_DEVICES': '', **returns}


def tell(row: Row, rung: str, outcome: dict[str, Any]) -> None:
    if outcome['trained']:
        text = f'trains, peak {show_bytes(outcome["peak"])}'
    else:
        text = outcome['limit'] or outcome['message'].strip().splitlines()[-1]
    planned = f' (planned {show_bytes(outcome["planned"])})' if outcome['planned'] is not None else ''
    print(f'{row.strategy} {row.option} {rung}: {text}{planned}', flush=True)


def shown_command(flags: list[str]) -> str:
    """The command without the files that it wrote."""
    kept = [
        flag for before, flag in zip(['', *flags], flags, strict=False) if not {before, flag} & {'--json', '--page'}
    ]
    return ' '.join(['python benchmarks/capacity.py', *kept])


def parse_args() -> Any:
    parser = Parser(description=__doc__)
    parser.add_argument('--memory', type=parse_bytes, default='24GiB', help='of the device, such as 24GiB')
    parser.add_argument(
        '--host_memory', type=parse_bytes, help='of the machine, such as 64GiB; on a CPU --memory is all there is'
    )
    parser.add_argument('--device', choices=('auto', 'cuda', 'cpu'), default='auto')
    parser.add_argument('--ladder', choices=tuple(ladders.FAMILIES), default='gpt')
    parser.add_argument(
        '--strategies', nargs='+', choices=STRATEGIES, help='default: those of one process that differ on the device'
    )
    parser.add_argument('--options', nargs='+', choices=tuple(OPTIONS), default=list(OPTIONS))
    parser.add_argument('--precision', choices=('auto', 'fp32', 'bf16', 'fp16'), default='auto')
    parser.add_argument('--batch_size', type=int, default=8, help='sequences of the phase and of a train batch')
    parser.add_argument('--prompt_length', type=int, default=400)
    parser.add_argument('--max_length', type=int, default=512)
    parser.add_argument(
        '--hopeless', type=float, default=1.5, help='rungs planned at more than this many times the cap are not tried'
    )
    parser.add_argument(
        '--plan_only',
        action='store_true',
        help='run nothing: what the planner says, for a device that need not be there',
    )
    parser.add_argument(
        '--smallest', action='store_true', help="also train the ladder's smallest rung everywhere, for its peak"
    )
    parser.add_argument('--timeout_s', type=float, default=600.0, help='for one rung')
    parser.add_argument('--json', type=Path, metavar='FILE', help='write what was found there')
    parser.add_argument('--page', type=Path, metavar='FILE', help='write a page of results there')
    parser.add_argument(
        '--report',
        type=Path,
        nargs='+',
        metavar='FILE',
        help='measure nothing: the page of earlier --json files, of one machine and one cap, planned anew',
    )
    parser.add_argument(
        '--before',
        type=Path,
        metavar='FILE',
        help="an earlier --json file, whose planner's errors the page shows as well",
    )
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.report:
        content = planned_anew(capacity_page.combined([json.loads(file.read_text()) for file in args.report]))
        if args.json:
            write_json(args.json, content)
    else:
        content = sweep_all(args)
    print()
    print(capacity_page.table(content))
    if args.page:
        if args.plan_only:
            raise ValueError('--plan_only measures nothing, and a page is of what was measured')
        before = json.loads(args.before.read_text()) if args.before else None
        capacity_page.write(args.page, content, before)


def sweep_all(args: Any) -> dict[str, Any]:
    """Every strategy with every option."""
    import torch

    on_cuda = args.device == 'cuda' if args.plan_only else args.device != 'cpu' and torch.cuda.is_available()
    if args.device == 'cuda' and not on_cuda:
        raise ValueError('--device cuda: torch sees none')
    base = DummyRun(
        precision=args.precision,
        num_episodes=1,
        max_timesteps=1,
        update_timesteps=1,
        max_epochs=2,
        ignore_phases=0,
        train_batch_size=args.batch_size,
        experience_batch_size=args.batch_size,
        prompt_length=args.prompt_length,
        max_length=args.max_length,
    )
    try:
        base.check(1)
    except ValueError as error:  # a mistake in the flags of this script, and said as one
        raise ValueError(str(error)) from None
    rungs = [r for r in ladders.FAMILIES[args.ladder][1] if r != 'tiny']
    sweep = Sweep(base, args.ladder, rungs, Cap(args.memory, args.host_memory, on_cuda, args.hopeless, args.timeout_s))
    rows: list[Row] = []
    content: dict[str, Any] = {}
    for strategy in args.strategies or (ON_CUDA if on_cuda else ON_CPU):
        for option in args.options:
            row = sweep.planned_row(strategy, option) if args.plan_only else sweep.row(strategy, option)
            if args.smallest and not args.plan_only and rungs[0] not in row.tried:
                settings = sweep.settings(strategy, option)
                planned, fits = sweep.plan(settings, rungs[0])
                row.tried[rungs[0]] = sweep.measure(settings, rungs[0]) | {'planned': planned, 'planner_fits': fits}
                tell(row, rungs[0], row.tried[rungs[0]])
            rows.append(row)
            content = {
                'command': shown_command(sys.argv[1:]),
                'memory': args.memory,
                'host_memory': args.host_memory,
                'device_type': 'cuda' if on_cuda else 'cpu',
                'ladder': args.ladder,
                'settings': asdict(base),
                'smallest': rungs[0] if args.smallest and not args.plan_only else None,
                'rows': [asdict(r) | {'disagreements': r.disagreements()} for r in rows],
                'machine': next((o['machine'] for r in rows for o in r.tried.values() if o.get('machine')), None),
            }
            if args.json:  # after every row: a sweep that is ended leaves what it found
                write_json(args.json, content)
    return content


if __name__ == '__main__':
    run_main(main)
