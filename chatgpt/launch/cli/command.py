"""The command `chatgpt-rlhf`: its first word is a method to train with, or another subcommand.

    chatgpt-rlhf ppo prompts.jsonl --pretrain gpt2 --reward_fn rewards.py:score
    python -m chatgpt ppo --help

A subcommand is imported when it is called. This module does not import torch.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, NamedTuple

from chatgpt import __version__
from chatgpt.hub import checked_path
from chatgpt.launch.arguments import run_main
from chatgpt.launch.methods import METHODS
from chatgpt.names import hint

NAME = 'chatgpt-rlhf'
ENTRY_POINTS = 'chatgpt.commands'
"""group of entry points by which other distributions add subcommands"""


class Subcommand(NamedTuple):
    module: str
    """name of the module; with `distribution` the name of its entry point"""
    about: str
    main: str = 'main'
    """function of the module that reads `sys.argv` and may return an exit code"""
    parser: str = 'parser'
    """function that returns the parser, for completion; '' if there is nothing to complete"""
    distribution: str = ''
    """distribution that has the module as an entry point of the group `ENTRY_POINTS`; '': this one"""

    @property
    def entry_points(self) -> list[EntryPoint]:
        """Entry points of the subcommand; empty if `distribution` is not installed."""
        return list(entry_points(group=ENTRY_POINTS, name=self.module))

    @property
    def installed(self) -> bool:
        return not self.distribution or bool(self.entry_points)

    def load(self, name: str) -> Any:
        """Returns an object of the module. Raises ValueError if its distribution is not installed."""
        if not self.installed:
            raise ValueError(f'{self.module} is in a package of its own: pip install {self.distribution}')
        module = self.entry_points[0].load() if self.distribution else importlib.import_module(self.module)
        return getattr(module, name)


GROUPS: dict[str, dict[str, Subcommand]] = {
    'use a model': {
        'generate': Subcommand('chatgpt.launch.cli.generate', 'generate responses to one prompt or a file of prompts'),
        'chat': Subcommand(
            'chatgpt.launch.cli.generate', 'talk to a model in the terminal', 'chat_main', 'chat_parser'
        ),
        'evaluate': Subcommand('chatgpt.launch.cli.evaluate', 'score the responses of a model to a file of prompts'),
        'compare': Subcommand('chatgpt.launch.cli.compare', 'let people judge pairs of answers in a browser'),
    },
    'around a run': {
        'init': Subcommand('chatgpt.launch.cli.init', 'write a commented config, data and a reward to start from'),
        'plan': Subcommand('chatgpt.plan.__main__', 'estimate the memory of a run, and whether it fits'),
        'launch': Subcommand('chatgpt.launch.__main__', 'start a script on several processes, with torchrun or on Ray'),
        'sweep': Subcommand('chatgpt.launch.search.__main__', 'search for settings with many runs'),
        'report': Subcommand(
            'chatgpt.launch.cli.report', 'write a page with the charts and samples of one run or several'
        ),
        'doctor': Subcommand('chatgpt.launch.cli.doctor', 'find what is wrong with a run, and what to change'),
        'verify': Subcommand(
            'chatgpt.launch.cli.verify', 'compare two runs to the last bit, and show the first difference'
        ),
        'rollouts': Subcommand('chatgpt.launch.cli.rollouts', 'show the recorded sequences of runs in a browser'),
        'convert': Subcommand('chatgpt.launch.cli.convert', 'convert a data file to another shape'),
        'compat': Subcommand(
            'compat', 'run or check a script written for TRL, trlX, ...', distribution='chatgpt-rlhf-compat'
        ),
        'completion': Subcommand('chatgpt.launch.cli.completion', 'print a script for completion in your shell'),
        'version': Subcommand('', 'print the version', parser=''),
    },
}
SUBCOMMANDS = {name: entry for group in GROUPS.values() for name, entry in group.items()}


def called() -> str:
    """Returns the name by which the user has called the command."""
    return NAME if Path(sys.argv[0]).stem.startswith(NAME) else 'python -m chatgpt'


def overview() -> str:
    width = max(map(len, [*METHODS, *SUBCOMMANDS])) + 2
    groups = {'train': {name: method.about for name, method in METHODS.items()}}
    groups |= {title: {name: entry.about for name, entry in group.items()} for title, group in GROUPS.items()}
    lines = [
        f'usage: {called()} COMMAND ...',
        '',
        'RLHF on Hugging Face models. See COMMAND --help for the options of a command.',
    ]
    for title, commands in groups.items():
        lines += ['', f'{title}:', *(f'  {name:{width}}{about}' for name, about in commands.items())]
    return '\n'.join(
        [*lines, '', 'To train with a method of your own, give module:name or path/to/file.py:name as COMMAND.']
    )


def train(name: str, argv: Sequence[str], prog: str) -> None:
    from chatgpt.launch.config_file import parse_run
    from chatgpt.launch.runs import run_class

    cls, method = run_class(name), METHODS.find(name)
    trial = 'Without data and --pretrain it trains a small model on embedded stories. ' if cls.has_trial else ''
    text = (
        f'{method.about}.\n\n{trial}Under --save_path'
        f'\nit leaves metrics.jsonl, config.yaml, checkpoints/ and {cls.trained}/, a Hugging Face folder with its '
        'tokenizer.'
    )
    settings = parse_run(cls, description=text, positional=method.positional, argv=argv, method=name, prog=prog)
    settings.fill_defaults()
    settings.validate()  # reports mistakes in settings and names before torch is imported
    for model in (settings.base, settings.tokenizer, getattr(settings, 'reward_model', None)):
        if model is not None:
            checked_path(model)
    from chatgpt.launch.recipes import execute

    execute(settings)


def run(words: Sequence[str]) -> int | None:
    """Executes a command line and returns the exit code. Raises ValueError for a word that is no command."""
    name, *rest = words or ['--help']
    prog = f'{called()} {name}'
    asks_help, asks_version = name in ('-h', '--help', 'help'), name in ('version', '--version')
    if len(rest) > asks_help and (asks_help or asks_version):
        raise ValueError(f'{rest[-1]!r} is one word too many')
    if asks_help and rest:
        return run([*rest, '--help'])
    if asks_help:
        print(overview())
    elif asks_version:
        print(f'{NAME} {__version__}')
    elif name in METHODS or ':' in name:
        METHODS.find(name)
        train(name, rest, prog)
    elif name in SUBCOMMANDS:
        sys.argv = [prog, *rest]
        return SUBCOMMANDS[name].load(SUBCOMMANDS[name].main)()
    else:
        raise ValueError(f'{name!r} is no command{hint(name, [*METHODS, *SUBCOMMANDS])} (--help lists what there is)')
    return None


def main() -> None:
    words = sys.argv[1:]
    run_main(lambda: run(words))
