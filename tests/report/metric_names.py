"""Writes chatgpt/monitor/report/assets/metrics.json from docs/metrics.md: python tests/report/metric_names.py"""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ASSET = ROOT / 'chatgpt' / 'monitor' / 'report' / 'assets' / 'metrics.json'


def read_names(page: str) -> dict[str, list[str]]:
    """Returns {metric: [unit, meaning]} of the page's tables, without those of other systems' names."""
    found = {}
    for line in page.split('\n## For those who come from')[0].splitlines():
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
    ASSET.write_text(text_of(read_names((ROOT / 'docs' / 'metrics.md').read_text())))
