"""The completion script for bash, called as bash calls it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from command_line import call

from chatgpt.strategies.registry import STRATEGIES

CASES = {
    'reward': {'reward-model'},
    'ppo --advantage_est': {'--advantage_estimator'},
    'ppo --policy_loss ci': {'cispo'},
    'dpo --strategy fs': {name for name in STRATEGIES if name.startswith('fs')},
    'simpo --gam': {'--gamma'},
    'sft --config_file sto': {'stories.jsonl'},
    'rollouts sto': {'stories.jsonl'},
    'ppo --log_with no': {'none'},
    'plan c --task re': {'reward_model'},
}


@pytest.fixture(scope='module')
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import shtab

    from chatgpt.launch.cli.completion import whole_parser

    folder = tmp_path_factory.mktemp('completion')
    (folder / 'script.bash').write_text(shtab.complete(whole_parser(), 'bash'))
    return folder


@pytest.mark.parametrize('words', CASES)
def test_bash_completes(scripts, tmp_path, words):
    """COMP_WORDS and COMP_CWORD are set by bash; `complete -p` names the function to call."""
    (tmp_path / 'stories.jsonl').touch()
    code = """
        source "$1"; shift
        function=$(complete -p chatgpt-rlhf | sed 's/.*-F \\([^ ]*\\) .*/\\1/')
        COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}; COMP_TYPE=9
        "$function" chatgpt-rlhf "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
        printf '%s\\n' "${COMPREPLY[@]}"
    """
    argv = ['bash', '-c', code, 'bash', str(scripts / 'script.bash'), 'chatgpt-rlhf', *words.split()]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True)
    assert {line for line in done.stdout.splitlines() if line} == CASES[words], done.stderr


def test_the_command_prints_it(monkeypatch, capsys, scripts):
    assert call(monkeypatch, 'completion', 'bash') == 0
    assert capsys.readouterr().out.strip() == (scripts / 'script.bash').read_text().strip()
    assert call(monkeypatch, 'completion', 'csh') == 2
    assert "invalid choice: 'csh'" in capsys.readouterr().err
