"""Measures speed on a CPU, in CPU seconds: GPT-2 of 4 layers x 256 (vocabulary 512), 32 prompts of 16 tokens, up to 48
new ones, one thread. Sides take turns, and a ratio is taken within a round.

    python benchmarks/speed.py ppo [--repeats 3] [--page]
    python benchmarks/speed.py rollout [--repeats 15] [--page]
    python benchmarks/speed.py packing [--repeats 7] [--page]

ppo: collect, score and learn, with four networks (actor, critic, reward model, initial model) and with a shared trunk
and value head, against the bare costs of the same model: a forward, a forward with backward, an AdamW step, and
`model.generate`. Their sum is the lower bound of PPO with this arithmetic; "x bare" is the ratio to it.

rollout: the local engine against `model.generate` on the same model, prompts and limits, sampled at temperature 1.
Ratios are local engine / generate, also per generated token, since the two sides sample different lengths.

packing: forward, and forward with backward, without padding and with it. Ratios are padded / packed; the share of real
tokens in the padded batch bounds them.

Lengths are fixed (every response runs to the limit) or vary: geometric with a mean of a third of the limit.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import harness
import torch
from torch import nn
from transformers import GPT2LMHeadModel

from chatgpt.batching import collate
from chatgpt.nn import Actor, GPTActor, GPTCritic, RewardModel
from chatgpt.rollout import Call, LocalEngine, SamplingParams
from chatgpt.strategies import NaiveStrategy
from chatgpt.types import Prompt, Sequence

ROWS, PROMPT_TOKENS, NEW_TOKENS, VOCAB = 32, 16, 48, 512
END = 1
PARTS = ('collect', 'score', 'learn')


# ---------------------------------------------------------------------- PPO against its bare costs


def make_trainer(arrangement: str, epochs: int) -> Any:
    strategy, shared = NaiveStrategy(seed=0), arrangement == 'shared trunk'
    actor = GPTActor(config=harness.gpt2(), value_head=True if shared else None)
    critic = None if shared else GPTCritic(config=harness.gpt2())
    reward = (lambda prompts, responses: [0.0] * len(prompts)) if shared else RewardModel(deepcopy(critic.model))
    trainer = harness.ppo_trainer(
        strategy, actor, critic, reward, deepcopy(actor), optimizer=partial(torch.optim.AdamW, lr=1e-5, eps=1e-5),
        experience_batch_size=ROWS, train_batch_size=ROWS, max_epochs=epochs, max_new_tokens=NEW_TOKENS,
        max_tokens_per_batch=ROWS * (PROMPT_TOKENS + NEW_TOKENS),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    trainer.set_prompts([torch.randint(2, VOCAB, (PROMPT_TOKENS,), generator=generator) for _ in range(ROWS)])
    return trainer


def one_phase(trainer: Any) -> dict[str, float]:
    trainer.collect(1)
    metrics = trainer.learn()
    return {part: metrics[f'perf/{part}_cpu_s'] for part in PARTS}


def bare_costs() -> dict[str, float]:
    """Returns the CPU seconds of the model's own operations."""
    model = GPT2LMHeadModel(harness.gpt2()).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, eps=1e-5)
    ids = torch.randint(2, VOCAB, (ROWS, PROMPT_TOKENS + NEW_TOKENS))

    @torch.no_grad()
    def forward() -> None:
        model(ids, use_cache=False)

    def backward() -> None:
        model(ids, labels=ids, use_cache=False).loss.backward()

    def bare_generate() -> None:
        harness.generate(model, ids[:, :PROMPT_TOKENS], NEW_TOKENS, top_k=50)  # its default

    acts = {'forward': forward, 'backward': backward, 'step': optimizer.step, 'generate': bare_generate}
    costs = {}
    for name, act in acts.items():  # the optimizer step uses the gradients of the backward before
        act()  # warm-up
        costs[name] = harness.cpu_seconds(act)
    return costs


def measure_ppo(arrangement: str, epochs: int, repeats: int) -> dict[str, Any]:
    trainer = make_trainer(arrangement, epochs)
    found = harness.alternate({'bare': lambda _: bare_costs(), 'phase': lambda _: one_phase(trainer)}, repeats)
    bare = {name: statistics.median(row[name] for row in found['bare']) for name in found['bare'][0]}
    parts = {part: statistics.median(row[part] for row in found['phase']) for part in PARTS}
    parts['total'] = statistics.median(sum(row.values()) for row in found['phase'])
    # The same arithmetic, bare. Scoring runs reference, critic and reward forwards; decoding returns the old log-probs.
    trained, scored = (1, 2) if arrangement == 'shared trunk' else (2, 3)
    learn = epochs * trained * (bare['backward'] + bare['step'])
    floor = {'collect': bare['generate'], 'score': scored * bare['forward'], 'learn': learn}
    floor['total'] = sum(floor.values())
    return {
        'arrangement': arrangement,
        'epochs': epochs,
        'new_tokens_per_cpu_s': ROWS * NEW_TOKENS / parts['total'],
        'cpu_s': parts,
        'bare_cpu_s': bare,
        'overhead': {part: parts[part] / floor[part] for part in parts},
    }


def ppo(repeats: int, page: bool) -> str:
    found = [measure_ppo(a, epochs, repeats) for a in ('four networks', 'shared trunk') for epochs in (1, 4)]
    if page:
        harness.write_json(harness.RESULTS / 'ppo_speed.json', found)
    return ppo_table(found)


def ppo_table(found: list[dict[str, Any]]) -> str:
    rows = []
    for row in found:
        cells = [f'{row["cpu_s"][p]:.2f} ({row["overhead"][p]:.2f})' for p in (*PARTS, 'total')]
        rows.append([row['arrangement'], row['epochs'], f'{row["new_tokens_per_cpu_s"]:.0f}', *cells])
    head = 'arrangement | epochs | new tokens / CPU s | ' + ' | '.join(f'{p} s (x bare)' for p in (*PARTS, 'total'))
    return harness.markdown(head, rows)


# ---------------------------------------------------------------------- collecting against model.generate


def with_end(end_prob: float) -> Any:
    """Returns a random GPT-2 with this probability of the end token at every step, and equal ones of other tokens."""
    torch.manual_seed(0)
    none = dict.fromkeys(('bos_token_id', 'eos_token_id', 'pad_token_id'))
    model = GPT2LMHeadModel(
        harness.gpt2(positions=PROMPT_TOKENS + NEW_TOKENS, tie_word_embeddings=False, **none)
    ).eval()
    model.lm_head = head = nn.Linear(model.config.n_embd, VOCAB)
    head.weight.data.zero_()  # same cost, with an exact end probability: p = e^b / (e^b + V - 1)
    head.bias.data.zero_()
    head.bias.data[END] = math.log(end_prob * (VOCAB - 1) / (1 - end_prob)) if end_prob > 0 else -1e9
    return model


def rollout_rows(end_prob: float, repeats: int) -> list[list[str]]:
    """Returns rows of the table: quantity, ratio, both sides."""
    model = with_end(end_prob)
    input_ids = torch.randint(2, VOCAB, (ROWS, PROMPT_TOKENS))
    prompts, eos = [Prompt(ids=row) for row in input_ids], (END,) if end_prob > 0 else ()
    sampling = SamplingParams(max_new_tokens=NEW_TOKENS, eos_token_ids=eos)
    engine = LocalEngine()
    engine.begin(Actor(model))

    def local(number: int) -> int:
        indices = range(number * ROWS, (number + 1) * ROWS)
        return sum(s.num_actions for s in engine.generate(Call.of(prompts, sampling, seed=0, indices=indices)))

    def reference(number: int) -> int:
        torch.manual_seed(number)
        response = harness.generate(model, input_ids, NEW_TOKENS, eos_token_id=END if eos else None)[:, PROMPT_TOKENS:]
        ended = (response == END).int().cumsum(1).clamp(max=1) if eos else torch.zeros_like(response)
        return int((1 - ended).sum() + ended.any(1).sum())

    sides = {'local': local, 'generate': reference}
    found = harness.alternate(
        {name: lambda n, act=act: harness.timed(lambda: act(n)) for name, act in sides.items()}, repeats
    )
    engine.end()
    measures: dict[str, Callable[[int, dict[str, float]], float]] = {
        'CPU s': lambda tokens, spent: spent['cpu_s'],
        'wall s': lambda tokens, spent: spent['wall_s'],
        'CPU s per token': lambda tokens, spent: spent['cpu_s'] / tokens,
    }
    rows = []
    for what, measure in measures.items():
        a, b = ([measure(*one) for one in found[name]] for name in sides)
        rows.append(
            [
                what,
                harness.least_median_greatest(harness.ratios(a, b)),
                *(f'{statistics.median(side):.4g}' for side in (a, b)),
            ]
        )
    return rows


def rollout(repeats: int, page: bool) -> str:
    kinds = {'fixed': 0.0, 'varying': harness.end_probability(1 / 3, NEW_TOKENS)}
    rows = [['4 x 256', kind, *row] for kind, end_prob in kinds.items() for row in rollout_rows(end_prob, repeats)]
    return harness.markdown('GPT-2 | lengths | measure | ratio: least median greatest | local engine | generate', rows)


# ---------------------------------------------------------------------- without padding


def sequences(kind: str) -> list[Sequence]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(ROWS):
        drawn = 1 + int(torch.empty(1).exponential_(3 / NEW_TOKENS, generator=generator))
        length = NEW_TOKENS if kind == 'fixed' else min(drawn, NEW_TOKENS)
        found.append(harness.random_sequence(generator, PROMPT_TOKENS, length, VOCAB))
    return found


def packing_row(precision: str, kind: str, repeats: int) -> list[str]:
    torch.manual_seed(0)
    actor, items = GPTActor(config=harness.gpt2()).eval(), sequences(kind)
    batches = {name: collate(items, pack=name == 'packed') for name in ('padded', 'packed')}

    def forward(batch: Any) -> Any:
        with torch.autocast('cpu', dtype=torch.bfloat16, enabled=precision == 'bf16'):
            return actor(batch, with_entropy=True)

    def learn(batch: Any) -> None:
        out = forward(batch)
        (out.logprobs.sum() + out.entropy.sum()).backward()

    def both(batch: Any) -> tuple[float, float]:
        with torch.no_grad():
            alone = harness.cpu_seconds(lambda: forward(batch))
        return alone, harness.cpu_seconds(lambda: learn(batch))

    found = harness.alternate({name: lambda _, b=batch: both(b) for name, batch in batches.items()}, repeats)
    sides = [zip(*found[name], strict=True) for name in ('padded', 'packed')]
    cells = [
        harness.least_median_greatest(harness.ratios(padded, packed)) for padded, packed in zip(*sides, strict=True)
    ]
    share = sum(s.num_tokens for s in items) / (len(items) * max(s.num_tokens for s in items))
    return [kind, precision, f'{share:.2f}', f'{1 / share:.2f}', *cells]


def packing(repeats: int, page: bool) -> str:
    head = 'lengths | compute | real tokens | bound | forward: least median greatest | forward and backward'
    return harness.markdown(
        head, [packing_row(p, kind, repeats) for p in ('fp32', 'bf16') for kind in ('fixed', 'eos')]
    )


MEASUREMENTS: dict[str, tuple[Callable[[int, bool], str], int]] = {
    'ppo': (ppo, 5),
    'rollout': (rollout, 15),
    'packing': (packing, 7),
}
"""function and number of rounds"""


def main() -> None:
    parser = harness.script_parser(__doc__, 'speed.md')
    parser.add_argument('what', choices=MEASUREMENTS)
    parser.add_argument('--repeats', type=int, help='number of rounds')
    args = parser.parse_args()
    torch.set_num_threads(1)
    measure, repeats = MEASUREMENTS[args.what]
    table = measure(args.repeats or repeats, args.page)
    print(table)
    if args.page:
        harness.write_page('speed.md', **{args.what: table})


if __name__ == '__main__':
    main()
