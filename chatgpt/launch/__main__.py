"""Start a script, or a command of chatgpt-rlhf, on several processes, with torchrun or on a Ray cluster.

    python -m chatgpt.launch --num_workers 2 examples/train_prompts.py --strategy ddp
    python -m chatgpt.launch --num_workers 2 sft stories.jsonl --pretrain gpt2 --strategy fsdp
    python -m chatgpt.launch --launcher ray --num_workers 4 --cpus_per_worker 2 --gpus_per_worker 1 \\
        examples/train_sft.py --strategy fsdp
    python -m chatgpt.launch --launcher ray examples/train_prompts.py --config_file run.yaml

Words after the script are its arguments. Without flags here, its settings num_training_workers and resources_per_worker
give the number and resources of workers. See docs/launch.md.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import chatgpt
from chatgpt.launch import torchrun
from chatgpt.launch.arguments import Parser, add_flag, field_docs, hints_of, run_main
from chatgpt.launch.config_values import collected, flat, overrides, read_file, typed, typed_text
from chatgpt.launch.methods import METHODS
from chatgpt.launch.ray_request import RayLaunch
from chatgpt.launch.torchrun import TorchrunLaunch
from chatgpt.names import hint, ours

RAY_FLAGS = ('gpus_per_worker', 'address', 'placement', 'wait_s')
TORCHRUN_FLAGS = ('num_nodes', 'rdzv_endpoint', 'run_id', 'local_addr')
RAY_ONLY: dict[str, Any] = {**dict.fromkeys(RAY_FLAGS), 'env': []}
TORCHRUN_ONLY: dict[str, Any] = dict.fromkeys(TORCHRUN_FLAGS)


def parser() -> Parser:
    out = Parser(prog='python -m chatgpt.launch', description=__doc__)
    add = out.add_argument
    add('--launcher', choices=('torchrun', 'ray'), default='torchrun', help='what starts them (default: torchrun)')
    add(
        '--num_workers',
        type=int,
        help='total number of processes, one per rank (default: num_training_workers of the script, or 1)',
    )
    add(
        '--cpus_per_worker',
        type=float,
        help='CPU cores of a worker, and its threads unless OMP_NUM_THREADS is set (default: 1)',
    )
    add(
        '--max_failures',
        type=int,
        default=3,
        help='number of times that failed workers are replaced before the run stops (default: 3)',
    )
    groups = {
        'ray': (RayLaunch, RAY_FLAGS),
        'torchrun, started with the same command on every node': (TorchrunLaunch, TORCHRUN_FLAGS),
    }
    for title, (launch, names) in groups.items():
        group, docs, hints = out.add_argument_group(title), field_docs(launch), hints_of(launch)
        defaults = {f.name: f.default for f in fields(launch)}  # type: ignore[arg-type]
        for name in names:
            text = docs[name] if defaults[name] is None else f'{docs[name]} (default: {defaults[name]})'
            add_flag(group, name, hints[name], text, None)
    env = 'environment variable for the script; may be given several times'
    add('--env', action='append', default=[], metavar='NAME=VALUE', help=f'{env}; with --launcher ray')
    add('script', help='Python file, or a command of chatgpt-rlhf that trains or generates')
    add('script_args', nargs=argparse.REMAINDER)
    return out


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    args = parser().parse_args(argv)
    args.script, args.script_args = script_of(args.script, args.script_args)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    given = {name: getattr(args, name) for name in (RAY_ONLY | TORCHRUN_ONLY)}
    wrong = TORCHRUN_ONLY if args.launcher == 'ray' else RAY_ONLY
    for name, unset in wrong.items():
        if given.pop(name) != unset:
            raise ValueError(f'--{name} is not for --launcher {args.launcher}')
    options = {name: value for name, value in given.items() if value is not None and name != 'env'}
    options |= {'script': args.script, 'script_args': args.script_args, 'max_failures': args.max_failures}
    options |= workers(args)
    if args.launcher == 'torchrun':
        options.pop('gpus_per_worker', None)  # torchrun assigns no devices: local rank i takes device i
        torchrun.run_on_torchrun(TorchrunLaunch(**options))
    from chatgpt.launch.ray import run_on_ray

    return run_on_ray(
        RayLaunch(**options, variables=variables(args.env), shared_path=peek(args.script_args).get('save_path'))
    )


def script_of(script: str, words: Sequence[str]) -> tuple[str, list[str]]:
    """Returns the file to run and its arguments. For a command of `python -m chatgpt` the file is `__main__.py`.

    Raises:
        ValueError: if `script` is neither a file nor a command; names the nearest command.
    """
    commands = [*METHODS, 'generate', 'evaluate']
    if not Path(script).is_file() and (script in commands or ':' in script):
        return str(Path(chatgpt.__file__).with_name('__main__.py')), [script, *words]
    if not Path(script).exists() and re.fullmatch(r'[\w+-]+', script):
        raise ValueError(f'{script!r} is no file, and no command that trains or generates{hint(script, commands)}')
    return script, list(words)


LAUNCHER_SETTINGS: dict[str, Any] = {
    'num_training_workers': int | None,
    'resources_per_worker': dict[str, float] | None,
    'save_path': str,
}
"""settings of a run that its launcher reads too"""


def peek(argv: Sequence[str]) -> dict[str, Any]:
    """Returns those of `LAUNCHER_SETTINGS` that the command line `argv` of a script, or its config file, gives.

    Raises:
        ValueError: if the config file cannot be read, or a value has another type.
    """
    flags = dict[str, str]()
    for word, following in zip(argv, [*argv[1:], ''], strict=False):
        name, equals, text = word.removeprefix('--').partition('=')
        if word.startswith('--'):
            flags[ours(name, LAUNCHER_SETTINGS)] = text if equals else following
    path = flags.pop('config_file', None)
    # the script may have sections of its own, so other words are not checked
    words = [w for w in argv if ours(w.partition('=')[0].rpartition('.')[2], LAUNCHER_SETTINGS) in LAUNCHER_SETTINGS]
    found = dict[str, Any]()
    for source, entries, read in (
        (f'config_file {path}: ', flat(read_file(path)) if path else (), typed),
        ('command line: ', overrides(words), typed),
        ('', ((f'--{name}', name, text) for name, text in flags.items()), typed_text),
    ):
        found |= collected(entries, LAUNCHER_SETTINGS, source, lambda where, key: None, read)
    return found


def workers(args: argparse.Namespace) -> dict[str, Any]:
    """Returns number and resources of workers, from the flags here or the script's settings.

    Raises:
        ValueError: if both give one, with different values.
    """
    settings = peek(args.script_args)
    resources = settings.get('resources_per_worker') or {}
    for name in resources:
        if name not in ('CPU', 'GPU'):
            raise ValueError(f'resources_per_worker: {name!r} is not known; there are CPU and GPU')
    found = {}
    for name, setting, there in (
        ('num_workers', 'num_training_workers', settings.get('num_training_workers')),
        ('cpus_per_worker', 'resources_per_worker CPU', resources.get('CPU')),
        ('gpus_per_worker', 'resources_per_worker GPU', resources.get('GPU')),
    ):
        here = getattr(args, name)
        if None not in (here, there) and here != there:
            raise ValueError(
                f"--{name} {here:g} and the script's {setting} {there:g} differ; give one, before or after the script"
            )
        if (here, there) != (None, None):
            found[name] = there if here is None else here
    return found


def variables(words: Sequence[str]) -> dict[str, str]:
    for word in words:
        if not re.match(r'[A-Za-z_]\w*=', word):
            raise ValueError(f'--env {word!r} is not NAME=VALUE')
    return dict(word.split('=', 1) for word in words)  # type: ignore[misc]


if __name__ == '__main__':
    run_main(main)
