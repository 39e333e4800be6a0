"""CPU seconds of a forward and of forward and backward, with padding left out and with it, in turns.

    python benchmarks/packing.py [--repeats 7] [--page]

GPT-2 of 4 layers x 256 (vocabulary 512), 32 sequences of 16 prompt tokens and up to 48 response tokens, one thread: all
48 ('fixed'), or geometric with a mean of a third of them ('eos'). Printed: the ratio padded / packed as least, median
and greatest, and the share of the padded batch that is real tokens, which is the bound.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from harness import PAGES, alternate, cpu_seconds, gpt2, least_median_greatest, markdown, ratios, write_page

from chatgpt.batching import collate
from chatgpt.nn import GPTActor
from chatgpt.types import Sequence

ROWS, PROMPT_TOKENS, NEW_TOKENS, VOCAB = 32, 16, 48, 512


def sequences(kind: str) -> list[Sequence]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(ROWS):
        drawn = 1 + int(torch.empty(1).exponential_(3 / NEW_TOKENS, generator=generator))
        length = NEW_TOKENS if kind == 'fixed' else min(drawn, NEW_TOKENS)
        prompt, response = (torch.randint(2, VOCAB, (n,), generator=generator) for n in (PROMPT_TOKENS, length))
        mask = torch.ones(length, dtype=torch.bool)
        found.append(Sequence(prompt_ids=prompt, response_ids=response, response_mask=mask))
    return found


def measure(precision: str, kind: str, repeats: int) -> list[str]:
    torch.manual_seed(0)
    actor, items = GPTActor(config=gpt2()).eval(), sequences(kind)
    batches = {name: collate(items, pack=name == 'packed') for name in ('padded', 'packed')}

    def forward(batch: Any) -> Any:
        with torch.autocast('cpu', dtype=torch.bfloat16, enabled=precision == 'bf16'):
            return actor(batch, with_entropy=True)

    def learn(batch: Any) -> None:
        out = forward(batch)
        (out.logprobs.sum() + out.entropy.sum()).backward()

    def both(batch: Any) -> tuple[float, float]:
        with torch.no_grad():
            alone = cpu_seconds(lambda: forward(batch))
        return alone, cpu_seconds(lambda: learn(batch))

    found = alternate({name: lambda _, b=batch: both(b) for name, batch in batches.items()}, repeats)
    sides = [zip(*found[name], strict=True) for name in ('padded', 'packed')]
    cells = [least_median_greatest(ratios(padded, packed)) for padded, packed in zip(*sides, strict=True)]
    share = sum(s.num_tokens for s in items) / (len(items) * max(s.num_tokens for s in items))
    return [kind, precision, f'{share:.2f}', f'{1 / share:.2f}', *cells]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--repeats', type=int, default=7)
    parser.add_argument('--page', action='store_true', help='write the table into docs/results/speed.md')
    args = parser.parse_args()
    torch.set_num_threads(1)
    head = 'lengths | compute | real tokens | bound | forward: least median greatest | forward and backward'
    rows = [measure(precision, kind, args.repeats) for precision in ('fp32', 'bf16') for kind in ('fixed', 'eos')]
    table = markdown(head, rows)
    print(table)
    if args.page:
        write_page(PAGES / 'speed.md', packing=table)


if __name__ == '__main__':
    main()
