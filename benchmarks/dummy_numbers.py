"""Numbers of a run of dummy.py: rates from what its phases did, the planner's error, the machine, a table, and the
file."""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path
from typing import Any

from arithmetic_done import PARTS


def averages(phases: list[dict[str, Any]], ignore_phases: int, world_size: int, peak: float) -> dict[str, Any]:
    """Rates over the phases after the first `ignore_phases`; over all where there are no more."""
    counted = phases[ignore_phases:] or phases
    seconds = {part: sum(p['seconds'][part] for p in counted) for part in PARTS}
    flop = {part: sum(p['flop'][part] for p in counted) for part in PARTS}
    seconds['total'], flop['total'] = sum(seconds.values()), sum(flop.values())
    rate = {part: flop[part] / max(seconds[part], 1e-9) / world_size for part in seconds}
    samples = sum(p['samples'] for p in counted)
    return {
        'phases_counted': len(counted),
        'seconds_per_phase': {part: s / len(counted) for part, s in seconds.items()},
        'flop_per_phase': {part: f / len(counted) for part, f in flop.items()},
        'samples_per_s': samples / seconds['total'],
        'samples_per_s_per_device': samples / seconds['total'] / world_size,
        'new_tokens_per_s': sum(p['new_tokens'] for p in counted) / seconds['total'],
        'tflops_per_device': {part: r / 1e12 for part, r in rate.items()},
        'matmul_peak_tflops': peak / 1e12,
        'share_of_peak': {part: r / peak for part, r in rate.items()},
    }


def planned(plan: Any, measured: int, on_cuda: bool, *, loads: bool = True) -> dict[str, Any]:
    """The planner's peak of what was measured (on a CPU host and device are one), and its error: planned / measured -
    1. loads: whether loading the models was measured too."""
    sizes = {
        name: sum(memory.device.values()) + (0 if on_cuda else sum(memory.host.values()))
        for name, memory in plan.phases.items()
        if loads or name != 'load'
    }
    phase = max(sizes, key=sizes.__getitem__)
    guess = sizes[phase]
    return {
        'planned_peak': guess,
        'planned_host': plan.host_peak,
        'planned_phase': phase,
        'planner_error': guess / measured - 1 if measured > 0 else None,
    }


def machine(device: Any) -> dict[str, Any]:
    """What it ran on."""
    import torch
    import transformers

    name = torch.cuda.get_device_name(device) if device.type == 'cuda' else _cpu_name()
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == 'cuda' else None
    return {
        'device': name,
        'device_type': device.type,
        'device_memory': memory,
        'cpu_count': os.cpu_count(),
        'threads': torch.get_num_threads(),
        'python': platform.python_version(),
        'torch': torch.__version__,
        'transformers': transformers.__version__,
        'date': time.strftime('%Y-%m-%d'),
    }


def _cpu_name() -> str:
    info = Path('/proc/cpuinfo')
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.split(':', 1)[1].strip() for line in lines if line.startswith('model name')), platform.machine())


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    from chatgpt.plan import show_bytes

    r, m = result, result['memory']
    size = ', '.join(f'{name} {n / 1e6:.4g} M' for name, n in r['parameters'].items())
    lines = [
        f'{r["ladder"]} {r["model"]}, {r["settings"]["strategy"]} x {r["world_size"]}, {r["settings"]["precision"]}, '
        f'{r["machine"]["device"]} ({r["machine"]["device_type"]})',
        f'parameters: {size}',
        '',
        '| part | s / phase | TFLOP / phase | TFLOPS per device | share of matmul peak |',
        '|---|---|---|---|---|',
    ]
    for part in (*PARTS, 'total'):
        numbers = (
            r['seconds_per_phase'][part],
            r['flop_per_phase'][part] / 1e12,
            r['tflops_per_device'][part],
            r['share_of_peak'][part],
        )
        lines.append(f'| {part} | {numbers[0]:.3f} | {numbers[1]:.4g} | {numbers[2]:.4g} | {numbers[3]:.1%} |')
    error = f' ({m["planner_error"]:+.0%})' if m['planner_error'] is not None else ''
    return '\n'.join(
        [
            *lines,
            '',
            f'samples/s {r["samples_per_s"]:.4g} ({r["samples_per_s_per_device"]:.4g} per device), new tokens/s '
            f'{r["new_tokens_per_s"]:.4g}, over {r["phases_counted"]} of {len(r["phases"])} phases',
            f'matmul peak, measured here: {r["matmul_peak_tflops"]:.4g} TFLOPS per device',
            f'peak memory: {show_bytes(m["peak"])}, planned {show_bytes(m["planned_peak"])}{error}; host '
            f'{show_bytes(m["host_peak"])}',
        ]
    )


def write_json(path: Path, content: Any) -> None:
    """All of it or nothing of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f'.{path.name}.tmp')
    unfinished.write_text(json.dumps(content, indent=1) + '\n')
    unfinished.replace(path)
