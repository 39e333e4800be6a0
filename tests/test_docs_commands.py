"""Every shell command on the pages: its program reads it without a complaint, and it runs, or `NOT_RUN` says why not.

The first half reads, in this process, and is part of `make test`. The second runs, shortened and with tiny stand-ins,
in a folder for each page, in the order of the page.
"""

from __future__ import annotations

import io
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from shell_commands import PAGES, ROOT, Command, bring, commands, parse, tiny_models

from chatgpt.cli import command

TYPED = [c for page in PAGES for c in commands(page) if not c.is_mention]

NOT_OURS = {
    r'^(git|cd) ': 'gets the repository',
    r'^ray start': "Ray's own",
    r'^python rlhf/': "llm-on-ray's own scripts, on the left of an arrow",
    r'^python tests/families/': 'minutes; tests/families/test_family_matrix.py has the shortened ones',
    r'^python -m chatgpt\.launch --launcher ray \.\.\.': 'an ellipsis for what other lines of the page spell out',
}
"""not even read"""
NOT_RUN = NOT_OURS | {
    r'^(python -m )?pip ': 'asks a package index',
    r'^python -m venv ': 'makes an environment',
    r'^make ': 'the targets are those of .ci/run, or take minutes; tests/test_docs_site.py runs make docs',
    r'^python -m pytest ': 'runs tests',
    r'\bbenchmarks/': 'takes minutes; what it printed is on the page, and tests/benchmarks has the shortened ones',
    r'--log_with ': 'starts trackers: tests/trainer/test_trackers.py',
    r'--launcher ray': 'starts Ray: tests/launch/test_launchers.py',
    r'--rollout_workers': 'starts Ray: tests/trainer/test_remote_rollouts.py',
    r'--tensor_parallel \d': 'several processes, and a family with a plan: tests/trainer/test_tensor_parallel_runs.py',
    r'--num_nodes 2': 'two nodes: tests/launch/test_launchers.py',
    r'launch --num_workers|launch ppo': 'two processes: tests/cli/test_launched_command.py',
    r'^torchrun --standalone': 'two processes: tests/examples/test_train_prompts.py',
    r'compat run train_prompts\.py': 'theirs: tests/compat/colossalai/test_colossalai_programs.py',
    r'Qwen/Qwen2\.5-7B': 'a model of the hub: tests/launch/test_one_card_chain.py runs it on a tiny one',
    r'^python -m chatgpt\.plan 7b/': 'a config of 7B: tests/plan/test_plan_of_one_card.py',
    r' verify (outputs|RUN_A)': 'two runs: tests/cli/test_verify_command.py',
    r' compare | rollouts outputs': 'a page, or what people said on it: tests/cli/test_compare.py',
    r'compat run hello\.py': 'the stand-in is that of script.py, which is run',
    r'human_loop\.py': 'asks people: tests/examples/test_human_loop.py',
    r'--push_to_hub ': 'uploads: tests/publish/test_push_runs.py',
    r'^python -m chatgpt sweep': 'several runs: tests/search/test_sweep_runs.py runs the one of the page',
}
"""why a command is not run here, by a pattern"""
RUN_ELSEWHERE = {
    **dict.fromkeys(('README.md', 'docs/command.md'), 'tests/cli/test_command_page.py'),
    'docs/encoder_decoders.md': 'tests/cli/test_encoder_decoder_commands.py',
}
"""whose block of chatgpt-rlhf commands another file runs"""
EXIT_CODES = {r'compat check poem\.txt': {2}, r' doctor ': {0, 1}}
"""other than 0: a file that is no Python, and a run with findings"""


def reason(c: Command, patterns: dict[str, str]) -> str | None:
    return next((why for pattern, why in patterns.items() if re.search(pattern, c.text)), None)


FIRST_HOUR = 'docs/first_hour.md'


def first_of_each(found: list[Command]) -> list[Command]:
    """Without those that another page has, too; the first hour is run whole."""
    return list({(c.page == FIRST_HOUR, *c.words): c for c in reversed(found)}.values())[::-1]


RUN = first_of_each(
    [
        c
        for c in TYPED
        if not reason(c, NOT_RUN)
        and not (c.page in RUN_ELSEWHERE and not c.inline and c.text.startswith('chatgpt-rlhf'))
    ]
)


@pytest.fixture(scope='module')
def model(tmp_path_factory):
    """One that writes; beside it stand one that scores, and a run's folder."""
    return tiny_models(tmp_path_factory.mktemp('docs'))


def test_the_search_finds_commands_and_every_reason_is_needed():
    texts = {c.text for c in TYPED}
    assert {'make docs', 'chatgpt-rlhf init sft', 'ray start --head --port=6379'} <= texts
    assert any(c.inline for c in TYPED) and any(not c.inline for c in TYPED)
    assert [p for p in NOT_RUN if not any(re.search(p, text) for text in texts)] == []
    for page, test in RUN_ELSEWHERE.items():
        assert page in (ROOT / test).read_text()
    named = re.findall(r'tests/[\w/]+\.py', ' '.join(NOT_RUN.values()))
    assert named and all((ROOT / name).is_file() for name in named)


def test_a_mistake_in_a_command_is_found(model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for text in (
        'chatgpt-rlhf stf chats.jsonl',
        'chatgpt-rlhf sft chats.jsonl --learning_rat 1',
        'chatgpt-rlhf sft chats.jsonl --lr fast',
        'chatgpt-rlhf generate outputs/a/actor --temprature 1',
        'python examples/train_sft.py --no_such_flag 1',
        'python examples/no_such_script.py',
        'python benchmarks/ppo.py --no_such_flag 1',
        'python -m chatgpt.plan config.json --memry 1GiB',
        'python -m chatgpt.launch --num_wrkers 2 sft',
        'python -m chatgpt.launch --num_workers 2 sft --no_such_flag 1',
        'torchrun --nproc-per-node 2 examples/train_sft.py --no_such_flag 1',
        'make no_such_target',
        'make test NO_SUCH=1',
        "pip install '.[no_such_extra]'",
    ):
        with pytest.raises((AssertionError, ValueError, SystemExit)):
            parse(bring(Command('', text, False), tmp_path, model), monkeypatch)


@pytest.mark.parametrize('page', sorted({c.page for c in TYPED}))
def test_programs_read_the_commands_of_a_page(page, model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    wrong = []
    for c in TYPED:
        if c.page == page and not reason(c, NOT_OURS):
            try:
                parse(bring(c, tmp_path, model), monkeypatch)
            except (AssertionError, ValueError, SystemExit, OSError) as error:
                wrong.append(f'{c.text}: {error} {capsys.readouterr().err}')
    assert not wrong, '\n'.join(wrong)


# ---------------------------------------------------------------------- running them

LESS = {
    'dataset': ['--max_steps=2', '--log_interval=1'],
    'prompt_path': [
        *('--num_episodes=2', '--max_timesteps=1', '--update_timesteps=1', '--experience_batch_size=4'),
        *('--train_batch_size=4', '--max_epochs=1', '--max_new_tokens=4'),
    ],
}
"""flags that shorten a run, by its positional setting"""
SCRIPTS = {
    'train_sft': 'dataset',
    'train_reward_model': 'dataset',
    'train_preference': 'dataset',
    'train_prompts': 'prompt_path',
}


def shortened(words: Sequence[str]) -> list[str]:
    from chatgpt.launch.methods import METHODS

    asks = {'init', '--help', '--help-all', '--print_config', '--plan', 'compat'}
    for word in words:
        if asks & set(words):
            break
        kind = METHODS[word].positional if word in METHODS else None
        kind = SCRIPTS.get(Path(word).stem) if word.startswith('examples/') else kind
        if kind:
            configured = '--config_file' in words and not any('run.yaml' in word for word in words)
            less = ['--max_new_tokens=4', '--reward_model=rm'] if configured and kind == 'prompt_path' else LESS[kind]
            return [*words, *less, *(['--pretrain=model'] if configured else [])]
        if word.endswith(':rwr'):
            return [*words, *LESS['dataset']]
    return list(words)


def run(words: Sequence[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code. In this process, but for what makes processes of its own, or imports what nobody else here
    should."""
    program, *rest = shortened(words)
    module = rest[1] if rest[:1] == ['-m'] else None
    if program == 'torchrun' or module == 'chatgpt.compat' or rest[0] == '-c':
        start = ['-m', 'torch.distributed.run'] if program == 'torchrun' else []
        environment = os.environ | {'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1', 'HF_HUB_OFFLINE': '1'}
        done = subprocess.run([sys.executable, *start, *rest], cwd=folder, env=environment, stdin=subprocess.DEVNULL)
        return done.returncode
    with monkeypatch.context() as patched:
        patched.setattr('sys.stdin', io.StringIO(''))
        path = folder / rest[0]
        arguments = rest[2:] if module else rest[1:] if program == 'python' else rest
        patched.setattr('sys.argv', ['chatgpt-rlhf' if program == 'chatgpt-rlhf' else rest[0], *arguments])
        try:
            if program == 'chatgpt-rlhf' or module == 'chatgpt':
                command.main()
            elif module:
                runpy.run_module(module, run_name='__main__')
            else:
                runpy.run_path(str(path), run_name='__main__')
        except SystemExit as stop:
            return int(stop.code or 0)
    return 0


@pytest.mark.system
@pytest.mark.timeout(600)
@pytest.mark.parametrize('page', sorted({c.page for c in RUN}))
def test_the_commands_of_a_page_run(page, model, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    wrong, printed = [], ''
    for c in RUN:
        if c.page == page:
            code = run(bring(c, tmp_path, model), tmp_path, monkeypatch)
            shown = capfd.readouterr()
            printed += shown.out + shown.err
            allowed = next((codes for pattern, codes in EXIT_CODES.items() if re.search(pattern, c.text)), {0})
            if code not in allowed:
                wrong.append(f'{c.text}: exit code {code}\n{shown.out[-300:]}{shown.err[-800:]}')
    assert not wrong, '\n'.join(wrong)
    if page == FIRST_HOUR:
        check_outputs(printed)


OUTPUT = r'^    ((?:\d+ examples|phase|loss|accuracy|score -|report|actor|reward_model|samples|\{"length|naive on).*)$'
"""lines of output on that page that any run prints, with numbers of its own"""


def check_outputs(printed: str) -> None:
    """What the page shows is what runs print: the same words, whatever the numbers."""
    lines = re.findall(OUTPUT, (ROOT / FIRST_HOUR).read_text(), re.MULTILINE)
    assert len(lines) > 15
    real = {skeleton(line) for line in printed.splitlines()}
    missing = [line for line in lines if not any(skeleton(line) <= words for words in real)]
    assert not missing, '\n'.join([*missing, '', printed[-3000:]])


def skeleton(line: str) -> frozenset[str]:
    """The words of a line. How long the rest takes stands in all but the last phase, and shares of bytes in any
    unit."""
    line = re.sub(r'left \S+ \S+$|left \S+ s$|(?<=[\d.]) [KMG]iB|val \S+', '', line)
    return frozenset(re.findall(r'[A-Za-z_/]{2,}', re.sub(r'\d\S*', '', line)))
