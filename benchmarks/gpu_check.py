"""Checks a machine with a GPU: tests marked `gpu`, speed of generation and PPO, peak memory against the plan, capacity,
TRL on the same card. Writes one JSON file and a table; `make gpu-check` runs it.

    python benchmarks/gpu_check.py [--call A] [--wheels FOLDER] [--parts tests decode-gpt2] [--out FOLDER]
    python benchmarks/gpu_check.py --device cpu            # tiny sizes, to test the program; ignore the measurements
    python benchmarks/gpu_check.py --page [FILE.json]      # writes results into docs/gpu.md and runs nothing

docs/gpu_check.md describes the parts of the three calls, and how --budget_s is divided among them. Parts share one
process (gpu_parts.py), which restarts when one fails. The file, <device>-<date>-<call>.json, is written after each part;
the folder logs beside it keeps the output of the processes and the numbers of each part.

Exit code 0: every part passed, or was left out because the card is too small or an optional package is missing; 1: a
part failed, ran out of time or was not reached, or the run was interrupted (results so far are written); 2: a mistake in
the flags, or the machine lacks what every part needs. No network is used. For several GPUs, start the benchmarks with
torchrun.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gpu_page
from harness import GIB, ROOT, Worker, environment, install_wheels, write_json

SCRIPT = ROOT / 'benchmarks/gpu_parts.py'
CALLS = ('A', 'B', 'C')
REQUIRED = ('torch', 'transformers', 'safetensors', 'loralib', 'pytest', 'pytest_timeout')
COLOSSALAI = ('colossalai', 'galore_torch', 'bitsandbytes', 'peft', 'accelerate', 'psutil', 'einops')
BUDGET_S, START_S = 530, 40
"""seconds for everything; for wheels and the first import of torch and transformers"""
REHEARSAL_S = 600
"""seconds for a part on a CPU, whose speed is no matter"""
LEAST_S = 8
"""seconds that must be left to start a part"""
HELD = 128 * 2**20
"""bytes of the device that a process may hold after a part; above that, the next part runs in a new process"""
TELLS = 4000
"""characters of a part's output that are kept"""


@dataclass(frozen=True)
class Part:
    """One measurement, a function of gpu_parts.py.

    Args:
        call: the call that it belongs to.
        needs: packages that it requires; it is left out if one is missing.
        worker: parts of the same name share a process.
        memory: bytes that the card must have.
        wheels: a folder of --wheels that it requires; the function receives its parent.
    """

    name: str
    function: str
    budget_s: int
    options: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    worker: str = 'main'
    memory: int = 0
    wheels: str = ''
    call: str = 'A'


def cuda_parts() -> list[Part]:
    """Returns the parts of a GPU: of call A, which tells whether it works and where time goes, of call B, which decides
    defaults, and of call C; in each the most important first."""
    generated = {'batch': 64, 'prompt': 64, 'new': 512}
    phases = {'num_episodes': 4, 'max_timesteps': 1, 'update_timesteps': 1, 'max_epochs': 2, 'ignore_phases': 2}
    batch = {'experience_batch_size': 32, 'train_batch_size': 32, 'max_tokens_per_batch': 4096}
    one = {'rungs': ['s']} | phases | {'num_episodes': 1, 'ignore_phases': 0}
    trl = {'precision': 'bf16', 'rung': 's', 'sequences': 64, 'prompt': 64, 'new': 128, 'lengths': ['eos', 'fixed']}
    ways = {'model': 'qwen2-1.5b', 'precision': 'bf16', 'batch': 64, 'prompt': 64, 'new': 128, 'rounds': 2}
    colossalai: dict[str, Any] = {'needs': COLOSSALAI, 'worker': 'colossalai', 'call': 'C'}
    vllm: dict[str, Any] = {'needs': ('vllm',), 'worker': 'vllm', 'call': 'C'}
    trunk = {'model': 'qwen2-7b', 'memory': 16 * GIB, 'prompt': 512, 'new': 512}
    capacity = {'caps': [8 * GIB, 16 * GIB, 24 * GIB], 'options': ['micro', 'lean']}
    lora = {'ladder': 'opt', 'rungs': ['1.3b', '350m'], 'lora_rank': 16}
    verl = {'model': 'qwen2-0.5b', 'sequences': 256, 'prompt': 105, 'new': 239, 'batch': 64, 'tokens': 16384}
    return [
        Part('device', 'device', 12),
        Part('tests', 'tests', 90, {'workers': 3}),
        Part('decode-qwen2', 'decode', 70, {'model': 'qwen2-1.5b'} | generated, memory=11 * GIB),
        Part('kernels', 'kernels', 60, {'model': 'qwen2-1.5b', 'batch': 64, 'rows': 8, 'tokens': 512}, memory=40 * GIB),
        Part('sampler', 'sampler', 12, {'rows': [64, 256], 'vocab': 151936}),
        Part('ppo-step', 'step', 75, verl | {'rounds': 3}, memory=24 * GIB),
        Part(
            'learn-16k',
            'kernels',
            25,
            {'model': 'qwen3-0.6b', 'rows': 1, 'tokens': 16384, 'recompute': True},
            memory=24 * GIB,
        ),
        Part('ppo-s', 'ppo', 25, {'rungs': ['s']} | phases | batch),
        Part('decode-gpt2', 'decode', 25, {'model': 'gpt2'} | generated, memory=6 * GIB),
        Part('trunk-7b', 'trunk', 55, trunk, memory=16 * GIB, needs=('bitsandbytes',)),
        Part('decode-ways', 'decode_ways', 200, ways, memory=11 * GIB, call='B'),
        Part('logprobs', 'head', 50, {'sizes': [[896, 8192]], 'vocab': 151936}, call='B'),
        Part('compiled-blocks', 'blocks', 60, {'layers': 8, 'width': 2048}, call='B'),
        Part('ppo-large', 'ppo', 60, {'rungs': ['xl', 'l', 'm']} | phases | batch, call='B'),
        Part('trl-1.12', 'peer', 40, {'peer': 'trl_ppo'} | trl, memory=16 * GIB, wheels='trl_ppo', call='B'),
        Part('trl-0.11.4', 'peer', 40, {'peer': 'trl_classic'} | trl, memory=16 * GIB, wheels='trl_classic', call='B'),
        Part(
            'decode-vllm', 'decode_vllm', 120, {'models': ['qwen2-1.5b', 'gpt2']} | generated, memory=16 * GIB, **vllm
        ),
        Part('capacity', 'capacity', 40, capacity, call='C'),
        Part('ddp', 'ppo', 12, {'strategy': 'ddp'} | one, call='C'),
        Part('fsdp', 'ppo', 12, {'strategy': 'fsdp'} | one, call='C'),
        Part('fsdp_cpu', 'ppo', 16, {'strategy': 'fsdp_cpu'} | one, call='C'),
        Part('opt-1.3b-lora', 'ppo', 40, lora | phases, call='C'),
        Part('ppo-s-fp32', 'ppo', 20, {'rungs': ['s'], 'precision': 'fp32'} | phases, call='C'),
        *(
            Part(name, 'ppo', 34, {'strategy': f'colossalai_{name}'} | one, **colossalai)
            for name in ('zero2', 'gemini', 'zero1', 'zero2_cpu', 'gemini_cpu')
        ),
    ]


LENGTHS = {'prompt_length': 8, 'max_length': 16}
SHORT = {'num_episodes': 2, 'max_timesteps': 1, 'update_timesteps': 1, 'max_epochs': 1} | LENGTHS
TINY = {'precision': 'fp32', 'prompt': 8, 'new': 8}
ON_A_CPU: dict[str, dict[str, Any]] = {
    'device': {},
    'tests': {'workers': 1, 'files': ['tests/gpu']},
    'decode': TINY | {'batch': 4, 'new': 16},
    'ppo': {'rungs': ['tiny'], **SHORT},
    'peer': TINY | {'rung': 'tiny', 'sequences': 4, 'rounds': 1, 'lengths': ['fixed']},
    'trunk': TINY | {'memory': GIB, 'sequences': 2, 'lora_rank': 2},
    'capacity': {'caps': [48 * 2**20], 'options': ['lean'], 'ladder': 'tiny', 'batch_size': 2, **LENGTHS},
    'decode_ways': TINY | {'batch': 2, 'rounds': 1, 'ways': ['plain', 'fixed']},
    'head': {'sizes': [[16, 40]], 'vocab': 512},
    'kernels': TINY | {'rows': 2, 'tokens': 16},
    'sampler': {'rows': [2], 'vocab': 1300, 'repeats': 1},
    'step': TINY | {'sequences': 4, 'batch': 2, 'tokens': 32, 'rounds': 1},
    'blocks': {'layers': 1, 'width': 32, 'repeats': 1, 'backend': 'eager'},
}
"""options on a CPU, by function"""
SIZED = ('experience_batch_size', 'train_batch_size', 'max_tokens_per_batch', 'ignore_phases')


def cpu_parts() -> list[Part]:
    """Returns the same parts at tiny sizes, without vLLM and without a second precision."""
    found = []
    for part in cuda_parts():
        if part.function not in ON_A_CPU or part.name == 'ppo-s-fp32':
            continue
        options = {k: v for k, v in part.options.items() if part.function != 'ppo' or k not in SIZED}
        options |= ON_A_CPU[part.function]
        if 'model' in options:
            options['model'] = 'tiny-gpt2' if options['model'] == 'gpt2' else 'tiny-qwen2'
        if part.function == 'kernels' and 'batch' in options:
            options['batch'] = 2
        if 'lora_rank' in options:
            options['lora_rank'] = 2
        found.append(replace(part, options=options, budget_s=REHEARSAL_S, memory=0))
    return found


def limits(parts: Sequence[Part], number: int, left_s: float) -> float:
    """Returns the seconds for a part: at most twice its budget, from what later parts do not need."""
    part, later = parts[number], sum(p.budget_s for p in parts[number + 1 :])
    return min(left_s, max(float(part.budget_s), min(2.0 * part.budget_s, left_s - later)))


# ---------------------------------------------------------------------- processes


def variables(device: str, site: str | None) -> dict[str, str]:
    more = {'HF_HUB_OFFLINE': '1', 'TOKENIZERS_PARALLELISM': 'false', 'PYTHONUNBUFFERED': '1'}
    if device == 'cpu':
        more |= {'CUDA_VISIBLE_DEVICES': '', 'OMP_NUM_THREADS': '1'}  # more threads are slower at these sizes
    return environment(ROOT, site, **more)


class Runner:
    """Runs parts one after another in a process that they share.

    Args:
        folder: of the log of the processes and of the numbers of each part, which stay.
    """

    def __init__(self, device: str, folder: Path, site: str | None = None, wheels: Path | None = None) -> None:
        self.device, self.folder, self.wheels = device, folder, wheels
        self.env = variables(device, site)
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / 'worker.log'
        self.worker: Worker | None = None
        self.machine: dict[str, Any] = {}

    def start_worker(self, name: str, timeout_s: float) -> Worker | None:
        """Returns the process of that name, after ending any other; None if it does not start in time.

        Raises:
            EOFError: the process ended; ValueError: it sees no CUDA device.
        """
        if self.worker is not None and self.worker_name == name:
            return self.worker
        self.end_worker()
        self.worker = Worker([sys.executable, SCRIPT, '--device', self.device], self.env, self.log)
        self.worker_name = name
        answer = self.worker.receive(timeout_s)
        if answer is None:
            self.end_worker()
            return None
        if answer['ready'] is None:
            raise ValueError('torch sees no CUDA device; --device cpu runs the same at tiny sizes')
        self.machine = answer['ready']
        return self.worker

    def end_worker(self) -> None:
        if self.worker is not None:
            self.worker.end()
        self.worker = None

    def lacks(self, part: Part) -> str | None:
        """Returns the reason to leave the part out, or None."""
        missing = not_installed(part.needs, self.env)
        if missing:
            return f'not installed: {", ".join(missing)}; WHEELS=folder brings them'
        if part.wheels and (self.wheels is None or not (self.wheels / part.wheels).is_dir()):
            return f'WHEELS=folder has no folder {part.wheels} of its wheels'
        card = self.machine.get('device_memory')
        # a card sold as 16 GB reports a little less than 16 GiB
        if part.memory and card is not None and card < 0.97 * part.memory:
            return f'it needs a card of {part.memory / GIB:.0f} GiB, and this one has {card / GIB:.1f}'
        return None

    def run(self, part: Part, timeout_s: float) -> dict[str, Any]:
        """Returns status, seconds, the end of the output, and the numbers that the part wrote."""
        out = self.folder / f'{part.name}.json'
        out.unlink(missing_ok=True)
        begin, start = self.log.stat().st_size if self.log.exists() else 0, time.monotonic()
        record: dict[str, Any] = {'name': part.name, 'budget_s': part.budget_s, 'function': part.function}
        try:
            record |= self._ask(part, out, timeout_s)
        except KeyboardInterrupt:
            record |= {'status': 'interrupted'}
        record['seconds'] = round(time.monotonic() - start, 1)
        if record['status'] not in ('passed', 'left out'):
            self.end_worker()  # the failure could affect the next part
            with self.log.open(errors='replace') as file:
                file.seek(begin)
                record['output'] = file.read()[-TELLS:]
        with suppress(OSError, ValueError):  # no numbers, or the part ended while writing
            record['result'] = json.loads(out.read_text())
        return record

    def _ask(self, part: Part, out: Path, timeout_s: float) -> dict[str, Any]:
        end = time.monotonic() + timeout_s
        too_late = {'status': 'out of time', 'reason': f'ended after {timeout_s:.0f} s'}
        try:
            worker = self.start_worker(part.worker, timeout_s)
            if worker is None:
                return too_late
            options = dict(part.options) | ({'wheels': str(self.wheels)} if part.wheels else {})
            left = end - time.monotonic()
            task = {'function': part.function, 'options': options, 'out': str(out), 'seconds': left}
            answer = worker.ask(json.dumps(task), left)
        except (EOFError, BrokenPipeError, ValueError) as error:
            return {'status': 'failed', 'reason': str(error)}
        if answer is None:
            return too_late
        if answer.pop('held') > HELD:
            self.end_worker()
        return answer


def not_installed(names: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """Returns the packages that a part cannot import."""
    if not names:
        return []
    code = 'import importlib.util, sys; print(*(n for n in sys.argv[1:] if importlib.util.find_spec(n) is None))'
    done = subprocess.run(
        [sys.executable, '-c', code, *names], env=env, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.split()


# ---------------------------------------------------------------------- all parts


def planner_errors(parts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns planned / measured - 1 of the peak of every measured run."""
    found: list[dict[str, Any]] = []

    def add(run: str, planned: int | None, measured: int | None) -> None:
        if planned and measured:
            found.append({'run': run, 'planned': planned, 'measured': measured, 'error': planned / measured - 1})

    for part in parts:
        result = part.get('result')
        if not isinstance(result, dict):
            continue
        memory = result.get('memory')
        if isinstance(memory, dict) and 'planned_peak' in memory:
            add(part['name'], memory['planned_peak'], memory['peak'])
        for phase, measured in result.get('peaks', {}).items():
            add(f'{part["name"]} {phase}', result['planned'].get(phase), measured)
        for row in result.get('rows', ()):
            for rung, outcome in row['tried'].items():
                if outcome['trained']:
                    cap = f' {row["cap"] / GIB:g} GiB' if 'cap' in row else ''
                    name = f'{part["name"]}{cap} {row["strategy"]} {row["option"]} {rung}'
                    add(name, outcome['planned'], outcome['peak'])
    return found


def commit() -> str | None:
    """Returns the commit of the working tree, or None without git."""
    try:
        done = subprocess.run(['git', 'rev-parse', 'HEAD'], cwd=ROOT, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def file_name(device: str | None, call: str) -> str:
    slug = re.sub(r'[^a-z0-9]+', '-', (device or 'unknown').lower()).strip('-')
    return f'{slug}-{time.strftime("%Y-%m-%d")}-{call.lower()}.json'


def check(
    parts: Sequence[Part], runner: Runner, *, out: Path, budget_s: float, begun: float | None = None
) -> dict[str, Any]:
    """Runs the parts one after another and writes the file after each. What cannot run is left out before time is
    shared out. begun: the start of the budget by time.monotonic; default: now."""
    reasons = {part.name: reason for part in parts if (reason := runner.lacks(part)) is not None}
    done: list[dict[str, Any]] = [{'name': n, 'status': 'left out', 'reason': why} for n, why in reasons.items()]
    for record in done:
        print(f'{record["name"]}: left out, {record["reason"]}', flush=True)
    wanted, parts = len(parts), [part for part in parts if part.name not in reasons]
    begun = time.monotonic() if begun is None else begun
    start_s, path, stopped = round(time.monotonic() - begun, 1), None, False
    content: dict[str, Any] = {}
    for number, part in enumerate(parts):
        limit = limits(parts, number, budget_s - (time.monotonic() - begun))
        if stopped or limit < LEAST_S:
            why = 'the run was interrupted' if stopped else f'{max(limit, 0):.0f} s of {budget_s:.0f} were left for it'
            record: dict[str, Any] = {'name': part.name, 'status': 'not reached', 'reason': why}
        else:
            record = runner.run(part, limit)
        stopped = stopped or record['status'] == 'interrupted'
        done.append(record)
        line = f'{part.name}: {record["status"]}, {record.get("seconds", 0)} s {record.get("reason", "")}'
        print(line.rstrip(), flush=True)
        content = {
            'device': runner.machine.get('device'),
            'device_type': runner.device,
            'machine': runner.machine,
            'date': time.strftime('%Y-%m-%d'),
            'commit': commit() if not content else content['commit'],
            'budget_s': budget_s,
            'start_s': start_s,
            'wall_s': round(time.monotonic() - begun, 1),
            'call': part.call,
            'passed': len(done) == wanted and all(map(is_well, done)),
            'planner': planner_errors(done),
            'decisions': gpu_page.decisions(done),
            'parts': done,
        }
        path = path or out / file_name(content['device'], part.call)
        write_json(path, content)
    if not content:
        raise ValueError(f'no part can run here: {"; ".join(reasons.values())}')
    print(f'\n{gpu_page.table(content)}\n{"passed" if content["passed"] else "failed"}: {path}')
    return content


def is_well(record: Mapping[str, Any]) -> bool:
    """Returns True if the part is no reason for exit code 1."""
    return record['status'] in ('passed', 'left out')


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument('--device', choices=('cuda', 'cpu'), default='cuda', help='cpu: tiny sizes, without a GPU')
    parser.add_argument('--call', choices=CALLS, default='A', help='the parts to run; in this order, one call each')
    parser.add_argument('--parts', nargs='+', metavar='NAME', help='run these parts, of any call')
    parser.add_argument('--wheels', type=Path, metavar='FOLDER', help='wheels of packages that the machine lacks')
    parser.add_argument(
        '--out', type=Path, metavar='FOLDER', help='default: benchmarks/results/gpu; outputs/gpu_check for --device cpu'
    )
    parser.add_argument('--budget_s', type=float, help=f'seconds in all, wheels included; default: {BUDGET_S} on a GPU')
    parser.add_argument(
        '--page', nargs='?', const='', metavar='FILE', help='write results into docs/gpu.md; default: the newest file'
    )
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    begun, results = time.monotonic(), ROOT / 'benchmarks/results/gpu'
    parts = cuda_parts() if args.device == 'cuda' else cpu_parts()
    budget_s = args.budget_s or (float(BUDGET_S) if args.device == 'cuda' else float(REHEARSAL_S * len(parts)))
    unknown = sorted(set(args.parts or ()) - {p.name for p in parts})
    site, runner = None, None
    for sign in (signal.SIGINT, signal.SIGTERM):  # background jobs of a shell ignore SIGINT
        signal.signal(sign, signal.default_int_handler)
    try:
        if args.page is not None:
            gpu_page.fill_page(ROOT / 'docs/gpu.md', [Path(args.page)] if args.page else gpu_page.newest(results))
            return 0
        if unknown:
            raise ValueError(f'there is no part {unknown[0]!r}; there are {", ".join(p.name for p in parts)}')
        wheels = args.wheels.resolve() if args.wheels else None
        if wheels is not None:
            site = tempfile.mkdtemp(prefix='gpu-check-site-')
            if any(wheels.glob('*.whl')) or not any(wheels.glob('*/*.whl')):
                install_wheels(wheels, site, budget_s - LEAST_S)
        out = args.out or (results if args.device == 'cuda' else ROOT / 'outputs/gpu_check')
        runner = Runner(args.device, out / 'logs', site, wheels)
        missing = not_installed(REQUIRED, runner.env)
        if missing:
            raise ValueError(
                f'not installed: {", ".join(missing)}; give a folder with their wheels: make gpu-check WHEELS=folder'
            )
        try:
            up = runner.start_worker('main', budget_s - (time.monotonic() - begun))
        except EOFError as error:
            output = ' '.join(runner.log.read_text().split())
            raise ValueError(f'the process of the parts cannot start: {error}: {output[-500:]}') from None
        if up is None:
            raise ValueError('the process of the parts was not up in time')
        chosen = [p for p in parts if (p.name in args.parts if args.parts else p.call == args.call)]
        return 0 if check(chosen, runner, out=out, budget_s=budget_s, begun=begun)['passed'] else 1
    except ValueError as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print('interrupted', file=sys.stderr)
        return 1
    finally:
        if runner is not None:
            runner.end_worker()
        if site is not None:
            shutil.rmtree(site, ignore_errors=True)


if __name__ == '__main__':
    sys.exit(main())
