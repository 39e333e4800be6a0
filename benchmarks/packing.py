"""CPU seconds of a forward and of forward and backward, with padding left out and with it, A B A B in one run.

    python benchmarks/packing.py [--repeats 7]

GPT-2 of 4 layers x 256 (vocabulary 512), 32 sequences of 16 prompt tokens and up to 48 response tokens, one thread: all
48 ('fixed'), or geometric with a mean of a third of them ('eos'). Printed: the ratio padded / packed as least, median
and greatest, and the share of the padded batch that is real tokens, which is the bound.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

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
        found.append(
            Sequence(prompt_ids=prompt, response_ids=response, response_mask=torch.ones(length, dtype=torch.bool))
        )
    return found


def cpu_seconds(act: Callable[[], Any]) -> float:
    start = time.process_time()
    act()
    return time.process_time() - start


def measure(precision: str, kind: str, repeats: int) -> str:
    from transformers import GPT2Config

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB, n_embd=256, n_layer=4, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2
    )
    actor = GPTActor(config=config).eval()
    items = sequences(kind)
    batches = {name: collate(items, pack=name == 'packed') for name in ('padded', 'packed')}

    def forward(batch: Any) -> Any:
        with torch.autocast('cpu', dtype=torch.bfloat16, enabled=precision == 'bf16'):
            return actor(batch, with_entropy=True)

    def learn(batch: Any) -> None:
        out = forward(batch)
        (out.logprobs.sum() + out.entropy.sum()).backward()

    ratios: dict[str, list[float]] = {'forward': [], 'forward and backward': []}
    for turn in range(repeats + 1):
        spent = {}
        for name, batch in batches.items():
            with torch.no_grad():
                spent['forward', name] = cpu_seconds(lambda b=batch: forward(b))
            spent['forward and backward', name] = cpu_seconds(lambda b=batch: learn(b))
        if turn:  # the first one warms up
            for what, found in ratios.items():
                found.append(spent[what, 'padded'] / spent[what, 'packed'])
    share = sum(s.num_tokens for s in items) / (len(items) * max(s.num_tokens for s in items))
    cells = [f'{min(r):.2f} {statistics.median(r):.2f} {max(r):.2f}' for r in ratios.values()]
    return f'| {kind} | {precision} | {share:.2f} | {1 / share:.2f} | {cells[0]} | {cells[1]} |'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--repeats', type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print('| lengths | compute | real tokens | bound | forward: least median greatest | forward and backward |')
    print('|---|---|---|---|---|---|')
    for precision in ('fp32', 'bf16'):
        for kind in ('fixed', 'eos'):
            print(measure(precision, kind, args.repeats), flush=True)


if __name__ == '__main__':
    main()
