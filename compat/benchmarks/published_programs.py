"""Published programs in the old systems' own environments and here: the numbers that they log, side by side.

    python compat/benchmarks/published_programs.py --trl CLONE --trlx CLONE [--only NAME ...]     # git clones of both
    python compat/benchmarks/published_programs.py --page                                         # writes the table only

The programs are taken byte for byte from the clones, by commit and path. Each runs in an environment of its system, made
on first use (`ENVIRONMENTS`), and through `chatgpt_compat` here, in a folder with the same models and data
(`peers/programs_data.py`), with the same arguments. `peers/programs_run.py` notes what it logs.

Programs without sampling see all rows in each optimizer step, so that their order does not matter, and are compared line
by line. The others run with several seeds, and the mean over a run is compared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CORE = HERE.parents[1] / 'benchmarks'
sys.path[:0] = [str(HERE / 'peers'), str(CORE), str(CORE / 'peers')]

import harness  # noqa: E402
from programs_data import dialogues, save_models, save_walker, sentences, turns, workspace  # noqa: E402
from vs_peers import ENVIRONMENTS, own_python  # noqa: E402

RESULTS = HERE / 'results' / 'published_programs.json'
ENVIRONMENTS |= {
    'TRL 0.11.4': [
        *('trl==0.11.4', 'transformers==4.45.2', 'accelerate==1.1.1', 'peft==0.13.2', 'datasets==2.21.0'),
        *('rich', 'numpy<2', 'pyarrow==17.0.0'),
    ],
    'TRL 0.7.11': [
        *('trl==0.7.11', 'transformers==4.36.2', 'accelerate==0.25.0', 'peft==0.7.1', 'datasets==2.16.1'),
        *('rich', 'numpy<2', 'pyarrow==17.0.0'),
    ],
    'trlX 0.7': [
        *(
            'transformers==4.32.0',
            'accelerate==0.22.0',
            'peft==0.5.0',
            'datasets==2.14.7',
            'rich',
            'numpy<2',
            'pyarrow==17.0.0',
        ),
    ],
}
COMMITS = {'TRL 0.11.4': '1f8ba929f', 'TRL 0.7.11': '0f13e51ef', 'trlX 0.7': '384b8b24f'}
SEEDS = (1, 2)
Data = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class Program:
    """A published program, and what it is run with.

    Args:
        path: its file in the system's repository.
        arguments: of the command line, for a seed.
        data: rows by 'hub name/split'.
        keys: names of the logged numbers to compare.
        sampled: it samples, so that only means over runs can be compared.
        seeds: of its runs; by default those of `SEEDS`, one without sampling. trlX's random walks have the graph of their
            seed, and the policy that they start from has learned that of 1000.
        commit: if it is not that of the system's version.
    """

    system: str
    path: str
    arguments: Callable[[int], list[str]]
    data: Data = field(default_factory=dict)
    keys: Sequence[str] = ()
    sampled: bool = False
    commit: str = ''
    seeds: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return f'{self.system}, {self.path}'


FULL = '--per_device_train_batch_size 16 --per_device_eval_batch_size 16 --logging_steps 1 --learning_rate 1e-3'
FULL += ' --report_to none --output_dir out --save_strategy no --num_train_epochs 8'
CLASSIC = '--model_name tiny --batch_size 32 --mini_batch_size 16 --learning_rate 1e-3'
CLASSIC += ' --query_dataset imdb --reward_model sentiment-analysis:lvwerra/distilbert-imdb'
LATER = '--output_dir out --report_to none --save_strategy no --per_device_train_batch_size 32 --learning_rate 1e-3'
LATER += ' --total_episodes 256 --response_length 16 --model_name_or_path tiny --sft_model_path tiny'
LATER += ' --reward_model_path rm --max_grad_norm 0 --num_ppo_epochs 2 --num_sample_generations 0 --logging_steps 1'
PAIRS = dialogues(32)
TEXTS = {'texts/train': sentences(16, 96), 'texts/test': sentences(16, 96, 1)}
FILMS = {'imdb/train': sentences(256, 240)}
PROMPTS = [{'prompt': row['text'][:16]} for row in sentences(340, 32)]
DESCRIPTIVE = {'trl-internal-testing/descriptiveness-sentiment-trl-style/data/descriptiveness-00000-of-00001': PROMPTS}
HH = {'Anthropic/hh-rlhf/train': PAIRS[:16], 'Anthropic/hh-rlhf/test': PAIRS[16:]}
SPLIT = {'pairs/train': turns(PAIRS[:16]), 'pairs/test': turns(PAIRS[16:])}
PREFERENCE = ('loss', 'rewards/chosen', 'rewards/rejected', 'rewards/accuracies', 'eval_loss', 'eval_rewards/margins')


def words(text: str, seed: str = '--seed') -> Callable[[int], list[str]]:
    return lambda number: [*text.split(), seed, str(number)]


def settings(**values: Any) -> Callable[[int], list[str]]:
    return lambda number: [
        json.dumps({name.replace('__', '.'): v for name, v in values.items()} | {'train.seed': number})
    ]


def trlx(**values: Any) -> Callable[[int], list[str]]:
    return settings(train__tracker=None, **values)


PROGRAMS = [
    Program(
        'TRL 0.11.4',
        'examples/scripts/sft.py',
        words(f'{FULL} --model_name_or_path tiny --dataset_name texts --max_seq_length 128 --dataset_text_field text'),
        TEXTS,
        ('loss',),
    ),
    Program(
        'TRL 0.11.4',
        'examples/scripts/dpo.py',
        words(f'{FULL} --model_name_or_path tiny --dataset_name pairs'),
        SPLIT,
        PREFERENCE,
    ),
    Program(
        'TRL 0.11.4',
        'examples/scripts/ppo.py',
        words(CLASSIC),
        FILMS,
        ('env/reward_mean', 'objective/kl', 'ppo/loss/value', 'objective/entropy'),
        sampled=True,
    ),
    Program(
        'TRL 0.11.4',
        'examples/scripts/ppo/ppo.py',
        words(LATER),
        DESCRIPTIVE,
        ('objective/scores', 'objective/kl', 'objective/rlhf_reward', 'loss/value_avg'),
        sampled=True,
    ),
    Program(
        'TRL 0.11.4',
        'examples/scripts/rloo/rloo.py',
        words(LATER),
        DESCRIPTIVE,
        ('objective/scores', 'objective/kl', 'objective/rlhf_reward'),
        sampled=True,
    ),
    Program(
        'TRL 0.7.11',
        'examples/scripts/sft.py',
        words(f'{FULL} --model_name_or_path tiny --dataset_name texts --max_seq_length 97'),
        TEXTS,
        ('loss',),
    ),
    Program(
        'TRL 0.7.11',
        'examples/scripts/dpo.py',
        words(f'{FULL} --model_name_or_path tiny --remove_unused_columns False'),
        HH,
        PREFERENCE,
    ),
    Program(
        'TRL 0.7.11',
        'examples/scripts/reward_modeling.py',
        words(
            f'{FULL} --model_name_or_path rm --remove_unused_columns False --max_length 256 --evaluation_strategy epoch'
        ),
        HH,
        ('loss', 'eval_loss', 'eval_accuracy'),
    ),
    Program(
        'TRL 0.7.11',
        'examples/scripts/ppo.py',
        words(CLASSIC),
        FILMS,
        ('env/reward_mean', 'objective/kl', 'ppo/loss/value', 'objective/entropy'),
        sampled=True,
    ),
    Program(
        'trlX 0.7',
        'examples/randomwalks/ppo_randomwalks.py',
        trlx(train__epochs=4, train__eval_interval=8),
        {},
        ('metrics/optimality', 'rollout_scores/mean', 'losses/value_loss'),
        sampled=True,
        seeds=(1000,),
    ),
    Program(
        'trlX 0.7',
        'examples/randomwalks/ilql_randomwalks.py',
        trlx(train__epochs=2, train__eval_interval=10),
        {},
        (
            'metrics/optimality@beta=0',
            'losses/loss_awac',
            'losses/loss_cql',
            'losses/loss_q',
            'losses/loss_v',
        ),
        sampled=True,
    ),
    Program(
        'trlX 0.7',
        'examples/sft_sentiments.py',
        trlx(
            model__model_path='tiny',
            tokenizer__tokenizer_path='tiny',
            train__batch_size=16,
            train__seq_length=128,
            train__total_steps=8,
            train__epochs=8,
            train__eval_interval=8,
            optimizer__kwargs__lr=1e-3,
            scheduler__kwargs__eta_min=1e-3,
        ),
        {'imdb/train': sentences(32, 96), 'imdb/test': []},
        ('loss',),
    ),
    Program(
        'trlX 0.7',
        'examples/rft_sentiments.py',
        trlx(
            model__model_path='tiny',
            tokenizer__tokenizer_path='tiny',
            train__batch_size=32,
            train__seq_length=128,
            train__total_steps=40,
            train__epochs=8,
            train__eval_interval=8,
            optimizer__kwargs__lr=1e-3,
            scheduler__kwargs__eta_min=1e-3,
        ),
        {'imdb/train': sentences(512, 96)},
        ('reward/mean', 'scores_mean', 'loss'),
        sampled=True,
        commit='3340c2f3a',
    ),
]


# ---------------------------------------------------------------------- running


def checkout(clone: Path, commit: str, paths: Sequence[str], folder: Path) -> Path:
    """Writes files of a commit into a folder, and returns it."""
    if not folder.exists():
        folder.mkdir(parents=True)
        packed = subprocess.run(['git', '-C', clone, 'archive', commit, *paths], check=True, capture_output=True).stdout
        subprocess.run(['tar', 'x', '-C', folder], input=packed, check=True)
    return folder


def source_of(program: Program, clones: dict[str, Path], work: Path) -> Path:
    """Returns a folder with the program, and for trlX its package."""
    commit = program.commit or COMMITS[program.system]
    of_trl = program.system.startswith('TRL')
    paths = ['examples/scripts'] if of_trl else ['examples', 'trlx']
    return checkout(clones['trl' if of_trl else 'trlx'], commit, paths, work / 'programs' / commit)


def run(program: Program, side: str, seed: int, source: Path, work: Path) -> list[dict[str, float]]:
    """Runs a program once, unless its folder has the numbers of a run, and returns what it logged."""
    name = f'{program.path.removesuffix(".py").replace("/", "_")}_{program.system}_{side}_{seed}'.replace(' ', '_')
    out = work / 'runs' / name / 'logged.json'
    if out.exists():  # of a run before
        return json.loads(out.read_text())
    folder = workspace(out.parent, work / 'models', program.data)
    is_trlx = program.system.startswith('trlX')
    python = sys.executable if side == 'ours' else own_python(program.system, work)
    own = [source] if is_trlx else []
    if side == 'ours' and is_trlx:  # the examples, without trlX itself
        own = [work / 'examples' / source.name]
        own[0].mkdir(parents=True, exist_ok=True)
        if not (own[0] / 'examples').exists():
            (own[0] / 'examples').symlink_to(source / 'examples')
    roots = [*own, *([HERE.parent, HERE.parents[1]] if side == 'ours' else [])]
    env = os.environ | {
        'PYTHONPATH': os.pathsep.join(map(str, roots)),
        'HF_HUB_OFFLINE': '1',
        'HF_DATASETS_CACHE': str(folder / 'cache'),
        'OMP_NUM_THREADS': '1',
        'TOKENIZERS_PARALLELISM': 'false',
        'CUDA_VISIBLE_DEVICES': '',
    }
    command = [python, HERE / 'peers' / 'programs_run.py', side, out, source / program.path, *program.arguments(seed)]
    with (folder / 'output.txt').open('w') as output:
        code = subprocess.run(command, cwd=folder, env=env, stdout=output, stderr=subprocess.STDOUT).returncode
    if code:
        raise SystemExit(f'{program.name}: {side} ended with {code}; see {folder / "output.txt"}')
    return json.loads(out.read_text())


def compare(program: Program, theirs: list[Any], ours: list[Any]) -> dict[str, Any]:
    """Returns the numbers of each key by side, one list for each run."""
    found = {}
    for key in program.keys:
        sides = {
            side: [[line[key] for line in logged if key in line] for logged in runs]
            for side, runs in (('theirs', theirs), ('ours', ours))
        }
        if all(all(runs) for runs in sides.values()):
            found[key] = sides
    return found


# ---------------------------------------------------------------------- the page


def rows_of(name: str, numbers: dict[str, Any]) -> list[list[str]]:
    """Returns rows of the table: what is compared, both sides' numbers, the difference, and what it is due to."""
    rows = []
    for key, sides in numbers.items():
        theirs, ours = ([value for run in sides[side] for value in run] for side in ('theirs', 'ours'))
        means = statistics.fmean(theirs), statistics.fmean(ours)
        if is_sampled(name):
            half = 1.96 * (statistics.variance(theirs) / len(theirs) + statistics.variance(ours) / len(ours)) ** 0.5
            shown, difference = [f'{mean:.4g}' for mean in means], f'{means[1] - means[0]:+.2g} ± {half:.2g}'
            what = 'mean of a run'
        elif len(theirs) != len(ours):
            shown, difference, what = [f'{mean:.4f}' for mean in means], f'{abs(means[1] - means[0]):.0e}', 'mean'
        else:
            shown = [' → '.join(f'{value:.4f}' for value in dict.fromkeys((run[0], run[-1]))) for run in (theirs, ours)]
            difference = f'{max(abs(a - b) for a, b in zip(theirs, ours, strict=True)):.0e}'
            what = 'each step' if len(theirs) > 1 else 'once'
        rows.append([f'`{key}`, {what}', *shown, difference])
    return rows


def is_sampled(name: str) -> bool:
    return next(program.sampled for program in PROGRAMS if program.name == name)


def table(results: dict[str, Any]) -> str:
    lines = ['| program | number | there | here | difference |', '|---|---|---|---|---|']
    for name in sorted(results, key=[program.name for program in PROGRAMS].index):
        system, path = name.split(', ', 1)
        for i, row in enumerate(rows_of(name, results[name])):
            lines.append('| ' + ' | '.join([f'{system}, `{path}`' if not i else '', *row]) + ' |')
    return '\n'.join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--trl', type=Path, help='a git clone of huggingface/trl')
    parser.add_argument('--trlx', type=Path, help='a git clone of CarperAI/trlx')
    parser.add_argument('--work-dir', type=Path, default=Path('outputs/peers'), help='environments, models and runs')
    parser.add_argument('--only', nargs='*', help='programs whose name contains one of these')
    parser.add_argument('--page', action='store_true', help='only write the table from the results')
    args = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if not args.page:
        if args.trl is None or args.trlx is None:
            parser.error('--trl and --trlx are needed, git clones of both')
        work = args.work_dir.resolve()
        clones = {'trl': args.trl, 'trlx': args.trlx}
        for program in PROGRAMS:
            if args.only and not any(part in program.name for part in args.only):
                continue
            source, seeds = source_of(program, clones, work), program.seeds or SEEDS[: 2 if program.sampled else 1]
            if not (work / 'models').exists():
                save_models(work / 'models')
            if 'randomwalks' in program.path and not (work / 'models' / 'CarperAI').exists():
                save_walker(work / 'models', source)
            runs = {side: [run(program, side, seed, source, work) for seed in seeds] for side in ('theirs', 'ours')}
            results[program.name] = compare(program, **runs)
            harness.write_json(RESULTS, results)
            print(table({program.name: results[program.name]}), flush=True)
    harness.write_page('published_programs.md', programs=table(results))


if __name__ == '__main__':
    main()
