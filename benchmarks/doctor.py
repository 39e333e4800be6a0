"""The doctor's findings on good runs and on runs with a planted fault.

    python benchmarks/doctor.py --model stories260K --stories stories.txt --reviews movie_reviews.jsonl \\
        --prompts prompts.jsonl [--seeds 1 2 3] [--runs outputs/doctor] [--only demo faults ...]
    python benchmarks/doctor.py --page [--runs outputs/doctor]

Good runs are the tasks of the other benchmarks, shortened; faults are tiny runs with one fault, and the same runs
without it (`doctor_faults.py`). Runs in --runs are not repeated, and --page only reads them. Writes every finding, word
for word, into docs/results/doctor.md.
"""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from doctor_faults import FAULTS, key_of
from harness import ROOT, markdown, script_parser, timed, write_page

from chatgpt.monitor.doctor import CHECKS, Finding, diagnose
from chatgpt.monitor.run_folder.reading import RunFolder

FAULTY = 'faults'
DONE = 'done'
SEEDS = (1, 2, 3)


def example(script: str, *flags: str) -> None:
    """Runs a script of examples/ in its own process."""
    subprocess.run([sys.executable, str(ROOT / 'examples' / f'{script}.py'), *flags], check=True)


def demo(folder: Path, seed: int, files: Namespace) -> None:
    """Runs the three stages of examples/demo.py in full."""
    example('demo', '--out', str(folder), '--seed', str(seed))


def preference(folder: Path, seed: int, files: Namespace) -> None:
    """Trains SFT and, from its model, four losses as in preference.py."""
    import preference as task

    from chatgpt.launch import demo_world

    tokenizer = demo_world.demo_tokenizer()
    start = task.sft(seed, tokenizer, folder / 'sft')
    for name in ('dpo sigmoid', 'kto', 'orpo', 'simpo'):
        task.optimise(name, start, seed, tokenizer, folder / name.replace(' ', '_'))


def randomwalks(folder: Path, seed: int, files: Namespace) -> None:
    """Trains PPO and GRPO from a model trained on the walks (60 optimizer steps, not 160), and ILQL (120, not 200)."""
    import randomwalks as task

    task.STEPS = 60
    for method in ('ppo', 'grpo'):
        task.run_online(method, 1000, seed, cache=folder, run_dir=folder / method)
    task.run_ilql(1000, seed, run_dir=folder / 'ilql', max_epochs=12)


def stories(folder: Path, seed: int, files: Namespace) -> None:
    """Rewards words of joy on a real model, for 30 phases and not 40."""
    import stories as task

    task.SETTINGS['max_timesteps'] = 30
    task.run(str(files.model), str(files.prompts), 'naive', seed, folder / 'ppo')


def three_stages(folder: Path, seed: int, files: Namespace) -> None:
    """Trains SFT (60 steps, not two epochs), a reward model (a whole epoch), and PPO (20 phases of 40)."""
    from_seed = f'--seed={seed}'
    example(
        'train_sft', str(files.stories), '--pretrain', str(files.model), '--save_path', str(folder / 'sft'),
        '--max_steps=60', '--lr=1e-3', '--lr_schedule=cosine', '--train_batch_size=16', '--max_len=256',
        '--validation_percentage=5', '--log_interval=4', from_seed,
    )  # fmt: skip
    example(
        'train_reward_model', str(files.reviews), '--pretrain', str(folder / 'sft/actor'), '--save_path',
        str(folder / 'rm'), '--max_epochs=1', '--lr=1e-3', '--train_batch_size=32', '--max_len=128',
        '--validation_percentage=10', from_seed,
    )  # fmt: skip
    example(
        'train_prompts', str(files.prompts), '--pretrain', str(folder / 'sft/actor'), '--reward_model',
        str(folder / 'rm/reward_model'), '--save_path', str(folder / 'ppo'), '--experience_batch_size=64',
        '--train_batch_size=32', '--max_epochs=4', '--lr=3e-4', '--critic_lr=1e-3', '--kl_coef=0.05',
        '--max_new_tokens=48', '--max_prompt_tokens=64', 'training_iteration=20', from_seed,
    )  # fmt: skip


GOOD: dict[str, Callable[[Path, int, Namespace], Any]] = {
    task.__name__: task for task in (demo, preference, randomwalks, stories, three_stages)
}


def make_good(folder: Path, name: str, seed: int, files: Namespace) -> None:
    if (folder / DONE).exists():
        return
    _, spent = timed(lambda: GOOD[name](folder, seed, files))
    (folder / DONE).touch()
    print(f'{name} seed {seed}: {spent["wall_s"]:.0f} s', flush=True)


def make_faulty(folder: Path) -> None:
    """Runs each fault, and each run without it once, since several faults share one."""
    made: dict[object, Path] = {}
    for name, fault in FAULTS.items():
        for which, make in (('planted', fault.planted), ('without', fault.without)):
            path = folder / which / name.replace(' ', '_')
            if make in made:
                path.parent.mkdir(parents=True, exist_ok=True)
                if not path.exists():
                    path.symlink_to(made[make].absolute())
            elif not (path / 'metrics.jsonl').exists():
                make(path)
            made.setdefault(make, path)


def found_in(folder: Path) -> tuple[int, list[Finding]]:
    """Returns the number of phases of a run, and its findings, the same as during the run."""
    run = RunFolder(folder)
    return run.phase, diagnose(run)


def findings_text(findings: list[Finding]) -> str:
    return cell('; '.join(f'{f.key} ({f.level}, phase {f.step}: {f.evidence})' for f in findings)) or 'none'


def cell(text: str) -> str:
    return text.replace('|', '\\|')


def good_table(folder: Path) -> tuple[str, int, int]:
    """Returns the table, the number of runs and the number of findings."""
    rows, num_findings = [], 0
    for path in sorted(folder.glob('*/*/*/metrics.jsonl'), key=lambda p: (p.parts[-4], p.parts[-2], p.parts[-3])):
        task, seed, run = path.parts[-4:-1]
        if task in GOOD and (path.parents[1] / DONE).exists():
            phases, findings = found_in(path.parent)
            num_findings += len(findings)
            rows.append([task, run, seed, phases, findings_text(findings)])
    return markdown('task | run | seed | phases | findings', rows), len(rows), num_findings


def fault_table(folder: Path) -> tuple[str, int, int, int]:
    """Returns the table and the numbers of faults, of found faults, and of findings in runs without the fault."""
    rows, num_found, num_false = [], 0, 0
    for name, fault in FAULTS.items():
        key, path = key_of(name), name.replace(' ', '_')
        if not (folder / 'planted' / path / 'metrics.jsonl').exists():
            continue
        seen, without = ([f for f in found_in(folder / w / path)[1] if f.key == key] for w in ('planted', 'without'))
        num_found, num_false = num_found + bool(seen), num_false + bool(without)
        what = cell(f'phase {seen[0].step}: {seen[0].evidence}') if seen else '**not found**'
        rows.append([name, fault.about, what, '**found**' if without else 'silent'])
    return markdown('finding | planted | seen | without', rows), len(rows), num_found, num_false


def fill_page(runs: Path) -> None:
    good, num_runs, num_findings = good_table(runs)
    faults, num_faults, num_found, num_false = fault_table(runs / FAULTY)
    summary = (
        f'{len(CHECKS)} kinds of finding ([doctor.md](../doctor.md)). **{num_found} of {num_faults} planted faults found**, and '
        f'{num_false} of {num_faults} in the same run without the fault. **{num_findings} findings in {num_runs} good runs.**'
    )
    write_page('doctor.md', summary=summary, good=good, faults=faults)


def main() -> None:
    parser = script_parser(__doc__)
    for name in ('model', 'stories', 'reviews', 'prompts'):
        parser.add_argument(f'--{name}', type=Path)
    parser.add_argument('--seeds', type=int, nargs='+', default=list(SEEDS))
    parser.add_argument('--runs', type=Path, default=ROOT / 'outputs' / 'doctor')
    parser.add_argument('--only', nargs='+', choices=[*GOOD, FAULTY], default=[FAULTY, *GOOD])
    parser.add_argument('--page', action='store_true', help='run nothing; write the page from --runs')
    args = parser.parse_args()
    if not args.page:
        if None in (args.model, args.stories, args.reviews, args.prompts):
            parser.error('give --model, --stories, --reviews and --prompts, or --page')
        torch.set_num_threads(1)
        if FAULTY in args.only:
            make_faulty(args.runs / FAULTY)
        for seed in args.seeds:
            for name in (name for name in GOOD if name in args.only):
                make_good(args.runs / name / str(seed), name, seed, args)
    fill_page(args.runs)


if __name__ == '__main__':
    main()
