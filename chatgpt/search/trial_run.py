"""One trial, a process of its own: `trial_run.py METHOD ...`, the command line of the method, under any launcher.

Left out: who starts it and reads its metrics (`trials`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from chatgpt.launch.arguments import run_main
from chatgpt.launch.config_file import parse_run
from chatgpt.launch.recipes import execute
from chatgpt.launch.runs import METHODS as PREFERENCE_METHODS
from chatgpt.launch.runs import PPORun, PreferenceRun, RewardRun, Run, SFTRun

METHODS: dict[str, type[Run]] = {'sft': SFTRun, 'reward-model': RewardRun, 'ppo': PPORun}
METHODS |= dict.fromkeys(PREFERENCE_METHODS, PreferenceRun)
"""what can be swept, and the settings of its runs"""


def presets(method: str) -> list[str]:
    """Words that a method's command line begins with."""
    return [f'method={method}'] if METHODS[method] is PreferenceRun else []


def main(argv: Sequence[str] | None = None) -> None:
    method, *words = sys.argv[1:] if argv is None else argv
    execute(parse_run(METHODS[method], description=__doc__, argv=[*presets(method), *words]))


if __name__ == '__main__':
    run_main(main)
