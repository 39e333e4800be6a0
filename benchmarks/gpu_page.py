"""Tables of the results of gpu_check.py, and their page, docs/gpu.md.

Replaces the table `results` of the page and, in its table of what has run on a GPU, the last cell of each row that
names parts in backticks in its second cell. The files of the calls of a day are one table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import GIB, markdown, write_page

Record = Mapping[str, Any]


def lines_of(head: str, rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a table and an empty line, or nothing without rows."""
    return [markdown(head, rows), ''] if rows else []


def bytes_of(size: float | None) -> str:
    return '' if size is None else f'{size / GIB:.2f} GiB'


def with_result(content: Record, function: str) -> list[tuple[str, Record]]:
    """Returns (name, numbers) of the parts of a function that wrote numbers."""
    found = [(p['name'], p.get('result')) for p in content['parts'] if p.get('function') == function]
    return [(name, result) for name, result in found if isinstance(result, dict)]


# ---------------------------------------------------------------------- what the numbers decide


def _speedup(old: str, new: str, *keys: str) -> Callable[[Record], float | None]:
    """Returns a function of a part's result: the number `old` divided by `new`, within the entries `keys`."""

    def ratio(result: Record) -> float | None:
        for key in keys:
            result = result.get(key, {})
        return result[old] / result[new] if old in result and new in result else None

    return ratio


def _of_ways(result: Record) -> float | None:
    rates = {n: w['tokens_per_s'] for n, w in result.get('ways', {}).items() if 'tokens_per_s' in w}
    others = [rate for name, rate in rates.items() if not name.startswith('compiled')]
    return rates['compiled'] / max(others) if 'compiled' in rates and others else None


def _of_heads(old: str, new: str) -> Callable[[Record], float | None]:
    def ratio(result: Record) -> float | None:
        return _speedup(old, new)({c['case']: c['seconds'] for c in result.get('cases', ())})

    return ratio


DECISIONS: tuple[tuple[str, str, Callable[[Record], float | None], float, bool], ...] = (
    ('norms, rotary and SwiGLU compiled: `LocalEngine(fixed_steps=)`', 'decode-ways', _of_ways, 1.15, False),
    ('draws in two levels: `inverse_cdf`', 'sampler', _speedup('one_level_ms', 'two_levels_ms', '256'), 1.0, True),
    ("the fused head: `logprob_kernel='auto'`", 'logprobs', _of_heads('plain', 'fused'), 1.0, True),
    (
        "liger's head where it is installed: `logprob_kernel='auto'`",
        'logprobs',
        _of_heads('fused', 'liger'),
        1.15,
        False,
    ),
    (
        'blocks compiled for learning: `compile_blocks`',
        'compiled-blocks',
        _speedup('plain_s', 'compiled_s'),
        1.15,
        False,
    ),
)
"""what is faster, the part that measures it, how many times as fast by its result, from how many times on it is the
default on CUDA, and whether it is"""


def decisions(parts: Sequence[Record]) -> list[dict[str, Any]]:
    """Returns the defaults that the measured parts decide: which, times as fast, from when on, whether it pays and
    whether it is the default."""
    results = {p['name']: p['result'] for p in parts if isinstance(p.get('result'), dict)}
    found = []
    for what, name, ratio, least, default in DECISIONS:
        times = ratio(results[name]) if name in results else None
        if times is not None:
            found.append({'what': what, 'times': times, 'least': least, 'pays': times >= least, 'default': default})
    return found


PUBLISHED = (
    (
        'learn-16k',
        '0.6B, one sequence of 16,384 tokens, recomputed blocks, one H100',
        '[prime-rl](https://github.com/PrimeIntellect-ai/prime-rl/tree/main/benchmarks): MFU 11.1 %, 12.5 GiB '
        '(26.8 % at 65,536 tokens)',
        lambda r: f'MFU {r["learn"]["mfu_of_h100"]:.1%}, {bytes_of(r["learn"]["peak_bytes"])}',
    ),
    (
        'ppo-step',
        'PPO step of 0.5B, 256 prompts of 105 + 239 tokens, critic and reference, one GPU',
        "[verl's quickstart](https://verl.readthedocs.io/en/latest/start/quickstart.html): 67.7 s (generating 21.5, reference "
        '4.4, values 5.8, learning 36.0); its card is not named',
        lambda r: f'{r["step_s"]:.1f} s (collecting {r["rounds"][-1]["collect_s"]:.1f})',
    ),
    (
        'trunk-7b',
        'tokens of a sequence on a 4-bit trunk of 7 to 8B in 16 GB',
        '[Unsloth](https://unsloth.ai/docs/basics/unsloth-benchmarks): 40,724 in SFT of one sequence; 78,475 in 24 GB, '
        '342,733 in 80 GB',
        lambda r: f'PPO at {r["prompt"] + r["new"]} tokens: {bytes_of(r["peak"])}' if r.get('peak') else '',
    ),
)
"""part, what it measures, what others published, its words"""


# ---------------------------------------------------------------------- summary of a part


def outcome(record: Record) -> str:
    """Returns the outcome of a part in a few words."""
    result = record.get('result')
    words = _words(record, result) if isinstance(result, dict) else ''
    if record['status'] == 'passed':
        return words
    return ', '.join(w for w in (record['status'], record.get('reason', ''), words) if w)


def _words(record: Record, result: Record) -> str:
    function = record['function']
    if function == 'tests':
        return f'{result["passed"]} passed, {result["failures"] + result["errors"]} failed, {result["skipped"]} skipped'
    if function == 'device':
        peaks = ', '.join(f'{name} {value:.0f}' for name, value in result.get('matmul_tflops', {}).items())
        return f'matrix products: {peaks} TFLOPS'
    if function == 'decode' and 'times' in result:
        times = ', '.join(f'{value:.1f} times {name}' for name, value in result['times'].items())
        return f'{result["engine"]["tokens_per_s"]:.0f} tokens/s; of `model.generate` {times}'
    if function == 'sampler':
        return ', '.join(
            f'{n} rows: {r["draw_ms"]:.2f} ms a draw'
            for n, r in result.items()
            if isinstance(r, dict) and 'draw_ms' in r
        )
    if function == 'step' and 'step_s' in result:
        return f'{result["step_s"]:.1f} s a PPO step of {result["sequences"]} sequences'
    if function == 'kernels':
        learn, launches = result['learn'], {n: t['launches'] for n, t in result.get('decode', {}).items()}
        steps = ''.join(f', {number:.0f} kernels a decode step ({name})' for name, number in launches.items())
        return f'learning at {learn["share_of_peak"]:.0%} of the matrix product, {learn["kernels"]["launches"]:.0f} kernels{steps}'
    if function == 'decode_vllm':
        rates = {name: r['tokens_per_s'] for name, r in result.items() if 'tokens_per_s' in r}
        return ', '.join(f'{name} {rate:.0f} tokens/s' for name, rate in rates.items())
    if function == 'decode_ways':
        rates = {name: way['tokens_per_s'] for name, way in result.get('ways', {}).items() if 'tokens_per_s' in way}
        return ', '.join(f'{name} {rate:.0f}' for name, rate in rates.items()) + ' tokens/s'
    if function == 'blocks' and 'plain_s' in result:
        return f'compiled {result["plain_s"] / result["compiled_s"]:.2f} times as fast'
    if function == 'ppo' and 'share_of_peak' in result:
        memory, error = result['memory'], result['memory']['planner_error']
        planned = '' if error is None else f', planned {error:+.0%}'
        return f'{result["rung"]}: learn at {result["share_of_peak"]["learn"]:.0%} of the matrix product; {bytes_of(memory["peak"])}{planned}'
    if function == 'trunk' and result.get('peak'):
        return f'peak {bytes_of(result["peak"])}, planned {bytes_of(result["planned_peak"])}'
    if function == 'capacity':
        return ', '.join(
            f'{row["cap"] / GIB:g} GiB {row["option"]}: {row["rung"]}' for row in result['rows'] if row.get('rung')
        )
    if function == 'peer':
        ratios = {kind: case['ratio_wall']['median'] for kind, case in result.get('cases', {}).items()}
        return ', '.join(f'{kind} {ratio:.1f} times' for kind, ratio in ratios.items())
    return ''


# ---------------------------------------------------------------------- tables


def table(content: Record) -> str:
    """Returns the tables of a run."""
    machine = content.get('machine') or {}
    what = f'{content["device"]}, torch {machine.get("torch")}, transformers {machine.get("transformers")}, {content["date"]}'
    took = f'{content["wall_s"]:.0f} s of {content["budget_s"]:.0f}, the first {content["start_s"]:.0f} for the start'
    lines = [f'{what}: {took}, commit {(content["commit"] or "")[:10]}', '']
    parts = [
        [p['name'], p['status'], f'{p.get("seconds", 0):.0f} / {p.get("budget_s", 0)}', outcome(p)]
        for p in content['parts']
    ]
    lines += lines_of('part | status | s / budget | what came out', parts)
    for make in (
        _failed_tests,
        _decided,
        _published,
        _decode,
        _ppo,
        _peers,
        _memory,
        _capacity,
        _ways,
        _logprobs,
        _blocks,
        _kernels,
        _watched,
    ):
        lines += make(content)
    return '\n'.join(lines).strip() + '\n'


def _failed_tests(content: Record) -> list[str]:
    results = [p['result'] for p in content['parts'] if p['name'] == 'tests' and isinstance(p.get('result'), dict)]
    return lines_of('failed tests', [[f'`{name}`'] for result in results for name in result.get('failed', ())])


def _decided(content: Record) -> list[str]:
    rows = [
        [d['what'], f'{d["times"]:.2f}', f'{d["least"]:g}', *('yes' if d[k] else 'no' for k in ('pays', 'default'))]
        for d in content['decisions']
    ]
    return lines_of('default on CUDA | times as fast | from | pays | is the default', rows)


def _published(content: Record) -> list[str]:
    results = {p['name']: p['result'] for p in content['parts'] if p['status'] == 'passed' and p.get('result')}
    rows = [[what, theirs, words(results[name])] for name, what, theirs, words in PUBLISHED if name in results]
    return lines_of('what | published | here', rows)


def _kernels(content: Record) -> list[str]:
    lines = []
    for name, r in with_result(content, 'kernels'):
        learn = r['learn']
        memory = f'held {bytes_of(learn["held_bytes"])}, peak {bytes_of(learn["peak_bytes"])}'
        copies = ' and '.join(f'{ms:.0f}' for ms in learn['copy_ms'])
        head = (
            f'{name}, {learn["rows"]} x {learn["tokens"]}: {memory}, step {learn["step_ms"]:.0f} ms, copy {copies} ms'
        )
        tables = [(head, learn['kernels']), *((f'{name}, decode {n}', t) for n, t in r.get('decode', {}).items())]
        for what, found in tables:
            rows = [[f'`{kernel[:90]}`', f'{number:.0f}', f'{us:.0f}'] for kernel, number, us in found['top']]
            lines += lines_of(f'{what} | {found["launches"]:.0f} | {found["us"]:.0f} µs', rows)
    return lines


def _watched(content: Record) -> list[str]:
    rows = []
    for part in content['parts']:
        seen = (part.get('result') or {}).get('watched')
        if seen and (seen['warnings'] or seen['attention'] or seen['captures'] or seen['given_up']):
            graphs = f'{seen["captures"]}, {seen["given_up"]} given up, {seen["capture_ms"]:.0f} ms'
            rows.append(
                [part['name'], ', '.join(seen['attention']), graphs, '; '.join(seen['warnings']).replace('|', '/')]
            )
    return lines_of('part | attention of decode | graphs captured | warnings', rows)


def _decode(content: Record) -> list[str]:
    rows = []
    for _, r in with_result(content, 'decode'):
        what = f'{r["model"]}, {r["batch"]} x {r["prompt"]} + {r["new"]}, {r["precision"]}'
        sides = {'local engine, first phase': r.get('first_phase'), 'local engine': r.get('engine')}
        sides |= {f'`model.generate` {kind}, {g["new"]} new tokens': g for kind, g in r.get('generate', {}).items()}
        for side, numbers in sides.items():
            if numbers is not None:
                rows.append([what, side, f'{numbers["tokens_per_s"]:.0f}', f'{numbers["seconds"]:.2f}'])
    for _, r in with_result(content, 'decode_vllm'):
        done = {name: v for name, v in r.items() if 'tokens_per_s' in v}
        rows += [[name, 'vLLM', f'{v["tokens_per_s"]:.0f}', f'{v["seconds"]:.2f}'] for name, v in done.items()]
    return lines_of('generating | by | tokens/s | s', rows)


def _ppo(content: Record) -> list[str]:
    rows = []
    for name, r in with_result(content, 'ppo'):
        for part in ('collect', 'score', 'learn') if 'share_of_peak' in r else ():
            numbers = r['seconds_per_phase'][part], r['tflops_per_device'][part], r['share_of_peak'][part]
            rows.append([name, r['rung'], part, f'{numbers[0]:.2f}', f'{numbers[1]:.1f}', f'{numbers[2]:.1%}'])
    return lines_of('PPO | rung | part | s / phase | TFLOPS | share of the matrix product', rows)


def _peers(content: Record) -> list[str]:
    rows = []
    for name, r in with_result(content, 'peer'):
        for kind, case in r.get('cases', {}).items():
            ratio, ours, theirs = case['ratio_wall'], case['ours'], case['theirs']
            spread = f'{ratio["min"]:.2f} / {ratio["median"]:.2f} / {ratio["max"]:.2f}'
            rows.append([name, kind, f'{ours["wall_s"]:.2f}', f'{theirs["wall_s"]:.2f}', spread])
    return lines_of('PPO update beside TRL | lengths | our s | their s | times its tokens/s, min / median / max', rows)


def _memory(content: Record) -> list[str]:
    rows = [
        [e['run'], bytes_of(e['planned']), bytes_of(e['measured']), f'{e["error"]:+.1%}'] for e in content['planner']
    ]
    return lines_of('peak memory | planned | measured | error of the plan', rows)


def _capacity(content: Record) -> list[str]:
    rows = []
    for _, r in with_result(content, 'capacity'):
        for row in r['rows']:
            stop = row.get('left_out') or f'{row.get("limit_at") or ""}: {row.get("limit") or ""}'
            size = f'{row["parameters"] / 1e6:.0f} M' if row.get('parameters') else ''
            rows.append([f'{row["cap"] / GIB:g} GiB', row['option'], row.get('rung') or '', size, stop])
    return lines_of('capacity | option | largest that trained | parameters | what stopped the next', rows)


def _ways(content: Record) -> list[str]:
    rows = []
    for _, r in with_result(content, 'decode_ways'):
        for name, way in r.get('ways', {}).items():
            if 'tokens_per_s' in way:
                numbers = f'{way["tokens_per_s"]:.0f}', f'{way["first_s"]:.2f}', f'{way["max_logprob_difference"]:.1e}'
                rows.append([name, way['attention'], *numbers])
            else:
                rows.append([name, way.get('not', ''), '', '', ''])
    return lines_of('way to decode | attention | tokens/s | first phase, s | log-probs differ by', rows)


def _logprobs(content: Record) -> list[str]:
    cases = [case for _, r in with_result(content, 'head') for case in r.get('cases', ())]
    rows = [[c['case'], f'{c["tokens"]} x {c["width"]}', f'{c["seconds"]:.4f}', bytes_of(c['bytes'])] for c in cases]
    return lines_of('log-probs | tokens x width | s | peak', rows)


def _blocks(content: Record) -> list[str]:
    rows = [
        [name, f'{r["plain_s"]:.3f}', f'{r["compiled_s"]:.3f}', f'{r["first_call_s"]:.1f}', f'{r["difference"]:.1e}']
        for name, r in with_result(content, 'blocks')
    ]
    return lines_of('compiled blocks | plain, s | compiled, s | first call, s | difference of log-probs', rows)


# ---------------------------------------------------------------------- docs/gpu.md


def newest(folder: Path) -> list[Path]:
    """Returns the files of the latest day and its device, by call."""
    files = {path: json.loads(path.read_text()) for path in sorted(folder.glob('*.json'))}
    if not files:
        raise ValueError(f'{folder} holds no results; make gpu-check writes them where there is a GPU')
    last = max(files, key=lambda path: (files[path]['date'], path.stat().st_mtime))
    same = [p for p, c in files.items() if all(c[key] == files[last][key] for key in ('date', 'device'))]
    return sorted(same, key=lambda path: files[path].get('call', ''))


def fill_page(page: Path, files: Sequence[Path]) -> None:
    """Writes the result files of the calls of a day into the page."""
    contents = []
    for file in files:
        if not file.is_file():
            raise ValueError(f'{file}: there is no such file')
        contents.append(json.loads(file.read_text()))
        if contents[-1]['device_type'] != 'cuda':
            raise ValueError(f'{file} is of a rehearsal on a CPU, which says nothing about a GPU')
    lines = page.read_text().split('\n')
    whole = contents[0] | {'parts': [part for content in contents for part in content['parts']]}
    page.write_text('\n'.join(_row(line, whole) if line.startswith('| ') else line for line in lines))
    write_page(page, results='\n'.join(map(table, contents)))


def _row(line: str, content: Record) -> str:
    cells = [cell.strip() for cell in line.strip().strip('|').split('|')]
    ran = {p['name']: p for p in content['parts'] if p['status'] not in ('left out', 'not reached')}
    found = [ran[name] for name in re.findall(r'`([^`]+)`', cells[1]) if name in ran] if len(cells) == 4 else []
    if not found:
        return line
    came = '; '.join(f'{p["name"]}: {outcome(p) or p["status"]}' for p in found)
    return '| ' + ' | '.join([*cells[:3], f'{content["device"]}, {content["date"]}. {came}']) + ' |'
