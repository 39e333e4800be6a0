"""One command for a machine with a GPU: marked tests, benchmarks, capacity, the planner's error; one JSON file. `make
gpu-check` runs it.

    python benchmarks/gpu_check.py [--wheels FOLDER] [--parts tests gpt-s-bf16] [--out FOLDER]
    python benchmarks/gpu_check.py --device cpu    # a rehearsal at tiny sizes, whose measurements mean nothing

Every part is a process with a budget of seconds and is ended with all that it started when it passes it. Everything,
from installing wheels on, ends within --budget_s; parts that no time is left for are reported as such. The file,
<device>-<date>.json, is written anew after each part, so what was measured outlives an interruption. Exit code 0: every
part passed or needs something optional that is not installed; 1: a part failed, ran out of time or was not reached; 2:
the machine lacks what nothing here can do without. No network is used. Left out: several GPUs; start the benchmarks
with torchrun for those.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
REQUIRED = ('torch', 'transformers', 'safetensors', 'loralib', 'pytest', 'pytest_timeout')
COLOSSALAI = ('colossalai', 'galore_torch', 'bitsandbytes')
LEAST_S = 15
"""a part is not begun with less time than this left"""
TELLS = 4000
"""characters of a part's output that are kept"""


@dataclass(frozen=True)
class Part:
    """One process. `{out}` in its command is the file that it writes its numbers to."""

    name: str
    command: tuple[str, ...]
    budget_s: int
    needs: tuple[str, ...] = ()
    """packages without which it is left out"""


def benchmark(name: str, which: str, budget_s: int, *flags: str, needs: tuple[str, ...] = ()) -> Part:
    return Part(name, (f'benchmarks/benchmark_{which}_dummy.py', '--json', '{out}', *flags), budget_s, needs)


def decoding(budget_s: int, *flags: str) -> Part:
    return Part('decode', ('benchmarks/rollout.py', '--json', '{out}', *flags), budget_s)


def cuda_parts() -> list[Part]:
    """In the order of what one wants to know first."""
    short = ('--num_episodes=2', '--max_timesteps=2', '--update_timesteps=2', '--max_epochs=2')
    large = ('--num_episodes=2', '--max_timesteps=1', '--update_timesteps=1', '--max_epochs=2')
    wide = ('--experience_batch_size=32', '--train_batch_size=32')
    return [
        Part('device', ('benchmarks/gpu_check.py', '--measure_device', '{out}'), 40),
        Part('tests', ('-m', 'pytest', '-m', 'gpu', '-q', '-p', 'no:cacheprovider', '--junitxml={out}'), 110),
        benchmark('gpt-s-bf16', 'gpt', 50, '--model=s', *short, *wide),
        decoding(
            70,
            '--device=cuda',
            '--precision=bf16',
            '--rungs',
            's',
            'xl',
            '--batch=32',
            '--prompt=64',
            '--new=64',
            '--rounds=3',
        ),
        benchmark('gpt-xl-bf16', 'gpt', 90, '--model=xl', *large),
        benchmark('opt-1.3b-lora', 'opt_lora', 70, '--model=1.3b', '--lora_rank=16', *large),
        benchmark('gpt-s-fp32', 'gpt', 50, '--model=s', '--precision=fp32', *short, *wide),
        benchmark('gpt-s-fsdp_cpu', 'gpt', 60, '--model=s', '--strategy=fsdp_cpu', *short),
        Part(
            'capacity-8GiB',
            (
                'benchmarks/capacity.py',
                '--memory=8GiB',
                '--host_memory=32GiB',
                '--strategies',
                'naive',
                '--options',
                'micro',
                'lean',
                '--smallest',
                '--json',
                '{out}',
            ),
            150,
        ),
        benchmark('gpt-s-zero2', 'gpt', 50, '--model=s', '--strategy=colossalai_zero2', *short, needs=COLOSSALAI),
        benchmark(
            'gpt-s-gemini_cpu', 'gpt', 60, '--model=s', '--strategy=colossalai_gemini_cpu', *short, needs=COLOSSALAI
        ),
        benchmark('gpt-s-ddp', 'gpt', 50, '--model=s', '--strategy=ddp', *short),
    ]


def cpu_parts() -> list[Part]:
    """The same kinds of part in seconds each."""
    tiny = (
        '--model=tiny',
        '--num_episodes=2',
        '--max_timesteps=1',
        '--update_timesteps=1',
        '--max_epochs=1',
        '--prompt_length=8',
        '--max_length=12',
    )
    return [
        Part('device', ('benchmarks/gpu_check.py', '--measure_device', '{out}'), 60),
        Part(
            'tests', ('-m', 'pytest', '-m', 'gpu', '-q', '-p', 'no:cacheprovider', 'tests/gpu', '--junitxml={out}'), 60
        ),
        benchmark('gpt-tiny', 'gpt', 60, *tiny),
        decoding(60, '--device=cpu', '--rungs', 'tiny', '--batch=4', '--prompt=8', '--new=8', '--rounds=2'),
        benchmark('opt-tiny-lora', 'opt_lora', 60, '--lora_rank=2', '--strategy=fsdp_cpu', *tiny),
        Part(
            'capacity',
            (
                'benchmarks/capacity.py',
                '--memory=160MiB',
                '--ladder=tiny',
                '--strategies',
                'naive',
                '--options',
                'full',
                '--prompt_length=8',
                '--max_length=16',
                '--batch_size=2',
                '--hopeless=1.2',
                '--json',
                '{out}',
            ),
            200,
        ),
        benchmark('gpt-tiny-zero2', 'gpt', 60, '--strategy=colossalai_zero2', *tiny, needs=COLOSSALAI),
    ]


# ---------------------------------------------------------------------- one part


def environment(device: str, site: str | None) -> dict[str, str]:
    path = os.pathsep.join(p for p in (str(ROOT), site, os.environ.get('PYTHONPATH')) if p)
    changed = {'PYTHONPATH': path, 'HF_HUB_OFFLINE': '1', 'TOKENIZERS_PARALLELISM': 'false', 'PYTHONUNBUFFERED': '1'}
    return os.environ | changed | ({'CUDA_VISIBLE_DEVICES': ''} if device == 'cpu' else {})


def run_part(part: Part, timeout_s: float, env: dict[str, str], device: str) -> dict[str, Any]:
    """Status, seconds, the end of the output, and the numbers that it wrote."""
    lacking = [name for name in part.needs if not installed(name, env)]
    if lacking:
        return {
            'name': part.name,
            'status': 'left out',
            'reason': f'not installed: {", ".join(lacking)}; WHEELS=folder brings them',
        }
    with tempfile.TemporaryDirectory(prefix='gpu-check-') as folder:
        out, log = Path(folder, 'out'), Path(folder, 'log')
        command = [sys.executable, *(word.replace('{out}', str(out)) for word in part.command)]
        start = time.monotonic()
        with log.open('w') as sink:
            child = subprocess.Popen(
                command,
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code: int | None = child.wait(timeout_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                end_group(child)
        record: dict[str, Any] = {
            'name': part.name,
            'command': ' '.join(['python', *part.command]),
            'status': 'passed' if code == 0 else 'failed',
            'seconds': round(time.monotonic() - start, 1),
            'budget_s': part.budget_s,
            'exit_code': code,
        }
        if code is None:
            record |= {'status': 'out of time', 'reason': f'ended after {timeout_s:.0f} s'}
        if record['status'] != 'passed':
            record['output'] = log.read_text(errors='replace')[-TELLS:]
        if out.is_file():
            record['result'] = read_result(out)
        if part.name == 'tests' and code == 0 and device == 'cuda' and not (record.get('result') or {}).get('passed'):
            record |= {'status': 'failed', 'reason': 'no marked test ran on the device'}
        return record


def end_group(child: subprocess.Popen[bytes]) -> None:
    """End a part with everything that it started."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, sign)
        except ProcessLookupError:
            break
        try:
            child.wait(2.0)
        except subprocess.TimeoutExpired:
            continue
    child.wait()


def read_result(path: Path) -> Any:
    """JSON as it is, pytest's XML as counts; None where a part was ended while it wrote."""
    text = path.read_text()
    try:
        if not text.startswith('<'):
            return json.loads(text)
        suites = list(ElementTree.fromstring(text).iter('testsuite'))
    except (ValueError, ElementTree.ParseError):
        return None
    counts = {
        name: sum(int(suite.get(name, 0)) for suite in suites) for name in ('tests', 'failures', 'errors', 'skipped')
    }
    return counts | {'passed': counts['tests'] - counts['failures'] - counts['errors'] - counts['skipped']}


def installed(name: str, env: dict[str, str]) -> bool:
    """Whether a part would find the package."""
    return answers(f'import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is None)', env, 60.0)


def answers(code: str, env: dict[str, str], left_s: float) -> bool:
    """Whether a Python in this environment ends with 0, within the time that is left and two minutes."""
    try:
        return (
            subprocess.run(
                [sys.executable, '-c', code], env=env, cwd=ROOT, timeout=max(min(left_s, 120.0), 0.1)
            ).returncode
            == 0
        )
    except subprocess.TimeoutExpired:
        return False


def install_wheels(folder: Path, site: str, timeout_s: float = 300.0) -> None:
    """Every wheel of the folder into `site`, from the folder alone.

    Raises:
        ValueError: no wheels there, or pip cannot install them, or not in this time.
    """
    wheels = sorted(map(str, folder.glob('*.whl')))
    if not wheels:
        raise ValueError(f'{folder} holds no wheels (*.whl)')
    command = [
        sys.executable,
        '-m',
        'pip',
        'install',
        '--quiet',
        '--disable-pip-version-check',
        '--no-index',
        '--no-deps',
        '--no-compile',
        '--target',
        site,
        *wheels,
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise ValueError(f'pip did not install the wheels of {folder} within {timeout_s:.0f} s') from None
    if done.returncode:
        raise ValueError(f'pip could not install the wheels of {folder}: {done.stderr.strip()[-500:]}')


# ---------------------------------------------------------------------- the device


def measure_device(out: Path) -> None:
    """What the machine is, and its speed at matrix products and copies."""
    import torch
    from arithmetic_done import matmul_peak
    from dummy_numbers import machine, write_json

    device = torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')
    found: dict[str, Any] = {
        'machine': machine(device),
        'cuda': torch.version.cuda,
        'tf32': torch.backends.cuda.matmul.allow_tf32,
    }
    dtypes = {'fp32': torch.float32, 'bf16': torch.bfloat16} | (
        {'fp16': torch.float16} if device.type == 'cuda' else {}
    )
    found['matmul_tflops'] = {name: matmul_peak(device, dtype) / 1e12 for name, dtype in dtypes.items()}
    size = (1 << 30) if device.type == 'cuda' else (1 << 26)
    host, there = torch.ones(size // 4), torch.empty(size // 4, device=device)
    if device.type == 'cuda':
        host = host.pin_memory()
    found['host_to_device_gb_per_s'] = max(size / seconds(lambda: there.copy_(host), device) / 1e9 for _ in range(3))
    copied = torch.empty_like(there)
    found['device_copy_gb_per_s'] = max(2 * size / seconds(lambda: copied.copy_(there), device) / 1e9 for _ in range(3))
    write_json(out, found)


def seconds(act: Any, device: Any) -> float:
    import torch

    synchronize = torch.cuda.synchronize if device.type == 'cuda' else lambda: None
    synchronize()
    start = time.perf_counter()
    act()
    synchronize()
    return time.perf_counter() - start


# ---------------------------------------------------------------------- all parts


def planner_errors(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """planned / measured - 1 of the peak of every run that was measured."""
    found = []
    for part in parts:
        result = part.get('result')
        if not isinstance(result, dict):
            continue
        m = result.get('memory')
        if isinstance(m, dict) and 'planned_peak' in m:
            found.append(
                {'run': part['name'], 'planned': m['planned_peak'], 'measured': m['peak'], 'error': m['planner_error']}
            )
        for row in result.get('rows', ()):
            for rung, outcome in row['tried'].items():
                if outcome['trained'] and outcome['planned'] is not None:
                    name = f'{part["name"]} {row["strategy"]} {row["option"]} {rung}'
                    error = outcome['planned'] / outcome['peak'] - 1
                    found.append(
                        {'run': name, 'planned': outcome['planned'], 'measured': outcome['peak'], 'error': error}
                    )
    return found


def decode_ratios(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How many times `model.generate`'s new tokens per second the local engine makes, by model and kind of lengths."""
    results = [part['result'] for part in parts if isinstance(part.get('result'), dict)]
    return [entry for result in results for entry in result.get('decode', ())]


def commit() -> str | None:
    """Of the working tree, where git knows."""
    try:
        done = subprocess.run(['git', 'rev-parse', 'HEAD'], cwd=ROOT, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def file_name(device: str | None) -> str:
    slug = re.sub(r'[^a-z0-9]+', '-', (device or 'unknown').lower()).strip('-')
    return f'{slug}-{time.strftime("%Y-%m-%d")}.json'


def check(
    parts: list[Part], *, device: str, out: Path, budget_s: float, site: str | None, begun: float | None = None
) -> dict[str, Any]:
    """Run the parts one after another; the file is written after each. `begun`, of time.monotonic, is when the budget
    began: now."""
    env, done = environment(device, site), []
    begun = time.monotonic() if begun is None else begun
    content: dict[str, Any] = {
        'device': None,
        'device_type': device,
        'date': time.strftime('%Y-%m-%d'),
        'commit': commit(),
        'budget_s': budget_s,
        'passed': False,
    }
    path: Path | None = None
    for part in parts:
        left = budget_s - (time.monotonic() - begun)
        if left < LEAST_S:
            record: dict[str, Any] = {
                'name': part.name,
                'status': 'not reached',
                'reason': f'{left:.0f} s of {budget_s:.0f} were left',
            }
        else:
            record = run_part(part, min(part.budget_s, left), env, device)
        done.append(record)
        print(
            f'{part.name}: {record["status"]}, {record.get("seconds", 0)} s {record.get("reason", "")}'.rstrip(),
            flush=True,
        )
        if part.name == 'device' and 'result' in record:
            content |= {'device': record['result']['machine']['device'], 'machine': record['result']['machine']}
        content |= {'passed': all(r['status'] in ('passed', 'left out') for r in done) and len(done) == len(parts)}
        content |= {'planner': planner_errors(done), 'decode': decode_ratios(done), 'parts': done}
        content |= {'wall_s': round(time.monotonic() - begun, 1)}
        path = path or out / file_name(content['device'])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + '\n')
    print(f'{"passed" if content["passed"] else "failed"}: {path}')
    return content


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument('--device', choices=('cuda', 'cpu'), default='cuda', help='cpu: tiny sizes, without a GPU')
    parser.add_argument('--parts', nargs='+', metavar='NAME', help='only these')
    parser.add_argument('--wheels', type=Path, metavar='FOLDER', help='wheels of what the machine lacks')
    parser.add_argument(
        '--out', type=Path, metavar='FOLDER', help='default: benchmarks/results/gpu; outputs/gpu_check for --device cpu'
    )
    parser.add_argument(
        '--budget_s', type=float, default=530.0, help='for everything together, installing wheels included'
    )
    parser.add_argument('--measure_device', type=Path, metavar='FILE', help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    if args.measure_device:
        measure_device(args.measure_device)
        return 0
    begun = time.monotonic()
    parts = cuda_parts() if args.device == 'cuda' else cpu_parts()
    unknown = sorted(set(args.parts or ()) - {p.name for p in parts})
    site = tempfile.mkdtemp(prefix='gpu-check-site-') if args.wheels else None
    try:
        if unknown:
            raise ValueError(f'there is no part {unknown[0]!r}; there are {", ".join(p.name for p in parts)}')
        if site is not None:
            install_wheels(args.wheels, site, args.budget_s - LEAST_S)
        env = environment(args.device, site)
        lacking = [name for name in REQUIRED if not installed(name, env)]
        if lacking:
            raise ValueError(
                f'not installed: {", ".join(lacking)}; give a folder with their wheels: make gpu-check WHEELS=folder'
            )
        sees = 'import sys, torch; sys.exit(not torch.cuda.is_available())'
        if args.device == 'cuda' and not answers(sees, env, args.budget_s - (time.monotonic() - begun)):
            raise ValueError('torch sees no CUDA device; --device cpu runs the same at tiny sizes')
        out = args.out or (ROOT / 'benchmarks/results/gpu' if args.device == 'cuda' else ROOT / 'outputs/gpu_check')
        chosen = [p for p in parts if not args.parts or p.name in args.parts]
        return (
            0
            if check(chosen, device=args.device, out=out, budget_s=args.budget_s, site=site, begun=begun)['passed']
            else 1
        )
    except ValueError as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    finally:
        if site is not None:
            shutil.rmtree(site, ignore_errors=True)


if __name__ == '__main__':
    sys.exit(main())
