"""Every layout to every other: three phases of PPO under one, a checkpoint, three more under another.

    python tests/trainer/layouts.py [--out docs/results/layouts.md]

The page explains the table.

Legs of one world size run one after another in the same processes. What a leg leaves is its checkpoint: weights,
optimizer states and counters are compared there, by name.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from chatgpt.rollout import compare_samples
from chatgpt.strategies.checkpoint import CheckpointReader
from chatgpt.testing.processes import run_distributed

ROOT = Path(__file__).resolve().parents[2]
HALF, TOTAL = 3, 6
GEMINI, BF16_REFERENCE = 'gemini(2) bf16', 'zero2(2) bf16'
LR, UPDATES_PER_PHASE = 1e-3, 4
SMALL_CHUNKS = {'min_chunk_size_mb': 0.001, 'search_range_mb': 0.001, 'hidden_dim': 32}
"""chunks of about a thousand elements, so that Gemini cuts a tiny model into many"""
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    'naive': ('NaiveStrategy', 1, {'device': 'cpu'}),
    'ddp(2)': ('DDPStrategy', 2, {'device': 'cpu'}),
    'fsdp(2)': ('FSDPStrategy', 2, {'device': 'cpu'}),
    'fsdp(2) offloaded': ('FSDPStrategy', 2, {'device': 'cpu', 'cpu_offload': True}),
    'fsdp(4) streamed': ('FSDPStrategy', 4, {'device': 'cpu', 'meta_init': True, 'stream_blocks': True}),
    'zero1(2)': ('ColossalAIStrategy', 2, {'stage': 1, 'precision': 'fp32'}),
    'zero2(2)': ('ColossalAIStrategy', 2, {'stage': 2, 'precision': 'fp32'}),
    'zero2(2) offloaded': ('ColossalAIStrategy', 2, {'stage': 2, 'precision': 'fp32', 'placement_policy': 'cpu'}),
    'zero2(2) bf16': ('ColossalAIStrategy', 2, {'stage': 2, 'precision': 'bf16'}),
    'gemini(2) bf16': ('ColossalAIStrategy', 2, {'stage': 3, 'precision': 'bf16', **SMALL_CHUNKS}),
}
NAMES = [name for name in LAYOUTS if name != BF16_REFERENCE]


@dataclass(kw_only=True)
class Leg:
    """A run of `total` phases under `layout`: resume from `source`, stop after phase `until` and write `target`."""

    layout: str
    until: int
    total: int
    source: Path | None = None
    target: Path | None = None
    every: int | None = None
    """write `target/step-...` after every `every` phases instead"""


@dataclass(kw_only=True)
class Log:
    """Metrics of each phase, without the seconds, and its samples."""

    metrics: list[dict[str, float]] = field(default_factory=list)
    samples: list[list[Any]] = field(default_factory=list)


def reward(prompts: list[str], responses: list[str]) -> list[float]:
    return [float(sum(c in 'aeiou0123456789' for c in response)) for response in responses]


def run_leg(leg: Leg) -> Log:
    """Runs a leg, on every process of the layout, with settings that a layout could affect: running score scaling, an
    adaptive KL coefficient, a learning-rate schedule, several micro-batches."""
    import tiny_runs

    from chatgpt.trainer import strategies
    from chatgpt.trainer.callbacks import Callback, SaveCheckpoint

    kind, _, options = LAYOUTS[leg.layout]
    settings = {'experience_batch_size': 8, 'max_epochs': 2, 'max_new_tokens': 8, 'max_tokens_per_batch': 48, 'lr': LR}
    settings |= {'score_scaling': 'running', 'kl_target': 2.0, 'lr_schedule': 'cosine'}
    stop: Any = Callback()
    stop.on_phase_end = lambda trainer, step, metrics: trainer.request_stop() if step == leg.until else None
    callbacks = [stop]
    if leg.every is not None:
        callbacks.append(SaveCheckpoint(leg.target, interval=leg.every))
    with getattr(strategies, kind)(seed=3, **options) as strategy:
        trainer = tiny_runs.ppo(strategy, reward, callbacks=callbacks, **settings)
        if leg.source is not None:
            trainer.load_checkpoint(leg.source)
        trainer.fit([*tiny_runs.PROMPTS, 'a seven'], 1, leg.total, 1)
        assert trainer.phase == leg.until
        if leg.target is not None and leg.every is None:
            trainer.save_checkpoint(leg.target)
        return Log(metrics=trainer.log.phases, samples=trainer.log.experiences)


def _run(legs: list[Leg]) -> list[Log]:
    return [run_leg(leg) for leg in legs]


def run_legs(legs: list[Leg]) -> list[Log]:
    """Runs legs in order, consecutive ones of a world size in the same processes; returns the log of rank 0 of each."""
    logs: list[Log] = []
    while len(logs) < len(legs):
        rest = legs[len(logs) :]
        world_size = LAYOUTS[rest[0].layout][1]
        group = rest[: next((i for i, leg in enumerate(rest) if LAYOUTS[leg.layout][1] != world_size), len(rest))]
        alone = world_size == 1
        logs += _run(group) if alone else run_distributed(_run, world_size, group, timeout_s=1200.0, init_group=True)[0]
    return logs


# ---------------------------------------------------------------------- comparisons

LOSS_NAMES = ('policy_loss', 'value_loss', 'actor_grad_norm', 'critic_grad_norm')
LOSSES = (*(f'ppo/{name}' for name in LOSS_NAMES), 'rollout/kl_mean', 'rollout/score_mean')


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Allowed differences of two layouts; weights in learning rates per optimizer step. A policy loss and a KL are sums
    of terms that cancel, so they have an absolute tolerance in addition to the relative one."""

    relative: float = 1e-4
    absolute: float = 5e-6
    edge: float = 1e-5
    weight: float = 0.05
    weight_mean: float = 0.05


FP32 = Tolerance()
BF16 = Tolerance(relative=2**-6, absolute=2**-5, edge=2**-7, weight=2.0, weight_mean=0.032)
"""Two engines in bf16, each number with a relative error of u = 2^-9. A gradient has about eight roundings: 8 u = 2^-6.
A response's log-prob is a sum over 8 tokens of logits of size 4, each with an error of u: 32 u / 2 = 2^-5. A cumulative
probability changes by at most the largest error of a logit, 4 u = 2^-7. Adam moves a weight whose gradient is below its
error by lr in either direction, so two may be 2 lr apart per step; that is 8 u of the weights, 0.032 lr in the mean."""


def compare_logs(want: Log, got: Log, *, first: int = 0, tolerance: Tolerance = FP32) -> str | None:
    """Compares the phases of `got` with those of `want` from number `first` on (0: its first). Where rounding explains
    another token, because the draw is close to an edge, the comparison ends with a report."""
    for number, (metrics, samples) in enumerate(zip(got.metrics, got.samples, strict=True), start=first):
        comparison = compare_samples(want.samples[number], samples, tolerance.edge)
        assert comparison.explained, f'phase {number + 1}: {comparison}'
        if not comparison.equal:
            return f'phase {number + 1}: {comparison}'
        assert [s.score for s in want.samples[number]] == [s.score for s in samples]
        for name in LOSSES:
            a, b = want.metrics[number][name], metrics[name]
            close = math.isclose(a, b, rel_tol=tolerance.relative, abs_tol=tolerance.absolute)
            assert close, f'phase {number + 1}, {name}: {a} and {b}'
        assert want.metrics[number].keys() == metrics.keys()
    return None


def compare_weights(want: Path, got: Path, *, steps: int, tolerance: Tolerance = FP32) -> float:
    """Returns the largest difference between the weights of two checkpoints, in learning rates per step."""
    a, b = tensors(want), tensors(got)
    names = {name for name in a if not name.startswith('rng/')}
    assert names == {name for name in b if not name.startswith('rng/')}, f'{want} and {got} hold other names'
    assert all(a[n].shape == b[n].shape for n in names)
    assert all(torch.equal(a[n], b[n]) for n in names if n.endswith('/step'))
    assert any(n.startswith('actor_optim/') and n.endswith('/exp_avg_sq') for n in names)
    difference = torch.cat([(a[n] - b[n]).abs() for n in names if n.startswith(('actor/', 'critic/'))]) / (LR * steps)
    largest, mean = float(difference.max()), float(difference.mean())
    near = largest <= tolerance.weight and mean <= tolerance.weight_mean
    assert near, f'weights are {largest:.3g} lr per step apart, {mean:.3g} in the mean'
    return largest


def differing(want: Path, got: Path) -> list[str]:
    """Returns the names of everything that differs in a bit: weights, optimizer states, random generators, counters and
    controllers."""
    a, b = tensors(want), tensors(got)
    names = [n for n in a.keys() | b.keys() if n not in a or n not in b or not torch.equal(a[n], b[n])]
    s, t = trainer_state(want), trainer_state(got)
    return sorted(names + [k for k in s.keys() | t.keys() if s.get(k) != t.get(k)])


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Returns every tensor of a checkpoint, flat, by name."""
    reader = CheckpointReader(folder)
    return {name: reader.read(name, 0, math.prod(reader.shape(name))) for name in sorted(reader.names())}


def trainer_state(folder: Path) -> dict[str, Any]:
    return json.loads((folder / 'state.json').read_text())['trainer']


def every_pair(folder: Path, names: list[str] | None = None) -> dict[tuple[str, str], str]:
    """Returns {(first, second): cell}; a cell that begins with FAILED describes the difference."""
    names = names or NAMES
    legs: dict[str, Leg] = {}
    for a in sorted(names, key=lambda name: LAYOUTS[name][1]):  # legs of the same world size share their processes
        begin = Leg(layout=a, until=HALF, total=TOTAL, target=folder / a)
        legs |= {a: begin, f'{a} straight': replace(begin, until=TOTAL, target=folder / f'{a} straight')}
    seconds = [*names, *([BF16_REFERENCE] if GEMINI in names else [])]
    for b in sorted(seconds, key=lambda name: LAYOUTS[name][1]):
        for a in names:
            target = folder / f'{a} to {b}'
            legs[target.name] = Leg(layout=b, until=TOTAL, total=TOTAL, source=folder / a, target=target)
    logs = dict(zip(legs, run_legs(list(legs.values())), strict=True))
    return {(a, b): _cell(folder, logs, a, b) for a in names for b in names}


def _cell(folder: Path, logs: dict[str, Log], a: str, b: str) -> str:
    name = f'{a} to {b}'
    if a == b:
        straight = logs[f'{a} straight']
        same_numbers = logs[a].metrics + logs[name].metrics == straight.metrics
        different = differing(folder / f'{a} straight', folder / name)
        return 'bits' if same_numbers and not different else f'FAILED: {different[:3] or "metrics"}'
    if b == GEMINI:
        return _compared(folder, logs, f'{a} to {BF16_REFERENCE}', name, 0, BF16)
    if a == GEMINI:
        return 'itself' if b == 'naive' else _compared(folder, logs, f'{a} to naive', name, 0, FP32)
    return _compared(folder, logs, 'naive straight', name, HALF, FP32)


def _compared(folder: Path, logs: dict[str, Log], want: str, got: str, first: int, tolerance: Tolerance) -> str:
    try:
        report = compare_logs(logs[want], logs[got], first=first, tolerance=tolerance)
        if report is not None:
            text = 'edge, ' + (re.match(r'phase \d+', report) or [''])[0]
        else:
            steps = (TOTAL - (0 if first else HALF)) * UPDATES_PER_PHASE
            text = f'{compare_weights(folder / want, folder / got, steps=steps, tolerance=tolerance):.0e}'
    except AssertionError as error:
        return f'FAILED: {str(error).splitlines()[0]}'
    return f'*{text}*' if tolerance is BF16 else text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', type=Path, default=ROOT / 'docs' / 'results' / 'layouts.md')
    parser.add_argument('--layouts', nargs='+', choices=NAMES, default=NAMES)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix='layouts-') as folder:
        cells = every_pair(Path(folder), args.layouts)
    rows = [
        '| began under ↓, resumed under → | ' + ' | '.join(args.layouts) + ' |',
        '|---' * (len(args.layouts) + 1) + '|',
    ]
    rows += [f'| {a} | ' + ' | '.join(cells[a, b] for b in args.layouts) + ' |' for a in args.layouts]
    table = '\n'.join(rows)
    page, parts = args.out.read_text(), r'(<!-- layouts -->\n\n).*(\n\n<!-- end of layouts -->)'
    args.out.write_text(re.sub(parts, lambda m: m[1] + table + m[2], page, flags=re.DOTALL))
    print(table)


if __name__ == '__main__':
    main()
