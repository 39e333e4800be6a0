"""Memory of one rank under each strategy: held between steps, and at the peak of a step; and of the records of a phase.

    python benchmarks/memory_per_rank.py [--page] [--world_sizes 1 2 4]
    python benchmarks/memory_per_rank.py --records [--page]

docs/results/memory_per_rank.md describes the model and defines held and peak memory.
"""

from __future__ import annotations

import gc
import os
import pickle
import threading
from typing import Any, Self

import torch
from harness import gpt2, markdown, process_memory, random_sequence, script_parser, stored_bytes, write_page

from chatgpt import strategies as s
from chatgpt.batching import collate
from chatgpt.nn import GPTActor
from chatgpt.nn.records import moved, shared
from chatgpt.testing.processes import run_distributed
from chatgpt.types import Experience

SMALL_CHUNKS = {'search_range_mb': 1, 'min_chunk_size_mb': 1}
STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    'ddp': ('DDPStrategy', {'device': 'cpu'}),
    'fsdp': ('FSDPStrategy', {'device': 'cpu', 'meta_init': True}),
    'colossalai zero1': ('ColossalAIStrategy', {'stage': 1}),
    'colossalai zero2': ('ColossalAIStrategy', {'stage': 2}),
    'colossalai gemini': ('ColossalAIStrategy', {'stage': 3, 'shard_init': True, **SMALL_CHUNKS}),
}
COMPARED = {
    'fp32': ('ddp', 'fsdp', 'colossalai zero1', 'colossalai zero2'),
    'bf16': ('ddp', 'fsdp', 'colossalai gemini'),
}


class Peak:
    """A context that records the peak of anonymous resident memory, in MiB above the start."""

    def __enter__(self) -> Self:
        self.start = self.highest = process_memory()['RssAnon']
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.001):
            self.highest = max(self.highest, process_memory()['RssAnon'])

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.mib = (self.highest - self.start) / 2**20


def two_steps(strategy: Any, layers: int, width: int) -> dict[str, float]:
    """Trains a new model; returns the memory held at the end, the size of its whole weights, and their number."""
    config = gpt2(2048, layers, width, 8, 64)
    with strategy.model_init_context():
        actor = GPTActor(config=config)
    parameters = sum(p.numel() for p in actor.parameters())
    optimizer = strategy.make_optimizer(actor.parameters(), lr=1e-4)
    actor, optimizer = strategy.prepare((actor, optimizer))
    batch = collate([random_sequence(torch.Generator().manual_seed(0), 2, 32, 2048)])
    for last_step in (False, True):
        with strategy.accumulate(actor, last=True):
            with strategy.autocast():
                loss = -actor(batch).logprobs.sum() / (32 * strategy.world_size)
            strategy.backward(loss, actor, optimizer)
        if not last_step:
            strategy.optimizer_step(optimizer)
    del loss
    gc.collect()
    tensors = [
        t for t in gc.get_objects() if isinstance(t, torch.Tensor) and t.device.type == 'cpu' and t.is_floating_point()
    ]
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    held = stored_bytes(tensors) / 2**20
    del tensors
    strategy.optimizer_step(optimizer)
    return {'held_mib': held, 'parameters': parameters}


def measure(kind: str, options: dict[str, Any], layers: int = 18, width: int = 512) -> dict[str, float]:
    def new() -> Any:
        return getattr(s, kind)(seed=0, **options)

    with new() as strategy:
        two_steps(strategy, layers=1, width=64)
        gc.collect()
        strategy.barrier()
        with Peak() as peak:
            result = two_steps(strategy, layers, width)
    return {**result, 'peak_mib': peak.mib}


# ---------------------------------------------------------------------- records of a phase

SEQUENCES, UPDATES, PROMPT, TOKENS = 1024, 4, 1024, 32768
"""sequences of a phase, optimizer steps on them, tokens of a prompt and of a sequence"""
COLUMNS = ('logprobs', 'filtered_logprobs', 'edge_distances', 'old_logprobs', 'ref_logprobs', 'values', 'kl')
COLUMNS += ('rewards', 'advantages', 'returns')


def full_record(index: int) -> Experience:
    actions = TOKENS - PROMPT
    fields: dict[str, Any] = {name: torch.full((actions,), 0.5) for name in COLUMNS}
    ids = torch.full((PROMPT,), 7), torch.full((actions,), 7)
    fields |= {'prompt_ids': ids[0], 'response_ids': ids[1], 'response_mask': torch.ones(actions, dtype=torch.bool)}
    return Experience(index=index, group=index // 8, finish_reason='length', score=0.0, **fields)


class RankZero:
    """Rank 0 of a run whose other ranks have records of the same lengths, and send what the functions of
    `chatgpt.nn.records` expect of them."""

    rank = 0

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.coming: list[int] = []
        """bytes that each rank sends next"""

    def from_leader(self, obj: Any) -> Any:
        return obj

    def all_gather_object(self, obj: list[Experience]) -> list[list[Experience]]:
        everyone = [pickle.loads(pickle.dumps(obj)) for _ in range(self.world_size)]
        for rank, records in enumerate(everyone):
            for record in records:
                record.rank, record.index = rank, record.index + rank
        return everyone

    def exchange(self, sent: list[torch.Tensor]) -> list[torch.Tensor]:
        flat = torch.cat(sent)  # as `ProcessGroup.exchange`
        received = flat.new_full((sum(self.coming),), 1)
        return list(received.split(self.coming))


def records_of_rank(world_size: int, stay: bool) -> dict[str, float]:
    """Returns MiB of the records on a rank after scoring, and at the peak of scoring and of the first update."""
    ranks, own = RankZero(world_size), SEQUENCES // world_size
    shared(RankZero(2), [full_record(i) for i in (0, 1)])  # imports and first allocations do not count
    gc.collect()
    start = process_memory()['RssAnon']
    with Peak() as peak:
        local = [full_record(i * world_size) for i in range(own)]
        if stay:
            records = shared(ranks, local)
        else:  # every rank has the records of all: pickled by each, received in one piece, unpickled
            sent = pickle.dumps(local)
            received = bytearray(b''.join([sent] * world_size))
            parts = (memoryview(received)[rank * len(sent) : (rank + 1) * len(sent)] for rank in range(world_size))
            records = [record for part in parts for record in pickle.loads(part)]
            del received, parts, sent, local
    gc.collect()
    held = process_memory()['RssAnon'] - start
    found = {'held': held / 2**20, 'collect': peak.mib}
    with Peak() as peak:
        batch, learner = records[: SEQUENCES // UPDATES], [i % world_size for i in range(SEQUENCES // UPDATES)]
        goes = learner[1:] + learner[:1]  # each rank learns what another has collected
        if stay:
            size = 8 * TOKENS + 4 * len(COLUMNS) * (TOKENS - PROMPT)
            ranks.coming = [size * sum(r.rank == rank and to == 0 != rank for r, to in zip(batch, goes, strict=True))
                            for rank in range(world_size)]  # fmt: skip
            batch = moved(ranks, batch, goes)  # type: ignore[arg-type]
    found['learn'] = found['held'] + peak.mib
    return found


def records_table() -> str:
    rows = []
    for world_size, stay in ((8, False), (8, True), (64, True)):
        (found,) = run_distributed(records_of_rank, 1, world_size, stay, fresh=True)
        name = 'stay on their rank' if stay else 'of all on every rank'
        numbers = [f'{found[part]:,.0f}' for part in ('held', 'collect', 'learn')]
        rows.append([world_size if stay else 'any', name, *numbers])
        print(rows[-1], flush=True)
    return markdown('ranks | records | held, MiB | peak of gathering, MiB | peak of an update, MiB', rows)


def table(names: tuple[str, ...], precision: str, world_sizes: list[int]) -> str:
    rows = []
    for name in names:
        kind, options = STRATEGIES[name]
        cells = []
        for world_size in world_sizes:
            ranks = run_distributed(
                measure, world_size, kind, options | {'precision': precision}, timeout_s=300.0, fresh=True
            )
            cells.append(f'{max(r["held_mib"] for r in ranks):.0f}, {max(r["peak_mib"] for r in ranks):.0f}')
        rows.append([name, *cells])
        print(rows[-1], flush=True)
    return markdown(['strategy', *(f'{w} rank{"s" * (w > 1)}: held MiB, peak MiB' for w in world_sizes)], rows)


def main() -> None:
    parser = script_parser(__doc__, 'memory_per_rank.md')
    parser.add_argument('--world_sizes', type=int, nargs='+', default=[1, 2, 4])
    parser.add_argument('--records', action='store_true', help='measure the records of a phase alone')
    args = parser.parse_args()
    os.environ['MALLOC_MMAP_THRESHOLD_'] = '65536'  # read by glibc in each new process
    if args.records:
        tables = {'records': records_table()}
        if args.page:
            write_page('memory_per_rank.md', **tables)
        return
    tables = {precision: table(names, precision, args.world_sizes) for precision, names in COMPARED.items()}
    if args.page:
        write_page('memory_per_rank.md', **tables)


if __name__ == '__main__':
    main()
