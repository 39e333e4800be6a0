"""Packages from a folder of wheels, for one run: pip puts them into a folder that a Python is told to look in. No network."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def install_wheels(folder: Path, site: Path | str, timeout_s: float = 300.0) -> None:
    """Every wheel of the folder into `site`, from the folder alone, without what they ask for.

    Raises:
        ValueError: no wheels there, or pip cannot install them, or not in this time.
    """
    wheels = sorted(map(str, folder.glob('*.whl')))
    if not wheels:
        raise ValueError(f'{folder} holds no wheels (*.whl)')
    pip = [sys.executable, '-m', 'pip', 'install', '--quiet', '--disable-pip-version-check']
    command = [*pip, '--no-index', '--no-deps', '--no-compile', '--target', str(site), *wheels]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise ValueError(f'pip did not install the wheels of {folder} within {timeout_s:.0f} s') from None
    if done.returncode:
        raise ValueError(f'pip could not install the wheels of {folder}: {done.stderr.strip()[-500:]}')
