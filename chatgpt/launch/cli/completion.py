"""Print a script with which your shell completes the command's words, flags and values (made by shtab).

    chatgpt-rlhf completion bash > ~/.local/share/bash-completion/completions/chatgpt-rlhf
    chatgpt-rlhf completion zsh > ~/.zfunc/_chatgpt-rlhf
    chatgpt-rlhf completion fish > ~/.config/fish/completions/chatgpt-rlhf.fish

Repeat this after an update.
"""

from __future__ import annotations

import argparse
import re

from chatgpt.launch.arguments import Parser
from chatgpt.launch.methods import METHODS


def parser() -> Parser:
    out = Parser(description=__doc__, usage='%(prog)s SHELL')
    out.add_argument('shell', choices=('bash', 'zsh', 'fish', 'tcsh'))
    return out


def main() -> None:
    shell = parser().parse_args().shell
    import shtab

    print(shtab.complete(whole_parser(), shell))


def whole_parser() -> argparse.ArgumentParser:
    """Returns one parser with all subcommands. A value without choices completes to files."""
    import shtab

    from chatgpt.launch.cli.command import NAME, SUBCOMMANDS
    from chatgpt.launch.config_file import run_parser
    from chatgpt.launch.runs import run_class

    root = argparse.ArgumentParser(prog=NAME, add_help=False)
    tree = root.add_subparsers()
    parsers = {
        name: (method.about, run_parser(run_class(name), '', method.positional, method=name, everything=True))
        for name, method in METHODS.items()
    }
    for name, entry in SUBCOMMANDS.items():
        if entry.installed:
            parsers[name] = entry.about, entry.load(entry.parser)() if entry.parser else Parser(add_help=False)
    for name, (about, flags) in parsers.items():
        for action in tree.add_parser(name, help=about, parents=[flags], add_help=False)._actions:
            values = re.match(r'{([^}:]+)}', str(action.metavar))  # `metavar_of` writes choices as {a,b}
            if not action.choices and values:
                action.choices = values[1].split(',')
            elif not action.choices and action.dest == 'method':
                action.choices = list(METHODS)
            elif not action.choices and action.nargs != 0:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    return root
