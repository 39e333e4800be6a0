"""Check that two runs are the same to the last bit and show the first difference.

    chatgpt-rlhf verify outputs/one outputs/other

Compares the phases that both runs have: recorded sequences, metrics except perf/, and the tensors and trainer state of
checkpoints (counters, KL coefficient, running moments), under any strategy and number of processes. For each of these
that differs it prints the first phase, number or tensor and element, with both values. The runs need not have ended,
nor have checkpoints of the same phases. Also prints a SHA-256 of the weights in each run's last checkpoint (see
docs/exact.md).

The exit code is 0 if all is the same, 1 if something differs, and 2 if the runs cannot be compared: they have no phase
in common, or a file is damaged.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from chatgpt.launch.arguments import Parser
from chatgpt.monitor.run_folder.differences import (
    Compared,
    Difference,
    compare_metrics,
    compare_rollouts,
    compare_states,
)
from chatgpt.monitor.run_folder.reading import RunFolder

if TYPE_CHECKING:
    from chatgpt.strategies.checkpoint import CheckpointReader

CHECKPOINTS = 'checkpoints'


def parser() -> Parser:
    out = Parser(description=__doc__, usage='%(prog)s RUN RUN')
    out.add_argument('runs', nargs=2, metavar='RUN', help='run folder, with metrics.jsonl')
    return out


def main() -> int:
    args = parser().parse_args(sys.argv[1:])
    a, b = (RunFolder(path) for path in args.runs)
    for run in (a, b):
        print(f'{run.path}: {_told(run)}')
    found = compare(a, b)
    if not any(part.phases for part in found.values()):
        raise ValueError(
            f'{a.path} and {b.path} have no phase in common, in metrics.jsonl, rollouts/ or {CHECKPOINTS}/: give two '
            'runs of which each has finished a phase'
        )
    compared = ', '.join(f'{part.phases} phase{"s" * (part.phases != 1)} of {kind}' for kind, part in found.items())
    differences = [part.difference for part in found.values() if part.difference is not None]
    if not differences:
        print(f'the same: {compared} compared')
        return 0
    print(f'different: {compared} compared, and they differ in')
    # In a phase sequences come before metrics and weights, so that a cause is above its effects.
    for difference in sorted(differences, key=lambda p: p.phase):
        print(f'  {difference}')
    return 1


def compare(a: RunFolder, b: RunFolder) -> dict[str, Compared]:
    """Compares two runs, by kind of data, in the order in which a phase writes it."""
    return {
        'rollouts': compare_rollouts(a, b),
        'metrics': compare_metrics(a, b),
        'weights': compare_saved(a, b, _weights),
        'state': compare_saved(a, b, lambda n, *both: compare_states(n, *(part.json()['trainer'] for part in both))),
    }


def compare_saved(
    a: RunFolder, b: RunFolder, compare_phase: Callable[[int, CheckpointReader, CheckpointReader], Difference | None]
) -> Compared:
    """Compares the checkpoints of the phases that both runs have."""
    from chatgpt.strategies.checkpoint import CheckpointReader, step_folder

    common = sorted(set(_saved(a)) & set(_saved(b)))
    for phase in common:
        with (
            CheckpointReader(step_folder(a.path / CHECKPOINTS, phase)) as one,
            CheckpointReader(step_folder(b.path / CHECKPOINTS, phase)) as other,
        ):
            if (difference := compare_phase(phase, one, other)) is not None:
                return Compared(len(common), difference)
    return Compared(len(common), None)


def _weights(phase: int, one: CheckpointReader, other: CheckpointReader) -> Difference | None:
    from chatgpt.strategies.checkpoint.parting import compare_checkpoints

    difference = compare_checkpoints(one, other)
    if difference is None:
        return None
    element = '' if difference.element is None else str(list(difference.element))
    more = f', and {difference.elements - 1} more of its elements' if difference.elements > 1 else ''
    more += f', in {difference.tensors} tensors' if difference.tensors > 1 else ''
    return Difference(phase, 'weights', difference.tensor + element, difference.values, more)


def _saved(run: RunFolder) -> list[int]:
    from chatgpt.strategies.checkpoint import list_checkpoints, step_of

    return [step for path in list_checkpoints(run.path / CHECKPOINTS) if (step := step_of(path)) is not None]


def hash_of(run: RunFolder) -> tuple[int, str] | None:
    """Returns phase and SHA-256 of the weights in the run's last checkpoint; None without a checkpoint."""
    from chatgpt.strategies.checkpoint import CheckpointReader, step_folder
    from chatgpt.strategies.checkpoint.parting import weights_hash

    saved = _saved(run)
    if not saved:
        return None
    with CheckpointReader(step_folder(run.path / CHECKPOINTS, saved[-1])) as reader:
        return saved[-1], weights_hash(reader)


def _told(run: RunFolder) -> str:
    phases = f'{run.phase} phase{"s" * (run.phase != 1)}'
    found = hash_of(run)
    return f'{phases}, ' + (
        'no checkpoint' if found is None else f'weights after phase {found[0]} have SHA-256 {found[1]}'
    )
