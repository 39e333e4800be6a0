"""Install the pinned torch in the build that this machine can use, and say which: CUDA where nvidia-smi shows a GPU,
else CPU.

    python install_torch.py [--cpu] [--dry-run]      # make calls it with the environment's Python

PyPI's wheels for Linux are CUDA builds with gigabytes of libraries, those for macOS and Windows are CPU builds. So a
Linux machine without a GPU takes the CPU build from PyTorch's own index, or the default build where that index does not
answer. TORCH_INDEX in the environment names another index instead, such as https://download.pytorch.org/whl/cu130.
`--cpu` does not look for a GPU. Standard library only.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

CPU_INDEX = 'https://download.pytorch.org/whl/cpu'


def pinned() -> str:
    """torch's line in requirements.txt."""
    found = re.search(r'^torch==\S+', (Path(__file__).resolve().parent / 'requirements.txt').read_text(), re.MULTILINE)
    if found is None:
        raise SystemExit('requirements.txt has no line torch==...')
    return found[0]


def gpus() -> int:
    """How many GPUs nvidia-smi lists; 0 without it, or when it fails."""
    tool = shutil.which('nvidia-smi')
    if tool is None:
        return 0
    listed = subprocess.run([tool, '-L'], capture_output=True, text=True, check=False)
    return 0 if listed.returncode else len(re.findall(r'^GPU ', listed.stdout, re.MULTILINE))


def answers(index: str) -> bool:
    """Whether that index can be reached: pip by itself would try for a minute and a half."""
    try:
        with urllib.request.urlopen(f'{index}/torch/', timeout=5):
            return True
    except OSError:
        return False


def choose(wanted: str | None, number: int, system: str) -> tuple[str | None, str]:
    """(an index beside the default one or None, what is chosen and why)."""
    if wanted:
        return wanted, f'from {wanted}, as TORCH_INDEX says'
    if number:
        return (
            None,
            f'the default build, which has CUDA on Linux, for nvidia-smi shows {number} GPU{"s" if number > 1 else ""}',
        )
    if system != 'Linux':
        return None, f'the default build, a CPU build on {system}'
    if not answers(CPU_INDEX):
        return None, f'the default build, for {CPU_INDEX} does not answer'
    return (
        CPU_INDEX,
        f'the CPU build, for nvidia-smi shows no GPU (with one to come: TORCH_INDEX=... or pip install {pinned()})',
    )


def main() -> None:
    number = 0 if '--cpu' in sys.argv[1:] else gpus()
    index, why = choose(os.environ.get('TORCH_INDEX'), number, platform.system())
    command = [sys.executable, '-m', 'pip', 'install', '--quiet', '--disable-pip-version-check', pinned()]
    command += ['--extra-index-url', index] if index else []
    print(f'{pinned()}: {why}', flush=True)
    if '--dry-run' in sys.argv[1:]:
        print(' '.join(command))
        return
    done = subprocess.run(command, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
    code = "import torch; print(torch.__version__, torch.version.cuda or '')"
    version, *cuda = subprocess.run(
        [sys.executable, '-c', code], capture_output=True, text=True, check=True
    ).stdout.split()
    print(f'torch {version} is installed: {f"CUDA {cuda[0]}" if cuda else "a CPU build"}')
    if number:  # a line if torch cannot use them
        code = 'from chatgpt.strategies.machine import unused_card; print(unused_card() or "")'
        subprocess.run([sys.executable, '-c', code], cwd=Path(__file__).resolve().parent, check=False)


if __name__ == '__main__':
    main()
