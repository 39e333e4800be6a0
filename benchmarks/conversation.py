"""Episodes whose keys and values stay in the cache between turns, beside the same episodes by rounds of new prompts.

    python benchmarks/conversation.py [--pairs 5] [--think 0.0]

Both in turn, with the same weights, tasks and draws; the ratio is paired, because other work on the machine moves every
number. Counted are the tokens that the policy sampled, which are the same in both, by CPU seconds of this process; by
wall-clock seconds where environments think.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

import torch

from chatgpt.environments import Environment, EnvironmentSettings
from chatgpt.nn import GPTActor
from chatgpt.rollout import LocalEngine, RolloutEngine, SamplingParams
from chatgpt.rollout.episodes import EpisodeEngine
from chatgpt.testing import byte_tokenizer, tiny_config
from chatgpt.types import Prompt

TURNS = 6


class Reader(Environment):
    """Answers each turn with a page of `page` characters, after a share of `think` seconds."""

    def __init__(self, page: int, think: float) -> None:
        self.page, self.think = page, think

    def reset(self, seed: int, **columns: Any) -> str:
        self.random, self.turns = random.Random(seed), 0
        return self._read()

    def step(self, response: str) -> Any:
        self.turns += 1
        time.sleep(self.think * random.random())  # which no draw may depend on
        return self._read(), 0.0, self.turns == TURNS, False, {}

    def _read(self) -> str:
        length = self.random.randint(self.page // 2, self.page)
        return ''.join(self.random.choices('abcdefghij ', k=length))


class ByRounds:
    """An engine without its `converse`."""

    reproducible = True

    def __init__(self, engine: RolloutEngine) -> None:
        self.begin, self.generate, self.end = engine.begin, engine.generate, engine.end


def seconds(engine: Any, actor: Any, args: argparse.Namespace) -> tuple[float, list[Any]]:
    tokenizer = byte_tokenizer()
    settings = EnvironmentSettings(max_turn_tokens=args.turn_tokens, num_workers=args.episodes)
    over = EpisodeEngine(engine, lambda: Reader(args.page, args.think), tokenizer, settings)
    nothing = [Prompt(ids=torch.zeros(0, dtype=torch.int64)) for _ in range(args.episodes)]
    sampling = SamplingParams(
        max_new_tokens=TURNS * (args.turn_tokens + args.page), eos_token_ids=tuple(range(0, 256, args.turn_tokens))
    )
    over.begin(actor)
    clock = time.perf_counter if args.think else time.process_time
    start = clock()
    samples = over.generate(nothing, sampling, seed=1, indices=range(args.episodes))
    took = clock() - start
    over.end()
    over.close()
    return took, samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--pairs', type=int, default=5)
    parser.add_argument('--episodes', type=int, default=24)
    parser.add_argument('--rows', type=int, default=8, help='decoded at once')
    parser.add_argument('--page', type=int, default=100, help='most tokens of an observation')
    parser.add_argument('--turn-tokens', type=int, default=16)
    parser.add_argument('--think', type=float, default=0.0, help='most seconds of a step of the environment')
    parser.add_argument('--hidden', type=int, default=128)
    args = parser.parse_args()
    torch.manual_seed(0)
    positions = 1 + args.page + TURNS * (args.turn_tokens + args.page)
    actor = GPTActor(
        config=tiny_config('gpt2', vocab_size=259, hidden=args.hidden, layers=4, heads=4, positions=positions)
    )
    local = LocalEngine(max_batch_size=args.rows)
    rates: list[tuple[float, float]] = []
    for pair in range(args.pairs + 1):
        kept, one = seconds(local, actor, args)
        rounds, other = seconds(ByRounds(local), actor, args)
        sampled, same = (sum(int(s.response_mask.sum()) for s in samples) for samples in (one, other))
        equal = sum(torch.equal(a.response_ids, b.response_ids) for a, b in zip(one, other, strict=True))
        if pair:  # the first is a warm-up
            rates.append((sampled / kept, same / rounds))
        else:
            told = statistics.mean(len(s.response_ids) for s in one)
            print(f'{args.episodes} episodes of {told:.0f} tokens, {sampled} sampled; {equal} the same in both')
    for kept_rate, rounds_rate in rates:
        print(f'cache kept {kept_rate:7.0f} tokens/s   rounds {rounds_rate:7.0f}   ratio {kept_rate / rounds_rate:.2f}')
    ratios = [a / b for a, b in rates]
    print(f'median ratio {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}')


if __name__ == '__main__':
    main()
