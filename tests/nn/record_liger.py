"""Records `liger_golden.json`: what liger-kernel computes for the cases of `liger_cases`.

TRITON_INTERPRET=1 python tests/nn/record_liger.py      # with liger-kernel and triton installed
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

from liger_cases import CASES, numbers

from chatgpt.nn.head_kernels import liger_logprobs


def main() -> None:
    cases = {
        ' '.join(str(x) for x in case): numbers(
            lambda hidden, head, ids, **options: liger_logprobs(hidden, head.weight, head.bias, ids, **options), *case
        )
        for case in CASES
    }
    rounded = {name: [[float(f'{x:.7g}') for x in row] for row in rows] for name, rows in cases.items()}
    found = {'liger-kernel': version('liger-kernel'), 'triton': version('triton'), 'cases': rounded}
    Path(__file__).with_name('liger_golden.json').write_text(
        json.dumps(found, indent=None, separators=(',', ':')) + '\n'
    )


if __name__ == '__main__':
    main()
