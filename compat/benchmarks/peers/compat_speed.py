"""Worker: `trl_classic.py` as it is, where `trl` means this library."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import chatgpt_compat.trl

sys.modules['trl'] = chatgpt_compat.trl
runpy.run_path(str(Path(__file__).parents[3] / 'benchmarks' / 'peers' / 'trl_classic.py'), run_name='__main__')
