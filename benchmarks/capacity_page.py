"""What capacity.py found, for people: a table, and a page for docs/results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chatgpt.plan import show_bytes

ON_A_CPU = """**Measured on a CPU ({device}), not on a GPU.** In place of a device there is a process that may take {cap} of private
memory (RLIMIT_DATA) above what it holds after a phase of a model of 34,000 parameters under the same strategy and option, and before any
other model exists. Host and device are one there, so offloading was not run; the packed weights of CPU decoding count. glibc gives every
freed block above 64 KiB back at once, and oneDNN keeps no kernel that it compiled, so that "peak" is what the run holds: tensors, copies
made inside torch's kernels and gloo, Python objects. The same sweep on a GPU (`--memory 24GiB --host_memory 64GiB --ladder gpt`, with fsdp_cpu, ZeRO and
Gemini offloading) has not been run: [gpu.md](../gpu.md). So nothing here measures the ancestor's claims for a GPU (10.3 times the
model on one, a demo in 1.62 GB)."""
NOTES_ON_A_CPU = """Of ColossalAI's strategies the planner counts, in host memory, which is the same here, the exact fp32 values of weights
that are not trained; of Gemini its chunks (a model below 32 x 2^20 elements is one, whole on every rank, and as large as all of the
model where only adapters are trained), twice, and once more in fp32 as the sum of gradients while there are several micro-batches; of
ZeRO-2 the bucket as autograd made it, flat, as gloo copied it and as it was received. What is left is oneDNN's and Python's own: at
these sizes about 10 MiB in fp32 and 16 to 24 MiB in bf16."""
ON_CUDA = """Measured on one {device}, whose allocator was limited to {cap}. The CUDA context and what else torch's allocator does
not manage come on top."""
WHAT = """A rung of the ladder `{ladder}` (benchmarks/ladders.py) trains when one PPO phase of two passes over {batch} sequences of
{prompt} + {response} tokens ends under the cap. "Parameters" are the actor's (with adapters, and
the frozen copy of a hydra); "x first" compares them with the first row; "peak" is
{peak}; "stopped by" is the limit that the next rung broke."""
BEFORE = """"Before" is `{command}` with a planner that left out chunks, sums and buckets, and with peaks
that held what glibc and oneDNN kept for later."""
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
        cells += [f'{r["parameters"] / 1e6:.1f} M', f'{r["parameters"] / base:.1f}'] if r['parameters'] else ['', '']
        if best is not None:
            cells += [show_bytes(best['peak']), show_bytes(best['planned']) if best['planned'] is not None else '']
        else:
            cells += ['', '']
        cells += [r['limit_at'] or 'end of the ladder', r['limit'] or '']
        if smallest:
            outcome = r['tried'].get(smallest, {})
            cells.append(show_bytes(outcome['peak']) if outcome.get('trained') else 'does not train')
        lines.append('| ' + ' | '.join(cells) + ' |')
    return '\n'.join(lines)


def planner_errors(content: dict[str, Any], strategy: str) -> list[float]:
    """planned / measured - 1 of every rung that trained under a strategy, lowest first."""
    outcomes = [o for r in content['rows'] if r['strategy'] == strategy for o in r['tried'].values()]
    return sorted(
        o['planned'] / o['peak'] - 1 for o in outcomes if o['trained'] and o['planned'] is not None and o['peak'] > 0
    )


def combined(contents: list[dict[str, Any]]) -> dict[str, Any]:
    """One content of several sweeps; of two rows of one strategy and option the later counts.

    Raises:
        ValueError: sweeps of different runs, caps or machines.
    """
    for name in ('memory', 'host_memory', 'device_type', 'ladder', 'settings', 'smallest'):
        if any(c[name] != contents[0][name] for c in contents):
            raise ValueError(f'--report: the files differ in {name}; give those of one sweep')
    if len({(c['machine'] or {}).get('device') for c in contents}) > 1:
        raise ValueError('--report: the files are of different machines; give those of one')
    rows = {(r['strategy'], r['option']): r for c in contents for r in c['rows']}
    strategies = list(dict.fromkeys(strategy for strategy, _ in rows))
    order = [option for strategy in strategies[:1] for s, option in rows if s == strategy]
    ordered = sorted(rows, key=lambda key: (strategies.index(key[0]), order.index(key[1]) if key[1] in order else 99))
    commands = list(dict.fromkeys(line for c in contents for line in c['command'].splitlines()))
    return contents[0] | {'command': '\n'.join(commands), 'rows': [rows[key] for key in ordered]}


def about_the_planner(content: dict[str, Any], before: dict[str, Any] | None = None) -> list[str]:
    """Its error, beside that of an earlier sweep, and where it was wrong about whether a rung fits."""
    head = ['strategy', 'rungs', 'least', 'median', 'greatest']
    head += ['least before', 'median before', 'greatest before'] if before else []
    lines = ['planned / measured - 1 of the peak, of the rungs that trained:', '', '| ' + ' | '.join(head) + ' |']
    lines.append('|---' * len(head) + '|')
    for strategy in dict.fromkeys(r['strategy'] for r in content['rows']):
        cells = [strategy, str(len(planner_errors(content, strategy)))]
        for sweep in (content, before) if before else (content,):
            errors = planner_errors(sweep, strategy)
            cells += [f'{e:+.0%}' for e in (errors[0], errors[len(errors) // 2], errors[-1])] if errors else [''] * 3
        if cells[2]:
            lines.append('| ' + ' | '.join(cells) + ' |')
    if before:
        lines += ['', BEFORE.format(command=before['command'])]
    lines.append('')
    wrong = [
        f'- {r["strategy"]}, {r["option"]}: {"; ".join(r["disagreements"])}'
        for r in content['rows']
        if r['disagreements']
    ]
    if not wrong:
        return [*lines, 'Planner and measurement agree on every rung that was tried.']
    return [*lines, 'Where planner and measurement disagree on whether a rung fits:', '', *wrong]


def failures(content: dict[str, Any]) -> list[str]:
    """Rungs that ended for another reason than memory."""
    found = [
        (r, n, o) for r in content['rows'] for n, o in r['tried'].items() if not o['trained'] and o['limit'] is None
    ]
    if not found:
        return []
    lines = ['', 'Ended for another reason than memory:', '']
    return lines + [
        f'- {r["strategy"]}, {r["option"]}, {n}: {o["message"].strip().splitlines()[-1]}' for r, n, o in found
    ]


def write(path: Path, content: dict[str, Any], before: dict[str, Any] | None = None) -> None:
    """The page."""
    s, device = content['settings'], (content['machine'] or {}).get('device')
    on_cuda, cap = content['device_type'] == 'cuda', show_bytes(content['memory'])
    if content['host_memory']:
        cap += f' (and the host to {show_bytes(content["host_memory"])})'
    what = WHAT.format(
        ladder=content['ladder'],
        batch=s['experience_batch_size'],
        prompt=s['prompt_length'],
        response=s['max_length'] - s['prompt_length'],
        peak="the allocator's" if on_cuda else 'resident memory above the start',
    )
    lines = [
        '# Capacity',
        '',
        '\n\n'.join(f'`{command}`' for command in content['command'].splitlines()),
        '',
        (ON_CUDA if on_cuda else ON_A_CPU).format(device=device, cap=cap),
        '',
        what,
    ]
    names = list(dict.fromkeys(r['option'] for r in content['rows']))
    run = {(r['strategy'], r['option']) for r in content['rows']}
    left_out = [
        f'{strategy} {option}'
        for strategy in {strategy for strategy, _ in run}
        for option in names
        if (strategy, option) not in run
    ]
    if left_out:
        lines += ['', f'Not run: {", ".join(sorted(left_out))}.']
    lines += ['', table(content), '', OPTIONS, '', *about_the_planner(content, before), *failures(content)]
    if not on_cuda and any(r['strategy'].startswith('colossalai') for r in content['rows']):
        lines += ['', NOTES_ON_A_CPU]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('\n'.join(lines) + '\n')
