"""Plans GRPO on 1, 8, 64 and 512 cards of 80 GiB: memory per card by the planner, traffic by formula, and time by
arithmetic. Nothing runs on a GPU.

    python benchmarks/scale.py --page

docs/scale.md states every assumption. Numbers in the file of --json are not planned again.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import RESULTS, ROOT, Results, markdown, script_parser, write_page
from seventy_b import SHAPE
from transformers import LlamaConfig
from which_gpu import config_of, planned

from chatgpt.plan import Setup, make_plan, models, show_bytes
from chatgpt.plan.phases import rows_per_forward
from chatgpt.strategies.fsdp import WHOLE_GRADIENTS_GIB
from chatgpt.types import Experience

PROMPTS, SAMPLES, UPDATES, PROMPT_TOKENS = 128, 8, 4, 1024
"""prompts of a phase, responses to each, optimizer steps on them, and tokens of a prompt"""
MACHINE, DEVICE, HOST = 8, 80 * 2**30, 2 * 2**40
FLOPS, NVLINK, PORT = 0.4 * 989e12, 450e9, 50e9
"""per second and card: arithmetic in bf16 at 40 % of the peak, bytes sent by NVLink, bytes sent by the network"""
GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Case:
    model: str
    cards: int
    training: int
    """cards that train; the others generate"""
    worker: int = 0
    """cards of a vLLM worker; 0: the training cards generate"""
    strategy: str = 'fsdp'
    parts: dict[str, int] = field(default_factory=dict)
    """tensor_parallel, sequence_parallel, replicas"""
    options: dict[str, Any] = field(default_factory=dict)
    tokens: int = 32768

    def part(self, name: str) -> int:
        return self.parts.get(name, 1)

    @property
    def ranks(self) -> int:
        return self.training // self.part('tensor_parallel') // self.part('sequence_parallel')

    @property
    def timestep(self) -> int:
        """Prompts that are generated and scored together."""
        return PROMPTS if self.worker else self.ranks

    @property
    def name(self) -> str:
        names = {'tensor_parallel': 'TP', 'sequence_parallel': 'SP', 'replicas': 'replicas'}
        what = 'FSDP2' if self.strategy == 'fsdp' else 'one process'
        what += ', 4 bits' if 'quantize' in self.options else ''
        what += ', LoRA' if 'lora_rank' in self.options else ''
        return ', '.join([what, *(f'{names[part]} {size}' for part, size in self.parts.items())])

    @property
    def workers(self) -> int:
        return (self.cards - self.training) // self.worker if self.worker else 0

    def setup(self) -> Setup:
        shape: dict[str, Any] = SHAPE
        config: Any = LlamaConfig(**shape) if self.model == '70B' else config_of(self.model)
        config.dtype = torch.bfloat16  # as published: frozen weights are then kept in 16 bits
        return Setup(
            config=config,
            strategy=self.strategy,
            strategy_options=self.parts,
            num_processes=self.training,
            processes_per_machine=min(MACHINE, self.training),
            precision='bf16',
            critic='none',
            gradient_checkpointing=True,
            memory=DEVICE,
            host_memory=HOST,
            experience_batch_size=self.timestep,
            update_timesteps=PROMPTS // self.timestep,
            num_samples_per_prompt=SAMPLES,
            train_batch_size=PROMPTS * SAMPLES // UPDATES,
            max_tokens_per_batch=self.tokens,
            max_prompt_tokens=PROMPT_TOKENS,
            max_new_tokens=self.tokens - PROMPT_TOKENS,
            rollouts_elsewhere=self.worker > 0,
            **self.options,
        )


LORA: dict[str, Any] = {'lora_rank': 16}
CASES = (
    Case(model='8B', cards=1, training=1, strategy='naive', options=LORA),
    Case(model='8B', cards=8, training=8),
    Case(model='8B', cards=64, training=32, worker=1),
    Case(model='8B', cards=64, training=32, worker=1, parts={'replicas': 4}),
    Case(model='8B', cards=512, training=256, worker=1, parts={'sequence_parallel': 2, 'replicas': 32}),
    Case(model='8B', cards=512, training=256, worker=8, parts={'sequence_parallel': 8, 'replicas': 32}),
    Case(model='70B', cards=1, training=1, strategy='naive', tokens=4096,
         options={'shared_trunk': True, 'quantize': 'nf4', **LORA}),
    Case(model='70B', cards=8, training=4, worker=4, parts={'sequence_parallel': 4}, options=LORA),
    Case(model='70B', cards=64, training=32, worker=4, parts={'tensor_parallel': 8}),
    Case(model='70B', cards=64, training=32, worker=4, parts={'sequence_parallel': 8}),
    Case(model='70B', cards=512, training=256, worker=4, parts={'sequence_parallel': 8}),
    Case(model='70B', cards=512, training=256, worker=4, parts={'sequence_parallel': 8, 'replicas': 4}),
)  # fmt: skip


def plan(case: Case) -> dict[str, Any]:
    """Returns the peak of each phase, and the sizes that traffic and arithmetic follow from."""
    setup = case.setup()
    found, size = make_plan(setup), models.measure(models.build('actor', setup.config, setup))
    config = setup.config
    whole = size if case.part('tensor_parallel') == 1 else models.measure(models.build('actor', config, _alone(case)))
    return {
        'phases': planned(found),
        'host': found.host_peak,
        'limit': found.limit,
        'micro_batches': PROMPTS * SAMPLES // UPDATES // case.ranks // rows_per_forward(setup, setup.train_batch_size),
        'weights': whole.total,
        'multiplied': whole.total - config.vocab_size * config.hidden_size,
        'attended': 2 * case.tokens * config.num_hidden_layers * config.hidden_size,
        'part': size.total,
        'outside': size.outside,
        'trained': size.trained,
        'waits': 4 * size.trained <= WHOLE_GRADIENTS_GIB * 2**30,
        'exchanged': found.exchanged if setup.sequence_parallel > 1 else 0,
        'summed': 2 * config.num_hidden_layers * config.hidden_size * setup.itemsize * case.tokens,
        'record': record_bytes(case.tokens - PROMPT_TOKENS),
    }


def _alone(case: Case) -> Setup:
    return Case(model=case.model, cards=1, training=1, strategy='naive', options=case.options).setup()


def record_bytes(actions: int) -> int:
    """Returns the bytes of a pickled record."""

    def numbers() -> torch.Tensor:
        return torch.zeros(actions)

    names = (
        'logprobs',
        'filtered_logprobs',
        'edge_distances',
        'old_logprobs',
        'ref_logprobs',
        'values',
        'kl',
        'rewards',
        'advantages',
        'returns',
    )
    ids = {'prompt_ids': torch.zeros(PROMPT_TOKENS, dtype=torch.int64), 'response_ids': numbers().long()}
    fields: Any = {**ids, 'response_mask': numbers().bool(), **{name: numbers() for name in names}}
    return len(pickle.dumps(Experience(index=0, group=0, finish_reason='length', score=0.0, **fields)))


# ---------------------------------------------------------------------- formulas


def arithmetic_s(found: dict[str, Any], case: Case, sequences: int, weights: float, attention: float) -> float:
    """Returns the seconds of so many passes over the weights, 2 FLOP per weight and token, and over causal attention, 2
    T L h per token of a sequence of T tokens."""
    flop = weights * 2 * found['multiplied'] + attention * found['attended']
    return sequences * case.tokens * flop / case.training / FLOPS


def learn_s(found: dict[str, Any], case: Case) -> float:
    """Returns the seconds of an update: forward, recomputed forward, gradients of activations, and of weights unless
    they are frozen."""
    return arithmetic_s(found, case, PROMPTS * SAMPLES // UPDATES, 3 if 'lora_rank' in case.options else 4, 4)


def phase_s(found: dict[str, Any], case: Case) -> float:
    """Returns the seconds of a phase's updates and scoring: the reference, and the actor for samples of vLLM."""
    forwards = 1 + bool(case.worker)
    return UPDATES * learn_s(found, case) + arithmetic_s(found, case, PROMPTS * SAMPLES, forwards, forwards)


def traffic(found: dict[str, Any], case: Case) -> tuple[float, float]:
    """Returns the bytes that a card sends for an update by NVLink, and by its network port."""
    tp, sp, replicas = (case.part(name) for name in ('tensor_parallel', 'sequence_parallel', 'replicas'))
    shards, rounds = case.training // tp // replicas, found['micro_batches']
    gathers = 2 * (2 * found['part'] - found['outside'])  # bf16: blocks forward and backward, the root once
    reductions = 1 if found['waits'] else rounds
    moved = (rounds * gathers + reductions * 4 * found['trained']) * (shards - 1) / shards
    if tp > 1:  # the cards of a rank fill a machine, so those that share a part are on different machines
        nvlink, network = 0.0, moved
    else:
        machines = -(-shards // MACHINE)
        nvlink, network = moved, moved * shards / max(shards - 1, 1) * (machines - 1) / machines / MACHINE
    network += reductions * 2 * 4 * found['trained'] / shards * (replicas - 1) / replicas
    nvlink += rounds * found['exchanged']
    nvlink += rounds * 3 * found['summed'] * 2 * (tp - 1) / tp  # sums: forward, recomputed, backward; two per layer
    return nvlink, network


# ---------------------------------------------------------------------- tables


def arrangements(numbers: dict[str, Any]) -> str:
    rows = []
    for case in CASES:
        found = numbers[key(case)]
        peak = max(found['phases'], key=found['phases'].get)
        where = f'{case.workers} x {case.worker}' if case.worker else 'the same cards'
        size = show_bytes(found['phases'][peak])
        host = show_bytes(found['host']) if found['host'] >= 2**30 else '-'
        cells = [case.training, case.name, case.ranks, where, int(bool(case.worker)), f'{case.tokens:,}']
        rows.append([case.model, case.cards, *cells, f'{size if not found["limit"] else f"**{size}**"}, {peak}', host])
    head = 'model | cards | train | arrangement | ranks | vLLM: workers x cards | staleness | tokens | peak of a card'
    return markdown(f'{head} | host, one machine', rows)


def updates(numbers: dict[str, Any]) -> str:
    rows = []
    for case in CASES:
        found = numbers[key(case)]
        seconds, sent = learn_s(found, case), traffic(found, case)
        cells = [case.model, case.cards, case.name, found['micro_batches'], three(seconds)]
        for size, speed in zip(sent, (NVLINK, PORT), strict=True):
            cells += (
                [three(size / GB), three(size / seconds / GB), f'{size / seconds / speed:.0%}'] if size else ['-'] * 3
            )
        rows.append(cells)
    head = 'model | cards | arrangement | micro-batches | arithmetic, s | NVLink, GB | GB/s | of its speed'
    return markdown(f'{head} | network, GB | GB/s | of its speed', rows)


def phases(numbers: dict[str, Any]) -> str:
    rows = []
    for case in CASES:
        found = numbers[key(case)]
        seconds = phase_s(found, case)
        weights = 2 * found['weights']
        served = -(-case.workers // case.training)  # workers of the card that serves most
        records = found['record'] * PROMPTS * SAMPLES if case.training > 1 else 0
        own = records / case.ranks
        update = own / UPDATES if case.ranks > 1 else 0
        on_machine = (own + update) * min(MACHINE, case.training)
        sent = ['-'] * 4
        if served:
            sent = [three(served * weights / GB), three(served * weights / PORT)]
            sent += [f'{served * weights / PORT / seconds:.1%}', three(weights * case.workers / case.training / GB)]
        held = [three(size / GB) if size else '-' for size in (records, own, 2 * update, on_machine)]
        rows.append([case.model, case.cards, case.name, three(seconds), *sent, *held])
    head = 'model | cards | arrangement | phase, s | NCCL: weights out of a card, GB | s | of the phase'
    head += ' | TCP: out of each card, GB | records, GB'
    held = 'of a rank, GB | while they move, on each card, GB | in host memory, one machine, GB'
    return markdown(f'{head} | {held}', rows)


def three(value: float) -> str:
    """Formats three digits."""
    return (
        f'{value:.{2 if value < 10 else 1 if value < 100 else 0}f}' if value < 1000 else f'{float(f"{value:.3g}"):,.0f}'
    )


def key(case: Case) -> str:
    return f'{case.model}, {case.cards}, {case.name}'


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument('--page', action='store_true', help='write the tables into docs/scale.md')
    parser.add_argument(
        '--json', type=Path, default=RESULTS / 'scale.json', help='file of numbers; those in it are kept'
    )
    args = parser.parse_args()
    results = Results(args.json)
    for case in CASES:
        results.measure(key(case), partial(plan, case))
    if args.page:
        tables = {'arrangements': arrangements(results), 'updates': updates(results), 'phases': phases(results)}
        write_page(ROOT / 'docs' / 'scale.md', **tables)


if __name__ == '__main__':
    main()
