"""Writes chatgpt/monitor/report/assets/metrics.json from the pages of metrics: python tests/report/metric_names.py"""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ASSET = ROOT / 'chatgpt' / 'monitor' / 'report' / 'assets' / 'metrics.json'


PAGES = [ROOT / 'docs' / 'metrics.md', ROOT / 'docs' / 'metrics_offline.md']


def read_names() -> dict[str, list[str]]:
    """Returns {metric: [unit, meaning]} of the tables of the pages."""
    found = {}
    for line in '\n'.join(page.read_text() for page in PAGES).splitlines():
        cells = [cell.strip() for cell in re.split(r'(?<!\\)\|', line.strip().strip('|'))]
        names = re.findall(r'`([a-z_]+(?:/[a-zA-Z_0-9]+)+)`', cells[0])
        if not line.startswith('|') or len(cells) != 3 or not names:
            continue
        for name in names:
            found[name] = [cells[1].replace('\\|', '|'), cells[2].replace('\\|', '|').replace('`', '')]
    return found


def text_of(names: dict[str, list[str]]) -> str:
    lines = (f'{json.dumps(name)}: {json.dumps(entry, ensure_ascii=False)}' for name, entry in names.items())
    return '{\n' + ',\n'.join(lines) + '\n}\n'


if __name__ == '__main__':
    ASSET.write_text(text_of(read_names()))
