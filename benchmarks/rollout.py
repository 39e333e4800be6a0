"""Collecting with the local engine against `model.generate`, on the same model, prompts and limits, in turns.

    python benchmarks/rollout.py [--page]
    python benchmarks/rollout.py --layers 2 --width 64 --rounds 3
    python benchmarks/rollout.py --device cuda --precision bf16 --rungs s xl --new 64 --rounds 3

Two cases: fixed lengths (no end token, every response runs to the limit) and varying lengths (a bias on the end token
makes response lengths geometric with a mean of a third of the limit, the same distribution on both sides). Both sides
sample at temperature 1 on one thread. A ratio is local engine / generate of one round; as the two sides draw different
lengths, also per generated token.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import ladders
import torch
from harness import PAGES, alternate, end_probability, gpt2, least_median_greatest, markdown, ratios, write_page
from torch import nn
from transformers import GenerationConfig, GPT2LMHeadModel

from chatgpt.nn import Actor
from chatgpt.rollout import Call, LocalEngine, SamplingParams
from chatgpt.types import Prompt

END = 1
PRECISIONS = {'fp32': torch.float32, 'bf16': torch.bfloat16}


def build_model(args: argparse.Namespace, end_prob: float) -> Any:
    """A random GPT-2 whose end token has this probability at every step (0: never); other tokens are equally likely."""
    torch.manual_seed(args.seed)
    none = dict.fromkeys(('bos_token_id', 'eos_token_id', 'pad_token_id'))
    positions = args.prompt + args.new
    config = gpt2(args.vocab, args.layers, args.width, args.heads, positions, tie_word_embeddings=False, **none)
    with torch.device(args.device):
        model = GPT2LMHeadModel(config).eval()
        head = nn.Linear(args.width, args.vocab)
    head.weight.data.zero_()  # costs as much as any other and makes the end probability exact: p = e^b / (e^b + V - 1)
    head.bias.data.zero_()
    head.bias.data[END] = math.log(end_prob * (args.vocab - 1) / (1 - end_prob)) if end_prob > 0 else -1e9
    model.lm_head = head
    return model.to(PRECISIONS[args.precision])


def compare(args: argparse.Namespace, end_prob: float) -> list[list[str]]:
    """Rows of the table: what, ratio, both sides."""
    model = build_model(args, end_prob)
    drawn = torch.randint(2, args.vocab, (args.batch, args.prompt))
    prompts, input_ids = [Prompt(ids=row) for row in drawn], drawn.to(args.device)
    mask, eos = torch.ones_like(input_ids), (END,) if end_prob > 0 else ()
    sampling = SamplingParams(max_new_tokens=args.new, eos_token_ids=eos)
    sampled = {'do_sample': True, 'top_k': 0, 'top_p': 1.0, 'temperature': 1.0, 'use_cache': True}
    generation = GenerationConfig(max_new_tokens=args.new, eos_token_id=END if eos else None, pad_token_id=0, **sampled)
    engine = LocalEngine()
    engine.begin(Actor(model))

    def local(number: int) -> int:
        first = number * args.batch
        samples = engine.generate(Call.of(prompts, sampling, seed=args.seed, indices=range(first, first + args.batch)))
        return sum(s.num_actions for s in samples)

    def reference(number: int) -> int:
        torch.manual_seed(number)
        with torch.inference_mode():
            sequences = model.generate(input_ids, attention_mask=mask, generation_config=generation)
        response = sequences[:, args.prompt :]
        ended = (response == END).int().cumsum(1).clamp(max=1) if eos else torch.zeros_like(response)
        return int((1 - ended).sum() + ended.any(1).sum())

    def measured(run: Callable[[int], int]) -> Callable[[int], tuple[float, float, float]]:
        """CPU seconds, wall seconds, CPU seconds per token."""

        def once(number: int) -> tuple[float, float, float]:
            wall, cpu = time.perf_counter(), time.process_time()
            tokens = run(number)
            if args.device == 'cuda':
                torch.cuda.synchronize()
            cpu = time.process_time() - cpu
            return cpu, time.perf_counter() - wall, cpu / tokens

        return once

    found = alternate({'local': measured(local), 'generate': measured(reference)}, args.rounds)
    engine.end()
    rows = []
    sides = (list(zip(*found[name], strict=True)) for name in ('local', 'generate'))
    for what, a, b in zip(('CPU s', 'wall s', 'CPU s per token'), *sides, strict=True):
        cells = [f'{statistics.median(side):.4g}' for side in (a, b)]
        rows.append([what, least_median_greatest(ratios(a, b)), *cells])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {'layers': 4, 'width': 256, 'heads': 4, 'vocab': 512, 'batch': 32, 'prompt': 16, 'new': 48, 'rounds': 15}
    for name, default in (sizes | {'threads': 1, 'seed': 0}).items():
        parser.add_argument(f'--{name}', type=int, default=default)
    parser.add_argument('--rungs', nargs='+', choices=tuple(ladders.GPT), help='sizes of the GPT-2 ladder instead')
    parser.add_argument('--device', choices=('cpu', 'cuda'), default='cpu')
    parser.add_argument('--precision', choices=tuple(PRECISIONS), default='fp32', help='of the weights, on both sides')
    parser.add_argument('--page', action='store_true', help='write the table into docs/results/speed.md')
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    for rung in args.rungs or [None]:
        if rung is not None:
            args.width, args.layers, args.heads = ladders.GPT[rung]
            args.vocab = ladders.TINY_VOCAB if rung == 'tiny' else ladders.GPT_VOCAB
        for lengths, end_prob in (('fixed', 0.0), ('varying', end_probability(1 / 3, args.new))):
            rows += [[f'{args.layers} x {args.width}', lengths, *row] for row in compare(args, end_prob)]
    table = markdown('GPT-2 | lengths | measure | ratio: least median greatest | local engine | generate', rows)
    print(table)
    if args.page:
        write_page(PAGES / 'speed.md', rollout=table)


if __name__ == '__main__':
    main()
