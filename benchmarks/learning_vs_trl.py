"""Compares learning from a reward in TRL and this library: held-out score against CPU seconds, at the best of nine
settings of each.

    python benchmarks/learning_vs_trl.py sums --start FOLDER      # of SmolLM2: examples/real_model/model.py
    python benchmarks/learning_vs_trl.py sentiment --start FOLDER --prompts FILE --held_out FILE --classifier FOLDER
    python benchmarks/learning_vs_trl.py additions --start FOLDER --prompts FILE --held_out FILE --rounds 3
    python benchmarks/learning_vs_trl.py --page      # the page of earlier measurements

sums: `sums.py`, after its SFT. sentiment: files, reward model and SFT model of `examples/real_model/sentiment.py
REVIEWS.jsonl --runs`. additions: sums of three digits asked in chat, for speed and memory (--rounds), with the files of
`examples/real_model/additions.py --files FOLDER --digits 3` and a model after two epochs of SFT on them.
Every side starts from the same weights with the same prompts, 64 responses an update (sentiment: 32), with GRPO four
to a prompt, train batches of 16 (additions: 32), two epochs, AdamW, fp32, one thread, no gradient checkpointing. Each
has the same search over learning rate x KL coefficient with seed 0; the best by the last two evaluations runs with
three seeds on other held-out prompts. CPU seconds are those of the whole process from the first update on, without
evaluations, which share their code (`benchmarks/peers/lesson.py`). Runs in `benchmarks/results/learning_vs_trl.json`
are not repeated.

Sides: PPO with a value head here and in TRL 0.11.4, which does not clip gradients, so PPO here also runs without
`max_grad_norm`, at the settings that its search with it chose; PPO with four networks in 1.12.0; GRPO here and in
1.16.0.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import harness
import sums
from vs_peers import PEERS, own_python

from lesson import Lesson  # isort: skip  # vs_peers adds its folder to Python's path

SIDES = {
    'ours_ppo': ('learn_ours.py', '', 'PPO, here'),
    'ours_unclipped': ('learn_ours.py', '', 'PPO, here, gradients not clipped'),
    'ours_one_rate': ('learn_ours.py', '', 'PPO, here, head at the rate of the policy'),
    'trl_classic': ('learn_trl_classic.py', 'trl_classic', 'PPO, TRL 0.11.4'),
    'trl_ppo': ('learn_trl_ppo.py', 'trl_ppo', 'PPO, TRL 1.12.0'),
    'ours_grpo': ('learn_ours.py', '', 'GRPO, here'),
    'trl_now': ('learn_trl_now.py', 'trl_now', 'GRPO, TRL 1.16.0'),
}
"""side -> worker, environment of a peer, name on the page"""
SEARCHED = {'ours_unclipped': 'ours_ppo'}
"""side -> another one, whose search it takes its settings from"""
RIVALS: dict[str, tuple[str, ...]] = {
    'trl_classic': ('ours_unclipped', 'ours_ppo', 'ours_one_rate'),  # it does not clip gradients
    'trl_ppo': ('ours_ppo', 'ours_one_rate'),
    'trl_now': ('ours_grpo',),
}
"""side of a peer -> sides here, of which the first that was run is compared with it"""
RATES, KLS, SEEDS = (3e-6, 1e-5, 3e-5), (0.0, 0.02, 0.1), (1, 2, 3)
NEW_TOKENS = {'additions': 16, 'sentiment': 12, 'sums': sums.NEW_TOKENS}
EVALUATIONS = {'additions': 8, 'sentiment': 3, 'sums': 8}
"""evaluations of a run of the comparison, after the initial one"""
SPEED = {'lr': 1e-5, 'kl_coef': 0.05, 'cpu_seconds': 100.0, 'every': 1e9}
"""settings of a run that measures speed; no run of the search has this KL coefficient"""
RECORDS = 'learning_vs_trl.json'


def write_task(start: str, prompts: Path, held_out: Path, folder: Path) -> dict[str, str]:
    """Writes files of formatted prompts: for learning, for the search (100) and for the comparison."""
    from transformers import AutoTokenizer

    folder.mkdir(parents=True, exist_ok=True)
    words = AutoTokenizer.from_pretrained(start)
    found, kept = ([json.loads(line) for line in path.read_text().splitlines()] for path in (prompts, held_out))
    for row in (*found, *kept):
        turns = row.pop('prompt')
        chat = {'tokenize': False, 'add_generation_prompt': True}
        row['text'] = turns if isinstance(turns, str) else words.apply_chat_template(turns, **chat)
    cuts = {'search': found[:100], 'held_out': kept, 'prompts': found[100:]}
    for name, rows in cuts.items():
        (folder / f'{name}.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return {name: str(folder / f'{name}.jsonl') for name in cuts}


def write_sums(pretrain: str, folder: Path) -> tuple[str, dict[str, str]]:
    """Writes the model after SFT, once, and the files of prompts. Returns the folder of the model, and the files."""
    from transformers import AutoTokenizer

    folder.mkdir(parents=True, exist_ok=True)
    start = folder / 'start' / Path(pretrain).name
    if not start.is_dir():
        part = folder / 'start.part'  # renamed when complete
        start.parent.mkdir(exist_ok=True)
        sums.taught(pretrain, 'fp32').float().save_pretrained(part)
        AutoTokenizer.from_pretrained(pretrain).save_pretrained(part)
        part.rename(start)
    held_out, _, asked = sums.questions(pretrain)
    cuts = {'search': held_out[:100], 'held_out': held_out[100:], 'prompts': asked}
    for name, prompts in cuts.items():
        rows = [{'text': prompt.text, 'answer': prompt.columns['answer']} for prompt in prompts]
        (folder / f'{name}.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return str(start), {name: str(folder / f'{name}.jsonl') for name in cuts}


def run(lesson: Lesson, work: Path) -> dict[str, Any]:
    """Runs a lesson in its own process and environment, and returns its record."""
    script, peer, _ = SIDES[lesson.side]
    python = own_python(peer, work) if peer else sys.executable
    env = os.environ | {'OMP_NUM_THREADS': '1', 'HF_HUB_OFFLINE': '1', 'TOKENIZERS_PARALLELISM': 'false'}
    env |= {'TRL_EXPERIMENTAL_SILENCE': '1', 'PYTHONPATH': os.pathsep.join(map(str, (PEERS, harness.ROOT)))}
    out = work / 'logs' / f'{lesson.name.replace(" ", "_")}.json'
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.with_suffix('.log').open('w') as sink:
        command = [python, PEERS / script, lesson.to_json(), out]
        subprocess.run(command, env=env, stdout=sink, stderr=sink, check=True, cwd=PEERS)
    record = {name: getattr(lesson, name) for name in ('side', 'lr', 'kl_coef', 'seed', 'cpu_seconds')}
    return {'task': lesson.label, **record, 'curve': json.loads(out.read_text())}


def measure(results: harness.Results, lesson: Lesson, work: Path) -> dict[str, Any]:
    """Returns the record of a run, which runs if there is none."""
    return results.measure(lesson.name, lambda: run(lesson, work), lambda found: f'{final(found):.3f}')


def final(record: dict[str, Any]) -> float:
    """Returns the mean of the last two evaluations."""
    return statistics.mean(point['score'] for point in record['curve'][-2:])


def search(results: harness.Results, lesson: Lesson, work: Path) -> tuple[float, float]:
    """Returns the best learning rate and KL coefficient of nine settings."""
    found = {
        (lr, kl): final(measure(results, replace(lesson, lr=lr, kl_coef=kl), work)) for lr, kl in product(RATES, KLS)
    }
    return max(found, key=lambda setting: found[setting])


def at(curve: Sequence[dict[str, float]], cpu_s: float) -> float:
    """Returns the score at `cpu_s`, interpolated linearly between evaluations."""
    for before, after in zip(curve, curve[1:], strict=False):
        if after['cpu_s'] >= cpu_s:
            part = (cpu_s - before['cpu_s']) / (after['cpu_s'] - before['cpu_s'])
            return before['score'] + part * (after['score'] - before['score'])
    return curve[-1]['score']


def page(results: harness.Results) -> None:
    finals = [r for r in results.values() if r['seed'] in SEEDS and r['kl_coef'] != SPEED['kl_coef']]
    rows, figures = [], {}
    for task in dict.fromkeys(r['task'] for r in finals):
        own = [r for r in finals if r['task'] == task]
        by_side = {side: [r for r in own if r['side'] == side] for side in SIDES}
        end = min(r['curve'][-1]['cpu_s'] for r in own)
        for side, (_, _, name) in SIDES.items():
            if not by_side[side]:
                continue
            scores = [at(r['curve'], end) for r in by_side[side]]
            against = next((ours for ours in RIVALS.get(side, ()) if by_side[ours]), None)
            ahead = ''
            if against and len(by_side[against]) == len(scores):
                ahead = harness.interval([at(r['curve'], end) for r in by_side[against]], scores)
            best = by_side[side][0]
            start = statistics.mean(r['curve'][0]['score'] for r in by_side[side])
            rows.append([task, name, f'{best["lr"]:g}', f'{best["kl_coef"]:g}', len(scores), f'{start:.3f}'])
            halfway = statistics.mean(at(r['curve'], end / 2) for r in by_side[side])
            ends = [r['curve'][-1] for r in by_side[side]]
            cost = statistics.mean(last['cpu_s'] / last['updates'] for last in ends)
            rows[-1] += [f'{halfway:.3f}', harness.mean_and_spread(scores), f'{cost:.0f}', ahead]
        figures[task] = by_side
    head = 'task | side | lr | KL | seeds | before | at half the time | at the end | CPU s per update | ours ahead by'
    harness.write_page('learning_vs_trl.md', scores=harness.markdown(head.split(' | '), rows), speed=speed(results))
    if figures:
        draw(figures)


def speed(results: harness.Results) -> str:
    """Returns the table of CPU seconds per update and peak memory, with ratios within a round."""
    costs: dict[tuple[str, str], list[float]] = {}
    peaks: dict[tuple[str, str], list[float]] = {}
    for record in results.values():
        if record['kl_coef'] == SPEED['kl_coef']:
            last, key = record['curve'][-1], (record['task'], record['side'])
            costs.setdefault(key, []).append(last['cpu_s'] / last['updates'])
            peaks.setdefault(key, []).append(last['peak_gib'])
    rows = []
    for task, side in product(dict.fromkeys(task for task, _ in costs), SIDES):
        key = task, side
        if key not in costs:
            continue
        own = next(((task, ours) for ours in RIVALS.get(side, ()) if (task, ours) in costs), None)
        faster = harness.least_median_greatest(harness.ratios(costs[key], costs[own])) if own else ''
        memory = harness.least_median_greatest(harness.ratios(peaks[own], peaks[key])) if own else ''
        rows.append([task, SIDES[side][2], len(costs[key]), f'{statistics.median(costs[key]):.0f}'])
        rows[-1] += [f'{statistics.median(peaks[key]):.1f}', faster, memory]
    head = ['task', 'side', 'rounds', 'CPU s per update', 'peak GiB', 'theirs / ours, CPU s', 'ours / theirs, peak']
    return harness.markdown(head, rows)


def draw(figures: dict[str, dict[str, list[dict[str, Any]]]]) -> None:
    with harness.figure('learning_vs_trl.png', len(figures)) as axes:
        for axis, (task, sides) in zip(axes, figures.items(), strict=True):
            for number, (side, runs) in enumerate(sides.items()):
                for run in runs:
                    label = SIDES[side][2] if run is runs[0] else None
                    points = [(p['cpu_s'], p['score']) for p in run['curve']]
                    axis.plot(*zip(*points, strict=True), color=f'C{number}', label=label, alpha=0.8)
            axis.set(title=task, xlabel='CPU seconds', ylabel='held-out score')


def main() -> None:
    parser = harness.script_parser(__doc__, page='learning_vs_trl.md')
    parser.add_argument('task', nargs='?', choices=sorted(NEW_TOKENS))
    parser.add_argument('--start', help='folder of the model that every run starts from; sums: before SFT')
    parser.add_argument(
        '--prompts', type=Path, help='JSON lines of `prompt` (text or messages) and, for additions, `answer`'
    )
    parser.add_argument('--held_out', type=Path, help='held-out prompts, in the same format')
    parser.add_argument('--classifier', default='', help='sentiment: a folder of AutoModelForSequenceClassification')
    parser.add_argument('--data', default='', help='name of these files and this model, if a task ran with others')
    parser.add_argument('--sides', nargs='+', choices=list(SIDES), default=list(SIDES))
    parser.add_argument('--search-seconds', type=float, default=120, help='CPU seconds per run of the search')
    parser.add_argument('--seconds', type=float, default=300, help='CPU seconds per run of the comparison')
    parser.add_argument(
        '--rounds', type=int, default=0, help='only measure speed and memory: one run per side and round'
    )
    parser.add_argument('--work-dir', type=Path, default=Path('outputs/peers'), help='environments, prompts and logs')
    args = parser.parse_args()
    if args.page:
        return page(harness.Results(RECORDS))
    given = args.task and args.start and (args.task == 'sums' or (args.prompts and args.held_out))
    if not given or (args.task == 'sentiment' and not args.classifier):
        parser.error(
            'give a task and --start; additions and sentiment also --prompts and --held_out; sentiment --classifier'
        )
    work, results = args.work_dir.resolve(), harness.Results(RECORDS)
    folder = work / f'{args.task} {args.data}'.strip()
    if args.task == 'sums':
        start, files = write_sums(args.start, folder)
    else:
        start, files = args.start, write_task(args.start, args.prompts, args.held_out, folder)
    lessons = [
        Lesson(
            side=side,
            task=args.task,
            start=str(Path(start).resolve()),
            prompts=files['prompts'],
            held_out=files['search'],
            lr=0.0,
            kl_coef=0.0,
            seed=0,
            cpu_seconds=args.search_seconds,
            every=args.search_seconds / 2,
            new_tokens=NEW_TOKENS[args.task],
            train_batch=32 if args.task == 'additions' else 16,
            classifier=args.classifier,
            data=args.data,
        )  # fmt: skip
        for side in args.sides
    ]
    if args.rounds:
        for number, lesson in product(range(args.rounds), lessons):
            measure(results, replace(lesson, seed=number, **SPEED), work)
        return
    for lesson in lessons:
        lr, kl = search(results, replace(lesson, side=SEARCHED.get(lesson.side, lesson.side)), work)
        for seed in SEEDS:
            best = replace(lesson, lr=lr, kl_coef=kl, seed=seed, held_out=files['held_out'])
            measure(results, replace(best, cpu_seconds=args.seconds, every=args.seconds / EVALUATIONS[args.task]), work)


if __name__ == '__main__':
    main()
