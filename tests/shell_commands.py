"""The shell commands that the pages print, and a folder with what they take for granted.

A command is a line of an indented or fenced block, or a piece of inline code, that begins with a program of `PROGRAMS`.
`bring` writes tiny stand-ins for the files and models that it names, and `parse` reads it as the program would and
stops there. Left out: running it, and which commands need not run (tests/test_docs_commands.py).
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import re
import runpy
import shlex
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from chatgpt.launch.arguments import Parser

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    *('README.md', 'CONTRIBUTING.md', 'CHANGELOG.md', 'examples/data/README.md'),
    *sorted(str(p.relative_to(ROOT)) for p in (ROOT / 'docs').rglob('*.md')),
]
PROGRAMS = ('chatgpt-rlhf', 'python', 'torchrun', 'make', 'pip', 'ray', 'git', 'cd', 'bash', 'tensorboard')
START = re.compile(rf'(?:\$ )?((?:[A-Z_]+=\S* )*)(?:\S*/bin/)?((?:{"|".join(PROGRAMS)}) .*)', re.DOTALL)
MODELS = ('gpt2', 'NAME_OR_FOLDER', 'MODEL')
"""words of the pages that stand for a model of the reader's"""


class Command(NamedTuple):
    page: str
    text: str
    """without prompt, comment and variables"""
    inline: bool

    @property
    def words(self) -> list[str]:
        """As a shell gives them to the program. Of `[--flag value]` the flag is taken, of `[other words]` nothing."""
        text = re.sub(r'\[(--[^\]]*)\]', r'\1', self.text)
        return shlex.split(re.sub(r"(?<=\s)\[[^\]']*\]", '', text))

    @property
    def is_mention(self) -> bool:
        """In the text and not to be typed: a program's name alone, or with an ellipsis or a <thing> for the rest."""
        program, *rest = self.text.split()
        if not self.inline:
            return False
        if any(word == '...' or re.search('[<|]', word) for word in rest):
            return True
        if program == 'python':
            return (
                rest[:1] == ['-m']
                and len(rest) <= 2 + (rest[1] == 'chatgpt')
                or len(rest) == 1
                and rest[0].startswith(('examples/', 'script'))
            )
        if program == 'torchrun':
            return not any(word == '-m' or word.endswith('.py') for word in rest)
        return program != 'make' and len(rest) == 1


def commands(page: str) -> list[Command]:
    """In the order of the page."""
    text = (ROOT / page).read_text()
    text = re.sub(
        r'^```(?:python|yaml)\n.*?^```', lambda m: '\n' * m[0].count('\n'), text, flags=re.DOTALL | re.MULTILINE
    )
    found, fenced = [], False
    paragraph: list[str] = []

    def end_paragraph() -> Iterator[Command]:
        joined = ' '.join(paragraph)
        paragraph.clear()
        for code in re.findall(r'(?<!`)`([^`]+)`(?!`)', joined):
            if match := START.fullmatch(code):
                yield Command(page, match[2], True)

    for line in [*re.sub(r' *\\\n\s*', ' ', text).split('\n'), '']:
        fenced ^= line.startswith('```')
        if fenced or line.startswith('    '):
            found += end_paragraph()
            for part in re.split(r' → +| && ', line.strip()):
                if match := START.fullmatch(part.strip()):
                    found.append(Command(page, re.sub(r'\s+#.*', '', match[2]), False))
        elif line.strip() and not line.startswith(('|', '- ', '#')):
            paragraph.append(line.strip())
        else:
            found += end_paragraph()
            paragraph.append(line.strip())
    return found


# ---------------------------------------------------------------------- a folder with what commands take for granted


def _lines(rows: list[dict[str, Any]]) -> str:
    return ''.join(json.dumps(row) + '\n' for row in rows)


def _block(page: str, name: str) -> str:
    """The code of a page that begins with the comment `# name`."""
    (code,) = re.findall(rf'```\w+\n(# {re.escape(name)}\n.*?)```', (ROOT / page).read_text(), re.DOTALL)
    return code


def _recipe() -> str:
    """The line that makes a method of one's own a command."""
    (line,) = re.findall(r"METHODS\['rwr'\] = (.+)", (ROOT / 'docs/extend/objective.md').read_text())
    return str(line)


TRL_PROGRAM = """
import torch
from transformers import AutoTokenizer
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer

tokenizer = AutoTokenizer.from_pretrained('model')
model = AutoModelForCausalLMWithValueHead.from_pretrained('model')
trainer = PPOTrainer(PPOConfig(batch_size=2, mini_batch_size=2), model, None, tokenizer)
queries = [tokenizer.encode(text, return_tensors='pt')[0] for text in ('one day', 'a fox')]
responses = trainer.generate(queries, return_prompt=False, max_new_tokens=4)
trainer.step(queries, responses, [torch.tensor(1.0), torch.tensor(0.0)])
"""
RECIPE = """
from functools import partial

from chatgpt.dataset import load_labelled
from chatgpt.launch.methods import Recipe
from chatgpt.trainer import OfflineTrainer


def read(run, inputs):
    train, _ = load_labelled(run.dataset, inputs.tokenizer)
    inputs.train = [(record.sequence, record.label) for record in train]


rwr = {}
"""
WORDS = 'one two three four five six seven eight'.split()


def _files() -> dict[str, Callable[[], str]]:
    """Contents of files that commands name, by name."""
    from chatgpt.cli.init import REWARD

    pairs = [{'prompt': f'a {w}', 'chosen': ' good', 'rejected': ' bad'} for w in WORDS]
    chats = [{'prompt': f'a {w}', 'response': ' good'} for w in WORDS]
    return {
        'prompts.csv': lambda: 'prompt\n' + ''.join(f'a {w}\n' for w in WORDS),
        'prompts.jsonl': lambda: _lines([{'prompt': f'a {w}'} for w in WORDS]),
        'pairs.jsonl': lambda: _lines(pairs),
        'chats.jsonl': lambda: _lines(chats),
        'preferences.jsonl': lambda: _lines(pairs),
        'stories.jsonl': lambda: _lines([{'text': f'a {w}'} for w in WORDS]),
        'data.jsonl': lambda: _lines([{'prompt': f'a {w}', 'response': ' b', 'reward': 1.0} for w in WORDS]),
        'rewards.py': lambda: REWARD,
        'my_rewards.py': lambda: REWARD,
        'guess.py': lambda: _block('docs/environments.md', 'guess.py'),
        'my_method.py': lambda: _block('docs/extend/algorithm.md', 'my_method.py'),
        'my_objective.py': lambda: _block('docs/extend/objective.md', 'my_objective.py') + RECIPE.format(_recipe()),
        'sweep.yaml': lambda: _block('docs/sweep.md', 'sweep.yaml'),
        'run.yaml': lambda: 'lr: 1.0e-5\nsave_path: outputs/of_run_yaml\n',
        'script.py': lambda: TRL_PROGRAM,
        'old.py': lambda: TRL_PROGRAM,
        'hello.py': lambda: TRL_PROGRAM,
        'poem.txt': lambda: 'no Python here\n',
        'train_prompts.py': lambda: (ROOT / 'tests/compat/colossalai/programs/march_prompts.py').read_text(),
        'reward.conf': lambda: (ROOT / 'examples/configs/reward.conf').read_text(),
        'ppo.conf': lambda: (ROOT / 'examples/configs/ppo.conf').read_text(),
    }


def tiny_models(folder: Path) -> Path:
    """A language model that reads bytes, as `folder`/model, and a reward model on its trunk, as `folder`/rm."""
    from chatgpt.nn import AutoRM
    from chatgpt.testing import byte_tokenizer, tiny_causal_lm

    model = tiny_causal_lm('gpt2', vocab_size=259, pad_token_id=256, bos_token_id=257, eos_token_id=258)
    model.save_pretrained(folder / 'model')
    byte_tokenizer().save_pretrained(folder / 'model')
    AutoRM(pretrained=str(folder / 'model')).save_pretrained(folder / 'rm', tokenizer=byte_tokenizer())
    return folder / 'model'


def write_run(folder: Path) -> None:
    """What a PPO run of three phases leaves of numbers."""
    folder.mkdir(parents=True)
    names = ('rollout/score_mean', 'rollout/kl_mean', 'ppo/policy_loss', 'ppo/value_loss', 'perf/total_s')
    rows = [{'step': step} | dict.fromkeys(names, step / 10) for step in (1, 2, 3)]
    (folder / 'metrics.jsonl').write_text(_lines(rows))


def bring(command: Command, folder: Path, model: Path) -> list[str]:
    """The command's words for this folder, and in the folder whatever they name that an earlier command has not left
    there."""
    from chatgpt.cli.init import config_text, example
    from chatgpt.launch.methods import METHODS

    files = _files()
    for name in ('examples', 'benchmarks'):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    for name in ('model', 'rm'):
        if not (folder / name).exists():
            (folder / name).symlink_to(model.with_name(name))
    words = ['model' if word in MODELS else word for word in command.words]
    for word in words:
        name = word.partition('=')[2] if word.startswith('--') and '=' in word else word
        name = re.sub(r'(\.py):\w+$', r'\1', name)
        name = re.sub(r'from (\w+) import .*', r'\1.py', name)
        path = folder / name
        if path.exists():
            continue
        if name in files:
            path.write_text(files[name]())
        elif (ROOT / 'examples' / 'data' / name).is_file():
            shutil.copy(ROOT / 'examples' / 'data' / name, path)
        elif name == 'config.json':
            shutil.copy(model / 'config.json', path)
        elif name.endswith('.yaml') and name.removesuffix('.yaml') in METHODS:  # what `init` writes
            given, own = example(name.removesuffix('.yaml'))
            path.write_text(config_text(name.removesuffix('.yaml'), own, 'chatgpt-rlhf'))
            for file, text in given.items():
                (folder / file).write_text(text)
        elif re.fullmatch(r'outputs/\w+|RUN', name) and {'doctor', 'report'} & set(words):
            write_run(path)
        elif re.fullmatch(r'outputs/\w+/actor', name):
            shutil.copytree(model, path)
    return words


# ---------------------------------------------------------------------- reading a command as its program does


class Parsed(BaseException):
    """Raised where a program would begin to work."""


def parse(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the words as their program does, in this process and in the working directory. A mistake is an
    AssertionError, ValueError or SystemExit(2)."""
    program, *rest = words
    if program == 'chatgpt-rlhf':
        _parse_command(rest, monkeypatch)
    elif program == 'python':
        _parse_python(rest, monkeypatch)
    elif program == 'torchrun':
        from torch.distributed.run import parse_args

        given = parse_args(rest)
        script = ['-m', given.training_script] if given.module else [given.training_script]
        _parse_python([*script, *given.training_script_args], monkeypatch)
    elif program == 'make':
        _parse_make(rest)
    elif program == 'pip':
        _parse_pip(rest)


def _parse_command(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from chatgpt.cli.command import SUBCOMMANDS
    from chatgpt.launch.methods import METHODS

    name, *rest = words
    if name in ('--help', 'version'):
        assert not rest
    elif name == 'launch':
        _parse_launch(rest, monkeypatch)
    elif name in METHODS or ':' in name:
        from chatgpt.launch.config_file import parse_run
        from chatgpt.launch.runs import run_class

        positional = METHODS.find(name).positional
        _or_help(lambda: parse_run(run_class(name), description='', positional=positional, argv=rest, method=name))
    else:
        assert name in SUBCOMMANDS, f'{name!r} is no command'
        entry = SUBCOMMANDS[name]
        _or_help(lambda: entry.load(entry.parser)().parse_args(rest))


def _or_help(read: Callable[[], Any]) -> None:
    """--help and --print_config print, and exit with 0."""
    try:
        read()
    except SystemExit as stop:
        if stop.code:
            raise


def _parse_launch(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from chatgpt.launch.__main__ import parser

    given = parser().parse_args(words)
    if Path(given.script).is_file():
        _parse_script(Path(given.script), given.script_args, monkeypatch)
    else:
        _parse_command([given.script, *given.script_args], monkeypatch)


def _parse_python(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    first, *rest = words
    if first == '-c':
        ast.parse(rest[0])
    elif first != '-m':
        _parse_script(Path(first), rest, monkeypatch)
    elif rest[0] == 'chatgpt':
        _parse_command(rest[1:], monkeypatch)
    elif rest[0] == 'chatgpt.launch':
        _parse_launch(rest[1:], monkeypatch)
    elif rest[0] == 'pip':
        _parse_pip(rest[1:])
    elif rest[0] == 'venv':
        assert len(rest) == 2
    elif rest[0] == 'pytest':
        assert all((ROOT / word).exists() for word in rest[1:] if '/' in word)
    else:
        module = importlib.import_module(
            f'{rest[0]}.__main__' if importlib.util.find_spec(f'{rest[0]}.__main__') else rest[0]
        )
        _or_help(lambda: module.parser().parse_args(rest[1:]))


def _parse_script(path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A script's own reading of its words: one that trains stops before it does so, any other after its parser."""
    assert path.is_file(), f'{path} is not there'
    with monkeypatch.context() as patched:
        patched.syspath_prepend(str(path.resolve().parent))
        patched.setattr(sys, 'argv', [str(path), *words])
        patched.setattr('chatgpt.launch.recipes.execute', _stop)
        if 'parse_run(' not in path.read_text():
            for kind in (argparse.ArgumentParser, Parser):
                patched.setattr(kind, 'parse_args', _stopping(kind.parse_args))
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            try:
                _or_help(lambda: runpy.run_path(str(path), run_name='__main__'))
            except Parsed:
                return
    assert words[-1:] in (['--help'], ['--help-all'], ['--print_config']), f'{path} read nothing'


def _stop(*arguments: Any, **keywords: Any) -> None:
    raise Parsed


def _stopping(read: Callable[..., Any]) -> Callable[..., Any]:
    def parse_args(*arguments: Any, **keywords: Any) -> None:
        read(*arguments, **keywords)
        raise Parsed

    return parse_args


def _parse_make(words: list[str]) -> None:
    text = (ROOT / 'Makefile').read_text()
    for word in words:
        name, equals, _ = word.partition('=')
        pattern = rf'\$\({name}\)' if equals else rf'^{re.escape(name)}:'
        assert re.search(pattern, text, re.MULTILINE), f'the Makefile knows no {name}'


def _parse_pip(words: list[str]) -> None:
    """Options as pip reads them, extras as setup.py has them, files that exist."""
    import setuptools  # noqa: F401  # before pip, which would bring the distutils that setuptools has replaced
    from pip._internal.commands import create_command

    command = create_command(words[0])
    options, names = command.parse_args(words[1:])
    for name in [*names, *(getattr(options, 'requirements', None) or [])]:
        extras = re.fullmatch(r'\.\[([\w,]+)\]', name)
        if extras:
            known = (ROOT / 'setup.py').read_text()
            assert all(f"    '{extra}': [" in known for extra in extras[1].split(',')), name
        elif name.endswith('.txt'):
            assert (ROOT / name).is_file(), name
