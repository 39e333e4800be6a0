"""The command: every listed subcommand exists, help fits two screens, an error is one line and names the nearest."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from command_line import call

import chatgpt
from chatgpt.launch.cli.command import SUBCOMMANDS
from chatgpt.launch.demo_world import rewarded_stories, trial_defaults
from chatgpt.launch.methods import METHODS
from chatgpt.launch.runs import run_class
from chatgpt.nn.ilql import ILQLModel

ROOT = Path(__file__).resolve().parents[2]
OTHERS = [name for name, entry in SUBCOMMANDS.items() if entry.module and not entry.distribution]


def test_the_list_names_every_command_once(monkeypatch, capsys):
    assert call(monkeypatch, '--help') == call(monkeypatch) == 0
    once, twice = capsys.readouterr().out.split('usage: ')[1:]
    assert once == twice and once.startswith('chatgpt-rlhf COMMAND ...\n')
    listed = [line.split()[0] for line in once.splitlines() if line.startswith('  ')]
    assert listed == [*METHODS, *SUBCOMMANDS] and len(set(listed)) == len(listed)
    assert call(monkeypatch, 'version') == call(monkeypatch, '--version') == 0
    assert capsys.readouterr().out == f'chatgpt-rlhf {chatgpt.__version__}\n' * 2
    assert call(monkeypatch, 'help', 'ppo') == call(monkeypatch, 'ppo', '--help') == 0
    once, twice = capsys.readouterr().out.split('usage: ')[1:]
    assert once == twice and once.startswith('chatgpt-rlhf ppo')
    monkeypatch.setattr('chatgpt.launch.cli.command.entry_points', lambda **_: ())
    assert call(monkeypatch, 'compat', 'check', 'script.py') == 2
    assert capsys.readouterr().err == 'error: compat is in a package of its own: pip install chatgpt-rlhf-compat\n'


@pytest.mark.parametrize('name', OTHERS)
def test_help_of_every_word(monkeypatch, capsys, name):
    assert call(monkeypatch, name, '--help') == 0
    lines = capsys.readouterr().out.splitlines()
    assert 5 < len(lines) <= 100 and lines[0].startswith('usage: ')


@pytest.mark.parametrize('name', METHODS)
def test_help_all_has_every_option_and_help_the_common_ones_with_their_defaults(monkeypatch, capsys, name):
    monkeypatch.setenv('COLUMNS', '100')
    assert call(monkeypatch, name, '--help') == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 100  # two screens
    common = ' '.join(' '.join(lines).split())
    call(monkeypatch, name, '--help-all')
    everything = ' '.join(capsys.readouterr().out.split())
    cls, method = run_class(name), METHODS[name]
    for f in fields(cls):
        shown = f' --{f.name} ' in everything
        assert shown or f.name in (method.positional, 'method') or METHODS[name].run != METHODS['sft'].run, f.name
    assert f'--save_path TEXT folder of this run (default: outputs/{name})' in common
    trial = trial_defaults(name, method.defaults)['lr']
    assert f'(default: by size; {trial} without --pretrain)' in common.split(' --lr X ')[1].split(' --lr_schedule')[0]
    for setting, value in method.settings.items():
        if any(setting in names for names in cls.common.values()):
            assert f'(default: {value})' in common.split(f' --{setting} ')[1].split(' --')[0], setting


@pytest.mark.parametrize(
    ('words', 'message'),
    [
        (['stf'], "error: 'stf' is no command; did you mean sft? (--help lists what there is)"),
        (
            ['sft', '--train_batch_szie=1'],
            "error: unknown argument '--train_batch_szie'; did you mean --train_batch_size",
        ),
        (['generate', 'm', 'hi', '--temprature=1'], "'--temprature'; did you mean --temperature?"),
        (['init', 'pop'], "error: method='pop' is not known; choose one of sft, "),
        (['generate', 'm'], 'error: give a prompt, or a file of prompts; the command chat needs none'),
        (['evaluate', 'm', 'p.jsonl'], 'error: give --reward_fn FILE:FUNCTION or --reward_model FOLDER'),
        (['missing_file.py:method'], "error: 'missing_file.py:method': there is no file missing_file.py"),
        (['ilql', '--lora_rank=2'], 'error: lora_rank: ILQL trains all weights; leave it out'),
        (['convert', 'a', 'b', '--to', 'prompts'], "'text'); did you mean prompt?"),
        (['plan', 'c', '--task', 'pop'], "'pop' is none of: ppo, sft, reward_model"),
        (['launch', 'stf'], "'stf' is no file, and no command that trains or generates; did you mean sft?"),
        (['version', '--foo'], "error: '--foo' is one word too many"),
        (['help', 'stf'], "error: 'stf' is no command; did you mean sft?"),
        (['sft', 'data.jsonl'], 'error: data of your own needs a model: give --pretrain NAME_OR_FOLDER'),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(monkeypatch, capsys, tmp_path, words, message):
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, *words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and message in lines[0], lines
    assert not list(tmp_path.iterdir())


LIGHT = """
import contextlib, io, json, sys
from chatgpt.launch.cli import command
from chatgpt.launch.methods import METHODS
heavy, seen = {'torch', 'transformers', 'datasets', 'numpy', 'chatgpt.monitor.report.page'}, {}
trained, others = list(METHODS), [
    name for name, entry in command.SUBCOMMANDS.items() if entry.module and not entry.distribution
]
calls = [[word, asked] for word in trained + others for asked in ('--help', '--hepl=1')]
for words in [*calls, *map(str.split, sys.argv[1:])]:
    text = io.StringIO()
    sys.argv = ['chatgpt-rlhf', *words]
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text), contextlib.suppress(SystemExit):
        command.main()
    seen[' '.join(words)] = [text.getvalue(), sorted(heavy & set(sys.modules))]
print(json.dumps(seen))
"""


def test_neither_help_nor_a_mistake_waits_for_torch(tmp_path):
    """Help of every subcommand, in one interpreter, and mistakes in values, config files and words with `=`."""
    (tmp_path / 'bad.yaml').write_text('lrr: 1\n')
    (tmp_path / 'sweep.yaml').write_text('spaces: {}\n')
    mistakes = {
        'ppo --advantage_estimator gea': 'did you mean gae',
        'ppo --strategy fdsp': 'did you mean fsdp',
        'ppo --policy_loss pppo --engine local': 'did you mean ppo',
        'ppo prompts.jsonl': 'nothing to learn from',
        'grpo lrr=1': 'did you mean lr',
        'sft --config_file bad.yaml': 'did you mean lr',
        'sft --log_with wandbb': 'did you mean wandb',
        'sft --model gptt': 'did you mean gpt2',
        'dpo --beta x': 'no number',
        'reward-model --hub_private': 'push_to_hub',
        'sweep sweep.yaml': 'no key of a sweep',
        'sft --print_config': 'lr: ',
        'completion bash': '_shtab',
        'version': chatgpt.__version__,
        'stf': 'did you mean sft',
    }
    command, env = [sys.executable, '-c', LIGHT, *mistakes], os.environ | {'PYTHONPATH': str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert next(((words, heavy) for words, (_, heavy) in seen.items() if heavy), None) is None
    assert len(seen) > 60 and all('usage' in text for words, (text, _) in seen.items() if words.endswith('--help'))
    assert [words for words, (text, _) in seen.items() if 'hepl' in words and 'error: ' not in text] == []
    assert {words: seen[words][0] for words, text in mistakes.items() if text not in seen[words][0]} == {}


def test_a_relative_of_ppo_is_ppo_with_settings_that_give_way(monkeypatch, capsys, tmp_path):
    import yaml

    monkeypatch.chdir(tmp_path)
    (tmp_path / 'c.yaml').write_text('kl_coef: 0.5\n')
    assert call(monkeypatch, 'grpo', '--config_file=c.yaml', '--num_samples_per_prompt=2', '--print_config') == 0
    found = yaml.safe_load(capsys.readouterr().out)
    assert (found['advantage_estimator'], found['kl_in']) == ('grpo', 'loss')  # the method's
    assert (found['kl_coef'], found['num_samples_per_prompt']) == (0.5, 2)  # the file's, the flag's
    assert (found['save_path'], found['eps_clip']) == ('outputs/grpo', 0.2)


def test_the_settings_of_a_method_are_kept_at_a_resume(monkeypatch, capsys, tmp_path):
    """Includes those that the user changed."""
    from chatgpt.launch.config_file import parse_run, write_resolved
    from chatgpt.launch.runs import PPORun

    first = parse_run(PPORun, description='', argv=['--kl_coef=0.25', f'--save_path={tmp_path}'], method='grpo')
    write_resolved(first, tmp_path)
    (tmp_path / 'checkpoints' / 'step_00000001').mkdir(parents=True)
    again = ['--resume', str(tmp_path), f'--save_path={tmp_path}']
    for method in ('grpo', None):
        run = parse_run(PPORun, description='', argv=again, method=method)
        assert (run.kl_coef, run.advantage_estimator, run.num_samples_per_prompt) == (0.25, 'grpo', 8)
    assert 'settings changed' not in capsys.readouterr().out


# ---------------------------------------------------------------------- the commands that pages print

ELSEWHERE = {
    'launch': 'starts processes: tests/cli/test_launched_command.py does',
    'my_objective.py:rwr': 'in the text; tests/launch/test_methods.py has one',
}


def commands(page: str) -> list[list[str]]:
    """Returns the arguments of the commands on a page."""
    text = (ROOT / page).read_text()
    found = re.findall(r'^    chatgpt-rlhf ((?:.*\\\n)*.*)$', text, re.MULTILINE)
    return [shlex.split(line.replace('\\\n', ' '), comments=True) for line in found]


def write_files(folder: Path) -> None:
    """Writes the files that docs/first_hour.md assumes."""
    (code,) = re.findall(r'```python\n(import re\n.*?)```', (ROOT / 'docs' / 'first_hour.md').read_text(), re.DOTALL)
    (folder / 'rewards.py').write_text(code)
    (folder / 'questions').mkdir()
    turns = '[{"role": "user", "content": "one day"}%s]'
    shown = turns % ', {"role": "assistant", "content": " a fox 7"}'
    (folder / 'questions' / 'demonstrations.jsonl').write_text(f'{{"messages": {shown}}}\n' * 10)
    for name in ('prompts', 'held_out'):
        (folder / 'questions' / f'{name}.jsonl').write_text(f'{{"prompt": {turns % ""}, "answer": 7}}\n' * 10)


def fewer(words: list[str], model: Path) -> list[str]:
    """Returns a command with a folder in place of a hub name, and at most one phase or step."""
    words = [str(model) if word in ('gpt2', 'MODEL', 'smollm2') else word for word in words]
    words = [
        '1' if before == '--num_layers_unfrozen' else word for before, word in zip(['', *words], words, strict=False)
    ]
    method = METHODS.get(words[0])
    if method is None or {'--help', '--help-all', '--plan'} & {*words}:
        return words
    if method.positional == 'dataset':
        return [*words, '--max_steps=1']
    return [*words, '--num_episodes=1', '--max_timesteps=1', '--update_timesteps=1', '--experience_batch_size=2']


@pytest.mark.parametrize('page', ['docs/command.md', 'README.md', 'docs/first_hour.md'])
def test_the_commands_of_a_page_run(monkeypatch, capsys, tmp_path, model_folder, page):
    monkeypatch.chdir(tmp_path)
    found = commands(page)
    assert len(found) >= 5
    if page == 'docs/first_hour.md':
        write_files(tmp_path)
    for words in found:
        monkeypatch.setattr('sys.stdin', io.StringIO('one day\n'))
        if words[0] not in ELSEWHERE:
            code = call(monkeypatch, *fewer(words, model_folder))
            assert code in ((0, 1) if words[0] == 'doctor' else (0,)), (words, capsys.readouterr().err)
    shown = capsys.readouterr().out
    assert 'actor written to outputs/ppo/actor; use it: ' in shown
    assert 'score_mean' in json.loads(next(line for line in shown.splitlines() if line.startswith('{"')))


@pytest.fixture
def words(tmp_path, model_folder):
    return ['ilql', str(tmp_path / 'data.jsonl'), f'--pretrain={model_folder}', f'--save_path={tmp_path}/run']


def write(tmp_path, rows):
    (tmp_path / 'data.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))


def test_a_run_learns_from_the_rewards_of_its_rows(monkeypatch, capsys, tmp_path, words):
    rows = rewarded_stories(12)
    write(tmp_path, rows)
    assert call(monkeypatch, *words, '--max_epochs=1', '--log_interval=1', '--train_batch_size=4') == 0
    lines = [json.loads(line) for line in (tmp_path / 'run' / 'metrics.jsonl').read_text().splitlines()]
    assert len(lines) == 3 and all(line['ilql/td_loss'] > 0 for line in lines)
    assert capsys.readouterr().out.endswith(f'python -m chatgpt generate {tmp_path}/run/actor "your prompt"\n')
    first = ILQLModel.from_pretrained(tmp_path / 'run' / 'actor')
    assert call(monkeypatch, 'generate', str(tmp_path / 'run' / 'actor'), 'one day a fox', '--max_new_tokens=2') == 0
    write(tmp_path, [row | {'reward': -row['reward']} for row in rows])  # negated rewards are learned too
    words[-1] = f'--save_path={tmp_path}/second'
    assert call(monkeypatch, *words, '--max_epochs=1', '--log_interval=1', '--train_batch_size=4') == 0
    second = ILQLModel.from_pretrained(tmp_path / 'second' / 'actor')
    same = [torch.equal(a, b) for a, b in zip(first.q_heads.parameters(), second.q_heads.parameters(), strict=True)]
    assert not all(same)
