"""Memory of one rank under each strategy: held between steps, and at the peak of a step.

    python benchmarks/memory_per_rank.py [--page] [--world_sizes 1 2 4]

docs/results/memory_per_rank.md describes the model and defines held and peak memory.
"""

from __future__ import annotations

import gc
import os
import threading
from typing import Any, Self

import torch
from harness import gpt2, markdown, process_memory, random_sequence, script_parser, stored_bytes, write_page

from chatgpt import strategies as s
from chatgpt.batching import collate
from chatgpt.nn import GPTActor
from chatgpt.testing.processes import run_distributed

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
    args = parser.parse_args()
    os.environ['MALLOC_MMAP_THRESHOLD_'] = '65536'  # read by glibc in each new process
    tables = {precision: table(names, precision, args.world_sizes) for precision, names in COMPARED.items()}
    if args.page:
        write_page('memory_per_rank.md', **tables)


if __name__ == '__main__':
    main()
