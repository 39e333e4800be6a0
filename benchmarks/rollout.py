"""Collecting with the local engine against `model.generate`, on the same model, prompts and limits, in one run.

Two cases: fixed lengths (no end token, every response runs to the limit) and varying lengths (a bias on the end token
makes response lengths geometric with a mean of a third of the limit, the same distribution on both sides). Both sides
sample at temperature 1 on one thread; rounds alternate A B A B, and the ratio of each round's times is reported as min,
median and max. For varying lengths the ratio is of times per generated token as well, since the two sides draw
different lengths. The file's `decode` is the other way round: how many times `generate`'s new tokens per second (of
wall time) the engine's are.

    python benchmarks/rollout.py
    python benchmarks/rollout.py --layers 2 --width 64 --rounds 3 --json out.json
    python benchmarks/rollout.py --device cuda --precision bf16 --rungs s xl --new 64 --rounds 3 --json out.json

Left out: scoring and learning.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import ladders
import torch
from torch import nn
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel

from chatgpt.nn import Actor
from chatgpt.rollout import LocalEngine, SamplingParams
from chatgpt.types import Prompt

END = 1
PRECISIONS = {'fp32': torch.float32, 'bf16': torch.bfloat16}


def build_model(args: argparse.Namespace, end_prob: float) -> Any:
    """A random GPT-2 whose end token has this probability at every step (0: never); other tokens are equally likely."""
    torch.manual_seed(args.seed)
    config = GPT2Config(
        n_layer=args.layers,
        n_embd=args.width,
        n_head=args.heads,
        vocab_size=args.vocab,
        n_positions=args.prompt + args.new,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    with torch.device(args.device):
        model = GPT2LMHeadModel(config).eval()
        head = nn.Linear(args.width, args.vocab)
    head.weight.data.zero_()  # costs as much as any other and makes the end probability exact: p = e^b / (e^b + V - 1)
    head.bias.data.zero_()
    head.bias.data[END] = math.log(end_prob * (args.vocab - 1) / (1 - end_prob)) if end_prob > 0 else -1e9
    model.lm_head = head
    return model.to(PRECISIONS[args.precision])


def compare(args: argparse.Namespace, end_prob: float) -> dict[str, Any]:
    model = build_model(args, end_prob)
    drawn = torch.randint(2, args.vocab, (args.batch, args.prompt))
    prompts, input_ids = [Prompt(ids=row) for row in drawn], drawn.to(args.device)
    eos = (END,) if end_prob > 0 else ()
    sampling = SamplingParams(max_new_tokens=args.new, eos_token_ids=eos)
    generation = GenerationConfig(
        max_new_tokens=args.new,
        do_sample=True,
        top_k=0,
        top_p=1.0,
        temperature=1.0,
        eos_token_id=END if eos else None,
        pad_token_id=0,
        use_cache=True,
    )
    engine = LocalEngine()
    engine.begin(Actor(model))
    mask = torch.ones_like(input_ids)

    def local(round_: int) -> int:
        first = round_ * args.batch
        samples = engine.generate(prompts, sampling, seed=args.seed, indices=range(first, first + args.batch))
        return sum(s.num_actions for s in samples)

    def reference(round_: int) -> int:
        torch.manual_seed(round_)
        with torch.inference_mode():
            sequences = model.generate(input_ids, attention_mask=mask, generation_config=generation)
        response = sequences[:, args.prompt :]
        ended = (response == END).int().cumsum(1).clamp(max=1) if eos else torch.zeros_like(response)
        return int((1 - ended).sum() + ended.any(1).sum())

    def measure(run: Callable[[int], int], round_: int) -> dict[str, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        tokens = run(round_)
        if args.device == 'cuda':
            torch.cuda.synchronize()
        return {'cpu_s': time.process_time() - cpu, 'wall_s': time.perf_counter() - wall, 'tokens': tokens}

    local(0), reference(0)  # warm-up
    rounds = [(measure(local, r), measure(reference, r)) for r in range(1, args.rounds + 1)]
    engine.end()

    def spread(ratios: list[float]) -> dict[str, float]:
        return {'min': min(ratios), 'median': statistics.median(ratios), 'max': max(ratios)}

    def side(which: int) -> dict[str, float]:
        return {key: statistics.median(pair[which][key] for pair in rounds) for key in ('cpu_s', 'wall_s', 'tokens')}

    return {
        'local': side(0),
        'generate': side(1),
        'ratio_cpu': spread([a['cpu_s'] / b['cpu_s'] for a, b in rounds]),
        'ratio_wall': spread([a['wall_s'] / b['wall_s'] for a, b in rounds]),
        'ratio_cpu_per_token': spread([(a['cpu_s'] / a['tokens']) / (b['cpu_s'] / b['tokens']) for a, b in rounds]),
        'times': spread([(a['tokens'] / a['wall_s']) / (b['tokens'] / b['wall_s']) for a, b in rounds]),
        'mean_length_share': sum(a['tokens'] for a, _ in rounds) / (args.rounds * args.batch * args.new),
    }


def mean_length(end_prob: float, limit: int) -> float:
    """Mean of min(geometric, limit)."""
    return (1 - (1 - end_prob) ** limit) / end_prob


def end_prob_for(share: float, limit: int) -> float:
    """The end probability at which responses are share * limit long on average, by bisection."""
    low, high = 1e-6, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if mean_length(middle, limit) > share * limit else (low, middle)
    return low


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (
        ('layers', 4),
        ('width', 256),
        ('heads', 4),
        ('vocab', 512),
        ('batch', 32),
        ('prompt', 16),
        ('new', 48),
    ):
        parser.add_argument(f'--{name}', type=int, default=default)
    parser.add_argument(
        '--rungs', nargs='+', choices=tuple(ladders.GPT), help='sizes of the GPT-2 ladder instead of the four above'
    )
    parser.add_argument('--device', choices=('cpu', 'cuda'), default='cpu')
    parser.add_argument('--precision', choices=tuple(PRECISIONS), default='fp32', help='of the weights, on both sides')
    parser.add_argument('--rounds', type=int, default=15)
    parser.add_argument('--threads', type=int, default=1)
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--json', default=None, help='also write the results to this file')
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results: dict[str, dict[str, Any]] = {}
    for name, sized in sizes(args).items():
        results[name] = {'fixed': compare(sized, 0.0), 'varying': compare(sized, end_prob_for(1 / 3, args.new))}
        show(name, sized, results[name])
    if args.json:
        decode = [
            {
                'model': name,
                'lengths': case,
                'times': result['times'],
                'tokens_per_s': {
                    side: result[side]['tokens'] / result[side]['wall_s'] for side in ('local', 'generate')
                },
            }
            for name, cases in results.items()
            for case, result in cases.items()
        ]
        with open(args.json, 'w') as file:
            json.dump(
                {'settings': vars(args), 'torch': torch.__version__, 'decode': decode, 'results': results},
                file,
                indent=1,
            )


def sizes(args: argparse.Namespace) -> dict[str, argparse.Namespace]:
    """The settings of each model to measure, by name."""
    if not args.rungs:
        return {f'{args.layers} x {args.width}': args}
    found = {}
    for rung in args.rungs:
        width, layers, heads = ladders.GPT[rung]
        vocab = ladders.TINY_VOCAB if rung == 'tiny' else ladders.GPT_VOCAB
        found[rung] = argparse.Namespace(
            **vars(args) | {'width': width, 'layers': layers, 'heads': heads, 'vocab': vocab}
        )
    return found


def show(name: str, args: argparse.Namespace, cases: dict[str, Any]) -> None:
    print(
        f'GPT-2 {name}, vocabulary {args.vocab}, {args.batch} prompts x {args.prompt} + {args.new} new tokens, '
        f'{args.precision} on {args.device}, {args.threads} thread(s), torch {torch.__version__}; local engine / '
        'model.generate'
    )
    print(f'{"lengths":10}{"measure":22}{"min":>8}{"median":>8}{"max":>8}{"local":>12}{"generate":>12}')
    for case, result in cases.items():
        for key, unit in (('ratio_cpu', 'cpu_s'), ('ratio_wall', 'wall_s'), ('ratio_cpu_per_token', 'tokens')):
            ratio = result[key]
            print(
                f'{case:10}{key:22}{ratio["min"]:8.3f}{ratio["median"]:8.3f}{ratio["max"]:8.3f}'
                f'{result["local"][unit]:12.4g}{result["generate"][unit]:12.4g} {unit}'
            )


if __name__ == '__main__':
    main()
