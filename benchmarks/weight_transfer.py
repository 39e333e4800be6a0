"""Compares the transfer of weights to rollout workers with a raw broadcast of as many bytes.

    python benchmarks/weight_transfer.py [--size small] [--repeats 5] [--page]

All processes are Ray actors on this machine, with one thread each. Time runs from the trainer's first access to a
weight until every worker has them in its model. Methods take turns, and a ratio is taken within a round, since other
load changes every number. Memory is resident memory: the peak during one transfer in new processes, less what was there
before, the workers' models included.
"""

from __future__ import annotations

import os
import re
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import alternate, markdown, ratios, script_parser, where, write_page
from transformers import AutoModelForCausalLM, GPT2Config

from chatgpt.nn import Actor
from chatgpt.rollout import RemoteEngine
from chatgpt.rollout.cluster import import_ray
from chatgpt.rollout.handshake import Handshake
from chatgpt.rollout.ray_workers import RayWorkers
from chatgpt.rollout.ray_workers import _Actor as RolloutActor
from chatgpt.rollout.wire import ModelSpec, fill_buckets, plan_buckets, policy_tensors
from chatgpt.testing.processes import free_port

SIZES: dict[str, dict[str, int]] = {  # the shapes of GPT-2
    'tiny': {'n_embd': 64, 'n_layer': 2, 'n_head': 2, 'vocab_size': 512},
    'small': {'n_embd': 768, 'n_layer': 12, 'n_head': 12, 'vocab_size': 50257},
}
BUCKETS_MIB = (1, 16, 64)
AT_ONCE = 'store, all buckets at once'


def make_model(size: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(GPT2Config(n_positions=1024, **SIZES[size])).eval()


class Process:
    """An actor that measures its memory and joins a broadcast group."""

    flat = torch.zeros(0)
    before = 0

    def watch(self) -> None:
        """Starts a measurement of peak memory."""
        Path('/proc/self/clear_refs').write_text('5')
        self.before = memory_kib('VmRSS')

    def peak_mb(self) -> float:
        return (memory_kib('VmHWM') - self.before) * 1024 / 1e6

    def join(self, rank: int, world_size: int, port: int) -> None:
        os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port))
        dist.init_process_group('gloo', rank=rank, world_size=world_size)

    def broadcast(self, num_bytes: int) -> float:
        """Broadcasts a flat, preallocated buffer by gloo; no weight is read or written."""
        if self.flat.numel() * 4 != num_bytes:
            self.flat = torch.zeros(num_bytes // 4)
        dist.barrier()
        start = time.perf_counter()
        dist.broadcast(self.flat, 0)
        dist.barrier()
        return time.perf_counter() - start

    def leave(self) -> None:
        dist.destroy_process_group()


def memory_kib(name: str) -> int:
    """Returns a number of /proc/self/status."""
    found = re.search(rf'{name}:\s+(\d+)', Path('/proc/self/status').read_text())
    assert found is not None
    return int(found[1])


class Trainer(Process):
    """The sender, which holds the weights."""

    def __init__(self, size: str) -> None:
        torch.set_num_threads(1)
        self.ray, self.model, self.version = import_ray('this benchmark'), make_model(size), 0
        self.actor = Actor(self.model)

    def describe(self) -> tuple[ModelSpec, int]:
        tensors = policy_tensors(self.model)
        return ModelSpec.of(self.model), sum(t.numel() * t.element_size() for t in tensors.values())

    def begin(self, workers: list[Any], way: str, mib: int) -> float:
        """Sends the weights as `RemoteEngine` does."""
        pool = RayWorkers(len(workers))
        pool.actors, pool._places = workers, [w.place.remote() for w in workers]
        engine = RemoteEngine(pool, weight_transfer=way, bucket_bytes=mib << 20)
        engine.spec = ModelSpec.of(self.model)  # the workers run
        start = time.perf_counter()
        engine.begin(self.actor)
        return time.perf_counter() - start

    def all_at_once(self, workers: list[Any], way: str, mib: int) -> float:
        """Puts every bucket into the object store before the workers fetch the first."""
        start = time.perf_counter()
        tensors, self.version = policy_tensors(self.model), self.version + 1
        handshake = Handshake.of(self.actor, 'RemoteEngine')
        manifest = plan_buckets(tensors, version=self.version, handshake=handshake, bucket_bytes=mib << 20)
        handles = [self.ray.put(bucket.numpy()) for bucket in fill_buckets(manifest, tensors)]
        for worker in workers:
            worker.call.remote('start_loading', (manifest,))
            for number, handle in enumerate(handles):
                worker.call.remote('fetch_bucket', (number, handle))
        self.ray.get([w.call.remote('finish_loading') for w in workers])
        return time.perf_counter() - start

    def copy(self, num_bytes: int) -> float:
        """Copies as many bytes in memory."""
        a, b = torch.zeros(num_bytes // 4), torch.zeros(num_bytes // 4)
        b.copy_(a)
        start = time.perf_counter()
        b.copy_(a)
        return time.perf_counter() - start


class Worker(RolloutActor, Process):
    """A rollout actor."""

    def build(self) -> None:
        """Makes the model, with memory that is resident."""
        worker: Any = self.worker
        worker._model = worker.spec.build()
        for parameter in worker._model.parameters():
            parameter.zero_()


def ways() -> dict[str, tuple[str, str, int]]:
    """Returns (method of the trainer, weight_transfer, MiB of a bucket) by name."""
    found = {f'{way}, buckets of {mib} MiB': ('begin', way, mib) for way in ('tcp', 'store') for mib in BUCKETS_MIB}
    return found | {AT_ONCE: ('all_at_once', 'store', 64)}


def start(size: str, num_workers: int) -> tuple[Any, list[Any], int]:
    """Returns a trainer, workers, and the bytes of the weights."""
    ray = import_ray('this benchmark')
    trainer = ray.remote(Trainer).options(num_cpus=1).remote(size)
    spec, num_bytes = ray.get(trainer.describe.remote())
    workers = [ray.remote(Worker).options(num_cpus=1).remote(spec, {}, 1, 'cpu') for _ in range(num_workers)]
    ray.get([worker.build.remote() for worker in workers])
    return trainer, workers, num_bytes


def measure(size: str, num_workers: int, repeats: int) -> tuple[int, dict[str, list[float]]]:
    """Returns the bytes of the weights, and the seconds of each method by round."""
    ray = import_ray('this benchmark')
    trainer, workers, num_bytes = start(size, num_workers)
    group, port = [trainer, *workers], free_port()
    ray.get([actor.join.remote(rank, len(group), port) for rank, actor in enumerate(group)])
    acts: dict[str, Any] = {'broadcast': lambda: max(ray.get([actor.broadcast.remote(num_bytes) for actor in group]))}
    for name, (method, way, mib) in ways().items():
        send = getattr(trainer, method)
        acts[name] = lambda send=send, way=way, mib=mib: ray.get(send.remote(workers, way, mib))
    acts['copy in memory'] = lambda: ray.get(trainer.copy.remote(num_bytes))
    seconds = alternate({name: lambda _, w=way: w() for name, way in acts.items()}, repeats)
    ray.get([actor.leave.remote() for actor in group])
    for actor in group:
        ray.kill(actor)
    return num_bytes, seconds


def peaks(size: str, name: str) -> tuple[float, float]:
    """Returns the peak memory of one transfer to one worker beside the models, in MB: of the trainer, of the worker.
    Pages of the object store count where they are touched."""
    ray = import_ray('this benchmark')
    initialize()
    try:
        trainer, workers, _ = start(size, 1)
        ray.get([actor.watch.remote() for actor in (trainer, *workers)])
        method, way, mib = ways()[name]
        ray.get(getattr(trainer, method).remote(workers, way, mib))
        found = ray.get([actor.peak_mb.remote() for actor in (trainer, *workers)])
        return found[0], found[1]
    finally:
        ray.shutdown()


def table(num_bytes: int, seconds: dict[str, list[float]]) -> str:
    rows = []
    for name, times in seconds.items():
        rates = sorted(num_bytes / 1e6 / t for t in times)
        ratio = statistics.median(ratios(seconds['broadcast'], times))
        span = f'{rates[0]:,.0f} to {rates[-1]:,.0f}'
        rows.append([name, f'{statistics.median(rates):,.0f}', span, f'{ratio:.2f}'])
    return markdown('way | MB/s, median | range | speed against the broadcast', rows)


def initialize(num_cpus: int = 2) -> None:
    options = {'include_dashboard': False, 'log_to_driver': False, 'logging_level': 'error'}
    import_ray('this benchmark').init('local', num_cpus=num_cpus, object_store_memory=3 << 30, **options)


def main() -> None:
    parser = script_parser(__doc__, 'weight_transfer.md')
    parser.add_argument('--size', choices=SIZES, default='small')
    parser.add_argument('--workers', type=int, nargs='+', default=[1, 2])
    parser.add_argument('--repeats', type=int, default=5)
    args = parser.parse_args()
    ray = import_ray('this benchmark')
    rows = [[name, *(f'{mb:,.0f}' for mb in peaks(args.size, name))] for name in ways() if ways()[name][2] == 64]
    memory = markdown('way | of the trainer, MB | of the worker, MB', rows)
    print(memory, flush=True)
    initialize(1 + max(args.workers))
    parts = [f'{args.repeats} rounds, {where()}, ray {ray.__version__}.']
    try:
        for number in args.workers:
            num_bytes, seconds = measure(args.size, number, args.repeats)
            parts += [
                f'To {number} worker{"s" * (number > 1)}, {num_bytes / 1e6:,.0f} MB of fp32:',
                table(num_bytes, seconds),
            ]
            print(parts[-1], flush=True)
    finally:
        ray.shutdown()
    if args.page:
        write_page('weight_transfer.md', measured='\n\n'.join(parts), memory=memory)


if __name__ == '__main__':
    main()
