"""What makes a shell complete the command's words, flags and values.

    chatgpt-rlhf completion bash > ~/.local/share/bash-completion/completions/chatgpt-rlhf
    chatgpt-rlhf completion zsh > ~/.zfunc/_chatgpt-rlhf
    chatgpt-rlhf completion fish > ~/.config/fish/completions/chatgpt-rlhf.fish

Made by shtab from the very parsers of the command. The script stands by itself: a completion that asked this program at
every key would wait for torch each time. Write it anew after an update.
"""

from __future__ import annotations

import argparse
import re
from typing import Any

from chatgpt.launch.arguments import Parser
from chatgpt.launch.methods import METHODS

SHELLS = ('bash', 'zsh', 'fish', 'tcsh')
PLACES = re.compile(
    r'words|.*(path|file|folder|data|dataset|pretrain|tokenizer|model|weights|input|output|resume|to|prompts|answers)$'
    r'|runs|out|db|export'
)
"""flags whose value may be a file or folder"""


def parser() -> Parser:
    out = Parser(description=__doc__, usage='%(prog)s SHELL')
    out.add_argument('shell', choices=SHELLS)
    return out


def main() -> None:
    shell = parser().parse_args().shell
    import shtab

    print(shtab.complete(whole_parser(), shell))


def whole_parser() -> argparse.ArgumentParser:
    """All subcommands as one tree."""
    from chatgpt.cli.command import NAME, SUBCOMMANDS
    from chatgpt.launch.config_file import run_parser
    from chatgpt.launch.runs import run_class

    root = argparse.ArgumentParser(prog=NAME, add_help=False)
    tree = root.add_subparsers()
    for name, method in METHODS.items():
        of_run = run_parser(run_class(name), method.about, method.positional, method=name, everything=True)
        _add(tree, name, method.about, of_run)
    for name, entry in SUBCOMMANDS.items():
        flags = entry.load(entry.parser)() if entry.parser else argparse.ArgumentParser(add_help=False)
        _add(tree, name, entry.about, flags)
    return root


def _add(tree: Any, name: str, about: str, flags: argparse.ArgumentParser) -> None:
    import shtab

    own = tree.add_parser(name, help=about, parents=[flags], add_help=False)
    for action in own._actions:
        values = re.match(r'{([^}:]+)}', str(action.metavar))  # the one place that words the values of a flag
        if values and not action.choices:
            action.choices = values[1].split(',')
        elif action.dest == 'method' and not action.choices:
            action.choices = list(METHODS)
        elif not action.choices and PLACES.fullmatch(action.dest):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
