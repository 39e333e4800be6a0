"""Write a config with every common option, its default and its meaning, and small data to run it on.

    chatgpt-rlhf init ppo --to first
    cd first && chatgpt-rlhf ppo --config_file ppo.yaml

The data are embedded stories and the model is a small GPT-2 that the run creates. For a run of your own change
`pretrain` and the data files in the config. Existing files are not overwritten.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import textwrap
import typing
from dataclasses import fields
from pathlib import Path
from typing import Any

from chatgpt.launch.arguments import Parser, field_docs
from chatgpt.launch.methods import METHODS

REWARD = '''"""A reward is any function of prompts and responses that gives a number for each response."""

GLAD = {'glad', 'happy', 'merry', 'proud', 'played', 'danced', 'laughed', 'flower', 'cake', 'gift', 'song'}


def score(prompts, responses, **columns):
    """Returns the number of different cheerful words, minus a penalty for length."""
    return [len(GLAD & set(text.split())) - 0.02 * len(text.split()) for text in responses]
'''
NUM_ROWS = 400
WIDTH = 100


def parser() -> Parser:
    out = Parser(description=__doc__, usage='%(prog)s METHOD [--to DIR]')
    out.add_argument('method', metavar='METHOD', help=f'one of {", ".join(METHODS)}')
    out.add_argument('--to', default='.', metavar='DIR', help='folder to write the files to (default: this one)')
    return out


def main() -> None:
    command = sys.argv[0].rpartition(' ')[0]  # without `init`
    args = parser().parse_args()
    METHODS.find(args.method)
    folder, name = Path(args.to), args.method.rpartition(':')[2]
    files, own = example(args.method)
    file, _, attribute = args.method.rpartition(':')
    method = f'{os.path.relpath(file, folder)}:{attribute}' if file.endswith('.py') else args.method
    start = f'{command} {shlex.quote(method)} --config_file {name}.yaml'
    files = {f'{name}.yaml': config_text(args.method, own, start), **files}
    for file, text in files.items():
        path = folder / file
        if path.exists() and not (path.is_file() and path.read_bytes() == text.encode()):
            raise ValueError(f'{path} is there already: give another folder with --to, or remove it')
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (folder / file).write_text(text)
    except OSError as error:
        raise ValueError(f'cannot write to {folder}: {error.strerror}') from None
    print(f'written: {", ".join(str(folder / file) for file in files)}\nstart it with:\n')
    print(f'    {start}' if folder == Path('.') else f'    cd {shlex.quote(str(folder))} && {start}')


def example(method: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Returns the texts of the files beside a config, by name, and the settings that use them."""
    from chatgpt.launch import demo_world
    from chatgpt.launch.runs import EMBEDDED, CriticRun, PPORun, PreferenceRun, RewardRun, run_class

    cls = run_class(method)
    if issubclass(cls, CriticRun):
        return {}, {'rollouts': ['outputs/ppo']}
    own: dict[str, Any] = {'pretrain': EMBEDDED}
    if issubclass(cls, PPORun):
        files = {'prompts.jsonl': _lines(demo_world.demo_prompts(64)), 'rewards.py': REWARD}
        own |= {'prompt_path': 'prompts.jsonl', 'reward_fn': 'rewards.py:score', 'max_new_tokens': 32}
        own |= {'num_episodes': 20, 'max_timesteps': 1, 'update_timesteps': 1, 'experience_batch_size': 32}
        return files, own | (
            {'num_samples_per_prompt': 4} if 'num_samples_per_prompt' in METHODS[method].settings else {}
        )
    if issubclass(cls, (PreferenceRun, RewardRun)):
        data, rows = 'preferences.jsonl', demo_world.demo_preferences(NUM_ROWS)
    elif METHODS[method].model == 'ILQLModel':
        data, rows = 'rewarded.jsonl', demo_world.rewarded_stories(NUM_ROWS)
    else:
        data, rows = 'stories.jsonl', demo_world.demo_corpus(NUM_ROWS)
    return {data: _lines(rows)}, own | {'dataset': data, 'validation_percentage': 5}


def _lines(rows: list[dict[str, Any]]) -> str:
    return ''.join(json.dumps(row) + '\n' for row in rows)


def config_text(method: str, own: dict[str, Any], start: str) -> str:
    """Returns YAML with every common option of a method; values are from `own`, the method or the class."""
    from chatgpt.launch.config_file import option_text, presets_of
    from chatgpt.launch.runs import run_class

    cls = run_class(method)
    docs, presets = field_docs(cls), presets_of(method)
    defaults = {f.name: f.default for f in fields(typing.cast(Any, cls))} | presets
    groups = dict(cls.common)
    more = tuple(name for name in presets if not any(name in names for names in groups.values()))
    if more:
        groups[f'what makes it {method}'] = more
    lines = [
        f'# {METHODS[method].about}',
        f'#     {start}',
        f'# More options: {start.split(" --config")[0]} --help-all',
    ]
    for title, names in groups.items():
        lines += ['', f'# {f" {title} ":-^{WIDTH - 2}}']
        for name in names:
            text = option_text(cls, name, docs.get(name, ''), defaults[name], method)
            lines += ['', *textwrap.wrap(f'# {text}', WIDTH, subsequent_indent='# ', break_on_hyphens=False)]
            lines.append(_entry(name, own.get(name, defaults[name])))
    return '\n'.join(lines) + '\n'


def _entry(name: str, value: Any) -> str:
    import yaml

    flow = None if isinstance(value, (list, dict)) else False  # None: the list or mapping inside on one line
    return yaml.safe_dump({name: value}, allow_unicode=True, default_flow_style=flow).strip()
