"""What capacity.py found, for people: a table, and a page for docs/results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chatgpt.plan import show_bytes

ON_A_CPU = """**Measured on a CPU ({device}), not on a GPU.** In place of a device there is a process that may take {cap} of private
memory (RLIMIT_DATA) above what it holds before any model exists. Host and device are one there, so offloading was not run; the packed
weights of CPU decoding count. The same sweep on a GPU (`--memory 24GiB --host_memory 64GiB --ladder gpt`, with fsdp_cpu, ZeRO and
Gemini offloading) has not been run: [gpu.md](../gpu.md). So nothing here measures the ancestor's claims for a GPU (10.3 times the
model on one, a demo in 1.62 GB)."""
ON_CUDA = """Measured on one {device}, whose allocator was limited to {cap}. The CUDA context and what else torch's allocator does
not manage come on top."""
WHAT = """A rung of the ladder `{ladder}` (benchmarks/ladders.py) trains when one PPO phase of two passes over {batch} sequences of
{prompt} + {response} tokens ends under the cap. "Parameters" are the actor's; "x first" compares them with the first row; "peak" is
{peak}; "stopped by" is the limit that the next rung broke."""
OPTIONS = """- full: actor, critic, initial model and reward model of one size; each batch in one forward
- micro: as full, with gradient checkpointing and one sequence per forward; so have the following
- lora: rank 16 on actor and critic; the actor with its adapter off is the reference
- hydra: the top two blocks are trained and their frozen copy is the reference; a value head in place of the critic
- lean: as lora, with a value head in place of the critic and a function in place of the reward model"""


def table(content: dict[str, Any]) -> str:
    """One row per strategy and option. The ratio is to the first row that trained anything."""
    rows, smallest = content['rows'], content['smallest']
    base = next((r['parameters'] for r in rows if r['parameters']), 0)
    head = ['strategy', 'option', 'largest', 'parameters', 'x first', 'peak', 'planned', 'next rung', 'stopped by']
    head += [f'peak of {smallest}'] if smallest else []
    lines = ['| ' + ' | '.join(head) + ' |', '|---' * len(head) + '|']
    for r in rows:
        best = r['tried'].get(r['rung']) if r['rung'] else None
        cells = [r['strategy'], r['option'], r['rung'] or 'none']
        if best is not None:
            planned = show_bytes(best['planned']) if best['planned'] is not None else ''
            cells += [f'{r["parameters"] / 1e6:.1f} M', f'{r["parameters"] / base:.1f}', show_bytes(best['peak']), planned]
        else:
            cells += [''] * 4
        cells += [r['limit_at'] or 'end of the ladder', r['limit'] or '']
        if smallest:
            outcome = r['tried'].get(smallest, {})
            cells.append(show_bytes(outcome['peak']) if outcome.get('trained') else 'does not train')
        lines.append('| ' + ' | '.join(cells) + ' |')
    return '\n'.join(lines)


def planner_errors(content: dict[str, Any]) -> list[float]:
    """planned / measured - 1 of every rung that trained, lowest first."""
    outcomes = [o for r in content['rows'] for o in r['tried'].values() if o['trained'] and o['planned'] is not None]
    return sorted(o['planned'] / o['peak'] - 1 for o in outcomes if o['peak'] > 0)


def about_the_planner(content: dict[str, Any]) -> list[str]:
    """Its error, and where it was wrong about whether a rung fits."""
    errors, lines = planner_errors(content), []
    if errors:
        spread = f'{errors[0]:+.0%} to {errors[-1]:+.0%}, median {errors[len(errors) // 2]:+.0%}'
        lines.append(f'The planner against {len(errors)} runs that trained: planned / measured - 1 is {spread}.')
    wrong = [f'- {r["strategy"]}, {r["option"]}, {text}' for r in content['rows'] for text in r['disagreements']]
    if not wrong:
        return [*lines, 'Planner and measurement agree on every rung that was tried.']
    return [*lines, 'Where planner and measurement disagree on whether a rung fits:', '', *wrong]


def failures(content: dict[str, Any]) -> list[str]:
    """Rungs that ended for another reason than memory."""
    found = [(r, n, o) for r in content['rows'] for n, o in r['tried'].items() if not o['trained'] and o['limit'] is None]
    if not found:
        return []
    lines = ['', 'Ended for another reason than memory:', '']
    return lines + [f'- {r["strategy"]}, {r["option"]}, {n}: {o["message"].strip().splitlines()[-1]}' for r, n, o in found]


def write(path: Path, content: dict[str, Any]) -> None:
    """The page."""
    s, device = content['settings'], (content['machine'] or {}).get('device')
    on_cuda, cap = content['device_type'] == 'cuda', show_bytes(content['memory'])
    if content['host_memory']:
        cap += f' (and the host to {show_bytes(content["host_memory"])})'
    what = WHAT.format(
        ladder=content['ladder'], batch=s['experience_batch_size'], prompt=s['prompt_length'],
        response=s['max_length'] - s['prompt_length'], peak="the allocator's" if on_cuda else 'resident memory above the start',
    )  # fmt: skip
    lines = ['# Capacity', '', f'`{content["command"]}`', '', (ON_CUDA if on_cuda else ON_A_CPU).format(device=device, cap=cap), '', what]
    lines += ['', table(content), '', OPTIONS, '', *about_the_planner(content), *failures(content)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('\n'.join(lines) + '\n')
